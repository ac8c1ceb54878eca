# SPDX-License-Identifier: Apache-2.0
"""Run the waits, arrivals and barriers of one block, to see which threads wait for ever.

Nothing else of the kernel runs. `wait_events.py` lists the events of threads that wait at the same places; together
they are a runner, which goes step by step. Runners take turns in several orders, as any of them may be slow. Bytes of
copies are taken to have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch_tile.ir.stmt import Kernel
from torch_tile.lowering.analysis.wait_events import Event, Kind, Place, Undecided, list_events

# What calls may bring as each dimension and number, where these decide the events. All kernels should work from USUAL
# on, as such sizes are multiples of usual tiles. Smaller ones keep the events of nested loops few.
SIZES = 3840, 768, 384, 100, 20
USUAL = 384
MOST_EVENTS = 2000  # of one runner, in a check that runs once for a kernel
FEW_EVENTS = 500  # of one runner, where a pass tries several forms of a kernel
MOST_STEPS = 20000  # of all runners together
# Which of the runners that can go on take the next step: the last of them, the first, or all.
ORDERS = slice(-1, None), slice(1), slice(None)


@dataclass
class Runner:
    """Threads that wait at the same places. At a barrier they wait for the end of number `use`."""

    threads: Sequence[int]
    events: Sequence[Event]
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
    if sum(len(events) for _, events in listed) > MOST_STEPS:
        return None
    for order in ORDERS:
        run = _Run([Runner(threads, events) for threads, events in listed])
        if not run.to_the_end(order):
            return None
        if run.outcome.waiting:
            break
    return run.outcome


class _Run:
    """Let the runners of a block take their steps."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.outcome = Outcome(runners)
        self.complete, self.come = self.outcome.complete, self.outcome.come

    def to_the_end(self, order: slice) -> bool:
        """Take steps until no runner can go on; return False if that takes too many."""
        for _ in range(2 * MOST_STEPS):
            ready = [r for r in self.outcome.runners if not r.has_ended and self._can_go_on(r)]
            if not ready:
                return True
            for runner in ready[order]:
                self._step(runner)
        return False

    def _can_go_on(self, runner: Runner) -> bool:
        """Return whether a runner can go on: a fresh mbarrier is in phase 0, so that a wait for parity 1 passes."""
        event, complete = runner.event, self.complete.get(runner.event.place, 0)
        if event.kind is Kind.WAIT:
            return complete & 1 != event.parity
        return event.kind is not Kind.BAR_SYNC or runner.use is None or complete > runner.use

    def _step(self, runner: Runner) -> None:
        """Let a runner take its next step. A barrier takes two: it counts, then it waits."""
        event = runner.event
        if event.kind is Kind.BAR_SYNC and runner.use is None:
            runner.use = self.complete.get(event.place, 0)
            self._count(event)
            return
        if event.kind in (Kind.ARRIVE, Kind.BAR_ARRIVE):
            self._count(event)
        runner.done, runner.use = runner.done + 1, None

    def _count(self, event: Event) -> None:
        """Count the arrivals of an event."""
        total = self.come.get(event.place, 0) + event.arrivals
        self.complete[event.place] = self.complete.get(event.place, 0) + total // event.needed
        self.come[event.place] = total % event.needed
