# SPDX-License-Identifier: Apache-2.0
"""One timer for all benchmarks: rivals take turns, so that a slow moment of the machine meets all of them.

Prints the median time of each rival, its spread (half the distance between the quartiles), its rate, and its speed
relative to the first rival. OMP_NUM_THREADS says how many cores take part.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch


def interleaved(rivals: dict[str, Callable[[], object]], seconds: float = 1.0) -> dict[str, list[float]]:
    """Times of single calls, in seconds, after one call of each to warm up; about `seconds` in all."""
    for call in rivals.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in rivals}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def report(
    what: str, rivals: dict[str, Callable[[], object]], work: float, unit: str = "GFLOP/s", seconds: float = 1.0
) -> None:
    """Time the rivals, of which the first is the yardstick, and print a line for each. `work`: flop, or bytes."""
    times = interleaved(rivals, seconds)
    yardstick = statistics.median(next(iter(times.values())))
    for name, samples in times.items():
        median = statistics.median(samples)
        first, _, third = statistics.quantiles(samples, n=4)
        print(
            f"{what:40} {name:14} {median * 1e6:11.1f} us +-{(third - first) / 2 / median:4.0%} "
            f"{work / median / 1e9:9.1f} {unit}  {yardstick / median:6.2f}x",
            flush=True,
        )


def arguments(description: str) -> argparse.Namespace:
    """What every benchmark takes from its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each line")
    parser.add_argument("--only", default="", help="run the problems whose name contains this")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    return options
