# SPDX-License-Identifier: Apache-2.0
"""Try the candidates of a search: compile them side by side, check them, and time them in turns.

Each function notes in a candidate why it is out, and skips candidates with such a note.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_tile.autotuner.machine import synchronize
from torch_tile.autotuner.result import Candidate, Settings
from torch_tile.compiler.parallel import progress, side_by_side, workers_for
from torch_tile.diagnostics.arguments import calls_back
from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.stmt import Program
from torch_tile.profiler import Profiler, do_bench
from torch_tile.runtime.cache import CacheError
from torch_tile.runtime.host_compiler import NoCompilerError
from torch_tile.runtime.nvrtc import NoNvrtcError
from torch_tile.tileop.uses import writes_of

_log = logging.getLogger("torch_tile")


def compile_all(name: str, candidates: Sequence[Candidate], target: Target, timeout: float | None) -> None:
    """Compile each candidate's kernel. Raises errors that are not a candidate's: no compiler, or no cache folder."""
    jobs = [partial(c.function.build, c.program, target) for c in candidates if c.program is not None]
    workers, start = workers_for(target), time.perf_counter()
    with progress(len(jobs), f"{name}: compiling") as tick:
        built = side_by_side(jobs, workers, timeout, tick)
    seconds = time.perf_counter() - start
    _log.info("autotune: %d configurations of %s compiled in %.1f s by %d threads", len(jobs), name, seconds, workers)
    for each, kernel in zip(candidates, built, strict=True):
        if isinstance(kernel, NoNvrtcError | NoCompilerError | CacheError):
            raise kernel
        if isinstance(kernel, Exception):
            each.fail(kernel)
        else:
            each.kernel = kernel


def check_all(
    name: str, candidates: Sequence[Candidate], target: Target, settings: Settings, inputs: Sequence[Any]
) -> None:
    """Compare each kernel with ref_prog, if that is asked for."""
    reference = settings.ref_prog
    if reference is None or settings.skip_check:
        return
    with progress(len(candidates), f"{name}: checking") as tick:
        for each in candidates:
            try:
                _check(each, settings, reference, inputs)
            except Exception as problem:  # wrong, or failed
                each.fail(problem, "differs from ref_prog: ")
                synchronize(target)
            tick()


def _check(each: Candidate, settings: Settings, reference: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Compare one kernel's results with those of ref_prog."""
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
    with progress(len(calls) * ROUNDS, f"{name}: timing") as tick:
        runners = race(calls, settings.warmup, settings.rep, factor, timer, tick, lost)
    for each, runner in zip(candidates, runners, strict=True):
        each.latency = runner.latency
        if runner.failure is not None:
            each.fail(runner.failure)
        elif runner.dropped:
            each.note = "left early"
    if settings.ref_prog is None:
        return None
    with calls_back("autotune calls ref_prog(*inputs), with the tensors of the kernel"):
        return timer(partial(settings.ref_prog, *inputs), settings.warmup, settings.rep)


def _timed(backend: str, call: Callable[[], object], warmup: float, rep: float) -> float:
    """Time a call; return its milliseconds, on the CPU of the least sample, since other processes disturb the clock."""
    return float(do_bench(call, warmup, rep, "median" if backend == "event" else "min", backend))


# Calls are timed in turns, so that a slow moment of the machine meets all of them. The slow ones leave early. A call is
# judged by its best turn: disturbances only make it slower.

ROUNDS = 4  # turns that each call gets
TRUSTED = 2  # after so many turns the slow ones leave: one turn may be all bad luck

Timer = Callable[[Callable[[], object], float, float], float]  # (call, warmup, rep) in ms -> ms of one call


@dataclass
class Runner:
    """One call of a race: its time in each turn in ms, and what it raised, if it did."""

    call: Callable[[], object]
    times: list[float] = field(default_factory=list)
    failure: Exception | None = None
    dropped: bool = False

    @property
    def latency(self) -> float | None:
        """Return the time of one call in its best turn in milliseconds; None if it failed."""
        return min(self.times, default=None)


def race(
    calls: Sequence[Callable[[], object]],
    warmup: float = 25,
    rep: float = 100,
    stop_factor: float | None = 1.3,
    timer: Timer | None = None,
    tick: Callable[[], object] = lambda: None,
    failed: Callable[[], object] = lambda: None,
) -> list[Runner]:
    """Time `calls`, about `warmup + rep` ms each; those slower than `stop_factor` times the best leave early.

    A call that raises is out. `tick` is called after each call's turn, `failed` after one that raised (it may raise
    itself: where the machine is lost there is no point in going on).
    """
    timer = timer or do_bench
    runners = [Runner(call) for call in calls]
    running = list(runners)
    for round_ in range(ROUNDS):
        for runner in running if round_ % 2 == 0 else running[::-1]:
            try:
                runner.times.append(timer(runner.call, warmup / ROUNDS, rep / ROUNDS))
            except Exception as problem:  # whatever a kernel raises, the others must be timed
                runner.failure, runner.times = problem, []
                failed()
            tick()
        running = [runner for runner in running if runner.failure is None]
        if stop_factor is None or round_ + 1 < TRUSTED:
            continue
        best = min((runner.latency or 0.0 for runner in running), default=0.0)
        for runner in running:
            runner.dropped = (runner.latency or 0.0) > stop_factor * best
        running = [runner for runner in running if not runner.dropped]
    return runners


# Inputs for trials: neither the caller's tensors nor its random stream may change.

SEED = 0  # every configuration, and every process, is tried on the same numbers


def written(program: Program) -> set[Buffer]:
    """Return the buffers that a program writes."""
    return {buffer for kernel in program.kernels for buffer in writes_of(kernel.body)}


def spare(value: Any) -> Any:
    """Copy a tensor with its strides. Return anything else, and a tensor that overlaps itself, unchanged."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    try:
        return made.copy_(value.detach())
    except RuntimeError:  # several elements in one place
        return value


@contextlib.contextmanager
def made_by_seed() -> Iterator[None]:
    """Seed torch's random numbers inside, and restore the caller's stream afterwards."""
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        yield
