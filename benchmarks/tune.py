# SPDX-License-Identifier: Apache-2.0
"""Finds the tilings that the library ships for a GPU: `python -m benchmarks.tune [gemm dequant attention mla]
[--only M5,b64] [--seconds 500] [--output DIR]`, on that GPU.

For each class of shapes of the benchmarks it starts from the model's cut and climbs: it races the neighbours (one field
changed) of the best cut so far, until none is faster. Wrong results are out. Tilings that beat the model's by 2 % go
into `DIR/<device>.json` (torch_tile/kernels/shipped by default) after every class, beside what the file holds already.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import torch_tile
from benchmarks.problem import Case, Problem, tolerance_of, wrong
from benchmarks.runner import LIMIT, problems_of, said
from torch_tile.autotuner.trials import race
from torch_tile.compiler.parallel import side_by_side, workers_for
from torch_tile.hardware import Target
from torch_tile.kernels.attention import forward as attention, tiling as attention_config
from torch_tile.kernels.common import Machine
from torch_tile.kernels.gemm import dequant as dequant_gemm, gemm, tiling as gemm_config
from torch_tile.kernels.mla import decode as mla_decode, spec as mla_spec
from torch_tile.kernels.tuned import FOLDER, file_of, read

FAMILIES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {  # who asks for cuts, who chooses, and the fields to vary
    "gemm": (
        gemm, gemm_config, ("block_m", "block_n", "block_k", "threads", "stages", "splits", "panel", "staged"),
    ),
    "dequant": (
        dequant_gemm, dequant_gemm, ("block_m", "block_n", "block_k", "threads", "stages", "splits"),
    ),
    "attention": (
        attention, attention_config,
        ("block_q", "block_kv", "threads", "stages", "split", "packed", "heavy_first", "resident", "shares", "staged",
         "ping_pong", "blocks"),
    ),
    "mla": (mla_decode, mla_spec, ("block_h", "block_kv", "threads", "stages", "split")),
}  # fmt: skip
WORTH_A_STEP = 0.99  # of the best cut's time: what is nearer may be noise
GAIN = 0.98  # of the model's time, that a tiling is worth a line
STOP_FACTOR = 1.15  # cuts so much slower than the best leave the race
CLIMBS = 4  # races for one class at most
MOST_CASES = 2  # problems of one class that are timed together: the orders in memory, or dtypes


@dataclass
class Group:
    """Problems of one class: their family, the model's cut, and how to make them."""

    family: str
    shape: str
    default: Any
    problems: list[Problem] = field(default_factory=list)


def groups_of(family: str, problems: Sequence[Problem]) -> dict[str, Group]:
    """The problems of a family by class; each is run once, by the model's cut."""
    asks, chooses, _ = FAMILIES[family]
    found: dict[str, Group] = {}
    for problem in problems:
        seen: list[tuple[str | None, Any]] = []

        def choose(*args: Any, seen: list[tuple[str | None, Any]] = seen) -> Any:
            described = [a for a in args if not isinstance(a, Machine | int)]
            plain = [replace(a, name="") if isinstance(a, Machine) else a for a in args]
            seen.append((chooses.shape_class(*described), chooses.config_for(*plain)))
            return seen[-1][1]

        with patch.object(asks, "config_for", choose):
            problem.make().ours()
        shape, default = seen[0] if seen else (None, None)
        if shape is not None and default is not None:
            found.setdefault(shape, Group(family, shape, default)).problems.append(problem)
    return found


