# SPDX-License-Identifier: Apache-2.0
"""What a last turn of tiles that leaves multiprocessors idle costs a product, and at which clock products run.

`python benchmarks/waves.py [--seconds S]`: products of growing height, by us and by cuBLAS, each repeated for S seconds
while nvidia-smi is asked for the clock and the power. Where power sets the clock, idle multiprocessors let the others
run faster, and what sharing out the last turn (stream-K) could gain is less than the turn's share.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

import torch_tile.ops  # noqa: F401

BF16 = torch.bfloat16
FIELDS = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"
HEIGHTS = (4096, 4224, 4352, 4480, 4608, 4736)  # by columns and K of 8192
OTHERS = ((4096, 1024, 8192), (8192, 1024, 8192), (8192, 8192, 8192))
TILE = 128, 256
EVERY, SETTLING = 100, 3  # milliseconds between two samples; samples until the clock has settled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    units = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for m, n, k in (*((height, 8192, 8192) for height in HEIGHTS), *OTHERS):
        a, b = (torch.randn(rows, k, device="cuda", dtype=BF16) for rows in (m, n))
        turns = -(-m // TILE[0]) * -(-n // TILE[1]) / units
        for name, run in {
            "cuBLAS": lambda a=a, b=b: torch.mm(a, b.T),
            "tile": lambda a=a, b=b: torch.ops.tile.gemm(a, [b.T], [], "", "", BF16),
        }.items():
            micros, clock, power, capped = sampled(run, options.seconds)
            rate = 2e-6 * m * n * k / micros
            print(
                f"{m}x{n}x{k} {turns:5.2f} turns {name:6} {micros:8.1f} us {rate:4.0f} TFLOP/s, {clock:.0f} MHz, "
                f"{power:.0f} W, power caps the clock in {capped:.0%} of the samples",
                flush=True,
            )


def sampled(run: Callable[[], object], seconds: float) -> tuple[float, float, float, float]:
    """Microseconds of a call that is repeated, and meanwhile the clock, the power, and how often power capped it."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "-lms", str(EVERY)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        start = time.perf_counter()
        begin.record()
        for count in itertools.count(1):
            run()
            if count % 10 == 0:
                torch.cuda.synchronize()
                if time.perf_counter() - start > seconds:
                    break
        end.record()
        torch.cuda.synchronize()
        sampler.terminate()
        lines = (sampler.stdout.read() if sampler.stdout else "").splitlines()
    samples = [line.split(", ") for line in lines][SETTLING:]
    clock, power = (statistics.median(float(sample[field]) for sample in samples) for field in (0, 1))
    capped = sum(sample[2] == "Active" for sample in samples) / len(samples)
    return begin.elapsed_time(end) / count * 1e3, clock, power, capped


if __name__ == "__main__":
    main()
