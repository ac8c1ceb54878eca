# SPDX-License-Identifier: Apache-2.0
"""Who touched which place of a memory, and whether barriers order it.

Each place remembers in which epoch (between two barriers) and by whom it was last written and read. An access is a race
if another thread touched the place in the same epoch, one of the two writes, and no barrier of their warp lies between.
Threads are told by number; WHOLE_WARP + w is warp w (ldmatrix: any lane may receive any byte), ANYONE stands for
several warps. Global memory also remembers what other blocks have touched, which is in order only for the last block to
arrive at a counter (arrive_last).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import MOST_BLOCKS_OF_CLUSTER, MOST_THREADS
from torch_tile.simulator.findings import Findings

WHOLE_WARP = MOST_BLOCKS_OF_CLUSTER * MOST_THREADS  # above the numbers of threads
WHO = 2 * WHOLE_WARP  # accessor codes per epoch: threads, warps from WHOLE_WARP on
ANYONE = WHO - 1
Array = Any


class Clock:
    """The epochs of all blocks, one after another."""

    def __init__(self) -> None:
        self.base = 0  # the epoch, times WHO
        self.counters: dict[object, dict[int, int]] = {}  # what blocks that have arrived there have released
        self.start_block()

    def start_block(self) -> None:
        """A new block begins."""
        # Of other blocks, by their first epoch: the epoch up to which all is known; and what the next barrier adds.
        self.heard: dict[int, int] = {}
        self.coming: dict[int, int] = {}
        self.barrier()
        self.first = self.base  # of this block

    def barrier(self) -> None:
        """All threads of the block have met: everything before is ordered before everything after."""
        self.base += WHO
        self.turns = np.zeros(33, np.int32)  # warp barriers of each warp in this epoch; the last is ANYONE's
        self.by_warp = False  # whether any warp met one
        self.heard, self.coming = _latest(self.heard, self.coming), {}

    def arrive(self, ids: Array, counter: object, last: bool) -> None:
        """A thread arrives at a counter, for what was before the last barrier; the `last` one hears of the others."""
        left = _latest(self.counters.pop(counter, {}), self.heard | {self.first: self.base})
        if last:
            self.coming = _latest(self.coming, left)
        else:
            self.counters[counter] = left

    def knows(self, stamps: Array) -> Array:
        """Whether what other blocks did at these times is in order."""
        firsts = np.array(sorted(self.heard), np.int64)
        ends = np.array([0, *(self.heard[n] for n in firsts.tolist())], np.int64)
        return stamps < ends[np.searchsorted(firsts, stamps, side="right")]

    def warp_barrier(self, warps: Array) -> None:
        """The threads of these warps have met."""
        self.turns[warps] += 1
        self.by_warp = True


class Trace:
    """The last accesses to each of `count` places of `name`; `who` names the accessor of each row of `places`."""

    def __init__(self, count: int, clock: Clock, findings: Findings):
        self.clock, self.findings = clock, findings
        self.writes = np.full(count, -1, np.int64)  # epoch * WHO + accessor of the last write; -1: never
        self.reads = np.full(count, -1, np.int64)  # the same of the reads since
        self.atomic = np.zeros(count, bool)  # whether the last write was an atomic update
        self.write_turn = np.zeros(count, np.int32)  # how often the accessor's warp had met a warp barrier
        self.read_turn = np.zeros(count, np.int32)

    def read(self, places: Array, who: Array, name: str, span: Span | None) -> Array:
        """Note a read; gives what is known of the writes before it."""
        written = self.writes[places]
        self.check(written, self.write_turn, places, who, f"`{name}` is read; written", span)
        self._add(self.reads, places, who)
        if self.clock.by_warp:
            self.read_turn[places] = self.clock.turns[_warp(who)][:, None]
        return written

    def before_write(
        self, places: Array, who: Array, name: str, span: Span | None, harmless: Array | None = None,
        atomic: bool = False,
    ) -> Array:  # fmt: skip
        """Check a write that is to come against all before it, but for `harmless` ones; gives the writes before."""
        self.check(self.reads[places], self.read_turn, places, who, f"`{name}` is overwritten; read", span)
        written = self.writes[places]
        if atomic:  # atomic updates do not race with each other
            harmless = self.atomic[places]
        stamps = written if harmless is None else np.where(harmless, -1, written)
        self.check(stamps, self.write_turn, places, who, f"`{name}` is written; written", span)
        return written

    def wrote(self, places: Array, who: Array, atomic: bool = False) -> None:
        """Note a write."""
        if atomic:
            self._add(self.writes, places, who)
        else:
            self.writes[places] = self.clock.base + who[:, None]
        self.atomic[places] = atomic
        if self.clock.by_warp:
            self.write_turn[places] = self.clock.turns[_warp(who)][:, None]

    def check(self, stamps: Array, turns: Array, places: Array, who: Array, what: str, span: Span | None) -> None:
        """Report places that others touched in this epoch, or other blocks at any time, as `stamps` tell."""
        clock = self.clock
        others = (stamps >= 0) & (stamps < clock.first)
        if others.any() and clock.heard:
            others &= ~clock.knows(stamps)
        if others.any():
            self.findings.add("race", span, f"{what} by another block", int(others.any(axis=1).sum()))
        bad = (stamps >= clock.base) & (stamps != clock.base + who[:, None])
        if not bad.any():
            return
        if clock.by_warp:
            other, mine = _warp(stamps - clock.base), _warp(who)[:, None]
            bad &= (other != mine) | (turns[places] >= clock.turns[mine])
            if not bad.any():
                return
        row, column = np.argwhere(bad)[0]
        earlier = _name(int(stamps[row, column] - clock.base))
        text = f"{what} before by {earlier}, now by {_name(int(who[row]))}"
        self.findings.add("race", span, text, int(bad.any(axis=1).sum()))

    def _add(self, stamps: Array, places: Array, who: Array) -> None:
        """Note accessors of places that others may have accessed in this epoch, too."""
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
        """Note that several threads have accessed a place."""
        here = places[where]
        base = self.clock.base
        a, b = _warp(np.broadcast_to(mine, where.shape)[where] - base), _warp(others[where] - base)
        apart = (a != b) | (a == 32)
        stamps[here] = base + WHOLE_WARP + a
        stamps[here[apart]] = base + ANYONE


def _latest(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """Of each block the later one."""
    return a | {first: max(end, a.get(first, 0)) for first, end in b.items()}


def _warp(who: Array) -> Array:
    """The warp of an accessor; 32 for ANYONE."""
    return np.where(who < WHOLE_WARP, who // 32, np.minimum(who - WHOLE_WARP, 32)).astype(np.int64)


def _name(who: int) -> str:
    if who == ANYONE:
        return "threads of several warps"
    return f"thread {who}" if who < WHOLE_WARP else f"warp {who - WHOLE_WARP}"
