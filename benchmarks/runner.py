# SPDX-License-Identifier: Apache-2.0
"""Runs problems and prints a line for each as it is done; what fails is printed, not raised.

Every module of a family calls `main`, and `python -m benchmarks` calls it with all of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.problem import Case, Problem, Result, poisoned, tolerance_of, wrong
from benchmarks.timer import Call, Ceilings, measure, measure_ceilings, name_of, peak_of

FAMILIES = (
    "gemm",
    "grouped",
    "dequant",
    "scaled_gemm",
    "attention",
    "attention_backward",
    "serving",
    "mla",
    "norm",
    "loss",
    "routing",
    "scan",
)
# Rivals that take long to make ready run only where --rivals names them.
ON_REQUEST = {"cuda": {"Triton"}, "cpu": {"Triton", "Inductor", "flex"}}
RIVALS_SLACK = 8  # how many times our tolerance a rival has: some sum in 16 bits
LIMIT = 120.0  # seconds for one problem, compilers included
MOST_SECONDS = 0.6  # spent on timing one problem


def arguments(families: Sequence[str], description: str | None, given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if len(families) > 1:
        parser.add_argument("families", nargs="*", default=list(families), help=f"of {', '.join(families)}")
    else:
        parser.set_defaults(families=list(families))
    parser.add_argument("--only", default="", help="problems whose name contains one of these, apart by commas")
    parser.add_argument("--rivals", help="time only these, apart by commas; `none` for none")
    parser.add_argument("--quick", action="store_true", help="a few problems of each family")
    parser.add_argument("--seconds", type=float, help="time for all problems together, making them ready included")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--json", type=Path, help="append results to this file, one line each")
    options = parser.parse_args(given)
    if unknown := set(options.families) - set(families):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(families)}")
    if options.seconds is None:
        options.seconds = 50.0 if options.quick else 240.0
    return options


def main(families: Sequence[str], description: str | None, given: Sequence[str] | None = None) -> int:
    """Run the problems of families; 1 if any of ours was wrong or failed, or none was run."""
    options = arguments(families, description, given)
    end = time.monotonic() + options.seconds
    found = [(f, p) for f in options.families for p in problems_of(f, options.device) if chosen(p, options)]
    if not found:
        print("no such problem")
        return 1
    file = options.json.open("a") if options.json else None
    torch.manual_seed(options.seed)
    dtypes = list(dict.fromkeys(p.dtype for _, p in found))
    ceilings = measure_ceilings(options.device, dtypes, 1.0 if options.device == "cuda" else 0.1)
    head = header(options, ceilings)
    print(describe(head), flush=True)
    write(file, head)
    results: list[Result] = []
    for family, problem in found:
        remaining = end - time.monotonic()
        if remaining <= 0:
            print(f"out of time: {len(found) - len(results)} of {len(found)} problems left")
            break
        seconds = min(MOST_SECONDS, 0.5 * remaining / (len(found) - len(results)))
        print(f"{problem.name:42} ", end="", flush=True)  # now, so that it is seen who hangs
        results.append(run(family, problem, options, ceilings, seconds))
        print(format_result(results[-1]), flush=True)
        write(file, results[-1].line())
        if options.device == "cuda" and not recovered():
            print("the GPU no longer answers: stopped")
            break
    print("\n".join(summary(results)))
    return int(any(r.status != "ok" for r in results))


def recovered() -> bool:
    """Free what a problem held; False if a kernel has left the GPU's context unusable."""
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(said(error))
        return False
    return True


def problems_of(family: str, device: str) -> list[Problem]:
    return list(importlib.import_module(f"benchmarks.{family}").problems(device))


def chosen(problem: Problem, options: argparse.Namespace) -> bool:
    return any(part in problem.name for part in options.only.split(",")) and (problem.quick or not options.quick)


