# SPDX-License-Identifier: Apache-2.0
"""One tuning run: trace every configuration, put aside what the model says is hopeless, compile the rest side by side,
check them, time them in turns, and keep the outcome on disk.

A configuration that fails at any step is skipped and listed with the reason; that all fail is an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..binding import Binding
from ..diagnostics import TileError, error
from ..ir.stmt import Program, dimensions
from ..jit import JITFunction
from ..profiler import Profiler, TensorSupplyType, do_bench
from ..runtime.cache import CacheError, get_or_build, key_of
from ..runtime.find_nvrtc import NoNvrtcError
from ..runtime.host_compiler import NoCompilerError
from ..target import Target
from .compiling import progress, side_by_side, workers_for
from .cost_model import Estimate, estimate
from .inputs import made_by_seed, spare, written
from .machine import can_measure, device_name, on_device, surroundings, synchronize, units_of
from .race import ROUNDS, Timer, race
from .result import AutotuneResult, Config, Try, from_json, show, to_json

if TYPE_CHECKING:
    from ..kernel import JITKernel

ENABLED, CACHED = "TORCH_TILE_AUTOTUNE", "TORCH_TILE_AUTOTUNE_CACHE"  # "0" turns either off
MOST_NOTES = 12  # failures that an error names
_log = logging.getLogger("torch_tile")


@dataclass(frozen=True)
class Settings:
    """How to tune; see `autotune`."""

    warmup: float = 25
    rep: float = 100
    timeout: float | None = 100
    supply_type: TensorSupplyType = TensorSupplyType.Auto
    supply_prog: Callable[[list[Any]], Sequence[Any]] | None = None
    ref_prog: Callable[..., Any] | None = None
    rtol: float = 1e-2
    atol: float = 1e-2
    max_mismatched_ratio: float = 0.01
    skip_check: bool = False
    manual_check_prog: Callable[[Any, Any], object] | None = None
    cache_input_tensors: bool = False  # accepted: all configurations run on the same tensors anyway
    early_stop: bool = True
    early_stop_factor: float = 1.3
    prune: float | None = 3.0

    @property
    def checks(self) -> bool:
        """Whether results are compared with ref_prog's."""
        return self.ref_prog is not None and not self.skip_check

    @property
    def effort(self) -> tuple[object, ...]:
        """What decides how well it is searched: another effort is another search."""
        factor = self.early_stop_factor if self.early_stop else None
        return self.checks, self.warmup, self.rep, factor, self.prune


@dataclass
class Candidate:
    """One configuration on its way: what is known of it so far, and why it is out, "" while it is in."""

    config: Config
    function: JITFunction
    program: Program | None = None
    tensors: Sequence[Any] = ()
    estimate: Estimate | None = None
    kernel: JITKernel | None = None
    latency: float | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        """The model's word, infinite where there is none."""
        return float("inf") if self.estimate is None else self.estimate.seconds

    @property
    def tried(self) -> Try:
        """What the table says."""
        model = None if self.estimate is None else self.estimate.seconds * 1e3
        return Try(self.config, self.latency, model, self.note)