def neighbours(config: Any, names: Sequence[str]) -> Iterator[Any]:
    """The tilings that differ from `config` in one of the fields `names`: a flag turned, a number doubled or halved, a
    stage more or less.

    Most of those that make no sense are refused by the compiler; the rest is slow, or wrong and found out.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool):
            values: tuple[Any, ...] = (not value,)
        elif name == "stages":
            values = (value - 1, value + 1)
        else:
            values = (8,) if value == 0 else (value * 2, value // 2)
        yield from (replace(config, **{name: v}) for v in values if isinstance(v, bool) or v > 0)


class Climb:
    """The search of one class. `timed` cuts ran, `refused` says why others did not."""

    def __init__(self, cases: Sequence[tuple[Problem, Case]], default: Any, names: Sequence[str]):
        self.cases, self.default, self.names = cases, default, names
        self.wanted = [case.expected() for _, case in cases]
        self.timed: set[Any] = {default}
        self.refused: dict[Any, str] = {}

    def best(self, warmup: float, rep: float, until: float) -> tuple[Any, float]:
        """The fastest cut that was found before `until`, and its time relative to the model's."""
        best = self.default
        for _ in range(CLIMBS):
            fresh = [
                c for c in dict.fromkeys(neighbours(best, self.names)) if c not in self.timed and c not in self.refused
            ]
            if time.monotonic() < until:
                compile_ahead([partial(ours(case), config=c) for c in fresh for _, case in self.cases])
            sound = [best, *(c for c in fresh if time.monotonic() < until and self.is_sound(c))]
            runners = race([self.call(c) for c in sound], warmup, rep, STOP_FACTOR)
            times = {c: r.latency for c, r in zip(sound, runners, strict=True) if r.latency and not r.dropped}
            fastest = min(times, key=lambda c: times[c], default=best)
            if fastest == best or (best in times and times[fastest] > WORTH_A_STEP * times[best]):
                break
            best = fastest
        if best == self.default:
            return best, 1.0
        model, found = race([self.call(self.default), self.call(best)], warmup, 2 * rep, None)
        return best, (found.latency or float("inf")) / (model.latency or float("inf"))

    def call(self, config: Any) -> Callable[[], object]:
        """All problems of the class, one after another."""
        calls = [partial(ours(case), config=config) for _, case in self.cases]
        return lambda: [call() for call in calls]

    def is_sound(self, config: Any) -> bool:
        """Whether a tiling gives the right results; sorts it in."""
        why = self.fault(config)
        if why:
            self.refused[config] = why
        else:
            self.timed.add(config)
        return not why

    def fault(self, config: Any) -> str:
        """Why a tiling cannot be used; "" if it can."""
        for (problem, case), want in zip(self.cases, self.wanted, strict=True):
            if torch.cuda.is_initialized():  # a kernel that waits forever ends the process, not the loan of the machine
                faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                call = partial(ours(case), config=config)
                _, why = wrong(case, call, want, tolerance_of(problem.dtype))
            except Exception as failure:  # refused by the compiler or at the launch
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # raises if the GPU is lost
                why = said(failure)[:120]
            finally:
                faulthandler.cancel_dump_traceback_later()
            if why:
                return why
        return ""


class Traced(Exception):
    """A kernel was about to be compiled, which is put off."""


def compile_ahead(calls: Sequence[Callable[[], object]]) -> None:
    """Compile what the calls would launch first, side by side, into the cache on disk."""
    jobs: list[Callable[[], object]] = []

    def put_off(*args: Any) -> None:
        jobs.append(partial(compile_kernel, *args))
        raise Traced("to be compiled with the others")

    compile_kernel = torch_tile.jit._compile
    with patch.object(torch_tile.jit, "_compile", put_off):
        for call in calls:
            with suppress(Exception):  # what is wrong with it is found when it is checked
                call()
    side_by_side(jobs, workers_for(Target.of("auto")), LIMIT)


def ours(case: Case) -> Callable[..., object]:
    """Our call of a case, which takes a tiling as `config`."""
    return case.ours


def write(path: Path, family: str, shape: str, config: Any | None, device: str) -> None:
    """Put a cut into the file, or take it out; the file is there completely at any time."""
    found: dict[str, Any] = {"device": device, **read(path)}
    cuts = {**found.get(family, {}), shape: config and asdict(config)}
    found[family] = {name: cuts[name] for name in sorted(cuts) if cuts[name]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


def changed(config: Any, default: Any) -> Mapping[str, Any]:
    """The fields in which a tiling differs from the model's."""
    return {name: value for name, value in asdict(config).items() if value != getattr(default, name)}


def tune(group: Group, path: Path, device: str, warmup: float, rep: float, until: float) -> None:
    """Search one class, print what was found, and keep it."""
    cases = [(problem, problem.make()) for problem in group.problems[:MOST_CASES]]
    climb = Climb(cases, group.default, FAMILIES[group.family][2])
    if why := climb.fault(group.default):
        print(f"{group.family} {group.shape}: the model's cut fails: {why}", flush=True)
        return
    config, ratio = climb.best(warmup, rep, until)
    count = f"{len(climb.timed)} timed, {len(climb.refused)} refused"
    print(
        f"{group.family} {group.shape}: {ratio:.3f} of the model's time by {changed(config, group.default)} ({count})"
    )
    for cut, why in climb.refused.items():
        print(f"    {changed(cut, group.default)}: {why}", flush=True)
    write(path, group.family, group.shape, config if ratio < GAIN else None, device)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all of them by default")
    parser.add_argument("--only", default="", help="problems whose name contains one of these, apart by commas")
    parser.add_argument("--seconds", type=float, default=500.0, help="time for all of it")
    parser.add_argument("--rep", type=float, default=40.0, help="milliseconds for each tiling that runs to its end")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(given)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    path = options.output / file_of(device)
    print(f"{device}, torch {torch.__version__}; into {path}")
    end = time.monotonic() + options.seconds
    groups = []
    for family in options.families or FAMILIES:
        problems = [p for p in problems_of(family, options.device) if any(o in p.name for o in options.only.split(","))]
        groups += groups_of(family, problems).values()
    for left, group in zip(range(len(groups), 0, -1), groups, strict=True):
        remaining = end - time.monotonic()
        if remaining <= 0:
            print(f"out of time: {left} classes left, from {group.family} {group.shape}")
            return 1
        tune(group, path, device, options.rep / 8, options.rep, time.monotonic() + 2 * remaining / left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
