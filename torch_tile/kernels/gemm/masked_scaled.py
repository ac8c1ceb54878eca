# SPDX-License-Identifier: Apache-2.0
"""Products of float8 matrices with scales, of equally many rows for each group, of which the first few count.

So experts get their tokens in decoding, where a CUDA graph fixes how many rows there may be. Tiles without rows that
count are not multiplied. Tiles are summed as scaled.py sums its tiles. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import entry_function, machine_of
from torch_tile.kernels.gemm import grouped_scaled
from torch_tile.kernels.gemm.args import GroupedScaledGemmArgs, MaskedScaledGemmArgs, flattened
from torch_tile.kernels.gemm.grouped_scaled import as_one_product, tiling_for
from torch_tile.kernels.gemm.scaled import GROUP, Spec, fetch_whole_scales, finish, multiply, prepare
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.masked_scaled_gemm` in float32 (float64 for float64 `a`), rounded once."""
    args: MaskedScaledGemmArgs[torch.Tensor] = MaskedScaledGemmArgs(*given, **named)
    (groups, height, _), flat = args.a.shape, flattened(args)
    ends = torch.arange(1, groups + 1, device=args.a.device, dtype=torch.int32) * height
    out = grouped_scaled.reference(*GroupedScaledGemmArgs(*flat[:4], ends, *flat[4:8]))
    hidden = torch.arange(height, device=out.device) >= args.counts[:, None]
    return out.view(groups, height, out.shape[1]).masked_fill(hidden[:, :, None], 0)


@library_jit
def masked_scaled_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel of `reference`; a is `[G * M, K]`, and b is stored `[G, N, K]`."""
    bm, bn = config.block_m, config.block_n
    groups, height = T.dynamic("matrices, height")
    _, n, k, types = spec.types(groups)

    @T.prim_func
    def masked_scaled_gemm(
        a: types[0],
        *operands: types[1:],
        counts: T.Tensor((groups,), "int32"),
        out: T.Tensor((groups, height, n), spec.product.out_dtype),
    ):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(height, bm), groups, threads=config.threads) as (bx, by, group):
            count = T.min(counts[group], height)
            steps = T.if_then_else(by * bm < count, T.ceildiv(k, GROUP), 0)
            first = group * height + by * bm
            pieces = spec.columns(config, bx, T.ceildiv(n, bn))
            ends = fetch_whole_scales(config, spec, operands, first, pieces, (group,))
            product = multiply(config, spec, a, operands, first, pieces, steps, (group,))
            ends.share()
            for piece in pieces:
                for i, j in T.Parallel(bm, piece.width):
                    row = by * bm + i
                    col = piece.col + j
                    if row < height:
                        place = i, piece.start + j
                        value = finish(spec, product[place], ends, *place, operands, first + i, col, (group,))
                        out[group, row, col] = T.if_then_else(row < count, value, 0.0)

    return masked_scaled_gemm


@entry_function(
    MaskedScaledGemmArgs,
    reference,
    lambda args: args.a.new_empty((*args.a.shape[:2], args.b.shape[2]), dtype=args.dtype),
)
def masked_scaled_gemm(
    args: MaskedScaledGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None
) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `tiling_for`."""
    a = args.a
    if not a.shape[2]:
        return False
    if not out.numel():
        return True
    machine = machine_of(a)
    spec, problem, tensors = prepare(flattened(args), machine, out, partial(as_one_product, a.shape[0]))
    config = config or replace(tiling_for(replace(problem, staged=False), a.shape[0], machine), panel=0)
    machine.kernel(masked_scaled_matmul)(config, spec)(*tensors, args.counts.contiguous(), out)
    return True
