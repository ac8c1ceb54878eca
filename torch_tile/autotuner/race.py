# SPDX-License-Identifier: Apache-2.0
"""Calls are timed in turns, so that a slow moment of the machine meets all of them; the slow ones leave early.

A call is judged by its best turn: what else the machine does can only make it slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_tile.profiler import do_bench

ROUNDS = 4  # turns that each call gets
TRUSTED = 2  # after so many turns the slow ones leave: one turn may be all bad luck

Timer = Callable[[Callable[[], object], float, float], float]  # (call, warmup, rep) in ms -> ms of one call


@dataclass
class Runner:
    """One call of a race: its time in each turn in ms, and what it raised, if it did."""

    call: Callable[[], object]
    turns: list[float] = field(default_factory=list)
    failure: Exception | None = None
    dropped: bool = False

    @property
    def latency(self) -> float | None:
        """Milliseconds of one call in its best turn; None if it failed."""
        return min(self.turns, default=None)


def race(
    calls: Sequence[Callable[[], object]], warmup: float = 25, rep: float = 100, stop_factor: float | None = 1.3,
    timer: Timer | None = None, told: Callable[[], object] = lambda: None, failed: Callable[[], object] = lambda: None,
) -> list[Runner]:  # fmt: skip
    """Time `calls`, about `warmup + rep` ms each; those slower than `stop_factor` times the best leave early.

    A call that raises is out. `told` is called after each call's turn, `failed` after one that raised (it may raise
    itself: where the machine is lost there is no point in going on).
    """
    timer = timer or do_bench
    runners = [Runner(call) for call in calls]
    running = list(runners)
    for turn in range(ROUNDS):
        for runner in running if turn % 2 == 0 else running[::-1]:
            try:
                runner.turns.append(timer(runner.call, warmup / ROUNDS, rep / ROUNDS))
            except Exception as problem:  # whatever a kernel does, the others are to be timed
                runner.failure, runner.turns = problem, []
                failed()
            told()
        running = [runner for runner in running if runner.failure is None]
        if stop_factor is None or turn + 1 < TRUSTED:
            continue
        best = min((runner.latency or 0.0 for runner in running), default=0.0)
        for runner in running:
            runner.dropped = (runner.latency or 0.0) > stop_factor * best
        running = [runner for runner in running if not runner.dropped]
    return runners
