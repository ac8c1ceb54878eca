# SPDX-License-Identifier: Apache-2.0
"""`tile.masked_scaled_gemm`: products of groups of equally many rows of float8, of which the first few count.

It has no gradient: float8 operands are results of a rounding, whose gradient the caller chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tile.kernels.gemm.args import MaskedScaledGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.checks import require
from torch_tile.ops.families import gemm
from torch_tile.ops.families.scaled_gemm import ADVICE, check_operands, check_scale
from torch_tile.ops.recomputed import no_gradient
from torch_tile.ops.registration import register
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "masked_scaled_gemm"


def _fake(args: MaskedScaledGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.masked_scaled_gemm` and make its empty results."""
    a, b, scale_a, scale_b, counts, aux, kinds, epilogue, dtype = args
    check_operands(OP, a, b, ("[G, M, K]", "[G, K, N]"))
    (groups, rows, k), n = a.shape, b.shape[2]
    checks.check_size(OP, "b", b, 0, groups, "G, as a")
    check_scale(OP, "scale_a", scale_a, a, (rows, k), "[G, 1 or M, 1 or K / 128]", groups, blocks=False)
    check_scale(OP, "scale_b", scale_b, a, (k, n), "[G, 1 or K / 128, 1, N or N / 128]", groups)
    checks.check_positions(OP, "counts", counts, 1, "[G], how many rows of each group count", a=a)
    checks.check_size(OP, "counts", counts, 0, groups, "G, as a")
    checks.check_result_dtype(OP, dtype)
    gemm.check_epilogue(OP, a, (groups * rows,), n, 1, aux, kinds, epilogue, groups)
    return a.new_empty((groups, rows, n), dtype=dtype)


def _check_values(args: MaskedScaledGemmArgs[Tensor]) -> None:
    """Check that counts lie within the rows. Only the CPU checks, since a GPU would have to wait."""
    counts, rows = args.counts, args.a.shape[1]
    if counts.device.type != "cpu" or not counts.numel():
        return
    low, high = (int(x) for x in counts.aminmax())
    what = f"tile.{OP}: counts has values from {low} to {high}; expected 0 to {rows}, as a has {rows} rows for a group"
    require(low >= 0 and high <= rows, lambda: what)


def _sharding(args: MaskedScaledGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.masked_scaled_gemm` for sharding."""
    # Columns are sharded where no scale spans several; groups where no operand counts the rows of all of them.
    columns, n = args.scale_b.shape[2], args.b.shape[2]
    of_a = ("group", "m" if args.scale_a.shape[1] == args.a.shape[1] else "block", "run")
    of_b = ("group", "step", "n" if columns == n else "strip")
    inputs = [("group", "m", "k"), ("group", "k", "n"), of_a, of_b, ("group",)]
    of_aux = [tuple("row" if x == "m" else x for x in dims) for dims in gemm.aux_dims(args.aux, args.kinds, ())]
    free = [("group", not args.aux), ("n", columns in (1, n))]
    return Rule(
        outputs=[("group", "m", "n")], inputs=[*inputs, *of_aux], free=tuple(name for name, fits in free if fits)
    )


def masked_scaled_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    counts: Tensor,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `scaled_gemm` of each group of rows with its own matrix, for the first `counts[g]` of a group's M rows.

    This is the layout of experts in decoding, where a CUDA graph fixes M. Sums are those of `scaled_gemm`
    (DeepSeek-V3, arXiv:2412.19437, 3.3.2). Tiles without rows that count are not multiplied.

    Args:
        a: `[G, M, K]`, float8_e4m3fn or float8_e5m2. Rows that do not count may hold anything.
        b: `[G, K, N]`, either of these; best stored as `[G, N, K]`, so transposed weights are a view.
        scale_a: of a floating dtype, taken as float32: `[G, 1 or M, 1 or K / 128]`, rounded up.
        scale_b: likewise `[G, 1, 1]`, `[G, 1, N]`, `[G, K / 128, N]` or `[G, K / 128, N / 128]`.
        counts: int32 `[G]`, how many rows of each group count: 0 to M.
        aux: as for `grouped_scaled_gemm` of G * M rows.
        kinds: as for `grouped_gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.

    Returns:
        `[G, M, N]`, without a gradient. Rows that do not count are 0.
    """
    op = torch.ops.tile.masked_scaled_gemm.default
    out: Tensor = op(a, b, scale_a, scale_b, counts, list(aux), kinds, epilogue, dtype)
    return out


register(
    name=OP,
    args=MaskedScaledGemmArgs,
    module="gemm.masked_scaled",
    form=masked_scaled_gemm,
    fake=_fake,
    check_values=_check_values,
    **no_gradient(OP, ADVICE),
    sharding=_sharding,
    flops=lambda args: 2 * math.prod(args.a) * args.b[2],  # all rows: how many count is known to the device,
)
