# SPDX-License-Identifier: Apache-2.0
"""Run one search: trace every configuration, rank them by the model, compile, check and time the promising ones.

Compilation runs in parallel, timing in turns. The result is kept on disk. A configuration that fails at any step is
skipped and listed with the reason. If all fail, the search raises an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch_tile.autotuner.machine import can_measure, device_name, num_sms_of, on_device, surroundings
from torch_tile.autotuner.result import (
    AutotuneResult,
    Candidate,
    Config,
    SearchSettings,
    Settings,
    from_json,
    settings_of,
    show,
    to_json,
    variant,
)
from torch_tile.autotuner.trials import check_all, compile_all, made_by_seed, spare, time_all, written
from torch_tile.compiler.binding import Binding
from torch_tile.compiler.cost_model import estimate
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.diagnostics.errors import Span, TileError, error
from torch_tile.hardware import Target
from torch_tile.ir.stmt import dimensions
from torch_tile.jit import JITFunction
from torch_tile.options import pass_options
from torch_tile.profiler import Profiler
from torch_tile.runtime.cache import get_or_build, key_of

ENABLED, CACHED = "TORCH_TILE_AUTOTUNE", "TORCH_TILE_AUTOTUNE_CACHE"  # "0" turns either off
MOST_NOTES = 12  # failures that an error names
_log = logging.getLogger("torch_tile")


class Session:
    """One search of the autotuner: a kernel function, its configurations, and the arguments of the call."""

    function: JITFunction
    settings: Settings
    tensors: Sequence[Any]

    def __init__(
        self,
        function: JITFunction,
        configs: Sequence[Config],
        settings: Settings,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        inputs: Sequence[Any] | None = None,
    ):
        self.function, self.settings, self.given = function, settings, inputs
        self.name: Any = function.__name__
        self.candidates: list[Candidate] = [self.traced(config, args, kwargs or {}) for config in configs]
        first = next(((c.program, c.tensors) for c in self.candidates if c.program is not None), None)
        if first is None:
            raise self.nothing_works()
        self.program, self.tensors = first
        self.target: Target = Target.of(function.target_for(self.tensors))
        self.ref_latency: float | None = None

    def traced(self, config: Config, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Candidate:
        """Trace a configuration, which takes about a millisecond."""
        function, keywords = variant(self.function, config)
        made = Candidate(config, function)
        try:
            made.program, made.tensors = function.trace(*args, **{**kwargs, **keywords})
        except Exception as problem:  # the author's own code runs here, which may refuse a configuration
            made.fail(problem)
        return made

    def result(self) -> AutotuneResult:
        """Return the result from the disk, or measure it. If nothing can be measured, the model alone decides."""
        if len(self.candidates) == 1 and not self.settings.checks:
            return self.outcome(0)
        with on_device(self.tensors or self.given or ()):
            return self.found()

    def found(self) -> AutotuneResult:
        """Tune several candidates on the current device, or load the stored result."""
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
        """Return the key of the outcome: the traced programs, the toolchain and machine, and how they are tried."""
        texts = [part for c in self.candidates for part in (repr(c.program), repr(c.function.options))]
        sizes = [str(max(0, size - 1).bit_length()) for size in self.sizes().values()]  # classes: powers of two
        how = str(self.settings.effort)
        return key_of("autotune", *surroundings(self.target), device_name(self.target), how, *sizes, "of", *texts)

    def sizes(self) -> dict[Any, int]:
        """Return the sizes known only at run time."""
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
        """Return the parameters that a caller gives."""
        out_idx = self.function.out_idx
        made = [] if out_idx is None else [out_idx] if isinstance(out_idx, int) else out_idx
        return Binding(self.program, [i % len(self.program.params) for i in made])

    def rank(self) -> None:
        """Estimate each candidate by the model, and drop those far behind the best."""
        known, num_sms = {v.name: n for v, n in self.sizes().items()}, num_sms_of(self.target)
        for each in self.running():
            if each.program is not None:
                sizes = {v: known[v.name] for v in dimensions(each.program) if v.name in known}
                each.estimate = estimate(each.program, self.target, num_sms, sizes)
        fit = [c for c in self.running() if c.estimate and not c.estimate.refused]
        best = min((c.seconds for c in fit), default=0.0)
        for each in self.running() if fit else ():  # if nothing fits, the compiler shall say why
            if each.estimate and each.estimate.refused:
                each.note = each.estimate.refused
            elif self.settings.prune and each.seconds > self.settings.prune * best:
                each.note = f"the model expects {each.seconds / best:.1f} times the best's time"

    def running(self) -> list[Candidate]:
        """Return the candidates that are still in the search."""
        return [c for c in self.candidates if not c.note]

    def by_model(self) -> AutotuneResult:
        """Return the candidate that is best by the model among those that compile."""
        for each in sorted(self.running(), key=lambda c: c.seconds):
            compile_all(self.name, [each], self.target, self.settings.timeout)
            if not each.note:
                return self.outcome(self.candidates.index(each))
        raise self.nothing_works()

    def measured(self) -> AutotuneResult:
        """Compile, check and time the running candidates."""
        name, target, settings = self.name, self.target, self.settings
        compile_all(name, self.running(), target, settings.timeout)
        if not self.running():
            raise self.nothing_works()
        inputs = self.inputs()
        check_all(name, self.running(), target, settings, inputs)
        self.ref_latency = time_all(name, self.running(), target, settings, inputs)
        finished = [c for c in self.running() if c.latency is not None]
        if not finished:
            raise self.nothing_works()
        best = min(finished, key=lambda c: c.latency or 0.0)
        result = self.outcome(self.candidates.index(best))
        _log.info("autotune: %r", result)
        return result

    def inputs(self) -> list[Any]:
        """Return the tensors to time on: those given, or made-up ones. An eager call's written tensors are copied."""
        if self.tensors:
            changed = written(self.program)
            pairs = zip(self.tensors, self.program.params, strict=True)
            return [spare(t) if p in changed else t for t, p in pairs]
        if self.given is None and self.settings.supply_prog is not None:
            self.given = list(self.settings.supply_prog(self.binding().given))
        kernel = self.running()[0].kernel
        if self.given is not None or kernel is None:
            return list(self.given or ())
        with made_by_seed():
            return Profiler(kernel, self.settings.supply_type).inputs()

    def outcome(self, best: int) -> AutotuneResult:
        """Build the result of the search, with candidate number `best` as the best."""
        return AutotuneResult(self.name, best, tuple(c.trial for c in self.candidates), self.ref_latency)

    def nothing_works(self) -> TileError:
        """Return the error that lists why each candidate failed."""
        failed: dict[tuple[Span | None, str], list[Candidate]] = {}  # by the line and reason, which many may share
        for each in self.candidates:
            failed.setdefault((each.failure.span if each.failure else None, each.note), []).append(each)
        notes = [(at, f"{_listed(of)}: {text}") for (at, text), of in failed.items()]
        if len(notes) > MOST_NOTES:
            notes[MOST_NOTES:] = [(None, f"and {len(notes) - MOST_NOTES} more")]
        same = self.candidates[0].failure if len(failed) == 1 else None
        span, fix = (same.span, same.fix) if same else (None, "")
        if same:
            notes = [(None, text) for _, text in notes]
        return error("no_config", span, notes, count=len(self.candidates), name=self.name, fix=fix)


