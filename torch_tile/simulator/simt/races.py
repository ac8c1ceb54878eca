# SPDX-License-Identifier: Apache-2.0
"""Detect races: record each access to a place of memory, and check its order by barriers or vector clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import MOST_BLOCKS_OF_CLUSTER, MOST_THREADS, WARP
from torch_tile.simulator.findings import Findings

WHOLE_WARP = MOST_BLOCKS_OF_CLUSTER * MOST_THREADS  # above the numbers of threads
WHO = 2 * WHOLE_WARP  # accessor codes per epoch: threads, warps from WHOLE_WARP on
ANYONE = WHO - 1
Array = Any


class Clock:
    """The epochs of all blocks in one sequence; each barrier of a block starts a new epoch."""

    warp_epochs: np.ndarray[Any, np.dtype[Any]]
    base: int

    def __init__(self) -> None:
        self.base = 0  # the epoch, times WHO
        self.has_met_by_warp: bool = False  # whether any warp met a warp barrier, in any epoch
        self.counters: dict[object, dict[int, int]] = {}  # releases of blocks that have arrived there
        self.start_block()

    def start_block(self) -> None:
        """Start the epochs of a new block."""
        # Knowledge of other blocks, by their first epoch: the epoch up to which all is known, and the addition of the
        # next barrier.
        self.heard: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.fenced: dict[int, Any] = {}  # what threads release by atomic updates, by thread
        self.barrier()
        self.first: int = self.base  # of this block

    def barrier(self) -> None:
        """Start a new epoch: all threads of the block have met, so earlier accesses precede later ones."""
        self.base += WHO
        self.warp_epochs = np.zeros(33, np.int32)  # warp barriers of each warp in this epoch; the last is ANYONE's
        self.by_warp: bool = False  # whether any warp met one in this epoch
        self.heard, self.coming = _latest(self.heard, self.coming), {}

    def arrive(self, ids: Array, counter: object, last: bool) -> None:
        """Count an arrival at a counter, and release accesses before the last barrier; the `last` one acquires."""
        left = _latest(self.counters.pop(counter, {}), self.heard | {self.first: self.base})
        if last:
            self.coming = _latest(self.coming, left)
        else:
            self.counters[counter] = left

    def fence_all(self, ids: Array) -> None:
        """Let later atomic updates of these threads release what came before the last barrier."""
        self.fenced.update(dict.fromkeys(ids.tolist(), self.heard | {self.first: self.base}))

    def publish(self, thread: int, counter: object) -> None:
        """Release what came before a thread's last fence, by an atomic update."""
        if (mine := self.fenced.get(thread)) is not None:
            self.counters[counter] = _latest(self.counters.get(counter, {}), mine)

    def hear(self, ids: Array, counter: object) -> None:
        """Let these threads acquire what atomic updates of earlier blocks have released."""
        self.coming = _latest(self.coming, self.counters.get(counter, {}))

    def knows(self, stamps: Array) -> Array:
        """Return whether accesses of other blocks at these times precede the current epoch."""
        firsts = np.array(sorted(self.heard), np.int64)
        ends = np.array([0, *(self.heard[n] for n in firsts.tolist())], np.int64)
        return stamps < ends[np.searchsorted(firsts, stamps, side="right")]

    def warp_barrier(self, warps: Array) -> None:
        """Record that the threads of these warps have met."""
        self.warp_epochs[warps] += 1
        self.by_warp = self.has_met_by_warp = True


