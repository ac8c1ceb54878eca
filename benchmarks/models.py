# SPDX-License-Identifier: Apache-2.0
"""Models under `torch.compile`: eager, Inductor and `backend="tile"` in turns, on one GPU.

`python -m benchmarks.models [--only llama,swiglu] [--rivals eager,Inductor,max-autotune] [--seconds S] [--json FILE]`

A line for each case: median milliseconds, how many times faster than Inductor tile is beside the ratio asked, what
compiling took, how far the results of both are from float64 (root mean square, relative), the most memory that a call
holds above weights and inputs, and what was replaced.
`--list` only names the cases. Max-autotune takes minutes for a model and runs only where --rivals names it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.model_cases import Made, ModelCase, cases, in_float64
from benchmarks.runner import said
from benchmarks.timer import Timing, measure, peak_of
from torch_tile.inductor.backend import tile
from torch_tile.inductor.report.rows import Report, collect

RIVALS = ("eager", "Inductor", "max-autotune")
FARTHER = 1.2  # how much farther from float64 than Inductor's ours may be


@dataclass
class Line:
    """What was found for one case: seconds and bytes by name, ours under "tile"."""

    name: str
    asked: dict[str, float]
    times: dict[str, Timing] = field(default_factory=dict)
    compiled: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    breaks: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    spared: float = 0.0  # GiB of Inductor's peak that ours should not take

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Line:
        """The line as it was written to a file."""
        return cls(**{**line, "times": {name: Timing(**t) for name, t in line["times"].items()}})

    def ratio(self, rival: str) -> float:
        """How many times faster than a rival ours is."""
        return self.times[rival].median / self.times["tile"].median

    @property
    def good(self) -> bool:
        """Whether it ran, reached what is asked, and is as close to float64 as Inductor."""
        if "tile" not in self.times:
            return False
        fast = all(self.ratio(r) >= asked for r, asked in self.asked.items() if r in self.times)
        fast = fast and ("max-autotune" not in self.times or self.ratio("max-autotune") >= 0.95)
        if {"tile", "Inductor"} <= self.peaks.keys():
            fast = fast and self.peaks["Inductor"] - self.peaks["tile"] >= self.spared * 2**30
        theirs = self.errors.get("Inductor")
        return fast and (theirs is None or self.errors["tile"] <= FARTHER * theirs + 1e-7)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains one of these, apart by commas")
    parser.add_argument("--rivals", default="eager,Inductor", help=f"of {', '.join(RIVALS)}")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after so many")
    parser.add_argument("--timing", type=float, default=1.0, help="seconds of timing for each case")
    parser.add_argument("--select", default="fastest", help="our option of that name")
    parser.add_argument("--json", type=Path, help="append results to this file, one line each")
    parser.add_argument("--plot", type=Path, help="draw how many times faster than Inductor everybody is (matplotlib)")
    parser.add_argument("--rows", action="store_true", help="print what was found in each case, and what became of it")
    parser.add_argument("--profile", action="store_true", help="print which kernels the time went to")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(given)
    chosen = [c for c in cases() if any(part in c.name for part in options.only.split(","))]
    if options.list:
        print("\n".join(c.name for c in chosen))
        return 0
    if not torch.cuda.is_available():
        sys.exit("the sizes are those of a GPU, and there is none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}")
    end, lines = time.monotonic() + options.seconds, []
    for case in chosen:
        if time.monotonic() > end:
            print(f"out of time before {case.name}")
            break
        print(f"{case.name:28} ", end="", flush=True)
        line, report = run(case, options)
        print(shown(line), flush=True)
        if options.rows:
            print(report, flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        lines.append(line)
    if options.plot is not None:
        draw(lines, options.plot)
    bad = sum(not line.good for line in lines)
    print(f"{bad} of {len(lines)} short of what is asked")
    return int(bool(bad))


def run(case: ModelCase, options: argparse.Namespace) -> tuple[Line, Report]:
    line, report = Line(case.name, dict(case.asked), spared=case.spared), Report()
    torch.manual_seed(0)
    try:
        made = case.make()
        with torch.set_grad_enabled(case.training), collect() as report:
            truth = first(called(in_float64(made), case.training)()) if case.exact else None
            calls = ready(case, made, truth, line, options)
            line.times = measure(calls, options.timing, "cuda")
            if options.profile:
                print("".join(profile(name, one) for name, one in calls.items()), flush=True)
        line.found = {s: len(report.select(status=s)) for s in sorted({r.status for r in report.rows})}
    except Exception as error:  # the next cases are to be seen too
        line.failed["case"] = said(error)
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return line, report


def ready(
    case: ModelCase, made: Made, truth: torch.Tensor | None, line: Line, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Each rival compiled and run once; those that fail are left out."""
    call = made[0]
    how: dict[str, dict[str, Any]] = {"eager": {}, "Inductor": {"backend": "inductor", "mode": case.mode}}
    how["max-autotune"] = {"backend": "inductor", "mode": "max-autotune" if case.mode else "max-autotune-no-cudagraphs"}
    own = {"mode": case.mode} if case.mode else {"options": {"select": options.select}}
    how = {name: how[name] for name in options.rivals.split(",") if name}
    how["tile"] = {"backend": tile, **own}
    calls: dict[str, Callable[[], Any]] = {}
    for name, keys in how.items():
        one = called((torch.compile(call, dynamic=False, **keys) if keys else call, *made[1:]), case.training, call)
        start = time.perf_counter()
        try:
            out = first(one())
        except Exception as error:
            line.failed[name] = said(error)
            continue
        line.compiled[name] = time.perf_counter() - start
        if truth is not None:
            line.errors[name] = float((out.double() - truth).norm() / truth.norm())
        calls[name] = one
        for _ in range(3):  # CUDA graphs are recorded at the second call
            one()
        line.peaks[name] = peak_of(one)
    return calls


