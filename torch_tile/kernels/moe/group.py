# SPDX-License-Identifier: Apache-2.0
"""Sort pairs of a token and an expert by their expert, stably, and count each expert's pairs: all on the device.

Blocks count the experts of a chunk of pairs; one block adds up the counts, `AT_ONCE` chunks at a time, which copies
fetch while it adds; blocks then place the pairs of each chunk.
No atomics: the order is the same in each run. Experts that do not exist come last and are not counted.
"""

from __future__ import annotations

from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import entry_function, machine_of, power_of_two
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.moe.args import GroupTokensArgs

CHUNK = 256  # pairs
AT_ONCE = 16  # chunks


def reference(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `tile.group_tokens` in plain torch: sorted pairs, the place of each pair, and the end of each group."""
    flat = experts.reshape(-1)
    known = torch.where((flat >= 0) & (flat < count), flat, count)
    order = known.sort(stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(flat.shape[0], device=flat.device))
    ends = (known[:, None] <= torch.arange(count, device=flat.device)).sum(0)
    return order.int(), place.view(experts.shape).int(), ends.int()


@library_jit
def group_pairs(dtype: torch.dtype, width: int, threads: int) -> Any:
    """Build the kernels that sort pairs of a token and an expert by expert. `width`: a power of two above them."""
    s, parts, count = T.dynamic("s, parts, count")

    @T.macro
    def load(experts: Any, ids: Any, first: Any) -> None:
        """Load the experts of a chunk; those that do not exist are number `count`, those behind the end `width`."""
        for i in T.Parallel(CHUNK):
            expert = T.cast(experts[T.min(first + i, s - 1)], "int64")
            exists = (expert >= 0) & (expert < T.cast(count, "int64"))
            known = T.if_then_else(exists, T.cast(expert, "int32"), count)
            ids[i] = T.if_then_else(first + i < s, known, width)

    @T.prim_func
    def group_tokens(
        experts: T.Tensor((s,), dtype),
        counts: T.Tensor((parts, width), "int32"),
        before: T.Tensor((parts, width), "int32"),
        starts: T.Tensor((width,), "int32"),
        order: T.Tensor((s,), "int32"),
        place: T.Tensor((s,), "int32"),
        offsets: T.Tensor((count,), "int32"),
    ):
        with T.Kernel(parts, threads=threads) as part:
            ids = T.alloc_shared((CHUNK,), "int32")
            found = T.alloc_fragment((width,), "int32")
            load(experts, ids, part * CHUNK)
            T.clear(found)
            for pair in T.serial(CHUNK):
                for e in T.Parallel(width):
                    found[e] += T.if_then_else(ids[pair] == e, 1, 0)
            for e in T.Parallel(width):
                counts[part, e] = found[e]
        with T.Kernel(1, threads=threads):
            total = T.alloc_fragment((width,), "int32")
            here = T.alloc_shared((AT_ONCE, width), "int32")
            until = T.alloc_shared((width,), "int32")
            T.clear(total)
            for first in T.Pipelined(T.ceildiv(parts, AT_ONCE), num_stages=2):
                T.copy(counts[first * AT_ONCE, 0], here)
                for p in T.unroll(AT_ONCE):
                    for e in T.Parallel(width):
                        if first * AT_ONCE + p < parts:
                            before[first * AT_ONCE + p, e] = total[e]
                    for e in T.Parallel(width):
                        total[e] += here[p, e]
            T.copy(total, until)
            T.cumsum(until)
            for e in T.Parallel(width):
                starts[e] = until[e] - total[e]
                if e < count:
                    offsets[e] = until[e]
        with T.Kernel(parts, threads=threads) as part:
            ids = T.alloc_shared((CHUNK,), "int32")
            rank = T.alloc_fragment((CHUNK,), "int32")
            load(experts, ids, part * CHUNK)
            T.clear(rank)
            for pair in T.serial(CHUNK):
                for i in T.Parallel(CHUNK):
                    rank[i] += T.if_then_else((pair < i) & (ids[pair] == ids[i]), 1, 0)
            for i in T.Parallel(CHUNK, independent=True):
                if part * CHUNK + i < s:
                    target = starts[ids[i]] + before[part, ids[i]] + rank[i]
                    order[target] = part * CHUNK + i
                    place[part * CHUNK + i] = target

    return group_tokens


def _empty_results(args: GroupTokensArgs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the sorted pairs, the place of each pair, and the end of each group."""
    experts, count = args
    order, place, offsets = (
        experts.new_empty(shape, dtype=torch.int32) for shape in ((experts.numel(),), experts.shape, (count,))
    )
    return order, place, offsets


@entry_function(GroupTokensArgs, reference, _empty_results)
def group_tokens(
    args: GroupTokensArgs[torch.Tensor], order: torch.Tensor, place: torch.Tensor, offsets: torch.Tensor
) -> bool:
    """Sort pairs as `reference` does."""
    experts, count = args
    if not experts.numel() or not count:
        return False
    flat, machine, width = experts.reshape(-1).contiguous(), machine_of(experts), power_of_two(count + 1)
    counts = order.new_empty((-(-flat.shape[0] // CHUNK), width))
    before, starts = torch.empty_like(counts), order.new_empty((width,))
    sort = machine.kernel(group_pairs)(experts.dtype, width, 256)
    sort(flat, counts, before, starts, order, place.view(-1), offsets)
    return True
