# SPDX-License-Identifier: Apache-2.0
"""Who touched which place of a memory, where vector clocks tell the order (thread_clocks).

Each place remembers its last writer, and for each warp and each asynchronous reader its last read. What an agent writes
or reads counts from the start of its work on; only those who waited for it know that it is done.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.simt.race_clocks import VectorClock, View
from torch_tile.simulator.simt.race_epochs import WHOLE_WARP, Array, Trace

COLUMNS = 1 << 16  # a stamp is a time and a column of VectorClock: time * COLUMNS + column; 0 is never
LANES = 64  # a read of a warp is a time and a lane: time * LANES + lane; 0 is never
ALL = LANES - 1  # several lanes


class OrderedTrace(Trace):
    """The last accesses to each of `count` places; the same questions as of a Trace, and those of agents."""

    def __init__(self, count: int, clock: VectorClock, findings: Findings):
        self.order, self.findings, self.count = clock, findings, count
        self.writes = np.zeros(count, np.int64)
        self.atomic = np.zeros(count, bool)
        self.by_warps: Array | None = None  # reads, `[warps, count]`
        self.by_agents: dict[tuple[int, ...], Array] = {}  # times of reads that all of these agents make together

    def read(self, places: Array, who: Array, name: str, span: Span | None) -> Array:
        """Note a read; gives what is known of the writes before it, negative for none."""
        view, written = self.order.view(who), self.writes[places]
        self._check_writes(view, written, who, f"`{name}` is read", span)
        self._note(view, places, who)
        return written - 1

    def before_write(
        self, places: Array, who: Array, name: str, span: Span | None, harmless: Array | None = None,
        atomic: bool = False,
    ) -> Array:  # fmt: skip
        """Check a write that is to come against all before it, but for `harmless` ones; gives the writes before."""
        view, written = self.order.view(who), self.writes[places]
        self._check_reads(view, places, who, name, span)
        if atomic:  # atomic updates do not race with each other
            harmless = self.atomic[places]
        if harmless is not None:  # what is under way does
            harmless = harmless & (written % COLUMNS < 2 * self.order.lanes)
        stamps = written if harmless is None else np.where(harmless, 0, written)
        self._check_writes(view, stamps, who, f"`{name}` is written", span)
        return written - 1

    def wrote(self, places: Array, who: Array, atomic: bool = False) -> None:
        """Note a write."""
        wide = who >= WHOLE_WARP
        warp = np.where(wide, who - WHOLE_WARP, who // 32)
        column = np.where(wide, self.order.lanes + warp * 32, who)
        self.writes[places] = (self.order.epoch[warp] * COLUMNS + column)[:, None]
        self.atomic[places] = atomic

    # What agents do, for threads that started it.

    def read_by_agents(
        self, places: Array, ids: Array, agents: tuple[int, ...], time: int, name: str, span: Span | None
    ) -> Array:
        """Note a read that the threads `ids` start together and that is over once all of `agents` come to `time`."""
        view, written = self.order.common_view(ids, len(places)), self.writes[places]
        self._check_writes(view, written, ids, f"`{name}` is read", span)
        self._check_fence(view, written // COLUMNS, written % COLUMNS, f"`{name}` is read", "written", span)
        if agents not in self.by_agents:
            self.by_agents[agents] = np.zeros(self.count, np.int64)
        self.by_agents[agents][places] = time
        return written - 1

    def before_engine(self, places: Array, thread: int, name: str, span: Span | None) -> None:
        """Check a write of a copy engine against all before it: ordinary reads and writes must be fenced besides."""
        ids, written, what = np.full(len(places), thread), self.writes[places], f"`{name}` is overwritten"
        self.before_write(places, ids, name, span)
        view = self.order.view(ids)
        self._check_fence(view, written // COLUMNS, written % COLUMNS, what, "written", span)
        for when, column in self._reads_of_warps(places):
            self._check_fence(view, when, column, what, "read", span)

    def written_by_agent(self, places: Array, agent: int, time: int, atomic: bool = False) -> None:
        """Note a write that is over once `agent` comes to `time`."""
        self.writes[places] = time * COLUMNS + agent
        self.atomic[places] = atomic

    # Checks.

    def _check_fence(self, view: View, when: Array, column: Array, what: str, verb: str, span: Span | None) -> None:
        """Report ordinary accesses that an engine's access comes after, but for which no fence stands between."""
        ordinary = (when >= self.order.first) & (column < 2 * self.order.lanes)
        if not ordinary.any():
            return
        column = np.where(ordinary, column, 0)
        late = ordinary & (view.seen(column) >= when) & (view.seen(column, fenced=True) < when)
        if late.any():
            who = self._name(int(column[late][0]))
            text = f"{what} asynchronously with no fence_proxy_async before; {verb} by {who}"
            self.findings.add("missing_fence", span, text, int(late.any(axis=1).sum()))

    def _reads_of_warps(self, places: Array) -> Iterator[tuple[Array, Array]]:
        """When, and by which column of the clock, each place was last read, warp by warp; 0 for never."""
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
            text = f"{what} while a copy to it is under way"
            self.findings.add("missing_wait", span, text, int(flying.any(axis=1).sum()))
        bad &= ~flying
        if bad.any():
            row, place = np.argwhere(bad)[0]
            self._race(f"{what}; written", self._name(int(column[row, place])), who, row, span, bad)

    def _check_reads(self, view: View, places: Array, who: Array, name: str, span: Span | None) -> None:
        """Report places that somebody may still be reading."""
        what, first = f"`{name}` is overwritten; read", self.order.first
        for when, column in self._reads_of_warps(places):
            self._of_others(self.order.of_others(view, when, column), what, span)
            bad = (when >= first) & (view.seen(column) < when)
            if bad.any():
                row, place = np.argwhere(bad)[0]
                self._race(what, self._name(int(column[row, place])), who, row, span, bad)
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
        if others.any():
            self.findings.add("race", span, f"{what} by another block", int(others.any(axis=1).sum()))

    def _race(self, what: str, earlier: str, who: Array, row: int, span: Span | None, bad: Array) -> None:
        now = who[row] if len(who) == len(bad) else who[0]
        column = now if now < WHOLE_WARP else self.order.lanes + 32 * (now - WHOLE_WARP)
        text = f"{what} before by {earlier}, now by {self._name(int(column))}"
        self.findings.add("race", span, text, int(bad.any(axis=1).sum()))

    def _name(self, column: int) -> str:
        return self.order.name(column)

    def _note(self, view: View, places: Array, who: Array) -> None:
        """Note reads; of several lanes of a warp that do not know of each other, that they are several."""
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