def draw(lines: Sequence[Line], path: Path) -> None:
    """A bar for each case and rival: Inductor's time over its time."""
    from matplotlib import pyplot  # type: ignore[import-not-found]

    found = [line for line in lines if {"tile", "Inductor"} <= line.times.keys()]
    names = [n for n in ("eager", "max-autotune", "tile") if any(n in line.times for line in found)]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(found)))
    for number, name in enumerate(names):
        at = [i + 0.25 * (number - len(names) / 2) for i in range(len(found))]
        speeds = [
            line.times["Inductor"].median / line.times[name].median if name in line.times else 0 for line in found
        ]
        axes.barh(at, speeds, 0.25, label=name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [line.name for line in found])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as Inductor")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def profile(name: str, call: Callable[[], Any]) -> str:
    """The kernels of one call, the longest first, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
    lines = [f"    {e.self_device_time_total:9.1f} us {e.count:4} x {e.key[:110]}" for e in rows]
    return "\n".join([f"\n  {name}", *lines])


def called(made: Made, training: bool, module: Any = None) -> Callable[[], Any]:
    """What is timed: the call or, in training, forward and backward, for the gradient of the first parameter.

    `module` holds the parameters, where what is called was compiled from it. The loss is the result in a direction that
    is random, and the same each time: of squares that a last norm makes equal there is no gradient to compare.
    """
    call, args, kwargs = made
    module = call if module is None else module
    direction: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        out = next(x for x in tree_leaves(call(*args, **kwargs)) if isinstance(x, torch.Tensor))
        if not direction:
            g = torch.Generator(out.device).manual_seed(0)
            direction.append(torch.randn(out.shape, generator=g, device=out.device).bfloat16().to(out.dtype))
        out.backward(direction[0])
        gradient: torch.Tensor = next(iter(module.parameters())).grad
        module.zero_grad(set_to_none=True)
        return gradient

    return step if training else lambda: call(*args, **kwargs)


def first(out: Any) -> torch.Tensor:
    """The first tensor of a result, when it is there."""
    found: torch.Tensor = next(x for x in tree_leaves(out) if isinstance(x, torch.Tensor)).clone()
    torch.cuda.synchronize()
    return found


def shown(line: Line) -> str:
    """The line of the table after its name."""
    parts = [f"{name} {t.median * 1e3:.3f}" for name, t in line.times.items()]
    if "tile" in line.times:
        ratios = [f"x{line.ratio(r):.3f} of {r}" for r in ("Inductor", "max-autotune") if r in line.times]
        asked = " ".join(f"{a:.2f}" for a in line.asked.values())
        parts += [*ratios, f"(asked {asked})", "ok" if line.good else "SHORT"]
    parts.append("compile " + "/".join(f"{s:.1f}" for n, s in line.compiled.items() if n != "eager"))
    peaks = "/".join(f"{p / 2**30:.2f}" for n, p in line.peaks.items() if n != "eager")
    parts.append(f"GiB {peaks}" + (f" (asked {line.spared:g} less)" if line.spared else ""))
    parts.append("error " + "/".join(f"{e:.1e}" for n, e in line.errors.items() if n != "eager"))
    parts.append(str(line.found) if line.found else "nothing found")
    return ", ".join([*parts, *(f"{name} FAILED: {why}" for name, why in line.failed.items())])


if __name__ == "__main__":
    sys.exit(main())
