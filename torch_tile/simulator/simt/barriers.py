# SPDX-License-Identifier: Apache-2.0
"""Simulate mbarriers and named barriers: their phases, and the order that arrivals and waits create.

An arrival releases what its thread knows. A wait acquires what the arrivals of its phase released (thread_clocks). A
copy's bytes arrive when the copy starts. Only threads that waited for the phase know that the bytes are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.buffer import Buffer
from torch_tile.simulator.simt.calls import Calls, Handler, Place, Run
from torch_tile.simulator.simt.cluster import Cluster, bits
from torch_tile.simulator.simt.memory import Memory
from torch_tile.simulator.simt.races import NOTHING, Array, merge_times
from torch_tile.simulator.simt.values import Value

MOST_BYTES = (1 << 20) - 1  # that a phase can wait for


@dataclass
class Phases:
    """The state of one mbarrier: the arrivals and bytes that phase `phase` lacks, and what earlier phases released."""

    name: str
    arrivals: int
    agent: int  # the column of its copies
    born: tuple[int, int] | None = None  # the thread that made it, and when
    fenced: bool = False
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    heard: Array = field(default_factory=lambda: NOTHING)
    released: list[Array] = field(default_factory=list)
    copies: dict[int, Span | None] = field(default_factory=dict)  # the last copy of each phase
    waited: int = -1  # the last phase that a thread waited for
    times: dict[int, float] = field(default_factory=dict)  # of a timeline: when each phase completes


class Barriers(Memory):
    """The mbarriers of one buffer."""

    calls: Calls

    def __init__(self, buffer: Buffer, size: int, calls: Calls):
        super().__init__(buffer, size, calls.threads)
        self.calls, self.items = calls, dict[tuple[int, int], Phases]()  # by block of the cluster, and place
        self.arrivals: list[Span | None] = []  # where the kernel arrives at them
        self.add = calls.threads.findings.add

    def reset(self) -> None:
        """Forget the barriers of the running block, which has made none yet."""
        self.items = {place: found for place, found in self.items.items() if place[0] != self.threads.block}

    def at(self, index: int, ids: Array, span: Span | None, fresh: bool = False, block: int | None = None) -> Phases:
        """Return a barrier of the running block or of `block`; report threads `ids` that do not know it was made."""
        if not 0 <= index < self.size:
            self.inside(np.array([index]), 1, span)
            index = 0
        order = self.calls.order
        place = self.threads.block if block is None else block, index
        found = self.items.get(place)
        if found is None:
            agent = order.agent(f"copies for `{self.name}[{index}]`", self, *place)
            found = self.items[place] = Phases(f"`{self.name}[{index}]`", self.buffer.arrivals, agent)
            found.pending = found.arrivals
            self.calls.state(Made).barriers.append(found)
            if not fresh:
                self.add("barrier", span, f"{found.name} is used before it is made")
        if found.born is not None and not fresh:
            maker, when = found.born
            if (order.known[ids, maker] < when).any():
                self.add("race", span, f"{found.name} is used; made before by {order.name(maker)}")
            if not found.fenced:
                self.add("missing_fence", span, f"{found.name} is used with no fence_barrier_init after it was made")
        return found

    def make(self, barrier: Phases, thread: int, arrivals: int, span: Span | None) -> None:
        """Simulate mbarrier_init: give the barrier its maker thread and its count of arrivals."""
        if barrier.born is not None:
            self.add("barrier", span, f"{barrier.name} is made again")
        barrier.born = thread, int(self.calls.order.epoch[thread // 32])
        barrier.arrivals = barrier.pending = arrivals
        self.calls.order.tick(np.array([thread]))

    def arrive(self, barrier: Phases, ids: Array, times: int, span: Span | None) -> None:
        """Count `times` arrivals of the threads `ids` at the barrier."""
        barrier.heard = merge_times(barrier.heard, self.calls.order.release(ids))
        self._delay(barrier, self.calls.timeline.now(ids))
        for _ in range(times):
            if barrier.pending == 0:
                text = f"{barrier.name} counts {barrier.arrivals} arrivals; one more before the bytes of phase "
                self.add("barrier", span, f"{text}{barrier.phase}")
                return
            barrier.pending -= 1
            self._complete(barrier)

    def expect(self, barrier: Phases, size: int, span: Span | None) -> None:
        """Add `size` to the bytes that the phase waits for; a copy that came passes a negative size."""
        barrier.bytes += size
        if size < 0:
            self._delay(barrier, self.calls.timeline.landing)
        if abs(barrier.bytes) > MOST_BYTES:
            self.add("barrier", span, f"{barrier.name} waits for at most {MOST_BYTES} bytes; {barrier.bytes}")
        self._complete(barrier)

    def _delay(self, barrier: Phases, time: float) -> None:
        """Let the barrier's phase complete no earlier than `time`."""
        barrier.times[barrier.phase] = max(time, barrier.times.get(barrier.phase, 0.0))

    def _complete(self, barrier: Phases) -> None:
        """Start the barrier's next phase if the current phase lacks neither arrivals nor bytes."""
        if barrier.pending or barrier.bytes:
            return
        order = self.calls.order
        heard = merge_times(barrier.heard, np.zeros(barrier.agent + 1, np.int64))
        heard[barrier.agent] = order.time(barrier.phase + 1)
        barrier.released.append(heard)
        barrier.phase, barrier.pending, barrier.heard = barrier.phase + 1, barrier.arrivals, NOTHING

    def wait(self, barrier: Phases, ids: Array, parity: int, span: Span | None) -> None:
        """Let the threads `ids` wait until the phase of this parity has completed.

        A thread that knows of `n` phases learns of the next one. If the last one had this parity it learns of nothing.
        This holds in any order of events, however far the barrier has come.
        """
        order = self.calls.order
        self.calls.tasks.until(
            lambda: barrier.phase % 2 != parity % 2, lambda: self.add("deadlock", span, self._lacks(barrier))
        )
        phases = np.maximum(0, order.known[ids, barrier.agent] - order.first)
        for phase in np.unique(phases[phases % 2 == parity % 2]).tolist():
            barrier.waited = max(barrier.waited, phase)
            order.acquire(ids[phases == phase], barrier.released[phase])
            self.calls.timeline.wait(ids[phases == phase], barrier.times.get(phase, 0.0), barrier.name, span)

    def _lacks(self, barrier: Phases) -> str:
        """Describe what a barrier still waits for."""
        lines = ", ".join(dict.fromkeys(str(s) for s in self.arrivals if s is not None))
        where = f"arrivals at {lines}" if lines else "some arrival of the compiler" if self.arrivals else "no arrival"
        found = f"phase {barrier.phase} of {barrier.name} lacks {barrier.pending} arrivals"
        found += f" and {barrier.bytes} bytes" if barrier.bytes else ""
        return f"{found}; there is {where}"


