# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile demo`: two small transformers through `backend="tile"`, with errors and times."""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_tile.inductor import compat
from torch_tile.inductor.report.rows import Report, collect
from torch_tile.tools.models import SAMPLES, VOCABULARY, Sample

Tensor = torch.Tensor
BATCH, LENGTH = 1, 128
SECONDS = 2.0  # of timing for each model
TOLERANCE = 1e-4  # relative, in float32


def demo(length: int = LENGTH) -> int:
    """Compile each sample model; print what was replaced, errors and times. Returns 1 if an error is too large."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # we do that, to see every pass run
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, batch {BATCH}, {length} tokens")
    with torch.no_grad():
        good = [show_compiled(make(), length) for make in SAMPLES.values()]
        good.append(show_latent_decoding(length))
    print("\nevery result agrees with float64" if all(good) else "\nsome result is wrong: see above")
    return 0 if all(good) else 1


def show_compiled(sample: Sample, length: int) -> bool:
    """One model compiled with every subgraph that fits replaced; whether the logits are right."""
    print(f"\n{sample.name} ({sample.source}, random weights)")
    ids = torch.randint(0, VOCABULARY, (BATCH, length))
    with progress("computing it in float64 and in float32"):
        exact = sample.run(copy.deepcopy(sample.model).double(), ids)
        eager = sample.run(sample.model, ids)
    with progress('compiling it with backend="tile"'), compat.no_caches(), collect() as report:
        compiled = torch.compile(sample.model, backend="tile", options={"select": "tile"})
        ours = sample.run(compiled, ids)
    print(summary(report))
    errors = {"eager": error(eager, exact), "tile": error(ours, exact)}
    print("  error against float64:   " + "   ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    with progress("timing"):
        times = medians(
            {"eager": lambda: sample.run(sample.model, ids), "tile": lambda: sample.run(compiled, ids)}, seconds=SECONDS
        )
    print("  time of a forward pass:  " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    torch._dynamo.reset()
    return errors["tile"] <= max(TOLERANCE, 1.5 * errors["eager"])


def show_latent_decoding(length: int) -> bool:
    """A decoding step of one latent attention layer of DeepSeek-V3's sizes, 16 heads; whether it is right."""
    from torch_tile.nn import MLAAttention

    print(f"\ntorch_tile.nn.MLAAttention (DeepSeek-V3's sizes, 16 heads): one new token over {16 * length} cached ones")
    layer = MLAAttention(512, 16, q_lora_rank=None).eval()
    x, kv, k_pe = torch.randn(1, 1, 512), torch.randn(1, 1, 16 * length, 512), torch.randn(1, 1, 16 * length, 64)
    angle = torch.rand(1, 1, 32).repeat(1, 1, 2)

    def run(layer: Any, absorb: bool, dtype: torch.dtype) -> Tensor:
        cache = FixedCache(kv.to(dtype), k_pe.to(dtype))
        rope = (angle.cos().to(dtype), angle.sin().to(dtype))
        mask = None if absorb else torch.ones(1, 1, 1, 16 * length + 1, dtype=torch.bool)
        out: Tensor = layer(x.to(dtype), rope, mask, cache)[0]
        return out

    with progress("computing it with expanded keys in float64, and with absorbed weights"):
        exact = run(copy.deepcopy(layer).double(), False, torch.float64)
        ours = run(layer, True, torch.float32)
    wrong = error(ours, exact)
    print(f"  error against float64:   absorbed {wrong:.1e}")
    with progress("timing"):
        times = medians(
            {
                "expanded": lambda: run(layer, False, torch.float32),
                "absorbed": lambda: run(layer, True, torch.float32),
            },
            seconds=SECONDS,
        )
    print("  time of a step:          " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    return wrong <= TOLERANCE


class FixedCache:
    """A cache that gives the same positions to every step, and forgets the step."""

    def __init__(self, kv: Tensor, k_pe: Tensor) -> None:
        self.kept = (kv, k_pe)

    def update(self, kv: Tensor, k_pe: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The cached positions and the new ones, `[B, 1, S + 1, C]` and `[B, 1, S + 1, R]`."""
        return torch.cat([self.kept[0], kv], dim=2), torch.cat([self.kept[1], k_pe], dim=2)


def summary(report: Report) -> str:
    """The replaced subgraphs by kind, and every one that was not replaced with its reason."""
    counts = Counter((row.family, row.what) for row in report.replaced())
    lines = [f"  {family:<10} {what}{f'  (x{n})' if n > 1 else ''}" for (family, what), n in counts.items()]
    lines += [f"  {row.family:<10} not replaced: {row.what} {row.where}: {row.reason}" for row in report.missed()]
    return "\n".join(
        [f"  {sum(counts.values())} subgraphs became tile kernels, {len(report.missed())} did not:", *lines]
    )


def error(value: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((value.double() - exact).abs().max() / exact.abs().max()).item()


def medians(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each, in seconds, taken in turns so that a busy machine is unfair to none."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what takes time: with a running clock on a terminal, with one line and its time elsewhere."""
    start, done, live = time.perf_counter(), threading.Event(), sys.stdout.isatty()

    def tick() -> None:
        while not done.wait(0.2):
            print(f"\r  {what} ... {time.perf_counter() - start:.0f} s", end="", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    if live:
        clock.start()
    try:
        yield
    finally:
        done.set()
        if live:
            clock.join()
        seconds = time.perf_counter() - start
        print(f"{chr(13) if live else ''}  {what}: {seconds:.1f} s", flush=True)
