# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile demo`: a small transformer by eager torch, Inductor and `backend="tile"`, by turns."""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torch_tile.inductor import compat
from torch_tile.inductor.report.rows import KEPT, Report, collect
from torch_tile.tools.models import SAMPLES, VOCABULARY, Sample

Tensor = torch.Tensor
BATCH, LENGTH = 1, 128
SECONDS = 2.0  # of timing for each model
TOLERANCE = 1e-4  # relative, in float32


def demo(length: int = LENGTH, select: str = "fastest", every: bool = False) -> int:
    """Compile a sample model, or `every` one and a layer of latent attention; print replacements, errors and times.

    `select` is the backend's option. Returns 1 if an error is too large.
    """
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, batch {BATCH}, {length} tokens")
    makers = list(SAMPLES.values())
    with torch.no_grad():
        good = [show_compiled(make(), length, select) for make in (makers if every else makers[:1])]
        if every:
            good.append(show_latent_decoding(length))
    print("\nevery result agrees with float64" if all(good) else "\nsome result is wrong: see above")
    if not every:
        print(
            "--all shows a DeepSeek-V3 and latent decoding as well; --select tile replaces whatever fits, faster or not"
        )
    return 0 if all(good) else 1


def show_compiled(sample: Sample, length: int, select: str = "fastest") -> bool:
    """Run one model by eager torch, by Inductor and by our backend; print times, and whether our logits are right."""
    print(f"\n{sample.name} ({sample.source}, random weights)")
    ids = torch.randint(0, VOCABULARY, (BATCH, length))
    with progress("computing it in float64 and in float32"):
        exact = sample.run(copy.deepcopy(sample.model).double(), ids)
        sample.run(sample.model, ids)
    with progress("compiling it with Inductor"), compat.no_caches():
        inductor = torch.compile(sample.model)
        sample.run(inductor, ids)
    with progress('compiling it with backend="tile"'), compat.no_caches(), collect() as report:
        compiled = torch.compile(sample.model, backend="tile", options={"select": select})
        sample.run(compiled, ids)
    print(summary(report))
    models = {"eager": sample.model, "Inductor": inductor, "tile": compiled}
    errors = {name: error(sample.run(model, ids), exact) for name, model in models.items()}
    print("  error against float64:   " + "   ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    with progress("timing"):
        times = medians({name: partial(sample.run, model, ids) for name, model in models.items()}, seconds=SECONDS)
    print("  time of a forward pass:  " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    print(f"  tile is {times['eager'] / times['tile']:.2f}x eager, {times['Inductor'] / times['tile']:.2f}x Inductor")
    torch._dynamo.reset()
    return errors["tile"] <= max(TOLERANCE, 1.5 * errors["eager"])


def show_latent_decoding(length: int) -> bool:
    """Run a decoding step of one latent attention layer of DeepSeek-V3's sizes, 16 heads; print times and the error."""
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
    """A KV cache that gives the same positions to every step, and forgets the step."""

    def __init__(self, kv: Tensor, k_pe: Tensor) -> None:
        self.kept: tuple[Tensor, Tensor] = (kv, k_pe)

    def update(self, kv: Tensor, k_pe: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The cached positions and the new ones, `[B, 1, S + 1, C]` and `[B, 1, S + 1, R]`."""
        return torch.cat([self.kept[0], kv], dim=2), torch.cat([self.kept[1], k_pe], dim=2)


def summary(report: Report) -> str:
    """Format the verdict, the replaced subgraphs by kind, how many Inductor does faster, and each miss."""
    counts = Counter((row.family, row.what) for row in report.replaced())
    kept = len(report.select(status=KEPT))
    became = sum(counts.values())
    lines = [f"  {report.verdict()}"]
    lines += [f"  {became} subgraph{'s became tile kernels' if became > 1 else ' became a tile kernel'}:"] * bool(
        became
    )
    lines += [f"  {family:<10} {what}{f'  (x{n})' if n > 1 else ''}" for (family, what), n in counts.items()]
    lines += [f"  {kept} stay Inductor's, which is as fast or faster there"] * bool(kept)
    lines += [f"  {row.family:<10} not replaced: {row.what} {row.where}: {row.reason}" for row in report.missed()]
    return "\n".join(lines)


def error(value: Tensor, exact: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return ((value.double() - exact).abs().max() / exact.abs().max()).item()


def medians(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Time each function; return the median seconds, taken in turns so that a busy machine is unfair to none."""
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
def progress(what: str, quiet: bool = False) -> Iterator[None]:
    """Show progress of a slow step: a running clock on a terminal, else one line with its time.

    With `quiet` the line goes again from a terminal, and is not written elsewhere.
    """
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
        said = "" if quiet else f"  {what}: {seconds:.1f} s\n"
        print(f"{chr(13) + chr(27) + '[K' if live else ''}{said}", end="", flush=True)