class Made:
    """The mbarriers that the running blocks have made."""

    def __init__(self, calls: Calls):
        self.barriers: list[Phases] = []
        self.calls = calls

    def fence(self, ids: Array) -> None:
        """Mark the barriers made by these threads as fenced, so that other threads may use them."""
        for barrier in self.barriers:
            barrier.fenced |= barrier.born is not None and barrier.born[0] in ids

    def known_by(self, ids: Array) -> Array:
        """Return what an arrival of these threads releases: the times at which they made barriers and fenced them."""
        found = np.zeros(self.calls.order.lanes, np.int64)
        for barrier in self.barriers:
            if barrier.fenced and barrier.born is not None and barrier.born[0] in ids:
                maker, when = barrier.born
                found[maker] = max(found[maker], when)
        return found

    def finish(self) -> None:
        """Report copies into the block's memory that no thread waited for."""
        for barrier in self.barriers:
            for phase, span in barrier.copies.items():
                if phase > barrier.waited:
                    text = f"the block ends while a copy for {barrier.name} is in flight"
                    self.calls.threads.findings.add("missing_wait", span, text)


def by_value(value: Value, ids: Array) -> Iterator[tuple[int, Array]]:
    """Yield each value with the threads among `ids` that hold it."""
    if not isinstance(value, np.ndarray):
        if len(ids):
            yield int(value), ids
        return
    mine = value[ids]
    for one in np.unique(mine).tolist():
        yield int(one), ids[mine == one]


