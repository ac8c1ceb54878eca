# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the library on a GPU under NVIDIA's compute-sanitizer, on small ragged problems.

`python -m benchmarks.sanitize [--only KERNEL] [--tools memcheck,racecheck] [--at-once N] [--seed S]`
One line for each kernel and tool: what the tool found and how long it took. Fails if any found anything, or any result
was wrong. Each run is a process of its own, in which every tensor is an allocation of its own size, so that accesses
between tensors are seen, and is filled by a copy from the host, so that no kernel but ours runs and initcheck knows all
that was written.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.kernel_problems import KERNELS, Problems

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Racecheck reports warpgroups that meet at one named barrier from two places of the code, also where both wait there
# (bar.sync in place of bar.arrive): it knows no such order. The interpreter of threads does.
BLIND = {"flash_mla_hopper": ("racecheck",)}
COUNTS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
LIMIT = 200  # seconds for one run
INSTALLED = "/usr/local/cuda/bin/compute-sanitizer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--at-once", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--run", help="only run this kernel's problems, here and without a tool")
    options = parser.parse_args()
    if options.run:
        run(options.run, options.seed)
        return
    sanitizer = shutil.which("compute-sanitizer") or INSTALLED
    if not Path(sanitizer).exists():
        sys.exit("compute-sanitizer was not found; it comes with the CUDA toolkit")
    names = [name for name in KERNELS if options.only in name]
    jobs = [(n, tool) for tool in options.tools.split(",") for n in names if tool not in BLIND.get(n, ())]
    print(f"seed {options.seed}: {len(names)} kernels, {len(jobs)} runs, {options.at_once} at once", flush=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        # Without a tool first: the kernels are compiled for all others, and wrong results are told apart.
        plain = list(pool.map(lambda name: sanitized(name, None, options.seed, ""), names))
        found = list(pool.map(lambda job: sanitized(*job, options.seed, sanitizer), jobs))
    if any((*plain, *found)):
        sys.exit(1)


def sanitized(name: str, tool: str | None, seed: int, sanitizer: str) -> int:
    """Run a kernel's problems under a tool (None: under none), print what was found, return how many mistakes."""
    command = [sys.executable, "-m", "benchmarks.sanitize", "--run", name, "--seed", str(seed)]
    if tool is not None:
        # The tools do not see what bulk stores write: a result so stored, copied to the host, would count as read
        # before it was written. That all of a result is written, its comparison shows; kernels' own reads stay checked.
        api = ["--check-api-memory-access", "no"] if tool == "initcheck" else []
        command = [sanitizer, "--tool", tool, *api, "--report-api-errors", "no", "--print-limit", "20", *command]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
        text, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired as late:
        parts = (late.stdout, late.stderr)
        text = "".join(x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in parts)
        text, failed = f"{text}\nstopped after {LIMIT} s", True
    counts = [int(first or second) for first, second in COUNTS.findall(text)]
    missing = tool is not None and not counts
    mistakes = sum(counts) or int(failed or missing)
    what = "no summary" if missing else "failed" if failed and not sum(counts) else f"{sum(counts)} errors"
    print(f"{name:24} {tool or 'result':10} {what:12} {time.perf_counter() - start:5.1f} s", flush=True)
    if mistakes:
        print("\n".join(f"    {line}" for line in text.splitlines()[-60:]), flush=True)
    return mistakes


def run(name: str, seed: int) -> None:
    """A kernel's problems; exits with an error if a result is wrong or the kernel did not run."""
    import torch

    from torch_tile.jit import JITFunction

    ran, compile = set(), JITFunction.compile

    def noted(self, *args, **kwargs):
        ran.add(self.__name__)
        return compile(self, *args, **kwargs)

    JITFunction.compile = noted
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        problems = Problems(seed)
        for number in range(3):
            got, want = KERNELS[name](problems, dtype, number)
            torch.cuda.synchronize()
            for x, y in zip(got, want, strict=True):
                if not y.numel():
                    continue
                x, seen = x.cpu().double(), y.isfinite()
                error = float((x - y)[seen].abs().max() / y[seen].square().mean().sqrt().clamp(min=0.1))
                assert torch.equal(x.isfinite(), seen) and error < 0.15, f"{name} {dtype} {number}: error {error:.1e}"
    assert name in ran, f"{name} did not run, but {sorted(ran)}"


if __name__ == "__main__":
    main()
