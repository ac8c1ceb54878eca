# SPDX-License-Identifier: Apache-2.0
"""Find waits for mbarriers and barriers that never end, and waits that pass before what they wait for.

`run_waits.py` runs a block's waits. Kernels whose conditions, counts or parities depend on data are left out. They may
depend on sizes that a call brings. A wait is then an error if it never ends for any of several usual sizes.
"""

from __future__ import annotations

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.stmt import Kernel, Program
from torch_tile.lowering.analysis.run_waits import USUAL, Outcome, Runner, outcomes
from torch_tile.lowering.analysis.wait_events import Kind, Place, waits_between_warps


def stuck_waits(program: Program) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """Return errors for waits that never end, one for each kernel, and warnings of waits that ask for one parity."""
    errors: list[Diagnostic] = []
    warnings: list[Diagnostic] = []
    for kernel in filter(waits_between_warps, program.kernels):
        error, warning = _of_kernel(kernel)
        errors += [] if error is None else [error]
        warnings += [] if warning is None else [warning]
    return errors, warnings


def _of_kernel(kernel: Kernel) -> tuple[Diagnostic | None, Diagnostic | None]:
    """Return the error and the warning for a kernel."""
    found = [(size, outcome) for size, outcome in outcomes(kernel) if size is None or size >= USUAL]
    if not found:
        return None, None
    size, outcome = found[-1]
    if size is None:
        return (_stuck(outcome), None) if outcome.waiting else (None, _of_one_parity(outcome))
    # An author may ask callers for certain sizes, so that one of them proves no mistake.
    mistaken = len(found) > 1 and all(each.waiting for _, each in found)
    return (_stuck(outcome) if mistaken else None), None


def _stuck(outcome: Outcome) -> Diagnostic:
    """Return the diagnostic for one of the runners that wait forever, at best one for which no arrival is left."""
    waiting = outcome.waiting
    left = {
        event.place
        for runner in waiting
        for event in runner.events[runner.done + (runner.event.kind is Kind.BAR_SYNC) :]
        if event.kind is not Kind.WAIT
    }
    runner = min(waiting, key=lambda each: (each.event.place in left, each.done))
    event = runner.event
    places = dict.fromkeys(each.event.span for each in waiting if each.event.place != event.place)
    notes: list[tuple[Span | None, str]]
    notes = [(span, "others wait here") for span in places if span is not None and span != event.span]
    if event.kind is Kind.WAIT:
        return _stuck_at_mbarrier(runner, notes, left, outcome)
    come, has_more = outcome.come.get(event.place, 0), event.place in left
    if has_more:
        why = "the threads that would come later wait for these, here or elsewhere"
        fix = "let all threads wait in one order: arrive at what other threads wait for before this, or move this"
    else:
        why = "no other thread comes here again"
        fix = "let all its threads come equally often: mend the counts of loops, a branch, or the number of threads"
    passed = sum(e.place == event.place for e in runner.events[: runner.done])
    name, count = event.place.name, event.needed
    return diagnose(
        "stuck_barrier", event.span, notes, name=name, count=count, passed=passed, come=come, why=why, fix=fix
    )


def _stuck_at_mbarrier(
    runner: Runner, notes: list[tuple[Span | None, str]], left: set[Place], outcome: Outcome
) -> Diagnostic:
    """Return the diagnostic for a wait for an mbarrier; arrivals at the places in `left` would still come."""
    event = runner.event
    before = runner.events[: runner.done]
    parities = [e.parity for e in before if e.place == event.place and e.kind is Kind.WAIT]
    name, complete = event.place.name, outcome.complete.get(event.place, 0)
    later = runner.events[runner.done + 1 :]
    if parities and set(parities) == {event.parity} and complete > 1:
        fix = "ask for the other parity in each next phase: `(k // stages) % 2` for iteration k"
    elif not parities and event.parity == 0 and any(e.place == event.place for e in later):
        fix = "begin with parity 1, `parity ^ 1`, where a buffer is free at first: such a wait passes before any phase"
    else:
        fix = "let as many phases complete as are waited for: mend the counts of loops, the stage, or the arrivals"
        fix += "" if event.place in left else f"; no arrival at `{name}` is left"
    passed = len(parities)
    return diagnose(
        "stuck_wait", event.span, notes, name=name, parity=event.parity, passed=passed, complete=complete, fix=fix
    )


def _of_one_parity(outcome: Outcome) -> Diagnostic | None:
    """Return a diagnostic for a wait that asks for one parity again and again while several phases complete."""
    for runner in outcome.runners:
        asked: dict[tuple[Span | None, Place], list[int]] = {}
        for event in runner.events:
            if event.kind is Kind.WAIT:
                asked.setdefault((event.span, event.place), []).append(event.parity)
        for (span, place), parities in asked.items():
            complete, buffer = outcome.complete.get(place, 0), place.buffer
            if buffer is not None and len(parities) > 1 and len(set(parities)) == 1 and complete > 1:
                return diagnose("same_parity", span, buffer=buffer.name, parity=parities[0], count=complete)
    return None
