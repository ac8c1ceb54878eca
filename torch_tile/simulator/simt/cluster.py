# SPDX-License-Identifier: Apache-2.0
"""Simulate the cluster: its blocks meet, and reach each other's shared memory and mbarriers.

The blocks run at the same time (interpreter.py). A block must not end while another block may still reach it. So the
ending block's threads must know of all accesses by other blocks, whatever order the interpreter ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from torch_tile.diagnostics.errors import LaunchError, Span
from torch_tile.intrinsics.bulk import reaches_others
from torch_tile.ir import stmt as st
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.simulator.simt import values as va
from torch_tile.simulator.simt.calls import Calls, Handler, Place, Run
from torch_tile.simulator.simt.memory import Tile
from torch_tile.simulator.simt.races import NOTHING, Array, merge_times
from torch_tile.simulator.simt.values import Value


def is_linked(kernel: st.Kernel) -> bool:
    """Return whether the blocks of a cluster synchronise or reach each other and so must run at the same time."""
    if kernel.cluster == (1, 1, 1):
        return False
    return any(isinstance(n, Call) and (n.name in CLUSTER or reaches_others(n)) for n in walk(kernel.body))


def concurrent_blocks(
    kernel: st.Kernel, sizes: list[int], blocks: Iterable[tuple[int, ...]] | None
) -> Iterable[list[tuple[int, ...]]]:
    """Yield the groups of blocks that run at the same time: single blocks, or the blocks of a cluster by rank.

    With `blocks`, only these blocks and the blocks of their clusters. Raises LaunchError for a grid that clusters do
    not divide.
    """
    if blocks is not None:
        blocks = _checked(blocks, sizes)
    if not is_linked(kernel):
        points = blocks if blocks is not None else _points(sizes)
        return ([point] for point in points)
    cluster = kernel.cluster[: len(sizes)]
    for axis, extent, group in zip("xyz", sizes, cluster, strict=False):
        if extent % group:
            raise LaunchError(f"{extent} blocks in {axis} are no clusters of {group}")
    every = _points([n // c for n, c in zip(sizes, cluster, strict=True)])
    if blocks is not None:
        every = dict.fromkeys(tuple(b // c for b, c in zip(point, cluster, strict=True)) for point in blocks)
    inside = list(_points(list(cluster)))
    return (
        [tuple(f * c + r for f, c, r in zip(first, cluster, rank, strict=True)) for rank in inside] for first in every
    )


def _checked(blocks: Any, sizes: list[int]) -> list[tuple[int, ...]]:
    """Return the chosen blocks of a grid. Raises LaunchError for what names no block of it."""
    points = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str) else [blocks]
    for point in points:
        if not isinstance(point, tuple | list) or len(point) != len(sizes):
            wanted = f"({', '.join('xyz'[: len(sizes)])}{',' * (len(sizes) == 1)})"
            raise LaunchError(f"argument `blocks` has {point!r}; expected points {wanted} of the grid, in a list")
        if not all(0 <= at < size for at, size in zip(point, sizes, strict=True)):
            raise LaunchError(f"argument `blocks` has {point}, and the grid has {' x '.join(map(str, sizes))} blocks")
    return [tuple(point) for point in points]


def _points(sizes: list[int]) -> Iterable[tuple[int, ...]]:
    """Return all points of a grid, with x fastest."""
    return (p[::-1] for p in itertools.product(*map(range, sizes[::-1])))


class Cluster:
    """The barrier of a cluster's threads, and a record of what its blocks have sent to each other."""

    calls: Calls

    def __init__(self, calls: Calls):
        self.calls, threads = calls, calls.threads
        self.add = threads.findings.add
        self.alive = np.zeros(threads.lanes, bool)
        for block in range(threads.blocks):
            self.alive |= threads.in_block(block)
        self.arrived, self.waited = (np.zeros(threads.lanes, np.int64) for _ in range(2))  # how often
        self.heard: Array = NOTHING
        self.released: list[Array] = []  # of each time that all had arrived
        self.ended: set[int] = set()
        self.sent: dict[tuple[int, int, Span | None], int] = {}  # to a block by a thread, and when last

    def arrive(self, ids: Array, known: Array, span: Span | None) -> None:
        """Count the threads `ids` at the cluster's barrier; waiting threads then acquire `known`."""
        if (self.arrived[ids] > self.waited[ids]).any():
            self.add("barrier", span, "threads arrive at the cluster's barrier again before they have waited")
        self.arrived[ids] += 1
        self.heard = merge_times(self.heard, known)
        self._complete()

    def wait(self, ids: Array, span: Span | None) -> None:
        """Let the threads `ids` wait until all live threads of the cluster have arrived as often as they have."""
        if (self.arrived[ids] == self.waited[ids]).any():
            self.add("barrier", span, "threads wait at the cluster's barrier without having arrived")
            return
        generation = int(self.arrived[ids].max())
        missing = "not all threads of the cluster arrive"
        self.calls.tasks.until(lambda: len(self.released) >= generation, lambda: self.add("deadlock", span, missing))
        self.waited[ids] = generation
        self.calls.order.acquire(ids, self.released[generation - 1])

    def _complete(self) -> None:
        """Release the threads of the cluster's barrier once all living threads have arrived."""
        generation = len(self.released)
        if (self.arrived > generation).any() and not (self.arrived[self.alive] <= generation).any():
            self.released.append(self.heard)
            self.heard = NOTHING

    def send(self, block: int, ids: Array, span: Span | None) -> None:
        """Record writes of these threads to another block, after which their clock has advanced."""
        self.reach(block, ids, span, 1)

    def reach(self, block: int, ids: Array, span: Span | None, ago: int = 0) -> None:
        """Record that these threads access another block, or accessed the block `ago` steps earlier."""
        if block in self.ended:
            self.add("missing_wait", span, f"block {block} of the cluster has ended when another one reaches it")
        for thread in ids.tolist():
            self.sent[block, thread, span] = int(self.calls.order.epoch[thread // 32]) - ago

    def leave(self, block: int) -> None:
        """End a block; report accesses of other blocks to it that its threads do not know of."""
        mine, order = self.calls.threads.in_block(block), self.calls.order
        known = order.known[mine].max(axis=0)
        for (to, thread, span), when in self.sent.items():
            if to == block and known[thread] < when:
                text = f"block {block} of the cluster may end before {order.name(thread)} reaches it"
                self.add("missing_wait", span, text)
        self.alive &= ~mine
        self.ended.add(block)
        self._complete()

    def finish(self) -> None:
        """Report nothing: each block reported its mistakes in `leave`."""


def bits(blocks: int, p: Place) -> Iterator[int]:
    """Yield the blocks in a bit mask; report bits that name no block of the cluster."""
    for block in range(blocks.bit_length()):
        if blocks >> block & 1 and block < p.threads.blocks:
            yield block
        elif blocks >> block & 1:
            text = f"block {block} of a cluster of {p.threads.blocks}"
            p.threads.findings.add("out_of_bounds", p.span, text)


def _arrive(p: Place) -> Run:
    """Compile cluster_arrive."""

    def run() -> None:
        p.calls.together(p.call, p.span)
        ids = p.threads.active()
        p.calls.state(Cluster).arrive(ids, p.calls.order.release(ids), p.span)

    return run


def _wait(p: Place) -> Run:
    """Compile cluster_wait."""

    def run() -> None:
        p.calls.together(p.call, p.span)
        p.calls.state(Cluster).wait(p.threads.active(), p.span)

    return run


def _at_rank(p: Place) -> Run:
    """Compile at_rank: read an element of another block's shared memory."""
    width, tile = va.carrier(p.call.type), cast(Tile, p.behind(0))

    def run() -> Value:
        ids = p.threads.active()
        first, ranks, ok = _places(p, tile, ids, 1)
        ids = ids[ok]
        raw = p.calls.shared.read(first, tile.dtype.itemsize, ids, tile.owner, p.span).view(tile.raw_type)[:, 0]
        _reach(p, ranks, ids)
        return p.threads.spread(va.decode(raw, tile.dtype).astype(width, copy=False), ids)

    return run


def _store_at_rank(p: Place) -> Run:
    """Compile store_at_rank: write an element of another block's shared memory."""
    tile = cast(Tile, p.behind(0))

    def run() -> None:
        ids = p.threads.active()
        value = va.encode(p.threads.each(p.operands[1](), ids), tile.dtype)
        first, ranks, ok = _places(p, tile, ids, 2)
        data = np.ascontiguousarray(value[ok][:, None]).view(np.uint8)
        p.calls.shared.write(first, data, ids[ok], tile.owner, p.span)
        _reach(p, ranks, ids[ok])

    return run


def _places(p: Place, tile: Tile, ids: Array, rank: int) -> tuple[Array, Array, Array]:
    """Return the addresses and ranks of elements in the cluster's blocks, and which are inside; report others."""
    index, ranks = p.addresses(0, ids), p.threads.each(p.operands[rank](), ids)
    known = (ranks >= 0) & (ranks < p.threads.blocks)
    if not known.all():
        text = f"block {int(ranks[~known][0])} of a cluster of {p.threads.blocks}"
        p.threads.findings.add("out_of_bounds", p.span, text, int((~known).sum()))
    inside = tile.inside(index, 1, p.span)
    ok = known if inside is None else known & inside
    first = tile.address(index[ok]) + (ranks[ok] - p.threads.block) * p.calls.shared.of_block
    return first, ranks[ok], ok


def _reach(p: Place, ranks: Array, ids: Array) -> None:
    """Record which other blocks the threads `ids` access."""
    for rank in np.unique(ranks[ranks != p.threads.block]).tolist():
        p.calls.state(Cluster).reach(rank, ids[ranks == rank], p.span)


CLUSTER: dict[str, Handler] = {
    "cluster_arrive": _arrive,
    "cluster_wait": _wait,
    "at_rank": _at_rank,
    "store_at_rank": _store_at_rank,
}
