# SPDX-License-Identifier: Apache-2.0
"""Combination of the partial results of blocks that each took a split of the keys, or of a sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, compute_dtype, power_of_two, start_early, strided
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.library_jit import library_jit

MOST_AHEAD = 8  # parts of a row that are read together, since memory's latency is the cost


@T.macro
def read_ahead(parts: Any, iteration: Any, count: int, place: tuple[Any, ...], first: Any, width: int) -> Any:
    """Read `parts[s, *place, first : first + width]` of an iteration's `count` splits, 0 for those behind the last."""
    values = [T.alloc_fragment((width,), parts.dtype) for _ in range(count)]
    for n, value in zip(range(count), values, strict=True):
        split = iteration * count + n
        for j in T.Parallel(width):
            value[j] = T.if_then_else(split < parts.shape[0], parts[(split, *place, first + j)], 0.0)
    return values


@T.macro
def sum_of_parts(parts: Any, place: tuple[Any, ...], first: Any, width: int) -> Any:
    """Compute `sum_s parts[s, *place, first : first + width]` over the splits that all blocks wrote."""
    total = T.alloc_fragment((width,), parts.dtype)
    T.clear(total)
    for iteration in T.serial(T.ceildiv(parts.shape[0], MOST_AHEAD)):
        for value in read_ahead(parts, iteration, MOST_AHEAD, place, first, width):
            for j in T.Parallel(width):
                total[j] += value[j]
    return total


@T.macro
def share_with_cluster(products: Sequence[Any], count: int = 2) -> list[Any]:
    """Copy each fragment to a shared tile, which all `count` blocks of the cluster may read from here on."""
    parts: list[Any] = []
    for product in products:
        part = T.alloc_shared(product.shape, product.dtype)
        T.copy(product, part)
        parts.append(part)
    if count > 1:
        T.cluster_sync()
    return parts


@T.macro
def sum_in_cluster(tile: Any, place: tuple[Any, ...], count: int) -> Any:
    """Sum an element of a shared tile over the `count` blocks of the cluster, all of which have written it."""
    total: Any = T.alloc_var(tile.dtype, 0.0)
    for rank in range(count):
        total += T.at_rank(tile[place], rank) if count > 1 else tile[place]
    return total


@T.macro
def join_parts(
    part: Any, part_lse: Any, slot_of: Callable[[Any], Any], count: Any, rows: Sequence[Any], ahead: int
) -> list[tuple[Any, Any]]:
    """Join the `count` parts `part[slot_of(n), row]` of each row by their weights `exp(part_lse[slot_of(n), row])`.

    From `count` on, slots are outside of `part`, where loads give 0. Returns a fragment of each row's results, and its
    log-sum-exp. Without visible keys these are 0 and -inf. `ahead` parts of all rows are read together, since memory's
    latency is the cost. More take registers, so that fewer blocks run at once.
    """
    accum, latent = compute_dtype(part.dtype), part.shape[2]
    infinity = T.infinity(accum)
    sums: list[Any] = [T.alloc_fragment((latent,), accum) for _ in rows]
    maxima: list[Any] = [T.alloc_var(accum, -infinity) for _ in rows]
    weight_sums: list[Any] = [T.alloc_var(accum, 0.0) for _ in rows]
    for acc in sums:
        T.clear(acc)
    for iteration in T.serial(T.ceildiv(count, ahead)):
        logs: list[list[Any]] = [[T.alloc_var(accum, -infinity) for _ in rows] for _ in range(ahead)]
        values = [[T.alloc_fragment((latent,), part.dtype) for _ in rows] for _ in range(ahead)]
        for n, its_logs, its_values in zip(range(ahead), logs, values, strict=True):
            slot = slot_of(iteration * ahead + n)
            for row, log, value in zip(rows, its_logs, its_values, strict=True):
                log = part_lse[slot, row]
                T.copy(part[slot, row, 0:latent], value)
        # Apart from the loads: a load behind two tests becomes a branch, and branches make the loads wait in line.
        for n, its_logs in enumerate(logs):
            for log in its_logs:
                log = T.if_then_else(iteration * ahead + n < count, log, -infinity)
        by_row = zip(sums, maxima, weight_sums, zip(*logs, strict=True), zip(*values, strict=True), strict=True)
        for acc, row_max, row_sum, row_logs, row_values in by_row:
            highest = functools.reduce(T.max, row_logs, row_max)
            level = T.if_then_else(highest == -infinity, 0.0, highest)
            rescale = T.exp(row_max - level)
            row_max = highest
            row_sum = row_sum * rescale
            for c in T.Parallel(latent):
                acc[c] *= rescale
            for value, log in zip(row_values, row_logs, strict=True):
                weight = T.exp(log - level)
                row_sum += weight
                for c in T.Parallel(latent):
                    acc[c] += weight * value[c]
    joined: list[tuple[Any, Any]] = []
    for acc, row_max, row_sum in zip(sums, maxima, weight_sums, strict=True):
        total = T.max(row_sum, 1.0)
        share = 1.0 / total
        for c in T.Parallel(latent):
            acc[c] *= share
        joined.append((acc, row_max + T.log(total)))
    return joined


@dataclass(frozen=True)
class Sharing:
    """How the threads of a block share the parts of a row: each of `groups` takes `each` parts in an iteration."""

    groups: int
    each: int
    threads: int

    def footprint(self, part_dtype: torch.dtype, latent: int) -> Footprint:
        """Compute the shared memory of an iteration's weights, and of each group's share of the sums."""
        if self.groups == 1:
            return Footprint(())
        bits = 8 * compute_dtype(part_dtype).itemsize
        return Footprint((Tile(1, self.groups * self.each, bits), Tile(self.groups, latent, bits)), bulk=True)