def barriers_of(p: Place, operand: int) -> Barriers:
    """Return the mbarriers that an operand addresses."""
    return cast(Barriers, p.behind(operand))


def _init(p: Place) -> Run:
    """Compile mbarrier_init: each running thread makes its barrier."""
    memory, arrivals = barriers_of(p, 0), cast(int, p.call.options[0])

    def run() -> None:
        for index, who in by_value(p.operands[0](), p.threads.active()):
            for thread in who.tolist():
                memory.make(memory.at(index, who, p.span, fresh=True), thread, arrivals, p.span)

    return run


def _fence_init(p: Place) -> Run:
    """Compile fence_barrier_init: publish the running threads' new barriers."""
    return lambda: p.calls.state(Made).fence(p.threads.active())


def _wait(p: Place) -> Run:
    """Compile mbarrier_wait: the running threads wait for a parity of their barrier."""
    memory = barriers_of(p, 0)

    def run() -> None:
        for index, some in by_value(p.operands[0](), p.threads.active()):
            for parity, who in by_value(p.operands[1](), some):
                memory.wait(memory.at(index, who, p.span), who, parity, p.span)

    return run


def _arrive(p: Place) -> Run:
    """Compile mbarrier_arrive, on the running block's barrier or on those of other blocks."""
    memory = barriers_of(p, 0)
    memory.arrivals.append(p.span)

    def run() -> None:
        for index, who in by_value(p.operands[0](), p.threads.active()):
            if len(p.operands) == 1:
                memory.arrive(memory.at(index, who, p.span), who, len(who), p.span)
                continue
            for block, some in by_value(p.operands[1](), who):
                for there in bits(1 << block, p):
                    _arrive_at(memory, index, there, some, p)

    return run


def _arrive_at(memory: Barriers, index: int, block: int, ids: Array, p: Place) -> None:
    """Let the threads `ids` arrive at a barrier of one block of the cluster."""
    memory.arrive(memory.at(index, ids, p.span, block=block), ids, len(ids), p.span)
    if block != p.threads.block:
        p.calls.state(Cluster).send(block, ids, p.span)


def _warp_arrive(p: Place) -> Run:
    """Compile warp_arrive: each warp fences, meets, and then arrives once at the barrier."""
    memory = barriers_of(p, 0)
    memory.arrivals.append(p.span)

    def run() -> None:
        ids = p.threads.active()
        p.calls.order.fence(ids)
        p.calls.order.warp_barrier(np.flatnonzero(p.calls.together(p.call, p.span)))
        if len(p.operands) == 1:
            for index, who in by_value(p.operands[0](), ids[ids % 32 == 0]):
                memory.arrive(memory.at(index, who, p.span), who, len(who), p.span)
            return
        for index, some in by_value(p.operands[0](), ids):
            for blocks, who in by_value(p.operands[1](), some):
                for block in bits(blocks, p):
                    _arrive_at(memory, index, block, who[who % 32 == block], p)

    return run


def _expect(p: Place) -> Run:
    """Compile mbarrier_expect: each running thread adds bytes to its barrier's phase."""
    memory = barriers_of(p, 0)

    def run() -> None:
        for index, some in by_value(p.operands[0](), p.threads.active()):
            for size, who in by_value(p.operands[1](), some):
                memory.expect(memory.at(index, who, p.span), size * len(who), p.span)

    return run


def _arrive_relaxed(p: Place) -> Run:
    """Compile a cluster arrival without release."""

    def run() -> None:
        p.calls.together(p.call, p.span)
        ids = p.threads.active()
        p.calls.state(Cluster).arrive(ids, p.calls.state(Made).known_by(ids), p.span)

    return run


BARRIERS: dict[str, Handler] = {
    "mbarrier_init": _init, "fence_barrier_init": _fence_init, "mbarrier_wait": _wait, "mbarrier_arrive": _arrive,
    "warp_arrive": _warp_arrive, "mbarrier_expect": _expect,
    "cluster_arrive_relaxed": _arrive_relaxed,
}  # fmt: skip