def run(family: str, problem: Problem, options: argparse.Namespace, ceilings: Ceilings, seconds: float) -> Result:
    """Check ours, make the rivals ready and check them, and time all that is right."""
    result = Result(
        family, problem.name, problem.group, name_of(problem.dtype), problem.flops, problem.bytes,
        asked=dict(problem.asked), memory=problem.memory,
    )  # fmt: skip
    result.best, result.bound = ceilings.seconds(problem.flops, problem.bytes, result.dtype, problem.traffic)
    if options.device == "cuda":  # a kernel that waits forever ends the process, not the loan of the machine
        faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        case = problem.make()
        want = case.expected()
        with poisoned():  # but not the rivals: what is compiled by torch would be compiled again without it
            result.error, result.message = wrong(case, case.ours, want, case.leeway * tolerance_of(problem.dtype))
        if not result.message:  # what is timed may be another kernel: one whose sums come in any order
            result.error, result.message = wrong(case, case.ours, want, case.leeway * tolerance_of(problem.dtype))
        if result.message:
            result.status = "WRONG"
            return result
        calls = {"tile": case.ours, **case.yardsticks}
        calls.update(ready(case, want, problem.dtype, options, result.failed))
        result.times = measure(calls, seconds, options.device)
        if problem.memory is not None and options.device == "cuda":
            result.peaks = {name: peak_of(call) for name, call in calls.items()}
    except Exception as error:  # the next problems are to be seen too
        result.status, result.message = "FAILED", said(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return result


def ready(
    case: Case, want: torch.Tensor, dtype: torch.dtype, options: argparse.Namespace, failed: dict[str, str]
) -> Iterator[tuple[str, Call]]:
    """The rivals that are installed, work and are right; `failed` gets the others, but for those not installed."""
    for name, prepare in case.rivals.items():
        wanted = name not in ON_REQUEST[options.device] if options.rivals is None else name in options.rivals.split(",")
        if not wanted:
            continue
        try:
            with warnings.catch_warnings():  # torch says at length which of its kernels it does not take
                warnings.simplefilter("ignore")
                call = prepare()
                message = wrong(case, call, want, case.leeway * RIVALS_SLACK * tolerance_of(dtype))[1]
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a rival that cannot do this problem is no reason to stop
            message = said(error)
        if message:
            failed[name] = message
        else:
            yield name, call


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def header(options: argparse.Namespace, ceilings: Ceilings) -> dict[str, Any]:
    """What the run was: the first line of its results."""
    gpu = options.device == "cuda"
    return {
        "run": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "seed": options.seed,
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
    }


def ceilings_of(head: dict[str, Any]) -> str:
    limits = head["ceilings"]
    products = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in limits["products"].items())
    return f"copy {limits['copy'] / 1e12:.3g}, read {limits['read'] / 1e12:.3g} TB/s; torch.mm {products} TFLOP/s"


def describe(head: dict[str, Any]) -> str:
    titles = (
        f"{'problem':42} {'us':>9} {'+-':>4} {'rate':>14} {'ceiling':>7} {'asked':>6} {'is':>6} {'against':11} "
        f"{'error':7} rivals in us"
    )
    return f"{head['device']}, torch {head['torch']}, {head['run']}, seed {head['seed']}; {ceilings_of(head)}\n{titles}"


def format_result(result: Result) -> str:
    """A line of the table after the name: time, spread, rate, share of the ceiling, ratio asked and reached, rivals."""
    if result.status != "ok":
        return f"{result.status}: {result.message}"
    ours, (rate, unit), goal = result.times["tile"], result.rate(), result.goal()
    asked = f"{goal[1]:6.2f} {goal[2]:6.3f} {goal[0]:11}" if goal else f"{'':6} {'':6} {'':11}"
    rivals = [f"{name} {t.median * 1e6:.1f}" for name, t in result.times.items() if name != "tile"]
    rivals += [f"({name}: {message[:60]})" for name, message in result.failed.items()]
    line = (
        f"{ours.median * 1e6:9.1f} {ours.spread:4.0%} {rate:6.4g} {unit:7} {result.share:7.1%} {asked} "
        f"{result.error:.1e} {', '.join(rivals)}"
    )
    return f"{line}; {memory_of(result)}" if result.peaks else line


def memory_of(result: Result) -> str:
    """Say how much memory each call held at most above its inputs, and how much is asked."""
    peaks = ", ".join(f"{name} {peak / 2**30:.2f}" for name, peak in result.peaks.items())
    return f"GiB above inputs: {peaks}; asked {(result.memory or 0) / 2**30:.2f}"


def summary(results: Sequence[Result]) -> Iterator[str]:
    """For each group and rival the geometric mean of the ratios, and the smallest."""
    for group in dict.fromkeys(r.group for r in results):
        ok = [r for r in results if r.group == group and r.status == "ok"]
        bad = sum(r.group == group for r in results) - len(ok)
        parts = [f"{bad} WRONG or FAILED"] if bad else []
        for rival in dict.fromkeys(name for r in ok for name in r.times if name != "tile"):
            ratios = [r.ratio(rival) for r in ok if rival in r.times]
            parts.append(f"{rival} {statistics.geometric_mean(ratios):.3f} (least {min(ratios):.3f}, {len(ratios)})")
        if ok:
            parts.append(f"of ceiling {statistics.geometric_mean([r.share for r in ok]):.1%}")
        yield f"geomean {group}: " + ", ".join(parts)


def write(file: IO[str] | None, line: dict[str, Any]) -> None:
    if file is not None:
        file.write(json.dumps(line) + "\n")
        file.flush()
