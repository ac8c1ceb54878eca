# SPDX-License-Identifier: Apache-2.0
"""How long a model takes from `torch.compile` to its first result, all caches empty, beside Inductor.

`python -m benchmarks.first_result [--only gelu,mla] [--repeat 2] [--seconds S]`: cases of benchmarks/models.py. Each
time is that of a fresh process, which has the imports and an eager call behind it; processes of both take turns.
Contests time kernels, so no two processes run at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

from benchmarks.fresh import in_fresh_process

CASES = "gelu 4096,swiglu 64,mla b64,llama 8x512,einsum attention training,llama training 2x4096"
BACKENDS = ("tile", "inductor")


def first_result(name: str, backend: str) -> None:
    """Print the seconds that the first call takes."""
    import torch

    from benchmarks.model_cases import cases
    from benchmarks.models import called
    from torch_tile.inductor.backend import tile

    case = next(c for c in cases() if c.name == name)
    torch.manual_seed(0)
    made = case.make()
    with torch.set_grad_enabled(case.training):
        called(made, case.training)()
        torch.cuda.synchronize()
        start = time.perf_counter()
        keys = {"mode": case.mode} if case.mode else {}
        compiled = torch.compile(made[0], dynamic=False, backend=tile if backend == "tile" else "inductor", **keys)
        called((compiled, *made[1:]), case.training, made[0])()
        torch.cuda.synchronize()
        print(json.dumps(time.perf_counter() - start))


def run(name: str, backend: str) -> float:
    """`first_result` in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_fresh_process("benchmarks.first_result", "--case", name, "--child", backend, caches=folder)
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=CASES, help="cases whose name contains one of these, apart by commas")
    parser.add_argument("--repeat", type=int, default=1, help="processes of each backend")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no case after so many")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        first_result(options.case, options.child)
        return
    from benchmarks.model_cases import cases

    end = time.monotonic() + options.seconds
    for case in (c for c in cases() if any(part in c.name for part in options.only.split(","))):
        if time.monotonic() > end:
            print(f"out of time before {case.name}")
            break
        found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(options.repeat):
            for backend in BACKENDS[:: 1 - 2 * (number % 2)]:
                found[backend].append(run(case.name, backend))
        ours, theirs = (statistics.median(found[backend]) for backend in BACKENDS)
        print(f"{case.name:28} tile {ours:5.1f} s, Inductor {theirs:5.1f} s: {ours / theirs:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
