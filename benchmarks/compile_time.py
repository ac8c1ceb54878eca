# SPDX-License-Identifier: Apache-2.0
"""From Python to machine code: cold, from an empty cache, and in a second process that finds it there.

Each row is the median of `--repeat` fresh processes: what tracing, our passes, the text and NVRTC take, all that comes
after tracing, and the whole; then the same kernel again from the cache, where NVRTC's share is that of finding a cubin.
No GPU is needed, and torch's own import is not counted. With a GPU, loading into it is.
`python benchmarks/compile_time.py [--target cuda:sm_90a] [--only NAME] [--repeat 5]`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

KERNELS = {"gemm": "gemm fp16 2048x2048x2048", "attention": "attention fp16 d128 causal", "mla": "mla fp16 paged"}
STEPS = ("trace", "passes", "text", "nvrtc", "compile", "load", "total")


def measure(case_name: str, target_name: str) -> dict[str, float]:
    """In a fresh process: seconds of each step, for the kernels that a case of the catalogue launches."""
    import time

    import torch

    from benchmarks.library import catalogue, compiled
    from torch_tile import jit, lowering
    from torch_tile.codegen import cuda
    from torch_tile.hardware import Target
    from torch_tile.runtime import nvrtc

    seconds = dict.fromkeys(STEPS, 0.0)

    def timed(module: object, name: str, step: str) -> None:
        original = getattr(module, name)

        def run(*args: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                seconds[step] += time.perf_counter() - start

        setattr(module, name, run)

    timed(lowering, "lower", "passes")
    timed(cuda, "emit_cuda", "text")
    timed(nvrtc, "compile_cubin", "nvrtc")
    timed(jit, "compile_program", "compile")
    timed(jit.JITFunction, "_compile", "total")
    case, target = next(c for c in catalogue() if c.name == case_name), Target.of(target_name)
    kernels = compiled(case, target)
    seconds["trace"] = seconds["total"] - seconds["compile"]
    if torch.cuda.is_available():
        from torch_tile.runtime.driver import driver

        torch.zeros(1, device="cuda")
        start = time.perf_counter()
        for kernel in kernels:
            kernel.launcher.load(driver(), 0)
        seconds["load"] = time.perf_counter() - start
    return seconds | {"total": seconds["total"] + seconds["load"]}


def process(case: str, target: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", case, "--target", target]
    done = subprocess.run(
        command, env=os.environ | {"TORCH_TILE_CACHE_DIR": cache}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, samples: list[dict[str, float]]) -> None:
    figures = [statistics.median(sample[step] for sample in samples) * 1e3 for step in STEPS]
    print(f"{name:24}" + "".join(f"{figure:9.1f}" for figure in figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.target)))
        return
    print(f"{options.target}, milliseconds, median of {options.repeat} processes, {os.cpu_count()} cores")
    print(f"{'':24}" + "".join(f"{step:>9}" for step in STEPS))
    for name, case in KERNELS.items():
        if options.only not in name:
            continue
        cold, again = [], []
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(process(case, options.target, cache))
                again.append(process(case, options.target, cache))
        row(f"{name}, cold", cold)
        row(f"{name}, from the cache", again)


if __name__ == "__main__":
    main()
