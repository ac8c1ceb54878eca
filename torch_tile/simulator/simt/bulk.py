# SPDX-License-Identifier: Apache-2.0
"""Simulate the tensor memory accelerator, which copies boxes between global and shared memory.

A load reads when it is started. Its bytes count at once for the phase of its mbarrier, the earliest possible time. Only
threads that waited for that phase may use them. A store reads until its thread waits for its group.
"""

from __future__ import annotations

import itertools
import math
from typing import cast

import numpy as np

from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.intrinsics.bulk import reaches_others
from torch_tile.ir.buffer import TensorMap
from torch_tile.simulator.simt.barriers import barriers_of
from torch_tile.simulator.simt.calls import Calls, Handler, Place, Run
from torch_tile.simulator.simt.cluster import Cluster, bits
from torch_tile.simulator.simt.memory import Global, Tile
from torch_tile.simulator.simt.races import Array, OrderedTrace
from torch_tile.simulator.simt.values import Value, decode, encode

CHUNK = 16  # bytes that a swizzle leaves together
_COMBINE = {"add": np.add, "min": np.minimum, "max": np.maximum}


def swizzled(address: Array, span: int) -> Array:
    """Apply the swizzle to byte addresses: XOR the 16-byte unit with the row number inside the pattern."""
    return address ^ (address >> 3 & (span - CHUNK)) if span else address