def _listed(candidates: Sequence[Candidate]) -> str:
    """Return the configurations of candidates as a message names them: the first three, and how many more."""
    more = f"; and {len(candidates) - 3} more" if len(candidates) > 3 else ""
    return "; ".join(show(c.config) for c in candidates[:3]) + more


# A search for the fastest configuration, called by hand; `@autotune` makes one at the first call for new arguments.


class AutoTuner:
    """Finds the fastest of `configs` for a kernel function. TileLang's calls can be chained:
    `AutoTuner.from_kernel(kernel, configs).set_compile_args(...).set_profile_args(...).run()`.
    """

    configs: list[Config]

    def __init__(self, function: JITFunction, configs: Sequence[Config], settings: Settings | None = None):
        if not configs:
            why, fix = "is empty", "give at least one dict of keyword arguments"
            raise error("bad_argument", None, op="autotune", name="configs", why=why, fix=fix)
        self.function, self.configs, self.settings = function, list(configs), settings or Settings()

    @classmethod
    @names_parameters
    def from_kernel(cls, kernel: Any, configs: Sequence[Config]) -> AutoTuner:
        """Make a tuner of a function that takes a configuration as keyword arguments, decorated with @jit or not."""
        return cls(kernel if isinstance(kernel, JITFunction) else JITFunction(kernel), configs)

    def set_compile_args(
        self, out_idx: int | Sequence[int] | None = None, target: object = "auto", **options: Any
    ) -> AutoTuner:
        """Set the options of `jit` for the kernel."""
        switches = pass_options("AutoTuner", **options)
        switches = replace(switches, measured=self.function.options.measured)
        self.function = JITFunction(self.function.function, out_idx, target, switches)
        return self

    def set_profile_args(self, **settings: Unpack[SearchSettings]) -> AutoTuner:
        """Set fields of Settings."""
        self.settings = settings_of("AutoTuner", settings, self.settings)
        return self

    def run(
        self,
        warmup: float | None = None,
        rep: float | None = None,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        inputs: Sequence[Any] | None = None,
        **settings: Any,
    ) -> AutotuneResult:
        """Return the best configuration for the other arguments `args` and `kwargs` of the kernel function."""
        given: dict[str, Any] = {"warmup": warmup, "rep": rep, "timeout": timeout}
        given |= settings
        self.settings = settings_of("AutoTuner.run", {k: v for k, v in given.items() if v is not None}, self.settings)
        result = Session(self.function, self.configs, self.settings, args, kwargs, inputs).result()
        if self.function.is_lazy:
            function, keywords = variant(self.function, result.config)
            kernel = function.compile(*args, **{**(kwargs or {}), **keywords})
            kernel.config, kernel.latency, kernel.ref_latency = result.config, result.latency, result.ref_latency
            result = replace(result, kernel=kernel)
        return result
