# SPDX-License-Identifier: Apache-2.0
"""`tile.grouped_scaled_gemm`: products of each group of rows of float8 with its own matrix, with scales.

It has no gradient: float8 operands are results of a rounding, whose gradient the caller chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tile.kernels.gemm.args import GroupedScaledGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.families import gemm
from torch_tile.ops.families.grouped_gemm import check_offsets
from torch_tile.ops.families.scaled_gemm import ADVICE, check_operands, check_scale
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "grouped_scaled_gemm"


def _fake(args: GroupedScaledGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.grouped_scaled_gemm` and make its empty result."""
    a, b, scale_a, scale_b, offsets, aux, kinds, epilogue, dtype = args
    check_operands(OP, a, b, ("[S, K]", "[G, K, N]"))
    (rows, k), (groups, _, n) = a.shape, b.shape
    check_scale(OP, "scale_a", scale_a, a, (rows, k), "[1 or S, 1 or K / 128]", blocks=False)
    check_scale(OP, "scale_b", scale_b, a, (k, n), "[G, 1 or K / 128, 1, N or N / 128]", groups)
    checks.check_positions(OP, "offsets", offsets, 1, "[G], the end of each group", a=a)
    checks.check_size(OP, "offsets", offsets, 0, groups, "as many groups as b")
    checks.check_result_dtype(OP, dtype)
    gemm.check_epilogue(OP, a, (rows,), n, 1, aux, kinds, epilogue, groups)
    return a.new_empty((rows, n), dtype=dtype)


def _sharding(args: GroupedScaledGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.grouped_scaled_gemm` for sharding."""
    # Ends of groups count rows of the whole tensor. Columns are sharded where no scale spans several.
    columns, n = args.scale_b.shape[2], args.b.shape[2]
    of_a = ("m" if args.scale_a.shape[0] == args.a.shape[0] else "block", "run")
    of_b = ("group", "step", "n" if columns == n else "strip")
    inputs = [("m", "k"), ("group", "k", "n"), of_a, of_b, ("group",), *gemm.aux_dims(args.aux, args.kinds, ())]
    return Rule(outputs=[("m", "n")], inputs=inputs, free=("n",) if columns in (1, n) else ())


def grouped_scaled_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `scaled_gemm` of runs of rows: `epilogue((a * scale_a)[rows of g] @ (b * scale_b)[g], aux)`.

    Sums are those of `scaled_gemm` (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

    Args:
        a: `[S, K]`, rows sorted by their group, float8_e4m3fn or float8_e5m2.
        b: `[G, K, N]`, either of these; best stored as `[G, N, K]`, so transposed weights are a view.
        scale_a: of a floating dtype, taken as float32: `[1, 1]`, `[S, 1]`, or `[S, K / 128]`, rounded up. No scale is
            of several rows, which might be of several groups.
        scale_b: likewise `[G, 1, 1]`, `[G, 1, N]`, `[G, K / 128, N]` or `[G, K / 128, N / 128]`.
        offsets: int32 `[G]`, the end of each group's rows, as for `grouped_gemm`.
        aux: as for `gemm`, S rows.
        kinds: as for `grouped_gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.

    Returns:
        `[S, N]`, without a gradient. Rows from `offsets[-1]` on have no matrices: their products are 0.
    """
    op = torch.ops.tile.grouped_scaled_gemm.default
    out: Tensor = op(a, b, scale_a, scale_b, offsets, list(aux), kinds, epilogue, dtype)
    return out


register(
    name=OP,
    args=GroupedScaledGemmArgs,
    module="gemm.grouped_scaled",
    form=grouped_scaled_gemm,
    fake=_fake,
    check_values=check_offsets(OP),
    **no_gradient(OP, ADVICE),
    sharding=_sharding,
    flops=lambda args: 2 * math.prod(args.a) * args.b[2],
)
