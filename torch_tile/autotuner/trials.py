# SPDX-License-Identifier: Apache-2.0
"""What is done to the candidates of a search: compiled side by side, checked, and timed in turns.

Each function notes in a candidate why it is out; those that have a note already are not given to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch_tile.autotuner.candidate import Candidate, Settings, reason
from torch_tile.autotuner.inputs import spare
from torch_tile.autotuner.machine import synchronize
from torch_tile.autotuner.race import ROUNDS, race
from torch_tile.compiler.parallel import progress, side_by_side, workers_for
from torch_tile.hardware import Target
from torch_tile.profiler import Profiler, do_bench
from torch_tile.runtime.cache import CacheError
from torch_tile.runtime.find_nvrtc import NoNvrtcError
from torch_tile.runtime.host_compiler import NoCompilerError

_log = logging.getLogger("torch_tile")


def compile_all(name: str, candidates: Sequence[Candidate], target: Target, timeout: float | None) -> None:
    """Give each candidate its kernel; raises what is no fault of theirs: no compiler, or no folder for the cache."""
    jobs = [partial(c.function.build, c.program, target) for c in candidates if c.program is not None]
    workers, start = workers_for(target), time.perf_counter()
    with progress(len(jobs), f"{name}: compiling") as told:
        built = side_by_side(jobs, workers, timeout, told)
    seconds = time.perf_counter() - start
    _log.info("autotune: %d configurations of %s compiled in %.1f s by %d threads", len(jobs), name, seconds, workers)
    for each, kernel in zip(candidates, built, strict=True):
        if isinstance(kernel, NoNvrtcError | NoCompilerError | CacheError):
            raise kernel
        if isinstance(kernel, Exception):
            each.note = reason(kernel)
        else:
            each.kernel = kernel


def check_all(
    name: str, candidates: Sequence[Candidate], target: Target, settings: Settings, inputs: Sequence[Any]
) -> None:
    """Compare each kernel with ref_prog, if that is asked for."""
    reference = settings.ref_prog
    if reference is None or settings.skip_check:
        return
    with progress(len(candidates), f"{name}: checking") as told:
        for each in candidates:
            try:
                _check(each, settings, reference, inputs)
            except Exception as problem:  # wrong, or failed
                each.note = f"differs from ref_prog: {reason(problem)}"
                synchronize(target)
            told()


def _check(each: Candidate, settings: Settings, reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    copies = [spare(x) for x in inputs]
    if each.kernel is not None and settings.manual_check_prog is not None:
        settings.manual_check_prog(each.kernel(*copies), reference(*map(spare, inputs)))
    elif each.kernel is not None:
        profiler = Profiler(each.kernel, settings.supply_type)
        profiler.assert_allclose(reference, settings.atol, settings.rtol, copies, settings.max_mismatched_ratio)


def time_all(
    name: str, candidates: Sequence[Candidate], target: Target, settings: Settings, inputs: Sequence[Any]
) -> float | None:
    """Race the kernels. Returns the milliseconds of ref_prog, if there is one."""
    calls = [partial(c.kernel, *inputs) for c in candidates if c.kernel is not None]
    timer = partial(_timed, "event" if target.kind == "cuda" else "wall")
    factor = settings.early_stop_factor if settings.early_stop else None
    lost = partial(synchronize, target)
    with progress(len(calls) * ROUNDS, f"{name}: timing") as told:
        runners = race(calls, settings.warmup, settings.rep, factor, timer, told, lost)
    for each, runner in zip(candidates, runners, strict=True):
        each.latency = runner.latency
        if runner.failure is not None:
            each.note = reason(runner.failure)
        elif runner.dropped:
            each.note = "left early"
    if settings.ref_prog is None:
        return None
    return timer(partial(settings.ref_prog, *inputs), settings.warmup, settings.rep)


def _timed(backend: str, call: Callable[[], object], warmup: float, rep: float) -> float:
    """Milliseconds of a call. Processes beside ours disturb the CPU's clock, not the GPU's: there the least counts."""
    return float(do_bench(call, warmup, rep, "median" if backend == "event" else "min", backend))