@T.macro
def join_in_groups(part: Any, part_lse: Any, row: Any, sharing: Sharing) -> list[tuple[Any, Any]]:
    """Join the parts of a row as `join_parts` does, by threads in several groups, which add up their shares.

    All threads read at once, and each does little: latency is the cost, of memory and of instructions.
    """
    splits, latent, accum = part.shape[0], part.shape[2], compute_dtype(part.dtype)
    infinity = T.infinity(accum)
    groups, each = sharing.groups, sharing.each
    values = [T.alloc_fragment((groups, latent), part.dtype) for _ in range(each)]
    sums = T.alloc_fragment((groups, latent), accum)
    logs = T.alloc_fragment((each * groups,), accum)
    highest, total = (T.alloc_fragment((1,), accum) for _ in range(2))
    joined = T.alloc_fragment((latent,), accum)
    weights = T.alloc_shared((each * groups,), accum)
    shares = T.alloc_shared((groups, latent), accum)
    T.clear(sums)
    T.clear(total)
    T.fill(highest, -infinity)
    for iteration in T.serial(T.ceildiv(splits, each * groups)):
        first = iteration * (each * groups)
        for n in T.Parallel(each * groups):
            logs[n] = T.if_then_else(first + n < splits, part_lse[first + n, row], -infinity)
        for n, value in enumerate(values):  # 0 behind the last part
            T.copy(part[first + n * groups : first + (n + 1) * groups, row, 0:latent], value)
        before = T.alloc_var(accum, highest[0])
        T.reduce_max(logs, highest, dim=0, clear=False)
        level = T.alloc_var(accum, T.if_then_else(highest[0] == -infinity, 0.0, highest[0]))
        rescale = T.alloc_var(accum, T.exp(before - level))
        for n in T.Parallel(each * groups):
            logs[n] = T.exp(logs[n] - level)
        T.copy(logs, weights)
        for i in T.Parallel(1):
            total[i] *= rescale
        T.reduce_sum(logs, total, dim=0, clear=False)
        for g, c in T.Parallel(groups, latent):
            sums[g, c] *= rescale
        for n, value in enumerate(values):
            for g, c in T.Parallel(groups, latent):
                sums[g, c] += weights[n * groups + g] * value[g, c]
    divisor = T.alloc_var(accum, T.max(total[0], 1.0))
    share = T.alloc_var(accum, 1.0 / divisor)
    T.copy(sums, shares)
    for c in T.Parallel(latent):
        own = T.alloc_var(accum, 0.0)
        for g in T.serial(groups):
            own += shares[g, c]
        joined[c] = own * share
    return [(joined, highest[0] + T.log(divisor))]


# Fast: the exponentials of few numbers, in few instructions.
@library_jit(pass_configs={"tl.enable_fast_math": True})  # type: ignore[untyped-decorator]
def combine(dtype: torch.dtype, part_dtype: torch.dtype, latent: int, sharing: Sharing) -> Any:
    """Build the kernel `out = sum_s exp(lse_s - lse) part_s` with `lse = log sum_s exp(lse_s)`. Rows without visible
    keys give 0 and -inf.

    The kernel that leaves the parts lets this one start early (`T.pdl_trigger`), so that its launch costs no time. A
    row of `out` has three indices, since they may lie in memory in any order.
    """
    accum = compute_dtype(part_dtype)
    splits, rows, outer, middle, inner = T.dynamic("splits, rows, outer, middle, inner")

    @T.prim_func
    def combine(
        part: T.Tensor((splits, rows, latent), part_dtype),
        part_lse: T.Tensor((splits, rows), accum),
        out: strided("out", (outer, middle, inner, latent), dtype, multiple=latent),
        lse: T.Tensor((rows,), accum),
    ):
        with T.Kernel(rows, threads=sharing.threads) as row:
            start_early()
            for acc, log_sum in (
                join_parts(part, part_lse, lambda n: n, splits, (row,), sharing.each)
                if sharing.groups == 1
                else join_in_groups(part, part_lse, row, sharing)
            ):
                T.copy(acc, out[row // inner // middle, row // inner % middle, row % inner, 0])
                lse[row] = log_sum

    return combine


def combine_parts(
    part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, machine: Machine
) -> None:
    """Combine parts `[splits, ..., width]` and `[splits, ...]` into `out`, dense in some order, and `lse`."""
    splits, width = part.shape[0], part.shape[-1]
    likely = splits.node.hint if isinstance(splits, torch.SymInt) else splits
    sharing = sharing_of(likely, width * part.dtype.itemsize)
    machine.kernel(combine)(out.dtype, part.dtype, width, sharing)(
        part.view(splits, -1, width), part_lse.view(splits, -1), out, lse.view(-1)
    )


AT_ONCE = 16  # parts of a row that threads read together if each has one element of them
MOST_JOINING = 512  # threads that join the parts of a row


def sharing_of(splits: int, row_bytes: int) -> Sharing:
    """Choose how a block's threads share the parts of a row: in groups, each thread with 16 bytes of a part, if parts
    are many. Fewer parts are joined sooner without groups, which hand each other sums.
    """
    readers = power_of_two(max(1, row_bytes // 16))
    groups = max(1, MOST_JOINING // readers)
    if splits <= 2 * MOST_AHEAD or groups == 1:
        ahead = AT_ONCE if row_bytes <= 128 * 4 else MOST_AHEAD
        return Sharing(1, min(power_of_two(splits), ahead), 128)
    groups = min(groups, power_of_two(splits))
    return Sharing(groups, min(power_of_two(-(-splits // groups)), MOST_AHEAD), max(128, groups * readers))