class Session:
    """One search: `function` with each of `configs` beside the arguments `args` and `kwargs`; a lazy kernel is timed on
    `inputs`, if given, by `timer`.
    """

    def __init__(
        self, function: JITFunction, configs: Sequence[Config], settings: Settings, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None, inputs: Sequence[Any] | None = None, timer: Timer | None = None,
    ):  # fmt: skip
        self.function, self.settings, self.given, self.timer = function, settings, inputs, timer
        self.name = function.__name__
        self.candidates = [self.traced(config, args, kwargs or {}) for config in configs]
        first = next((c for c in self.candidates if c.program is not None), None)
        if first is None:
            raise self.nothing_works()
        self.tensors = first.tensors
        self.target = Target.of(self.function.target_for(self.tensors))
        self.program, self.out_idx = first.program, self.function.out_idx
        assert self.program is not None
        self.ref_latency: float | None = None

    def traced(self, config: Config, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Candidate:
        """The candidate of a configuration; tracing takes about a millisecond."""
        function, keywords = variant(self.function, config)
        made = Candidate(config, function)
        try:
            made.program, made.tensors = function.trace(*args, **{**kwargs, **keywords})
        except Exception as problem:  # the author's own code runs here, which may refuse a configuration
            made.note = reason(problem)
        return made

    def result(self) -> AutotuneResult:
        """From the disk, or measured; by the model alone where nothing can be measured."""
        if len(self.candidates) == 1:
            return self.outcome(0)
        with on_device(self.tensors or self.given or ()):
            return self.found()

    def found(self) -> AutotuneResult:
        """The result of several candidates, on the current device."""
        self.rank()
        if os.environ.get(ENABLED, "1") == "0" or not can_measure(self.target):
            _log.info("autotune: %s is not measured; the model chooses", self.name)
            return self.by_model()
        if os.environ.get(CACHED, "1") == "0":
            return self.measured()
        made: list[AutotuneResult] = []

        def build(path: Path) -> None:
            made.append(self.measured())
            path.write_text(to_json(made[0]))

        found = get_or_build(self.key(), ".json", build)
        return made[0] if made else from_json(found.read_text(), [c.config for c in self.candidates])

    def key(self) -> str:
        """All that the outcome depends on: the traced programs, what compiles and runs them, how they are tried."""
        texts = [part for c in self.candidates for part in (repr(c.program), repr(c.function.options))]
        sizes = [str(max(0, size - 1).bit_length()) for size in self.sizes().values()]  # classes: powers of two
        how = str(self.settings.effort)
        return key_of("autotune", *surroundings(self.target), device_name(self.target), how, *sizes, "of", *texts)

    def sizes(self) -> dict[Any, int]:
        """The sizes known only at run time."""
        assert self.program is not None
        if not dimensions(self.program):
            return {}
        binding = self.binding()
        inputs = list(self.tensors) or self.given
        if inputs is None and self.settings.supply_prog is not None:
            inputs = self.given = list(self.settings.supply_prog(binding.given))
        if inputs is None:
            name = dimensions(self.program)[0].name
            fix = "give supply_prog=, or call it inside `with torch_tile.autotuner.set_autotune_inputs(tensors):`"
            why = f"is missing, and `{name}` is known only at run time"
            raise error("bad_argument", None, op="autotune", name="supply_prog", why=why, fix=fix)
        return binding.sizes_of(inputs, self.target.kind)

    def binding(self) -> Binding:
        """The parameters that a caller gives."""
        assert self.program is not None
        given = [] if self.out_idx is None else [self.out_idx] if isinstance(self.out_idx, int) else self.out_idx
        return Binding(self.program, [i % len(self.program.params) for i in given])

    def rank(self) -> None:
        """The model's word on each candidate; those far behind the best are out."""
        known, units = {v.name: n for v, n in self.sizes().items()}, units_of(self.target)
        for each in self.running():
            assert each.program is not None
            sizes = {v: known[v.name] for v in dimensions(each.program) if v.name in known}
            each.estimate = estimate(each.program, self.target, units, sizes)
        fit = [c for c in self.running() if c.estimate and not c.estimate.refused]
        best = min((c.seconds for c in fit), default=0.0)
        for each in self.running() if fit else ():  # if nothing fits, the compiler shall say why
            if each.estimate and each.estimate.refused:
                each.note = each.estimate.refused
            elif self.settings.prune and each.seconds > self.settings.prune * best:
                each.note = f"the model expects {each.seconds / best:.1f} times the best's time"

    def running(self) -> list[Candidate]:
        """The candidates that are in."""
        return [c for c in self.candidates if not c.note]

    def by_model(self) -> AutotuneResult:
        """The candidate that the model likes best and that can be compiled."""
        for each in sorted(self.running(), key=lambda c: c.seconds):
            self.compile([each])
            if not each.note:
                return self.outcome(self.candidates.index(each))
        raise self.nothing_works()

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Build them side by side."""
        jobs = [partial(c.function.build, c.program, self.target) for c in candidates if c.program is not None]
        with progress(len(jobs), f"{self.name}: compiling") as told:
            built = side_by_side(jobs, workers_for(self.target), self.settings.timeout, told)
        for each, kernel in zip(candidates, built, strict=True):
            if isinstance(kernel, NoNvrtcError | NoCompilerError | CacheError):  # no fault of the configuration
                raise kernel
            if isinstance(kernel, Exception):
                each.note = reason(kernel)
            else:
                each.kernel = kernel

    def measured(self) -> AutotuneResult:
        """Compile, check and time what is in."""
        self.compile(self.running())
        if not self.running():
            raise self.nothing_works()
        inputs = self.inputs()
        self.check(inputs)
        self.time(inputs)
        finished = [c for c in self.running() if c.latency is not None]
        if not finished:
            raise self.nothing_works()
        best = min(finished, key=lambda c: c.latency or 0.0)
        result = self.outcome(self.candidates.index(best))
        _log.info("autotune: %r", result)
        return result

    def inputs(self) -> list[Any]:
        """What to run on: copies of what kernels write of an eager call, the tensors given, or made-up ones."""
        assert self.program is not None
        if self.tensors:
            changed = written(self.program)
            pairs = zip(self.tensors, self.program.params, strict=True)
            return [spare(t) if id(p) in changed else t for t, p in pairs]
        kernel = self.running()[0].kernel
        assert kernel is not None
        if self.given is None and self.settings.supply_prog is not None:
            self.given = list(self.settings.supply_prog(kernel.launcher.given))
        with made_by_seed():
            return Profiler(kernel, self.settings.supply_type).inputs() if self.given is None else list(self.given)

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare each kernel with ref_prog."""
        settings = self.settings
        if not settings.checks:
            return
        assert settings.ref_prog is not None
        with progress(len(self.running()), f"{self.name}: checking") as told:
            for each in self.running():
                assert each.kernel is not None
                copies = [spare(x) for x in inputs]
                try:
                    if settings.manual_check_prog is not None:
                        settings.manual_check_prog(each.kernel(*copies), settings.ref_prog(*inputs))
                    else:
                        Profiler(each.kernel, settings.supply_type).assert_allclose(
                            settings.ref_prog, settings.atol, settings.rtol, copies, settings.max_mismatched_ratio
                        )
                except Exception as problem:  # wrong, or failed
                    each.note = f"differs from ref_prog: {reason(problem)}"
                    synchronize(self.target)
                told()

    def time(self, inputs: Sequence[Any]) -> None:
        """Race the kernels."""
        settings, running = self.settings, self.running()
        calls = [partial(c.kernel, *inputs) for c in running if c.kernel is not None]
        factor = settings.early_stop_factor if settings.early_stop else None
        timer = self.timer or partial(_timed, "event" if self.target.kind == "cuda" else "wall")
        with progress(len(calls) * ROUNDS, f"{self.name}: timing") as told:
            runners = race(
                calls, settings.warmup, settings.rep, factor, timer, told, lambda: synchronize(self.target)
            )  # fmt: skip
        for each, runner in zip(running, runners, strict=True):
            each.latency = runner.latency
            if runner.failure is not None:
                each.note = reason(runner.failure)
            elif runner.dropped:
                each.note = "left early"
        if settings.ref_prog is not None:
            self.ref_latency = timer(partial(settings.ref_prog, *inputs), settings.warmup, settings.rep)

    def outcome(self, best: int) -> AutotuneResult:
        """The result with `best` as the best."""
        return AutotuneResult(self.name, best, tuple(c.tried for c in self.candidates), self.ref_latency)

    def nothing_works(self) -> TileError:
        """The error that lists why."""
        failed = [f"{show(c.config)}: {c.note}" for c in self.candidates]
        if len(failed) > MOST_NOTES:
            failed[MOST_NOTES:] = [f"and {len(failed) - MOST_NOTES} more"]
        notes = [(None, text) for text in failed]
        return error("no_config", None, notes, count=len(self.candidates), name=self.name)


def variant(function: JITFunction, config: Config) -> tuple[JITFunction, dict[str, Any]]:
    """The function that a configuration is for, and what it passes to it: `pass_configs` are the compiler's."""
    keywords = dict(config)
    if "pass_configs" in keywords and "pass_configs" not in function.signature.parameters:
        function = function.with_pass_configs(keywords.pop("pass_configs"))
    return function, keywords


def _timed(backend: str, call: Callable[[], object], warmup: float, rep: float) -> float:
    return do_bench(call, warmup, rep, backend=backend)


def reason(problem: Exception) -> str:
    """Why a configuration failed, in one line."""
    if isinstance(problem, TileError):
        return problem.diagnostics[0].message
    text = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
