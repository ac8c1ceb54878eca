# SPDX-License-Identifier: Apache-2.0
"""Joins what blocks computed that each saw a share of the keys, or of a sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import Machine, compute_dtype, strided

AHEAD = tuple(range(8))  # shares of a row that are read together, as what they wait for is memory


@T.macro
def read_ahead(
    parts: Any, turn: Any, shares: Any, slot: Callable[[Any], Any], place: tuple[Any, ...], first: Any, width: int
) -> Any:
    """`parts[slot(s), *place, first : first + width]` of the shares of a turn, 0 where there is no such share."""
    values = [T.alloc_fragment((width,), parts.dtype) for _ in AHEAD]
    for n, value in zip(AHEAD, values, strict=True):
        share = turn * len(AHEAD) + n
        for j in T.Parallel(width):
            value[j] = T.if_then_else(share < shares, parts[(slot(share), *place, first + j)], 0.0)
    return values


@T.macro
def sum_of_parts(parts: Any, place: tuple[Any, ...], first: Any, width: int) -> Any:
    """`sum_s parts[s, *place, first : first + width]` of all that others wrote."""
    total = T.alloc_fragment((width,), parts.dtype)
    T.clear(total)
    for turn in T.serial(T.ceildiv(parts.shape[0], len(AHEAD))):
        for value in read_ahead(parts, turn, parts.shape[0], lambda share: share, place, first, width):
            for j in T.Parallel(width):
                total[j] += value[j]
    return total


@T.macro
def joined(part: Any, part_lse: Any, shares: Any, slot: Callable[[Any], Any], row: Any) -> Any:
    """`sum_s exp(lse_s - lse) part_s[row]` and `lse = log sum_s exp(lse_s)` of shares in their slots.

    A row that saw nothing: 0 and -inf.
    """
    latent, accum = part.shape[2], part.dtype
    infinity = T.infinity(accum)
    sums = T.alloc_fragment((latent,), accum)
    peak = T.alloc_var(accum, -infinity)
    total = T.alloc_var(accum, 0.0)
    T.clear(sums)
    for turn in T.serial(T.ceildiv(shares, len(AHEAD))):
        logs: list[Any] = [T.alloc_var(accum, -infinity) for _ in AHEAD]
        for n, log in zip(AHEAD, logs, strict=True):
            share = turn * len(AHEAD) + n
            log = T.if_then_else(share < shares, part_lse[slot(share), row], -infinity)
        values = read_ahead(part, turn, shares, slot, (row,), 0, latent)
        highest = functools.reduce(T.max, logs, peak)
        level = T.if_then_else(highest == -infinity, 0.0, highest)
        fade = T.exp(peak - level)
        peak = highest
        total = total * fade
        for c in T.Parallel(latent):
            sums[c] *= fade
        for value, log in zip(values, logs, strict=True):
            weight = T.exp(log - level)
            total += weight
            for c in T.Parallel(latent):
                sums[c] += weight * value[c]
    for c in T.Parallel(latent):
        sums[c] /= T.max(total, 1.0)
    return sums, peak + T.log(T.max(total, 1.0))


@T.macro
def left_for_cluster(products: Sequence[Any]) -> list[Any]:
    """Each fragment in a shared tile, which the other blocks of the cluster may read from here on."""
    parts: list[Any] = []
    for product in products:
        part = T.alloc_shared(product.shape, product.dtype)
        T.copy(product, part)
        parts.append(part)
    T.cluster_sync()
    return parts


@T.macro
def sum_in_cluster(tile: Any, place: tuple[Any, ...], count: int) -> Any:
    """The sum of an element of a shared tile over the `count` blocks of the cluster, which have all written it."""
    total: Any = T.alloc_var(tile.dtype, 0.0)
    for rank in range(count):
        total += T.at_rank(tile[place], rank)
    return total


@jit
def combine(dtype: torch.dtype, latent: int) -> Any:
    """Every row `joined`. A row of `out` has three indices, since they may lie in memory in any order."""
    accum = compute_dtype(dtype)
    splits, rows, outer, middle, inner = T.dynamic("splits, rows, outer, middle, inner")

    @T.prim_func
    def combine(
        part: T.Tensor((splits, rows, latent), accum),
        part_lse: T.Tensor((splits, rows), accum),
        out: strided("out", (outer, middle, inner, latent), dtype, multiple=latent),
        lse: T.Tensor((rows,), accum),
    ):
        with T.Kernel(rows, threads=128) as row:
            sums, log_sum = joined(part, part_lse, splits, lambda share: share, row)
            T.copy(sums, out[row // inner // middle, row // inner % middle, row % inner, 0])
            lse[row] = log_sum

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
