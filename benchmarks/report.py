# SPDX-License-Identifier: Apache-2.0
"""Tables and a roofline of results: `python -m benchmarks.report FILE... [--markdown FILE] [--plot FILE.svg]`.

Reads the files that `--json` wrote. Where a problem was run more than once on a device the last result counts. The plot
needs matplotlib (`pip install torch_tile[bench]`) and is left out without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.problem import Result
from benchmarks.runner import ceilings_of, summary

Run = tuple[dict[str, Any], list[Result]]


def read(paths: Sequence[Path]) -> list[Run]:
    """For each device and version of torch the header of the last run, and its results by problem."""
    heads: dict[tuple[str, str], dict[str, Any]] = {}
    found: dict[tuple[str, str], dict[str, Result]] = {}
    for path in paths:
        key = None
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # a run that was killed while it wrote
                print(f"{path}:{number}: not a whole line, left out", file=sys.stderr)
                continue
            if "run" in line:
                key = (line["device"], line["torch"])
                heads[key] = line
            elif key is None:
                raise ValueError(f"{path}:{number}: a result before any header")
            else:
                found.setdefault(key, {})[line["name"]] = Result.of_line(line)
    return [(heads[key], list(results.values())) for key, results in found.items()]


def markdown(runs: Sequence[Run]) -> Iterator[str]:
    """A table for each family of each run, its lines one by one."""
    for head, results in runs:
        yield f"## {head['device']}, torch {head['torch']}, {head['run']}\n"
        yield f"`{head['command']}`: {ceilings_of(head)}. A ratio is how many times faster we are.\n"
        for family in dict.fromkeys(r.family for r in results):
            own = [r for r in results if r.family == family]
            yield from table(own)
            yield ""
            yield from (f"- {line}" for line in summary(own))
            yield ""


def table(results: Sequence[Result]) -> Iterator[str]:
    rivals = list(dict.fromkeys(name for r in results for name in r.times if name != "tile"))
    titles = ["problem", "µs", "±", "rate", "of ceiling", "asked", "reached"]
    titles += [f"{name} µs · ratio" for name in rivals]
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for r in results:
        if r.status != "ok":
            yield f"| {r.name} | {r.status}: {r.message} |" + " |" * (len(titles) - 2)
            continue
        ours, (rate, unit), goal = r.times["tile"], r.rate(), r.goal()
        cells = [r.name, f"{ours.median * 1e6:.1f}", f"{ours.spread:.0%}", f"{rate:.4g} {unit}", f"{r.share:.0%}"]
        cells += [f"{goal[1]:.2f} × {goal[0]}", f"{goal[2]:.3f}"] if goal else ["", ""]
        for name in rivals:
            timed = name in r.times
            cells.append(f"{r.times[name].median * 1e6:.1f} · {r.ratio(name):.3f}" if timed else "")
        yield "| " + " | ".join(cells) + " |"


def plot(run: Run, path: Path) -> bool:
    """The roofline of a run: operations per byte against operations per second; False without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    head, results = run
    right = [r for r in results if r.status == "ok" and r.flops]
    intensity = {r.name: r.flops / r.bytes for r in right}
    figure, axes = plt.subplots(figsize=(9, 6))
    ends = [min(intensity.values()) / 2, max(intensity.values()) * 2]
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 200) for i in range(201)]
    for number, (name, rate) in enumerate(head["ceilings"]["products"].items()):
        roof = [min(rate, x * head["ceilings"]["read"]) / 1e12 for x in steps]
        style = ("-", "--", ":", "-.")[number % 4]
        axes.plot(steps, roof, style, color="black", linewidth=1, label=f"read, torch.mm {name}")
    for number, family in enumerate(dict.fromkeys(r.family for r in right)):
        own = [r for r in right if r.family == family]
        colour = f"C{number}"
        fastest = {r.name: min((t.median for n, t in r.times.items() if n not in ("tile", "copy")), default=None)
                   for r in own}  # fmt: skip
        for r in own:
            best = fastest[r.name]
            if best:
                axes.scatter(intensity[r.name], r.flops / best / 1e12, s=24, facecolors="none", edgecolors=colour)
        ours = [r.flops / r.times["tile"].median / 1e12 for r in own]
        axes.scatter([intensity[r.name] for r in own], ours, s=18, color=colour, label=family)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.set_title(f"{head['device']}: ours filled, the fastest rival hollow", fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables here instead of printing them")
    parser.add_argument("--plot", type=Path, help="write the roofline here; numbered after the first run")
    options = parser.parse_args(given)
    runs = read(options.files)
    if not runs:
        print("no results", file=sys.stderr)
        return 1
    text = "\n".join(markdown(runs)) + "\n"
    if options.markdown:
        options.markdown.write_text(text)
    else:
        print(text)
    for number, run in enumerate(runs if options.plot else []):
        path = options.plot.with_stem(f"{options.plot.stem}_{number}") if number else options.plot
        if not plot(run, path):
            print("no roofline: matplotlib is not installed", file=sys.stderr)
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
