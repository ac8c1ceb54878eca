# SPDX-License-Identifier: Apache-2.0
"""The result of a tuning run: the best configuration, and a table of all tried ones. Kept on disk as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from torch_tile.compiler.cost_model import Estimate
from torch_tile.diagnostics.errors import Diagnostic, TileError, error
from torch_tile.diagnostics.spelling import nearest
from torch_tile.ir.stmt import Program
from torch_tile.jit import JITFunction
from torch_tile.profiler import TensorSupplyType

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel


Config = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """The trial of one configuration: measured and modelled ms, and why it is out."""

    config: Config
    latency: float | None = None
    estimate: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class AutotuneResult:
    """The best `config`, its `latency` in ms and its `kernel`, and all `trials` in the order given.

    `latency` is None if nothing was measured, `kernel` is None for eager kernels. `ref_latency` is that of ref_prog, if
    there is one. Prints as a table.
    """

    name: str
    best: int
    trials: tuple[Trial, ...]
    ref_latency: float | None = None
    kernel: JITKernel | None = None

    @property
    def config(self) -> Config:
        """Return the best configuration."""
        return self.trials[self.best].config

    @property
    def latency(self) -> float | None:
        """Return the time of the best configuration in milliseconds."""
        return self.trials[self.best].latency

    @property
    def libcode(self) -> str | None:
        """Return the generated source of `kernel`."""
        return None if self.kernel is None else self.kernel.get_kernel_source()

    @property
    def func(self) -> JITKernel | None:
        """Return `kernel`, under TileLang's name, which is called."""
        return self.kernel

    def __repr__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.trials)} configurations", *table(self.trials, self.best)])


def table(trials: Sequence[Trial], best: int | None = None) -> list[str]:
    """Format measured time, the model's, the configuration and the note; fastest first."""
    order = sorted(
        range(len(trials)), key=lambda i: (i != best, trials[i].note != "", trials[i].latency or float("inf"))
    )
    lines = ["        ms   model ms  configuration"]
    for number in order:
        each = trials[number]
        note = "  <- best" if number == best else f"  ({each.note})" if each.note else ""
        lines.append(f"{_number(each.latency)} {_number(each.estimate)}  {show(each.config)}{note}")
    return lines


def show(config: Config) -> str:
    """Format a configuration as its author would pass it."""
    return ", ".join(f"{name}={value!r}" for name, value in config.items()) or "(defaults)"


def _number(milliseconds: float | None) -> str:
    """Format milliseconds for the table, "-" for none."""
    return f"{'-':>10}" if milliseconds is None else f"{milliseconds:10.4f}"


def to_json(result: AutotuneResult) -> str:
    """Write a result as JSON. Configurations stand there for readers only: they are found again by their order."""
    trials = [
        {"config": show(each.config), "latency": each.latency, "estimate": each.estimate, "note": each.note}
        for each in result.trials
    ]
    found = {"name": result.name, "best": result.best, "ref_latency": result.ref_latency, "trials": trials}
    return json.dumps(found, indent=1)


def from_json(text: str, configs: Sequence[Config]) -> AutotuneResult:
    """Read the text that `to_json` wrote for these configurations."""
    found = json.loads(text)
    trials = tuple(
        Trial(config, each["latency"], each["estimate"], each["note"])
        for config, each in zip(configs, found["trials"], strict=True)
    )
    return AutotuneResult(found["name"], found["best"], trials, found["ref_latency"])


# The state of one configuration during a search, and the settings of the search.


@dataclass(frozen=True)
class Settings:
    """Settings of a search; see `autotune`."""

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
        """Return whether results are compared with ref_prog's."""
        return self.ref_prog is not None and not self.skip_check

    @property
    def effort(self) -> tuple[object, ...]:
        """Return the settings that decide how thorough the search is. Another value makes another search."""
        factor = self.early_stop_factor if self.early_stop else None
        return self.checks, self.warmup, self.rep, factor, self.prune

    def changed(self, op: str, given: Mapping[str, Any]) -> Settings:
        """Return these settings with the fields in `given`. Raise TileError for an unknown field."""
        known = [field.name for field in fields(self)]
        for name, value in given.items():
            if name in NUMBERS and (not isinstance(value, int | float) or value < 0):
                fix = f"give a number of 0 or more, as {name}={getattr(self, name)}"
                raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}"[:80], fix=fix)
            if name in LIMITS and value is not None and (not isinstance(value, int | float) or value <= 0):
                fix = f"give a number above 0, or None for no limit, as {name}={getattr(self, name)}"
                raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}"[:80], fix=fix)
            if name in FUNCTIONS and value is not None and not callable(value):
                fix = f"give a function: {name}=f"
                raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}"[:80], fix=fix)
            if name == "supply_type" and not isinstance(value, TensorSupplyType):
                fix = f"give one of TensorSupplyType.{', TensorSupplyType.'.join(TensorSupplyType.__members__)}"
                raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}"[:80], fix=fix)
            if name == "max_mismatched_ratio" and value > 1:
                fix = f"give a share of the elements, at most 1, as {name}={self.max_mismatched_ratio}"
                raise error("bad_argument", None, op=op, name=name, why=f"is {value!r}", fix=fix)
            if name not in known:
                near = nearest(name, known)
                fix = FOREIGN.get(name) or (f"did you mean {near}?" if near else f"give one of {', '.join(known)}")
                raise error("bad_argument", None, op=op, name=name, why="is not a setting", fix=fix)
        return replace(self, **given)