# Barriers of the block and of some of its threads, and the fence that goes with them.
#
# An arriving thread releases what it knows; a waiting thread acquires all that was released (thread_clocks). A barrier
# of one role therefore orders nothing for the threads of another role.


@dataclass
class NamedBarrier:
    """One named barrier: its thread count, the arrivals so far, and what each earlier use released."""

    threads: int = 0
    arrived: int = 0
    heard: Array = field(default_factory=lambda: NOTHING)
    released: list[Array] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)  # of a timeline: when each use is complete


class NamedBarriers:
    """The named barriers of each block; barrier 0 is the barrier of all threads."""

    calls: Calls
    found: dict[tuple[int, int], NamedBarrier]

    def __init__(self, calls: Calls):
        self.calls, self.found = calls, dict[tuple[int, int], NamedBarrier]()

    def finish(self) -> None:
        """Report nothing: a barrier that lacks threads at the end of a block is no mistake."""

    def meet(self, p: Place, number: int, threads: int, waits: bool) -> None:
        """Count the running threads at a named barrier; with `waits`, let them wait for the missing threads."""
        ids, add = p.threads.active(), p.threads.findings.add
        barrier = self.found.setdefault((p.threads.block, number), NamedBarrier())
        if barrier.arrived and barrier.threads != threads:
            add("barrier", p.span, f"barrier {number} is for {threads} threads here, for {barrier.threads} elsewhere")
        barrier.threads, generation = threads, len(barrier.released)
        barrier.arrived += len(ids)
        timeline = self.calls.timeline
        barrier.times[generation] = max(timeline.now(ids), barrier.times.get(generation, 0.0))
        barrier.heard = merge_times(barrier.heard, self.calls.order.release(ids))
        if barrier.arrived > threads:
            add("barrier", p.span, f"barrier {number} is for {threads} threads; {barrier.arrived} come")
        if barrier.arrived >= threads:
            barrier.released.append(barrier.heard)
            barrier.arrived, barrier.heard = 0, NOTHING
        if waits:
            self.calls.tasks.until(
                lambda: len(barrier.released) > generation,
                lambda: add("deadlock", p.span, f"barrier {number} is for {threads} threads; {barrier.arrived} come"),
            )
            self.calls.order.acquire(ids, barrier.released[generation])
            timeline.wait(ids, barrier.times[generation], f"barrier {number}", p.span)


def _barrier(waits: bool) -> Handler:
    """Return the handler of a block barrier or named barrier; without `waits` its threads only arrive."""

    def compile(p: Place) -> Run:
        number, count = (cast(int, o) for o in p.call.options) if p.call.options else (0, p.threads.count)

        def run() -> None:
            p.threads.findings.barriers += number == 0
            p.calls.together(p.call, p.span)
            p.calls.state(NamedBarriers).meet(p, number, count, waits)

        return run

    return compile


def _in_ping_pong(p: Place) -> Run:
    """Compile a turn as csrc/sync.h does: a warpgroup and its predecessor meet at the warpgroup's barrier."""
    first, start, count = (cast(int, o) for o in p.call.options)
    what = p.call.name.removeprefix("turn_")

    def run() -> None:
        p.calls.together(p.call, p.span)
        (group,) = set(
            (p.threads.active() % p.threads.of_block // 128).tolist()
        )  # barrier groups are warpgroups where there are turns
        here, meet = group - start, p.calls.state(NamedBarriers).meet
        if what in ("take", "pass"):
            meet(p, first + (here + (what == "pass")) % count, 256, what == "take")
        elif here == (count - 1 if what == "open" else 0):
            meet(p, first, 256, what == "close")

    return run


def _fence_async(p: Place) -> Run:
    """Compile fence_proxy_async: order the running threads' accesses before those of engines."""
    return lambda: p.calls.order.fence(p.threads.active())


MEETINGS: dict[str, Handler] = {
    "barrier": _barrier(True), "named_barrier": _barrier(True), "named_barrier_arrive": _barrier(False),
    "fence_proxy_async": _fence_async,
    **{f"turn_{what}": _in_ping_pong for what in ("open", "take", "pass", "close")},
}  # fmt: skip
