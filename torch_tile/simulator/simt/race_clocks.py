# SPDX-License-Identifier: Apache-2.0
"""Order between threads that meet one another in other ways than at barriers of the whole block.

Each thread knows how far every other thread, and every asynchronous agent, had come when it last heard of it (a vector
clock). An access is in order if the accessor knows of the accesses before it that it conflicts with, whatever the order
in which the interpreter happened to run them. Threads hear of each other where one releases (arrives) and the other
acquires (waits). An agent is what copies or multiplies for a thread: a wait tells its time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_tile.simulator.simt.arrivals import Heard
from torch_tile.simulator.simt.race_epochs import WHOLE_WARP, Array, Clock

NOTHING = np.zeros(0, np.int64)  # is what is known before anything is


def joined(a: Array, b: Array) -> Array:
    """All that either knows: the later time of each column; agents may be missing at the end of the shorter one."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    found = longer.copy()
    found[: len(shorter)] = np.maximum(found[: len(shorter)], shorter)
    return found


class View:
    """What accessors know: `table[row]` for each of them."""

    def __init__(self, table: Array, row: Array, lanes: int):
        self.table, self.row, self.lanes = table, row[:, None], lanes

    @cached_property
    def of_warps(self) -> Array:
        """What is known of whole warps, first of their accesses and then of their fences."""
        own = self.table[:, : 2 * self.lanes]
        return own.reshape(len(own), -1, 32).min(axis=2)

    def seen(self, column: Array, fenced: bool = False) -> Array:
        """The time of each accessor in `column` that is known, `[rows, places]`.

        Of a thread (column below `lanes`), of a warp as a whole (below twice that) or of an agent. With `fenced`, the
        time up to which it fenced what it wrote.
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
    """`known[t]` is what thread t knows: of every thread's accesses, of its fenced writes, and of the agents.

    Time goes on with every release, for a warp at once, and from block to block. Where the blocks of a cluster run at
    the same time, `lanes` are the threads of all, `of_block` those of one.
    """

    def __init__(self, lanes: int, of_block: int = 0):
        self.lanes, self.latest, self.of_block = lanes, 0, of_block or lanes
        self.released: dict[object, dict[int, Array]] = {}  # at counters, by the first times of the blocks
        super().__init__()

    def start_block(self) -> None:
        """A new block begins."""
        self.first = self.latest + 1
        self.epoch = np.full(self.lanes // 32, self.latest)
        self.names: dict[int, str] = {}  # of the columns of agents
        self.columns: dict[tuple[object, ...], int] = {}
        self.known = np.zeros((self.lanes, 2 * self.lanes + 64), np.int64)
        self.news: list[tuple[Heard, int]] = []  # of blocks before, and the column whose time `first` tells who has it
        self.tick(np.arange(self.lanes))

    def barrier(self) -> None:
        """All threads of the block have met."""
        self.meet(np.arange(self.lanes))

    def warp_barrier(self, warps: Array) -> None:
        """The threads of these warps have met."""
        per_warp = self.known.reshape(-1, 32, self.known.shape[1])
        per_warp[warps] = per_warp[warps].max(axis=1, keepdims=True)
        self.tick(warps * 32)

    def tick(self, ids: Array) -> None:
        """What these threads do from now on is later than what they did."""
        warps = np.unique(ids // 32)
        self.epoch[warps] += 1
        self.latest = max(self.latest, int(self.epoch[warps].max(initial=0)))
        threads = (warps[:, None] * 32 + np.arange(32)).ravel()
        self.known[threads, threads] = self.epoch[threads // 32]

    def release(self, ids: Array) -> Array:
        """What these threads know together, for those who acquire it."""
        found = self.known[ids].max(axis=0)
        self.tick(ids)
        return found

    def acquire(self, ids: Array, known: Array) -> None:
        """These threads hear what others released."""
        self.known[ids, : len(known)] = np.maximum(self.known[ids, : len(known)], known)

    def arrive(self, ids: Array, counter: object, last: bool) -> None:
        """A thread arrives at a counter, for all that it knows; the `last` one hears what the others knew."""
        left = self.released.pop(counter, {})
        mine = {
            first: known
            for heard, column in self.news
            if self._has(ids, column)
            for first, known in heard.blocks.items()
        }
        mine[self.first] = self.release(ids)
        for first, known in mine.items():
            left[first] = joined(left[first], known) if first in left else known
        if not last:
            self.released[counter] = left
            return
        self.acquire(ids, left.pop(self.first))  # those of the cluster, with which it runs
        column = self.agent("the blocks that arrived before", len(self.news))
        self.news.append((Heard(left, self.lanes), column))
        self.learn(ids, column, self.time(0))

    def _has(self, ids: Array, column: int) -> bool:
        return bool((self.known[ids, column] >= self.first).all())

    def of_others(self, view: View, when: Array, column: Array) -> Array:
        """Which stamps of blocks before say what an accessor has not heard of."""
        strange = (when > 0) & (when < self.first)
        for heard, news in self.news if strange.any() else ():
            strange &= ~((view.table[view.row, news] >= self.first) & heard.has(when, column))
        return strange

    def meet(self, ids: Array) -> None:
        """These threads hear from each other."""
        self.acquire(ids, self.release(ids))

    def fence(self, ids: Array) -> None:
        """These threads' writes up to now are in order for asynchronous readers."""
        self.known[ids, self.lanes + ids] = self.epoch[ids // 32]
        self.tick(ids)

    def agent(self, name: str, *key: object) -> int:
        """The column of an asynchronous agent."""
        column = self.columns.get((name, *key))
        if column is None:
            column = self.columns[name, *key] = 2 * self.lanes + len(self.columns)
            self.names[column] = name
            if column >= self.known.shape[1]:
                self.known = np.pad(self.known, ((0, 0), (0, self.known.shape[1] // 2)))
        return column

    def time(self, turn: int) -> int:
        """The time at which an agent is done with its turn number `turn`, counted from 1."""
        self.latest = max(self.latest, self.first + turn)
        return self.first + turn

    def learn(self, ids: Array, column: int, time: int) -> None:
        """These threads know that an agent has come so far."""
        self.known[ids, column] = np.maximum(self.known[ids, column], time)

    def name(self, column: int) -> str:
        """Of a thread (column below `lanes`), a warp as a whole (below twice that) or an agent."""
        if column >= 2 * self.lanes:
            return self.names[column]
        block, thread = divmod(column % self.lanes, self.of_block)
        found = f"thread {thread}" if column < self.lanes else f"warp {thread // 32}"
        return found if self.of_block == self.lanes else f"{found} of block {block} of the cluster"

    def view(self, who: Array) -> View:
        """What each accessor knows; a warp as a whole what all of its threads do."""
        if len(who) and who[0] >= WHOLE_WARP:
            return View(self.known.reshape(-1, 32, self.known.shape[1]).min(axis=1), who - WHOLE_WARP, self.lanes)
        return View(self.known, who, self.lanes)

    def common_view(self, ids: Array, rows: int) -> View:
        """What all of the threads `ids` know, for each of `rows` accesses of theirs."""
        return View(self.known[ids].min(axis=0)[None], np.zeros(rows, np.int64), self.lanes)
