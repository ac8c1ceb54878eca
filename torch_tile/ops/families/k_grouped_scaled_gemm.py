# SPDX-License-Identifier: Apache-2.0
"""`tile.k_grouped_scaled_gemm`: gradients of experts' matrices from float8 operands, summed over each expert's tokens.

It has no gradient: float8 operands are results of a rounding, whose gradient the caller chooses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_tile.kernels.gemm.args import KGroupedScaledGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require, shape_of
from torch_tile.ops.families.grouped_gemm import check_order
from torch_tile.ops.families.scaled_gemm import ADVICE, GROUP, check_operands
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "k_grouped_scaled_gemm"


def _fake(args: KGroupedScaledGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.k_grouped_scaled_gemm` and make its empty results."""
    a, b, scale_a, scale_b, offsets, dtype = args
    check_operands(OP, a, b, ("[M, K]", "[K, N]"))
    (m, k), n, groups = a.shape, b.shape[1], offsets.shape[:1]
    checks.check_positions(OP, "offsets", offsets, 1, "[G], the end of each group", a=a)
    runs = -(-k // GROUP)
    for name, scale, size, (outer, inner) in (("scale_a", scale_a, m, (1, 2)), ("scale_b", scale_b, n, (2, 1))):
        checks.check_floating(OP, **{name: scale})
        checks.check_device(OP, name, scale, "a", a)
        checks.check_dims(OP, name, scale, 3, "groups, rows and columns")
        of_groups = scale.shape[0] in (1, *groups) and scale.shape[inner] == 1
        of_runs = scale.shape[0] == 1 and scale.shape[inner] == runs
        fits = scale.shape[outer] in (1, size) and (of_groups or of_runs)
        forms = {
            "scale_a": "[1 or G, 1 or M, 1] or [1, 1 or M, K / 128]",
            "scale_b": "[1 or G, 1, 1 or N] or [1, K / 128, 1 or N]",
        }
        what = f"{name} has shape {shape_of(scale)}; expected {forms[name]}, rounded up, for {m} x {k} by {k} x {n}"
        require(fits, lambda what=what: f"tile.{OP}: {what}")  # type: ignore[misc]
    checks.check_result_dtype(OP, dtype)
    return a.new_empty((*groups, m, n), dtype=dtype)


def _check_values(args: KGroupedScaledGemmArgs[Tensor]) -> None:
    """Check the values of `offsets`."""
    check_order(OP, args.offsets, args.a.shape[1])
    starts = args.offsets[:-1]
    if args.offsets.device.type == "cpu" and max(args.scale_a.shape[2], args.scale_b.shape[1]) > 1:
        whole = not (starts % GROUP).any()
        what = f"offsets are {starts.tolist()}; expected multiples of {GROUP} before the last, as runs have scales"
        require(whole, lambda: f"tile.{OP}: {what}")


def _sharding(args: KGroupedScaledGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.k_grouped_scaled_gemm` for sharding."""
    of_a = ("one", "m" if args.scale_a.shape[1] == args.a.shape[0] else "row", "run")
    of_b = ("matrix", "step", "n" if args.scale_b.shape[2] == args.b.shape[1] else "column")
    inputs = [("m", "k"), ("k", "n"), of_a, of_b, ("group",)]
    return Rule(outputs=[("group", "m", "n")], inputs=inputs, free=("m", "n"))


def k_grouped_scaled_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offsets: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute `(a * scale_a)[:, columns of g] @ (b * scale_b)[rows of g]` for each group g.

    These are gradients of experts' matrices. K counts the tokens of all experts. Sums are those of
    `scaled_gemm` (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

    Args:
        a: `[M, K]`, columns sorted by their group, float8_e4m3fn or float8_e5m2.
        b: `[K, N]`, either of these; best stored as `[N, K]`, so a transposed matrix is a view.
        scale_a: of a floating dtype, taken as float32: `[1 or G, 1 or M, 1]`, or `[1, 1 or M, K / 128]`, rounded up,
            for runs of 128 columns. Then every group but the first must begin at a multiple of 128. Only the CPU
            checks that.
        scale_b: likewise `[1 or G, 1, 1 or N]` or `[1, K / 128, 1 or N]`.
        offsets: int32 `[G]`: group g has the columns of a from `offsets[g - 1]` (0 for the first) up to `offsets[g]`.
        dtype: of the result.

    Returns:
        `[G, M, N]`, without a gradient; 0 for groups without columns.
    """
    out: Tensor = torch.ops.tile.k_grouped_scaled_gemm.default(a, b, scale_a, scale_b, offsets, dtype)
    return out


register(
    name=OP,
    args=KGroupedScaledGemmArgs,
    module="gemm.grouped_scaled_wgrad",
    form=k_grouped_scaled_gemm,
    fake=_fake,
    check_values=_check_values,
    **no_gradient(OP, ADVICE),
    sharding=_sharding,
    flops=lambda args: 2 * math.prod(args.a) * args.b[1],
)