class Box:
    """The box of a tensor map: its elements in the tensor and its bytes in shared memory."""

    p: Place
    map: TensorMap
    size: int
    tensor: Global
    tile: Tile
    start: Run
    place: list[Run]
    sizes: list[Run]
    strides: list[Run]

    def __init__(self, p: Place, map_at: int, dst: int, place: int):
        map_ = cast(TensorMap, p.call.args[map_at])
        self.p, self.map, self.size = p, map_, map_.buffer.dtype.itemsize
        self.tensor, self.tile = cast(Global, p.behind(map_at)), cast(Tile, p.behind(dst))
        self.start, self.place = p.operands[dst], p.operands[place : place + len(map_.box)]
        self.sizes, self.strides = ([p.compile(e) for e in es] for es in (map_.sizes, map_.strides))
        self.bytes: int = math.prod(map_.box) * self.size
        self.points = np.indices(map_.box).reshape(len(map_.box), -1)
        if map_.swizzle and map_.box[-1] * self.size != map_.swizzle:
            raise InternalError(f"rows of a swizzled box span {map_.swizzle} bytes", p.span)

    def elements(self, thread: int) -> tuple[Array, Array]:
        """Return which elements of the box lie in the tensor, and the tensor indices of those."""
        inside, index = np.ones(self.points.shape[1], bool), np.zeros(self.points.shape[1], np.int64)
        steps = [int(stride()) for stride in self.strides]
        for points, start, size, step in zip(self.points, self.place, self.sizes, steps, strict=True):
            at = points + of_thread(start(), thread)
            inside &= (at >= 0) & (at < int(size()))
            index += at * step
        for step in steps[:-1]:
            if step * self.size % CHUNK:
                self._misaligned(f"a stride of `{self.tensor.name}` of {step * self.size} bytes")
        if self.tensor.raw.ctypes.data % CHUNK:
            self._misaligned(f"`{self.tensor.name}` for bulk copies")
        return inside, index[inside]

    def chunks(self, thread: int) -> Array | None:
        """Return the shared addresses of the box in units of 16 bytes; None if the box leaves the tile."""
        index, tile = of_thread(self.start(), thread), self.tile
        if tile.inside(np.array([index]), self.bytes // self.size, self.p.span) is not None:
            return None
        first, unit = int(tile.address(np.array([index]))[0]), 8 * self.map.swizzle or 128
        if first % unit:
            self._misaligned(f"a box in `{tile.name}` needs multiples of {unit} bytes; {first}")
        return swizzled(first + np.arange(0, self.bytes, CHUNK), self.map.swizzle)

    def _misaligned(self, text: str) -> None:
        """Report a misaligned box."""
        self.p.threads.findings.add("misaligned", self.p.span, text)


class Stores:
    """The bulk stores of a block: for each thread its commit groups, each with the source lines of its stores."""

    def __init__(self, calls: Calls):
        self.calls = calls
        self.groups: dict[int, list[list[Span | None]]] = {}  # the last one is open
        self.read: dict[int, int] = {}  # groups that are known to have read their source

    def of(self, thread: int) -> list[list[Span | None]]:
        """Return the commit groups of a thread."""
        return self.groups.setdefault(thread, [[]])

    def agent(self, thread: int, what: str) -> int:
        """Return the clock column of the reads ("read") or writes ("write") of a thread's stores."""
        return self.calls.order.agent(f"the bulk store of thread {thread}", what, thread)

    def wait(self, thread: int, pending: int, read: bool) -> None:
        """Let the thread wait for all its groups but the newest `pending`."""
        order, done = self.calls.order, max(0, len(self.of(thread)) - 1 - pending)
        self.read[thread] = max(done, self.read.get(thread, 0))
        for what in ("read",) if read else ("read", "write"):
            order.learn(np.array([thread]), self.agent(thread, what), order.time(done))

    def finish(self) -> None:
        """Report stores that may still read the block's memory when the block ends."""
        for thread, groups in self.groups.items():
            for span in itertools.chain(*groups[self.read.get(thread, 0) :]):
                text = f"the block ends while a bulk store of thread {thread} may still read its memory"
                self.calls.threads.findings.add("missing_wait", span, text)


def of_thread(value: Value, thread: int) -> int:
    """Return a value as this thread holds it."""
    return int(value[thread] if isinstance(value, np.ndarray) else value)


def _load(p: Place) -> Run:
    """Compile tma_load: copy a box from a tensor to the shared memory of one block or several."""
    box, barriers = Box(p, 1, 0, 3), barriers_of(p, 2)

    def run() -> None:
        for thread in p.threads.active().tolist():
            chunks = box.chunks(thread)
            for block in _destinations(p, thread):
                barrier = barriers.at(of_thread(p.operands[2](), thread), np.array([thread]), p.span, block=block)
                inside, index = box.elements(thread)
                raw = np.zeros(len(inside), box.tensor.raw_type)
                time = p.calls.order.time(barrier.phase + 1)
                raw[inside] = _got(box.tensor, index, thread, (barrier.agent, time), p.span)
                barrier.copies[barrier.phase] = p.span
                if chunks is not None:
                    data = raw.view(np.uint8).reshape(-1, CHUNK)
                    there = chunks + (block - p.threads.block) * p.calls.shared.of_block
                    p.calls.shared.write_by_agent(there, data, thread, barrier.agent, time, box.tile.owner, p.span)
                barriers.expect(barrier, -box.bytes, p.span)

    return run


def _destinations(p: Place, thread: int) -> list[int]:
    """Return the blocks of the cluster that a load writes to; report blocks that have ended."""
    if not reaches_others(p.call):
        return [p.threads.block]
    found = list(bits(of_thread(p.operands[-1](), thread), p))
    cluster = p.calls.state(Cluster)
    for block in found:
        if block in cluster.ended:  # `Made.finish` checks that it waited for all other bytes
            text = f"block {block} of the cluster has ended when a copy comes to it"
            p.threads.findings.add("missing_wait", p.span, text)
    return found


def _store(p: Place) -> Run:
    """Compile tma_store: copy or combine a box of shared memory into a tensor."""
    box, combine = Box(p, 0, 1, 2), str(p.call.options[0])

    def run() -> None:
        order, stores = p.calls.order, p.calls.state(Stores)
        for thread in p.threads.active().tolist():
            who, groups = np.array([thread]), stores.of(thread)
            groups[-1].append(p.span)
            time, chunks = order.time(len(groups)), box.chunks(thread)
            if chunks is None:
                continue
            reader = (stores.agent(thread, "read"),)
            bytes_ = p.calls.shared.fetch(chunks, CHUNK, who, reader, time, box.tile.owner, p.span)
            inside, index = box.elements(thread)
            raw = bytes_.reshape(-1).view(box.tensor.raw_type)[inside]
            _write_elements(box.tensor, index, raw, thread, (stores.agent(thread, "write"), time), combine, p.span)

    return run


def _got(tensor: Global, index: Array, thread: int, done: tuple[int, int], span: Span | None) -> Array:
    """Read elements of a tensor for a copy that ends when the agent `done[0]` reaches the time `done[1]`."""
    ok = tensor.inside(index, 1, span)
    inside = index if ok is None else index[ok]
    if isinstance(tensor.trace, OrderedTrace):
        agent, time = done
        tensor.trace.read_by_agents(inside[:, None], np.array([thread]), (agent,), time, tensor.name, span)
    found = np.zeros(len(index), tensor.raw_type)
    found[slice(None) if ok is None else ok] = tensor.peek(inside)
    return found


def _write_elements(
    tensor: Global, index: Array, raw: Array, thread: int, done: tuple[int, int], combine: str, span: Span | None
) -> None:
    """Write or combine elements for a copy that ends when the agent `done[0]` reaches the time `done[1]`."""
    ok = tensor.inside(index, 1, span)
    if ok is not None:
        index, raw = index[ok], raw[ok]
    places, trace = index[:, None], tensor.trace
    if isinstance(trace, OrderedTrace):
        trace.before_write(places, np.full(len(index), thread), tensor.name, span, atomic=bool(combine))
        trace.written_by_agent(places, *done, atomic=bool(combine))
    if combine:
        before, new = (decode(x, tensor.dtype) for x in (tensor.peek(index), raw))
        raw = encode(_COMBINE[combine](before, new), tensor.dtype)
    tensor.poke(index, raw)


def _commit(p: Place) -> Run:
    """Compile bulk_commit: each running thread closes its group of stores."""

    def run() -> None:
        for thread in p.threads.active().tolist():
            p.calls.state(Stores).of(thread).append([])

    return run


def _wait(p: Place) -> Run:
    """Compile bulk_wait: the running threads wait for their commit groups."""
    pending, read = int(str(p.call.options[0])), bool(p.call.options[1])

    def run() -> None:
        for thread in p.threads.active().tolist():
            p.calls.state(Stores).wait(thread, pending, read)

    return run


BULK: dict[str, Handler] = {"tma_load": _load, "tma_store": _store, "bulk_commit": _commit, "bulk_wait": _wait}
