# SPDX-License-Identifier: Apache-2.0
"""`tile.grouped_dequant_gemm`: products of each group of rows with its own matrix, stored in few bits.

Gradients flow to a, to the auxiliary operands and to floating scales and zeros; the words themselves are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tile.kernels.gemm.args import GroupedDequantGemmArgs, GroupedGemmArgs
from torch_tile.ops import checks
from torch_tile.ops.families import gemm
from torch_tile.ops.families.dequant_gemm import backward_of_weights, check_weights
from torch_tile.ops.families.grouped_gemm import check_offsets, gradients
from torch_tile.ops.registration import register
from torch_tile.ops.registry import Shape
from torch_tile.ops.sharding_rule import Rule, Spec

OP = "grouped_dequant_gemm"


def _fake(args: GroupedDequantGemmArgs[Tensor]) -> Tensor:
    """Check the arguments of `tile.grouped_dequant_gemm` and make its empty result."""
    a, bs, _, _, offsets, _, _, _, aux, kinds, epilogue, dtype, _ = args
    check_weights(OP, args.dense, grouped=True)
    groups, n = bs[0].shape[:2]
    checks.check_positions(OP, "offsets", offsets, 1, "[G], the end of each group", a=a)
    checks.check_size(OP, "offsets", offsets, 0, groups, "as many groups as bs[0]")
    checks.check_result_dtype(OP, dtype)
    gemm.check_epilogue(OP, a, (a.shape[0],), n, len(bs), aux, kinds, epilogue, groups)
    return a.new_empty((a.shape[0], n), dtype=dtype)


def _sharding(args: GroupedDequantGemmArgs[Spec]) -> Rule:
    """Name the dimensions of `tile.grouped_dequant_gemm` for sharding."""
    # Ends of groups count rows of the whole tensor; words and runs of columns need not end where a shard would.
    words, factors = [("group", "n", "word")] * len(args.bs), len(args.scales) + len(args.zeros)
    inputs = [("m", "k"), *words, *[("group", "n", "run")] * factors, ("group",)]
    return Rule(outputs=[("m", "n")], inputs=[*inputs, *gemm.aux_dims(args.aux, args.kinds, ())], free=("n",))


def _flops(args: GroupedDequantGemmArgs[Shape]) -> int:
    """Count the operations of `tile.grouped_dequant_gemm`."""
    return 2 * math.prod(args.a) * args.bs[0][1] * len(args.bs)


def grouped_dequant_gemm(
    a: Tensor,
    bs: Sequence[Tensor],
    scales: Sequence[Tensor],
    zeros: Sequence[Tensor],
    offsets: Tensor,
    bits: int = 8,
    high_first: bool = False,
    offset: int = 0,
    aux: Sequence[Tensor] = (),
    kinds: str = "",
    epilogue: str = "",
    *,
    dtype: torch.dtype,
    format: str = "",
) -> Tensor:
    """Compute `dequant_gemm` of runs of rows with a matrix each, as the experts of a mixture (arXiv:1701.06538).

    `epilogue(a[rows of g] @ w0[g].T, a[rows of g] @ w1[g].T, ..., aux)` for each group g, with weights widened as
    `dequant_gemm` does. MXFP4 experts, as gpt-oss has them, are of format "e2m1" with scales of float8_e8m0fnu for runs
    of 32 columns.

    Args:
        a: `[S, K]`, rows sorted by their group.
        bs: each `[G, N, K * bits / 8]`, of int8, uint8, float8_e4m3fn or float8_e5m2, all alike.
        scales: none, or one for each b: `[G, N, runs]`, as for `dequant_gemm`.
        zeros: none, or one for each b: `[G, N, runs]`.
        offsets: int32 `[G]`, the end of each group's rows, as for `grouped_gemm`.
        bits: as for `dequant_gemm`.
        high_first: as for `dequant_gemm`.
        offset: what is subtracted from every weight, as for `dequant_gemm`.
        aux: as for `gemm`, S rows.
        kinds: as for `grouped_gemm`.
        epilogue: as for `gemm`.
        dtype: of the result.
        format: as for `dequant_gemm`.

    Returns:
        `[S, N]`. Rows from `offsets[-1]` on have no matrices: their products are 0.
    """
    fields, ends = (bits, high_first, offset), offsets
    op = torch.ops.tile.grouped_dequant_gemm.default
    out: Tensor = op(a, list(bs), list(scales), list(zeros), ends, *fields, list(aux), kinds, epilogue, dtype, format)
    return out


register(
    name=OP,
    args=GroupedDequantGemmArgs,
    module="gemm.grouped_dequant",
    form=grouped_dequant_gemm,
    fake=_fake,
    check_values=check_offsets(OP),
    backward=backward_of_weights(GroupedGemmArgs, gradients),
    sharding=_sharding,
    flops=_flops,
    lower_precision=("a",),
)
