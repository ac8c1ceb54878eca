# SPDX-License-Identifier: Apache-2.0
"""Joins what blocks computed that each saw a share of the keys."""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import Machine, compute_dtype, strided


@jit
def combine(dtype: torch.dtype, latent: int) -> Any:
    """`out = sum_s exp(lse_s - lse) part_s` with `lse = log sum_s exp(lse_s)`; rows that saw nothing: 0 and -inf.

    A row of `out` has three indices, since they may lie in memory in any order.
    """
    accum = compute_dtype(dtype)
    infinity = T.infinity(accum)
    splits, rows, outer, middle, inner = T.dynamic("splits, rows, outer, middle, inner")

    @T.prim_func
    def combine(
        part: T.Tensor((splits, rows, latent), accum),
        part_lse: T.Tensor((splits, rows), accum),
        out: strided("out", (outer, middle, inner, latent), dtype, multiple=latent),
        lse: T.Tensor((rows,), accum),
    ):
        with T.Kernel(rows, threads=128) as row:
            sums = T.alloc_fragment((latent,), accum)
            peak = T.alloc_var(accum, -infinity)
            total = T.alloc_var(accum, 0.0)
            T.clear(sums)
            for split in T.serial(splits):
                peak = T.max(peak, part_lse[split, row])
            if peak > -infinity:
                for split in T.serial(splits):
                    weight = T.exp(part_lse[split, row] - peak)
                    total += weight
                    for c in T.Parallel(latent):
                        sums[c] += weight * part[split, row, c]
                for c in T.Parallel(latent):
                    sums[c] /= total
            T.copy(sums, out[row // inner // middle, row // inner % middle, row % inner, 0])
            lse[row] = peak + T.log(T.max(total, 1.0))

    return combine


def combine_parts(
    part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, machine: Machine
) -> None:
    """`combine` of parts `[splits, ..., width]` and `[splits, ...]` into `out` and `lse`.

    `out` has four dimensions and is dense in some order, the last one innermost; the others are contiguous.
    """
    splits, width = part.shape[0], part.shape[-1]
    machine.kernel(combine)(out.dtype, width)(
        part.view(splits, -1, width), part_lse.view(splits, -1), out, lse.view(-1)
    )