FOREIGN = {
    "key": "leave it out: new arguments start a search; do_not_specialize names those that start none",
    "prune_configs_by": "`prune=3.0` leaves out what the cost model calls so many times slower",
    "reset_to_zero": "leave it out: each configuration gets copies of the tensors that the kernel writes",
    "restore_value": "leave it out: each configuration gets copies of the tensors that the kernel writes",
    "cache_results": "leave it out: results are kept on disk",
}
"""What settings of Triton's are called here, or why there is none."""

NUMBERS = ("warmup", "rep", "rtol", "atol", "max_mismatched_ratio", "early_stop_factor")
"""Settings that are numbers and never None."""

LIMITS = ("timeout", "prune")
"""Settings that are numbers above 0, or None."""

FUNCTIONS = ("supply_prog", "ref_prog", "manual_check_prog")
"""Settings that are functions, or None."""

# TileLang's: all are compiled side by side anyway, and timed on the device that the tensors lie on.
WITHOUT_EFFECT = {
    "enable_grouped_compile", "group_compile_size", "use_pipeline", "benchmark_devices", "benchmark_multi_gpu",
    "backend",
}  # fmt: skip


class SearchSettings(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments; a test compares the names."""

    warmup: float
    rep: float
    timeout: float | None
    supply_type: TensorSupplyType
    supply_prog: Callable[[list[Any]], Sequence[Any]] | None
    ref_prog: Callable[..., Any] | None
    rtol: float
    atol: float
    max_mismatched_ratio: float
    skip_check: bool
    manual_check_prog: Callable[[Any, Any], object] | None
    cache_input_tensors: bool
    early_stop: bool
    early_stop_factor: float
    prune: float | None


def settings_of(op: str, given: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return `base` with the fields that TileLang's keywords name. Raise TileError for an unknown name."""
    kept = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    return (base or Settings()).changed(op, kept)


@dataclass
class Candidate:
    """One configuration of an autotuner's search, with its program, estimate, kernel and measured time.

    `note` says why the search left it out, "" while it did not; `failure` names the line.
    """

    config: Config
    function: JITFunction
    program: Program | None = None
    tensors: Sequence[Any] = ()
    estimate: Estimate | None = None
    kernel: JITKernel | None = None
    latency: float | None = None
    note: str = ""
    failure: Diagnostic | None = None

    def fail(self, problem: Exception, what: str = "") -> None:
        """Take the candidate out of the search, with the reason and, of a TileError, its first finding."""
        self.note = what + reason(problem)
        self.failure = problem.diagnostics[0] if isinstance(problem, TileError) else None

    @property
    def seconds(self) -> float:
        """Return the model's estimate, infinite without one."""
        return float("inf") if self.estimate is None else self.estimate.seconds

    @property
    def trial(self) -> Trial:
        """Return the candidate's row of the result's table."""
        model = None if self.estimate is None else self.estimate.seconds * 1e3
        return Trial(self.config, self.latency, model, self.note)


def variant(function: JITFunction, config: Config) -> tuple[JITFunction, dict[str, Any]]:
    """Return the function of a configuration, and its arguments; `pass_configs` go to the compiler."""
    keywords = dict(config)
    if "pass_configs" in keywords and "pass_configs" not in function.signature.parameters:
        function = function.with_pass_configs(keywords.pop("pass_configs"))
    return function, keywords


def reason(problem: Exception) -> str:
    """Say in one line why a configuration failed."""
    if isinstance(problem, TileError):
        return problem.diagnostics[0].message
    text = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