class Trace:
    """The last accesses to each of `count` places of a memory; `who` names the accessor of each row of `places`."""

    writes: np.ndarray[Any, np.dtype[Any]]
    reads: np.ndarray[Any, np.dtype[Any]]
    atomic: np.ndarray[Any, np.dtype[Any]]
    write_warp_epoch: np.ndarray[Any, np.dtype[Any]]
    read_warp_epoch: np.ndarray[Any, np.dtype[Any]]
    clock: Clock
    findings: Findings

    def __init__(self, count: int, clock: Clock, findings: Findings):
        self.clock, self.findings = clock, findings
        self.writes = np.full(count, -1, np.int64)  # epoch * WHO + accessor of the last write; -1: never
        self.reads = np.full(count, -1, np.int64)  # the same of the reads since
        self.atomic = np.zeros(count, bool)  # whether the last write was an atomic update
        self.write_warp_epoch = np.zeros(count, np.int32)  # how often the accessor's warp had met a warp barrier
        self.read_warp_epoch = np.zeros(count, np.int32)

    def read(self, places: Array, who: Array, name: str, span: Span | None) -> Array:
        """Record a read and check its order; return the stamps of the writes before it, negative for none."""
        written = self.writes[places]
        self.check(written, self.write_warp_epoch, places, who, f"`{name}` is read; written", span)
        self._add(self.reads, places, who)
        if self.clock.has_met_by_warp:  # the place may still have a number of an earlier epoch
            self.read_warp_epoch[places] = self.clock.warp_epochs[_warp(who)][:, None]
        return written

    def before_write(
        self,
        places: Array,
        who: Array,
        name: str,
        span: Span | None,
        harmless: Array | None = None,
        atomic: bool = False,
    ) -> Array:
        """Check a coming write against all earlier accesses but `harmless` writes. Return the earlier stamps."""
        self.check(self.reads[places], self.read_warp_epoch, places, who, f"`{name}` is overwritten; read", span)
        written = self.writes[places]
        if atomic:  # atomic updates do not race with each other
            harmless = self.atomic[places]
        stamps = written if harmless is None else np.where(harmless, -1, written)
        self.check(stamps, self.write_warp_epoch, places, who, f"`{name}` is written; written", span)
        return written

    def wrote(self, places: Array, who: Array, atomic: bool = False) -> None:
        """Record a write."""
        if atomic:
            self._add(self.writes, places, who)
        else:
            self.writes[places] = self.clock.base + who[:, None]
        self.atomic[places] = atomic
        if self.clock.has_met_by_warp:
            self.write_warp_epoch[places] = self.clock.warp_epochs[_warp(who)][:, None]

    def check(self, stamps: Array, warp_epochs: Array, places: Array, who: Array, what: str, span: Span | None) -> None:
        """Report places whose access has no order with an earlier one in `stamps`, of this epoch or another block."""
        clock = self.clock
        others = (stamps >= 0) & (stamps < clock.first)
        if others.any() and clock.heard:
            others &= ~clock.knows(stamps)
        if others.any():
            self.findings.add(
                "race", span, f"{what} by another block", int(others.any(axis=1).sum()), between_blocks=True
            )
        bad = (stamps >= clock.base) & (stamps != clock.base + who[:, None])
        if not bad.any():
            return
        if clock.by_warp:
            other, mine = _warp(stamps - clock.base), _warp(who)[:, None]
            bad &= (other != mine) | (warp_epochs[places] >= clock.warp_epochs[mine])
            if not bad.any():
                return
        row, column = np.argwhere(bad)[0]
        earlier = _name(int(stamps[row, column] - clock.base))
        text = f"{what} before by {earlier}, now by {_name(int(who[row]))}"
        self.findings.add("race", span, text, int(bad.any(axis=1).sum()))

    def _add(self, stamps: Array, places: Array, who: Array) -> None:
        """Record accessors of places that other threads may have accessed in this epoch, too."""
        base, me = self.clock.base, self.clock.base + who[:, None]
        before = stamps[places]
        known = (before == me) | (before == base + ANYONE) | (before == base + WHOLE_WARP + who[:, None] // 32)
        if known.all():
            return
        stamps[places] = me
        now = stamps[places]
        several, recent = now != me, (before >= base) & (before != me)
        if several.any():
            self._join(stamps, places, me, now, several)
        if recent.any():
            self._join(stamps, places, stamps[places], before, recent)

    def _join(self, stamps: Array, places: Array, mine: Array, others: Array, where: Array) -> None:
        """Record that several threads have accessed a place."""
        here = places[where]
        base = self.clock.base
        a, b = _warp(np.broadcast_to(mine, where.shape)[where] - base), _warp(others[where] - base)
        separate = (a != b) | (a == 32)
        stamps[here] = base + WHOLE_WARP + a
        stamps[here[separate]] = base + ANYONE


def _latest(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """Merge two records of blocks, keeping the later time of each block."""
    return a | {first: max(end, a.get(first, 0)) for first, end in b.items()}


def _warp(who: Array) -> Array:
    """Return the warp of an accessor; 32 for ANYONE."""
    return np.where(who < WHOLE_WARP, who // 32, np.minimum(who - WHOLE_WARP, 32)).astype(np.int64)


def _name(who: int) -> str:
    """Return the text of a thread or warp."""
    if who == ANYONE:
        return "threads of several warps"
    return f"thread {who}" if who < WHOLE_WARP else f"warp {who - WHOLE_WARP}"


# Order between threads that synchronise by other means than barriers of the whole block. Each thread has a vector
# clock: how far every other thread, and every asynchronous agent, had come when it last heard of it. An access is in
# order if the accessor knows of all earlier accesses that conflict with it. The order in which the interpreter ran them
# does not matter. One thread releases (arrives), another one acquires (waits), and so hears of it. An agent copies or
# multiplies for a thread: a wait tells its time.

NOTHING = np.zeros(0, np.int64)  # is what is known before anything is


def merge_times(a: Array, b: Array) -> Array:
    """Merge two records of times into the later of each column; the shorter record may lack last agents."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    found = longer.copy()
    found[: len(shorter)] = np.maximum(found[: len(shorter)], shorter)
    return found


class View:
    """The knowledge of accessors: accessor `n` knows the times in `table[row[n]]`."""

    table: Array
    row: Array
    lanes: int

    def __init__(self, table: Array, row: Array, lanes: int):
        self.table, self.row, self.lanes = table, row[:, None], lanes

    @cached_property
    def of_warps(self) -> Array:
        """Return the common knowledge of each warp's threads: times of its accesses, then those of its fences."""
        own = self.table[:, : 2 * self.lanes]
        return own.reshape(len(own), -1, 32).min(axis=2)

    def seen(self, column: Array, fenced: bool = False) -> Array:
        """Return the known time of each accessor in `column`, `[rows, places]`.

        Columns below `lanes` are threads, below twice `lanes` whole warps, and above that agents. With `fenced`, return
        the time up to which the accessor fenced its writes.
        """
        lanes = self.lanes
        wide = (column >= lanes) & (column < 2 * lanes)
        some = bool(wide.any())
        threads = np.where(wide, 0, column) if some else column
        found = self.table[self.row, threads + lanes if fenced else threads]
        if not some:
            return found
        warp = np.where(wide, column - lanes, 0) // 32 + (lanes // 32 if fenced else 0)
        return np.where(wide, self.of_warps[self.row, warp], found)


class VectorClock(Clock):
    """The vector clock of a block: `known[t]` holds the times that thread t knows.

    Its columns are the threads' accesses, the threads' fenced writes, and the agents. Time advances with every release,
    for a warp at once, and from block to block. If the blocks of a cluster run at the same time, `lanes` are the
    threads of all blocks. `of_block` are those of one block.
    """

    epoch: np.ndarray[Any, np.dtype[Any]]
    known: np.ndarray[Any, np.dtype[Any]]
    lanes: int
    of_block: int

    def __init__(self, lanes: int, of_block: int = 0):
        self.lanes, self.latest, self.of_block = lanes, 0, of_block or lanes
        self.released: dict[object, dict[int, Array]] = {}  # at counters, by the first times of the blocks
        super().__init__()

    def start_block(self) -> None:
        """Start the clock of a new block."""
        self.first: int = self.latest + 1
        self.epoch = np.full(self.lanes // 32, self.latest)
        self.fenced: dict[int, dict[int, Array]] = {}  # what threads release by atomic updates
        self.names: dict[int, str] = {}  # of the columns of agents
        self.columns: dict[tuple[object, ...], int] = {}
        self.known = np.zeros((self.lanes, 2 * self.lanes + 64), np.int64)
        self.news: list[tuple[Heard, int]] = []  # of earlier blocks; threads that have it know `first` in the column
        self.tick(np.arange(self.lanes))

    def barrier(self) -> None:
        """Record that all threads of the block have met."""
        self.meet(np.arange(self.lanes))

    def warp_barrier(self, warps: Array) -> None:
        """Record that the threads of these warps have met."""
        per_warp = self.known.reshape(-1, 32, self.known.shape[1])
        per_warp[warps] = per_warp[warps].max(axis=1, keepdims=True)
        self.tick(warps * 32)

    def tick(self, ids: Array) -> None:
        """Advance the time of these threads' warps, so that later accesses have a later time."""
        warps = np.unique(ids // 32)
        self.epoch[warps] += 1
        self.latest = max(self.latest, int(self.epoch[warps].max(initial=0)))
        threads = (warps[:, None] * 32 + np.arange(32)).ravel()
        self.known[threads, threads] = self.epoch[threads // 32]

    def release(self, ids: Array) -> Array:
        """Return the union of these threads' knowledge for the acquiring threads, and advance their time."""
        found = self.known[ids].max(axis=0)
        self.tick(ids)
        return found

    def acquire(self, ids: Array, known: Array) -> None:
        """Add the knowledge released by other threads to that of these threads."""
        self.known[ids, : len(known)] = np.maximum(self.known[ids, : len(known)], known)

    def arrive(self, ids: Array, counter: object, last: bool) -> None:
        """Count an arrival at a counter, and release the thread's knowledge; the `last` one acquires all."""
        left = self.released.pop(counter, {})
        for first, known in self.gathered(ids).items():
            left[first] = merge_times(left[first], known) if first in left else known
        if not last:
            self.released[counter] = left
            return
        self.acquire(ids, left.pop(self.first))  # those of the cluster, with which it runs
        self.told(ids, left)

    def gathered(self, ids: Array) -> dict[int, Array]:
        """Release these threads' knowledge: of this block, and of earlier ones that they have heard of."""
        mine = {
            first: known
            for heard, column in self.news
            if (self.known[ids, column] >= self.first).all()
            for first, known in heard.blocks.items()
        }
        return mine | {self.first: self.release(ids)}

    def told(self, ids: Array, left: Mapping[int, Array]) -> None:
        """Let these threads know what earlier blocks knew."""
        column = self.agent("the blocks that arrived before", len(self.news))
        self.news.append((Heard(left, self.lanes), column))
        self.learn(ids, column, self.time(0))

    def fence_all(self, ids: Array) -> None:
        """Let later atomic updates of these threads release what each of them knows now."""
        self.fenced.update((n, self.gathered(np.array([n]))) for n in ids.tolist())

    def publish(self, thread: int, counter: object) -> None:
        """Release what a thread knew at its last fence, by an atomic update."""
        left = self.released.get(counter, {})
        for first, known in self.fenced.get(thread, {}).items():
            self.released[counter] = left = {**left, first: merge_times(left[first], known) if first in left else known}

    def hear(self, ids: Array, counter: object) -> None:
        """Let these threads acquire what atomic updates have released."""
        left = dict(self.released.get(counter, {}))
        if (own := left.pop(self.first, None)) is not None:
            self.acquire(ids, own)
        if left:
            self.told(ids, left)

    def of_others(self, view: View, when: Array, column: Array) -> Array:
        """Mark the accesses of earlier blocks, by their time stamps, that nothing orders before this access."""
        strange = (when > 0) & (when < self.first)
        for heard, news in self.news if strange.any() else ():
            strange &= ~((view.table[view.row, news] >= self.first) & heard.knew(when, column))
        return strange

    def meet(self, ids: Array) -> None:
        """Let these threads acquire what each of them knows."""
        self.acquire(ids, self.release(ids))

    def fence(self, ids: Array) -> None:
        """Fence these threads' writes up to now, so that asynchronous readers see them in order."""
        self.known[ids, self.lanes + ids] = self.epoch[ids // 32]
        self.tick(ids)

    def agent(self, name: str, *key: object) -> int:
        """Return the clock column of an asynchronous agent; add a column for a new agent."""
        column = self.columns.get((name, *key))
        if column is None:
            column = self.columns[name, *key] = 2 * self.lanes + len(self.columns)
            self.names[column] = name
            if column >= self.known.shape[1]:
                self.known = np.pad(self.known, ((0, 0), (0, self.known.shape[1] // 2)))
        return column

    def time(self, step: int) -> int:
        """Return the time at which an agent finishes its step number `step`, counted from 1."""
        self.latest = max(self.latest, self.first + step)
        return self.first + step

    def learn(self, ids: Array, column: int, time: int) -> None:
        """Record these threads' knowledge that an agent has reached `time`."""
        self.known[ids, column] = np.maximum(self.known[ids, column], time)

    def name(self, column: int) -> str:
        """Name the accessor of a report's column: below `lanes` a thread, below twice that a warp, else an agent."""
        if column >= 2 * self.lanes:
            return self.names[column]
        block, thread = divmod(column % self.lanes, self.of_block)
        found = f"thread {thread}" if column < self.lanes else f"warp {thread // 32}"
        return found if self.of_block == self.lanes else f"{found} of block {block} of the cluster"

    def view(self, who: Array) -> View:
        """Return the view of each accessor; a whole warp knows what all its threads know."""
        if len(who) and who[0] >= WHOLE_WARP:
            return View(self.known.reshape(-1, 32, self.known.shape[1]).min(axis=1), who - WHOLE_WARP, self.lanes)
        return View(self.known, who, self.lanes)

    def common_view(self, ids: Array, rows: int) -> View:
        """Return a view of what all of the threads `ids` know, for `rows` accesses of these threads."""
        return View(self.known[ids].min(axis=0)[None], np.zeros(rows, np.int64), self.lanes)


# Accesses to each place of a memory, for threads ordered by vector clocks. Each place remembers its last writer, and
# for each warp and each asynchronous reader its last read. An agent's accesses count from the start of its work. Only
# threads that waited for it know that it is done.

COLUMNS = 1 << 16  # a stamp is a time and a column of VectorClock: time * COLUMNS + column; 0 is never
LANES = 64  # a read of a warp is a time and a lane: time * LANES + lane; 0 is never
ALL = LANES - 1  # several lanes


class OrderedTrace(Trace):
    """The last accesses to each of `count` places, checked by a vector clock.

    It answers the questions of a Trace, and also records accesses of asynchronous agents.
    """

    writes: np.ndarray[Any, np.dtype[Any]]
    atomic: np.ndarray[Any, np.dtype[Any]]
    order: VectorClock
    findings: Findings
    count: int

    def __init__(self, count: int, clock: VectorClock, findings: Findings):
        self.order, self.findings, self.count = clock, findings, count
        self.writes = np.zeros(count, np.int64)
        self.atomic = np.zeros(count, bool)
        self.by_warps: Array | None = None  # reads, `[warps, count]`
        self.by_agents: dict[tuple[int, ...], Array] = {}  # times of reads that all of these agents make together

    def read(self, places: Array, who: Array, name: str, span: Span | None) -> Array:
        """Record a read and check its order; return the stamps of the writes before it, negative for none."""
        view, written = self.order.view(who), self.writes[places]
        self._check_writes(view, written, who, f"`{name}` is read", span)
        self._note(view, places, who)
        return written - 1

    def before_write(
        self,
        places: Array,
        who: Array,
        name: str,
        span: Span | None,
        harmless: Array | None = None,
        atomic: bool = False,
    ) -> Array:
        """Check a coming write against all earlier accesses but `harmless` writes. Return the earlier stamps."""
        view, written = self.order.view(who), self.writes[places]
        self._check_reads(view, places, who, name, span)
        if atomic:  # atomic updates do not race with each other, be they in flight or not
            harmless = self.atomic[places]
        elif harmless is not None:  # what is in flight does
            harmless = harmless & (written % COLUMNS < 2 * self.order.lanes)
        stamps = written if harmless is None else np.where(harmless, 0, written)
        self._check_writes(view, stamps, who, f"`{name}` is written", span)
        return written - 1

    def wrote(self, places: Array, who: Array, atomic: bool = False) -> None:
        """Record a write."""
        wide = who >= WHOLE_WARP
        warp = np.where(wide, who - WHOLE_WARP, who // 32)
        column = np.where(wide, self.order.lanes + warp * 32, who)
        self.writes[places] = (self.order.epoch[warp] * COLUMNS + column)[:, None]
        self.atomic[places] = atomic

    # Accesses of agents, for the threads that started them.

    def read_by_agents(
        self, places: Array, ids: Array, agents: tuple[int, ...], time: int, name: str, span: Span | None
    ) -> Array:
        """Record a read that the threads `ids` start. It ends once all `agents` reach `time`."""
        view, written = self.order.common_view(ids, len(places)), self.writes[places]
        self._check_writes(view, written, ids, f"`{name}` is read", span)
        self._check_fence(view, written // COLUMNS, written % COLUMNS, f"`{name}` is read", "written", span)
        if agents not in self.by_agents:
            self.by_agents[agents] = np.zeros(self.count, np.int64)
        self.by_agents[agents][places] = time
        return written - 1

    def check_agent_write(self, places: Array, thread: int, name: str, span: Span | None) -> None:
        """Check a copy engine's write against all earlier accesses, of which ordinary ones must be fenced, too."""
        ids, written, what = np.full(len(places), thread), self.writes[places], f"`{name}` is overwritten"
        self.before_write(places, ids, name, span)
        view = self.order.view(ids)
        self._check_fence(view, written // COLUMNS, written % COLUMNS, what, "written", span)
        for when, column in self._reads_of_warps(places):
            self._check_fence(view, when, column, what, "read", span)

    def written_by_agent(self, places: Array, agent: int, time: int, atomic: bool = False) -> None:
        """Record a write that ends once `agent` reaches `time`."""
        self.writes[places] = time * COLUMNS + agent
        self.atomic[places] = atomic

    # Checks.

    def _check_fence(self, view: View, when: Array, column: Array, what: str, verb: str, span: Span | None) -> None:
        """Report ordinary accesses with no fence between them and the engine's later access."""
        ordinary = (when >= self.order.first) & (column < 2 * self.order.lanes)
        if not ordinary.any():
            return
        column = np.where(ordinary, column, 0)
        late = ordinary & (view.seen(column) >= when) & (view.seen(column, fenced=True) < when)
        if late.any():
            who = self.order.name(int(column[late][0]))
            text = f"{what} asynchronously with no fence_proxy_async before; {verb} by {who}"
            self.findings.add("missing_fence", span, text, int(late.any(axis=1).sum()))

    def _reads_of_warps(self, places: Array) -> Iterator[tuple[Array, Array]]:
        """Yield for each warp the time and clock column of its last read of each place; time 0 means never."""
        for warp, reads in enumerate(() if self.by_warps is None else self.by_warps):
            codes = reads[places]
            if codes.any():
                lane = codes % LANES
                yield codes // LANES, 32 * warp + np.where(lane == ALL, self.order.lanes, lane)

    def _check_writes(self, view: View, stamps: Array, who: Array, what: str, span: Span | None) -> None:
        """Report places whose last write the accessors do not know of."""
        if not stamps.any():
            return
        first, when, column = self.order.first, stamps // COLUMNS, stamps % COLUMNS
        self._of_others(self.order.of_others(view, when, column), f"{what}; written", span)
        bad = (when >= first) & (view.seen(column) < when)
        if not bad.any():
            return
        flying = bad & (column >= 2 * self.order.lanes)
        if flying.any():
            text = f"{what} while a copy to it is in flight"
            self.findings.add("missing_wait", span, text, int(flying.any(axis=1).sum()))
        bad &= ~flying
        if bad.any():
            row, place = np.argwhere(bad)[0]
            self._race(f"{what}; written", self.order.name(int(column[row, place])), who, row, span, bad)

    def _check_reads(self, view: View, places: Array, who: Array, name: str, span: Span | None) -> None:
        """Report places that another thread or agent may still be reading."""
        what, first = f"`{name}` is overwritten; read", self.order.first
        for when, column in self._reads_of_warps(places):
            self._of_others(self.order.of_others(view, when, column), what, span)
            bad = (when >= first) & (view.seen(column) < when)
            if bad.any():
                row, place = np.argwhere(bad)[0]
                self._race(what, self.order.name(int(column[row, place])), who, row, span, bad)
        for agents, times in self.by_agents.items():
            when = times[places]
            for agent in agents:
                self._of_others(self.order.of_others(view, when, np.full_like(when, agent)), what, span)
            known = view.table[:, list(agents)].min(axis=1)[view.row]
            bad = (when >= first) & (known < when)
            if bad.any():
                text = f"`{name}` is overwritten while {self.order.names[agents[0]]} may still read it"
                self.findings.add("race", span, text, int(bad.any(axis=1).sum()))

    def _of_others(self, others: Array, what: str, span: Span | None) -> None:
        """Report races with other blocks."""
        if others.any():
            self.findings.add(
                "race", span, f"{what} by another block", int(others.any(axis=1).sum()), between_blocks=True
            )

    def _race(self, what: str, earlier: str, who: Array, row: int, span: Span | None, bad: Array) -> None:
        """Report races between two accesses."""
        now = who[row] if len(who) == len(bad) else who[0]
        column = now if now < WHOLE_WARP else self.order.lanes + 32 * (now - WHOLE_WARP)
        text = f"{what} before by {earlier}, now by {self.order.name(int(column))}"
        self.findings.add("race", span, text, int(bad.any(axis=1).sum()))

    def _note(self, view: View, places: Array, who: Array) -> None:
        """Record reads; a place read by lanes of a warp that do not know of each other is marked ALL."""
        if self.by_warps is None:
            self.by_warps = np.zeros((self.order.lanes // 32, self.count), np.int64)
        wide = who >= WHOLE_WARP
        warp, lane = np.where(wide, who - WHOLE_WARP, who // 32)[:, None], np.where(wide, ALL, who % 32)[:, None]
        start = self.order.epoch[warp] * LANES
        before = self.by_warps[warp, places]
        if ((before == start + lane) | (before == start + ALL)).all():
            return
        self.by_warps[warp, places] = start + lane
        several = self.by_warps[warp, places] != start + lane
        others = before % LANES
        recent = (before >= self.order.first * LANES) & (others != lane)
        if recent.any():
            column = 32 * warp + np.where(others == ALL, self.order.lanes, others)
            several |= recent & (view.seen(np.where(recent, column, 0)) < before // LANES)
        if several.any():
            rows = np.broadcast_to(warp, several.shape)[several]
            self.by_warps[rows, places[several]] = np.broadcast_to(start + ALL, several.shape)[several]


# Arrivals of blocks at counters in global memory (arrive_last), and the last block's knowledge of earlier ones. This is
# per thread; `Clock` has the same for kernels that only barriers of the block order.


class Heard:
    """Releases of some earlier blocks: for each block, by its first time, the times that one of its threads knew."""

    firsts: np.ndarray[Any, np.dtype[Any]]
    table: np.ndarray[Any, np.dtype[Any]]

    def __init__(self, blocks: Mapping[int, Array], lanes: int):
        """Build a table with one row of known times for each block."""
        self.blocks: dict[int, Array] = dict(sorted(blocks.items()))
        self.firsts = np.array(list(self.blocks), np.int64)
        width = max((len(known) for known in self.blocks.values()), default=0)
        self.table = np.zeros((len(self.blocks), width + 1), np.int64)  # the last column is of agents not known
        for row, known in zip(self.table, self.blocks.values(), strict=True):
            row[: len(known)] = known
            row[lanes : 2 * lanes] = np.repeat(known[:lanes].reshape(-1, WARP).min(axis=1), WARP)

    def knew(self, when: Array, column: Array) -> Array:
        """Return whether these blocks knew of accesses at times `when`; `column` is as for View.seen."""
        block = np.searchsorted(self.firsts, when, side="right") - 1
        if not self.blocks:
            return np.zeros(when.shape, bool)
        known = self.table[np.maximum(block, 0), np.minimum(column, self.table.shape[1] - 1)]
        return (block >= 0) & (known >= when)
