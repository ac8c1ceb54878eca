# SPDX-License-Identifier: Apache-2.0
"""Barriers of the block and of some of its threads, and the fence that goes with them.

Who arrives releases what it knows; who waits acquires what all released (thread_clocks). One role's barrier therefore
says nothing of another's threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from torch_tile.simulator.simt.calls import Calls, Handler, Place, Run
from torch_tile.simulator.simt.race_clocks import NOTHING, joined
from torch_tile.simulator.simt.race_epochs import Array


@dataclass
class Meeting:
    """A named barrier: who is there of those that it waits for, and what each turn before released."""

    threads: int = 0
    here: int = 0
    heard: Array = field(default_factory=lambda: NOTHING)
    released: list[Array] = field(default_factory=list)


class Meetings:
    """The named barriers of each block; 0 is that of all threads."""

    def __init__(self, calls: Calls):
        self.calls, self.found = calls, dict[tuple[int, int], Meeting]()

    def finish(self) -> None:
        """Who has not met needs not."""

    def meet(self, p: Place, number: int, threads: int, waits: bool) -> None:
        """The running threads arrive, and wait for the others if they have to."""
        ids, add = p.threads.active(), p.threads.findings.add
        meeting = self.found.setdefault((p.threads.block, number), Meeting())
        if meeting.here and meeting.threads != threads:
            add("barrier", p.span, f"barrier {number} is for {threads} threads here, for {meeting.threads} elsewhere")
        meeting.threads, turn = threads, len(meeting.released)
        meeting.here += len(ids)
        meeting.heard = joined(meeting.heard, self.calls.order.release(ids))
        if meeting.here > threads:
            add("barrier", p.span, f"barrier {number} is for {threads} threads; {meeting.here} come")
        if meeting.here >= threads:
            meeting.released.append(meeting.heard)
            meeting.here, meeting.heard = 0, NOTHING
        if waits:
            self.calls.tasks.until(
                lambda: len(meeting.released) > turn,
                lambda: add("deadlock", p.span, f"barrier {number} is for {threads} threads; {meeting.here} come"),
            )
            self.calls.order.acquire(ids, meeting.released[turn])


def _meets(waits: bool) -> Handler:
    def compile(p: Place) -> Run:
        number, count = (cast(int, o) for o in p.call.options) if p.call.options else (0, p.threads.count)

        def run() -> None:
            p.threads.findings.barriers += number == 0
            p.calls.together(p.call, p.span)
            p.calls.state(Meetings).meet(p, number, count, waits)

        return run

    return compile


def _in_turns(p: Place) -> Run:
    """As csrc/sync.h: the warpgroup before, and this one, meet at this one's barrier."""
    first, start, count = (cast(int, o) for o in p.call.options)
    what = p.call.name.removeprefix("turn_")

    def run() -> None:
        p.calls.together(p.call, p.span)
        (group,) = set(
            (p.threads.active() % p.threads.of_block // 128).tolist()
        )  # crews are warpgroups where there are turns
        here, meet = group - start, p.calls.state(Meetings).meet
        if what in ("take", "pass"):
            meet(p, first + (here + (what == "pass")) % count, 256, what == "take")
        elif here == (count - 1 if what == "open" else 0):
            meet(p, first, 256, what == "close")

    return run


def _fence_async(p: Place) -> Run:
    return lambda: p.calls.order.fence(p.threads.active())


MEETINGS: dict[str, Handler] = {
    "barrier": _meets(True), "named_barrier": _meets(True), "named_barrier_arrive": _meets(False),
    "fence_proxy_async": _fence_async,
    **{f"turn_{what}": _in_turns for what in ("open", "take", "pass", "close")},
}  # fmt: skip
