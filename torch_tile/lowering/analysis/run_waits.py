# SPDX-License-Identifier: Apache-2.0
"""Run the waits, arrivals and barriers of one block, to see which threads wait for ever.

Nothing else of the kernel runs. `wait_events.py` lists the events of threads that wait at the same places. Those of
one warp are a runner, which goes step by step. Runners take steps in several orders, as any of them may be slow, one
warp of a role, too. Bytes of copies are taken to have come.

A warp passes a wait for an mbarrier that another warp with its list has passed. Else it might miss the phase: all warps
of a usual producer wait for what one of them fills, and nobody waits for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch_tile.ir.stmt import Kernel
from torch_tile.lowering.analysis.wait_events import Event, Kind, Place, Undecided, list_events

# What calls may bring as each dimension and number, where these decide the events. All kernels should work from USUAL
# on, as such sizes are multiples of usual tiles. Smaller ones keep the events of nested loops few.
SIZES = 3840, 768, 384, 100, 20
USUAL = 384
MOST_EVENTS = 2000  # of one runner, in a check that runs once for a kernel
FEW_EVENTS = 500  # of one runner, where a pass tries several forms of a kernel
MOST_STEPS = 20000  # of all runners together


@dataclass
class Runner:
    """Threads of one warp that wait at the same places. At a barrier they wait for the end of number `use`.

    The warp is number `warp` of those that share the events. The first of these has `seen` so many events.
    """

    warp: int
    events: Sequence[Event]
    seen: list[int]
    done: int = 0
    use: int | None = None

    @property
    def event(self) -> Event:
        """Return what the runner does next."""
        return self.events[self.done]

    @property
    def has_ended(self) -> bool:
        """Return whether no event is left."""
        return self.done == len(self.events)


@dataclass
class Outcome:
    """Where a block stands when no thread can go on.

    Each place has a number of complete phases or uses, and of arrivals that the next one has.
    """

    runners: Sequence[Runner]
    complete: dict[Place, int] = field(default_factory=dict)
    come: dict[Place, int] = field(default_factory=dict)

    @property
    def waiting(self) -> list[Runner]:
        """Return the runners that wait for ever."""
        return [runner for runner in self.runners if not runner.has_ended]


def outcomes(kernel: Kernel, most: int = MOST_EVENTS) -> Iterator[tuple[int | None, Outcome]]:
    """Yield sizes with the outcome for each, the largest size first; None where the events depend on no size.

    Sizes are left out for which `run_waits` returns None.
    """
    for size in (None, *SIZES):
        found = run_waits(kernel, size, most)
        if found is not None:
            yield size, found
            if size is None:
                return


def run_waits(kernel: Kernel, size: int | None = None, most: int = MOST_EVENTS) -> Outcome | None:
    """Run a block until no thread can go on. All dimensions and numbers that a call brings have this `size`.

    Return None if something else decides the events, or if a runner has more than `most`. If some runner waits for ever
    in one of several orders, return the outcome of that order.
    """
    try:
        listed = list_events(kernel, size, most)
    except Undecided:
        return None
    if sum(len(warps) * len(events) for warps, events in listed) > MOST_STEPS:
        return None
    ends = [0, *accumulate(len(warps) for warps, _ in listed)]
    for order in _schedules([range(a, b) for a, b in pairwise(ends)]):
        lists = [(len(warps), events, [0]) for warps, events in listed]
        run = _Run([Runner(warp, events, seen) for count, events, seen in lists for warp in range(count)])
        if not run.to_the_end(order):
            return None
        if run.outcome.waiting:
            break
    return run.outcome


def _schedules(lists: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield schedules: groups of runners by priority. The first group with a runner that can go on takes the next step.

    `lists` are the runners with each list of events. Most schedules give one runner, or all with its list, the lowest
    priority.
    """
    each = [[runner] for one in lists for runner in one]
    yield [[runner for one in lists for runner in one]]
    for parts in (each, list(lists)):
        yield [*parts]
        yield [*reversed(parts)]
    for slow in (part for one in lists for part in ((one[:1], one) if len(one) > 1 else (one,))):
        yield [*(one for one in each if one[0] not in slow), slow]


class _Run:
    """Let the runners of a block take their steps."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.outcome = Outcome(runners)
        self.complete, self.come = self.outcome.complete, self.outcome.come

    def to_the_end(self, order: Sequence[Sequence[int]]) -> bool:
        """Take steps in an order until no runner can go on; return False if that takes too many."""
        parts = [[self.outcome.runners[each] for each in part] for part in order]
        for _ in range(2 * MOST_STEPS):
            found = (ready for part in parts if (ready := [*filter(self._can_go_on, part)]))
            if not (ready := next(found, [])):
                return True
            for runner in ready:
                self._step(runner)
        return False

    def _can_go_on(self, runner: Runner) -> bool:
        """Return whether a runner can go on: a fresh mbarrier is in phase 0, so that a wait for parity 1 passes."""
        if runner.has_ended:
            return False
        event, complete = runner.event, self.complete.get(runner.event.place, 0)
        if event.kind is Kind.WAIT:
            return complete & 1 != event.parity or runner.done < runner.seen[0]
        return event.kind is not Kind.BAR_SYNC or runner.use is None or complete > runner.use

    def _step(self, runner: Runner) -> None:
        """Let a runner take its next step. A barrier takes two: it counts, then it waits."""
        event = runner.event
        if event.kind is Kind.BAR_SYNC and runner.use is None:
            runner.use = self.complete.get(event.place, 0)
            self._count(event, runner.warp)
            return
        if event.kind in (Kind.ARRIVE, Kind.BAR_ARRIVE):
            self._count(event, runner.warp)
        runner.done, runner.use = runner.done + 1, None
        runner.seen[0] = max(runner.seen[0], runner.done)

    def _count(self, event: Event, warp: int) -> None:
        """Count the arrivals of a warp at an event."""
        total = self.come.get(event.place, 0) + event.arrivals[warp]
        self.complete[event.place] = self.complete.get(event.place, 0) + total // event.needed
        self.come[event.place] = total % event.needed
