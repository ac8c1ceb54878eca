# SPDX-License-Identifier: Apache-2.0
"""One timer for all benchmarks: rivals take turns, each from a cold L2 cache, and the machine's ceilings are measured
in the same run.

Turns, because clocks follow the power that the chip draws: a slow moment meets all rivals, and who goes first changes
from round to round. What is timed on a GPU is its own time, between two events.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[], object]

FLUSHED = 256 * 2**20  # bytes written before each sample; the largest L2 cache of today holds half of that
BURST = 5  # rounds between two waits for the GPU
LEAD = 8  # flushes at the start of a burst, at least: while the GPU is at them, the host gets ahead of it
FLUSH_SECONDS = 50e-6  # that a flush takes at least
FEWEST, MOST = 5, 200  # rounds


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the 20th and 80th percentile of `count` samples."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        last = len(ordered) - 1
        low, high = (ordered[round(part * last)] for part in (0.2, 0.8))
        return cls(statistics.median(ordered), low, high, len(ordered))

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def measure(calls: Mapping[str, Call], seconds: float, device: str) -> dict[str, Timing]:
    """Time each call for about `seconds` in all; they must have been made once before, so that all is compiled."""
    samples = (by_events if device == "cuda" else by_clock)(calls, seconds)
    return {name: Timing.of(times) for name, times in samples.items()}


def peak_of(call: Call) -> int:
    """Return the most bytes of the GPU that one call holds, its results included, above those held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rounds_for(seconds: float, round_seconds: float) -> int:
    return max(FEWEST, min(MOST, int(seconds / max(round_seconds, 1e-9))))


def turns(names: Sequence[str], number: int) -> Sequence[str]:
    """The order of a round: each is first in its turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def by_clock(calls: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Samples of each call, in seconds, on the CPU: with one thread its own time, in which nobody else's work is."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = time.perf_counter()
    for call in calls.values():
        call()
    for number in range(rounds_for(seconds, time.perf_counter() - start)):
        for name in turns(list(calls), number):
            start = clock()
            calls[name]()
            samples[name].append(clock() - start)
    return samples


def by_events(calls: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Samples of each call, in seconds, on the current stream of the GPU."""
    cache = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")

    def one_round(number: int) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        for name in turns(list(calls), number):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            start.record()
            calls[name]()
            stop.record()
            events[name] = (start, stop)
        return events

    one_round(0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    one_round(1)
    lead = max(LEAD, math.ceil(1.5 * BURST * (time.perf_counter() - begin) / FLUSH_SECONDS))
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rounds = rounds_for(seconds, time.perf_counter() - begin)
    for first in range(0, rounds, BURST):
        for _ in range(lead):
            cache.zero_()
        made = [one_round(number) for number in range(first, min(first + BURST, rounds))]
        torch.cuda.synchronize()
        for events in made:
            for name, (start, stop) in events.items():
                samples[name].append(start.elapsed_time(stop) / 1e3)
    return samples


@dataclass(frozen=True)
class Ceilings:
    """The most that the machine did in this run: bytes/s copied (read plus written) and read, flop/s of torch.mm on
    N(0, 1) data by dtype.
    """

    copy: float
    read: float
    products: dict[str, float]

    def seconds(self, flops: float, moved: float, dtype: str, traffic: str) -> tuple[float, str]:
        """The least time for so many operations and bytes, and which of the two it takes: "flops" or "bytes"."""
        by_flops = flops / self.products.get(dtype, max(self.products.values()))
        by_bytes = moved / (self.read if traffic == "read" else self.copy)
        return (by_flops, "flops") if by_flops >= by_bytes else (by_bytes, "bytes")


def measure_ceilings(device: str, dtypes: Sequence[torch.dtype], seconds: float) -> Ceilings:
    """The machine's ceilings, by torch's own copy, sum and product; a copy reads too, and bounds reading from below."""
    n, size = (2**28, 8192) if device == "cuda" else (2**22, 512)
    x = torch.randn(n, device=device)
    y = torch.empty_like(x)
    timed = measure({"copy": partial(y.copy_, x), "read": x.sum}, seconds / 2, device)
    del x, y
    copy, read = 2.0 * 4 * n / timed["copy"].low, 4.0 * n / timed["read"].low
    pairs = {dtype: [torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)] for dtype in dtypes}
    timed = measure({name_of(d): partial(torch.mm, *pair) for d, pair in pairs.items()}, seconds / 2, device)
    return Ceilings(copy, max(read, copy), {name: 2.0 * size**3 / t.low for name, t in timed.items()})


def name_of(dtype: torch.dtype) -> str:
    """fp16, bf16, fp32 or fp64."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def arguments(description: str | None) -> argparse.Namespace:
    """What small benchmarks take from their command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each line")
    parser.add_argument("--only", default="", help="run the problems whose name contains this")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    return options
