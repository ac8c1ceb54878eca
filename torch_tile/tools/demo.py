# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile demo`: a transformer by eager torch, Inductor and `backend="tile"`, by turns.

It is a small one on a CPU; on a GPU it has layers of Llama 3 8B's size and long inputs.
"""

from __future__ import annotations

import copy
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from torch_tile.diagnostics.progress import clock_line, only_clock
from torch_tile.inductor import compat
from torch_tile.inductor.report.rows import KEPT, Report, collect
from torch_tile.kernels.epilogue.program import in_words
from torch_tile.tools.models import LLAMA_8B, SMALL, Sample, Sizes, deepseek, plain_llama

Tensor = torch.Tensor
BATCH = 1
SECONDS = 2.0  # of timing for each model
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative to the largest value
ROOM = 24 << 30  # bytes of a GPU for all layers of LLAMA_8B and their copies in float64; a smaller one gets one layer


@dataclass(frozen=True)
class Machine:
    """Where the demo runs, in which dtype, and how large a model and an input this machine is given."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    length: int

    def __str__(self) -> str:
        gpu = self.device.type == "cuda"
        where = torch.cuda.get_device_name(self.device) if gpu else f"{torch.get_num_threads()} threads"
        return f"{where}, {str(self.dtype).rpartition('.')[2]}"

    def make(self, maker: Callable[[Sizes], Sample], sizes: Sizes) -> Sample:
        """Make a sample model with its weights in this machine's memory and dtype."""
        with self.device:
            sample = maker(sizes)
        return replace(sample, model=sample.model.to(self.dtype))


def this_machine() -> Machine:
    """Choose sizes that take some 40 s in all: a small model on a CPU, layers of Llama 3 8B on a GPU."""
    if not torch.cuda.is_available():
        return Machine(torch.device("cpu"), torch.float32, SMALL, 128)
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.cuda.get_device_properties(device).total_memory >= ROOM
    return Machine(device, torch.bfloat16, LLAMA_8B if large else replace(LLAMA_8B, layers=1), 2048)


def demo(length: int = 0, select: str = "fastest", every: bool = False) -> int:
    """Compile a Llama, and with `every` a small DeepSeek-V3 and a layer of latent attention; print what comes out.

    That is what was replaced, errors and times. `length` is the number of tokens, 128 on a CPU and 2048 on a GPU by
    default; `select` is the backend's option. Returns 1 if an error is too large.
    """
    torch.manual_seed(0)
    machine = this_machine()
    machine = replace(machine, length=length or machine.length)
    print(f"torch {torch.__version__}, {machine}, batch {BATCH}, {machine.length} tokens")
    with torch.no_grad():
        # in plain torch: transformers takes up to 8 s to import
        good = [show_compiled(plain_llama, machine, machine.sizes, select)]
        if every:
            good += [show_compiled(deepseek, machine, SMALL, select), show_latent_decoding(machine)]
    print("\nevery result agrees with float64" if all(good) else "\nsome result is wrong: see above")
    if not every:
        print(
            "--all shows a DeepSeek-V3 and latent decoding as well; --select tile replaces whatever fits, faster or not"
        )
    return 0 if all(good) else 1


def show_compiled(maker: Callable[[Sizes], Sample], machine: Machine, sizes: Sizes, select: str = "fastest") -> bool:
    """Run one model by eager torch, by Inductor and by our backend; print times, and whether our logits are right."""
    with progress("making a model", quiet=True):
        sample = machine.make(maker, sizes)
    size = f"{sizes.layers} layer{'s' * (sizes.layers > 1)} of {sizes.width} features"
    print(f"\n{sample.name} ({sample.source}, random weights): {size}")
    ids = torch.randint(0, sample.vocabulary, (BATCH, machine.length), device=machine.device)
    with progress(f"computing it in float64 and in {str(machine.dtype).rpartition('.')[2]}"):
        exact = sample.run(copy.deepcopy(sample.model).double(), ids)
        sample.run(sample.model, ids)
    # Ours first: Inductor then finds the kernels that ours kept from it. Measured so on a GPU: docs/perf-log.md.
    with progress('compiling it with backend="tile" and with Inductor'), compat.no_graph_caches():
        compiled = torch.compile(sample.model, backend="tile", options={"select": select})
        with collect() as report:
            sample.run(compiled, ids)
        inductor = torch.compile(sample.model)
        sample.run(inductor, ids)
    print(summary(report))
    models = {"eager": sample.model, "Inductor": inductor, "tile": compiled}
    errors = {name: error(sample.run(model, ids), exact) for name, model in models.items()}
    print("  error against float64:   " + "   ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    with progress("timing"):
        times = medians({name: partial(sample.run, model, ids) for name, model in models.items()}, seconds=SECONDS)
    print("  time of a forward pass:  " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    print(f"  tile is {times['eager'] / times['tile']:.2f}x eager, {times['Inductor'] / times['tile']:.2f}x Inductor")
    torch._dynamo.reset()
    return errors["tile"] <= max(TOLERANCES[machine.dtype], 1.5 * errors["eager"])


def show_latent_decoding(machine: Machine) -> bool:
    """Run a decoding step of one latent attention layer of DeepSeek-V3's sizes, 16 heads; print times and the error."""
    from torch_tile.nn import MLAAttention

    cached = min(16 * machine.length, 8192)
    print(f"\ntorch_tile.nn.MLAAttention (DeepSeek-V3's sizes, 16 heads): one new token over {cached} cached ones")
    with machine.device:
        layer = MLAAttention(512, 16, q_lora_rank=None).eval().to(machine.dtype)
        x, kv, k_pe = torch.randn(1, 1, 512), torch.randn(1, 1, cached, 512), torch.randn(1, 1, cached, 64)
        angle = torch.rand(1, 1, 32).repeat(1, 1, 2)
        everything = torch.ones(1, 1, 1, cached + 1, dtype=torch.bool)

    def run(layer: Any, absorb: bool, dtype: torch.dtype) -> Tensor:
        token, keys, parts, cos, sin = (t.to(machine.dtype).to(dtype) for t in (x, kv, k_pe, angle.cos(), angle.sin()))
        out: Tensor = layer(token, (cos, sin), None if absorb else everything, FixedCache(keys, parts))[0]
        return out

    with progress("computing it with expanded keys in float64, and with absorbed weights"):
        exact = run(copy.deepcopy(layer).double(), False, torch.float64)
        ours = run(layer, True, machine.dtype)
    wrong = error(ours, exact)
    print(f"  error against float64:   absorbed {wrong:.1e}")
    with progress("timing"):
        times = medians(
            {"expanded": lambda: run(layer, False, machine.dtype), "absorbed": lambda: run(layer, True, machine.dtype)},
            seconds=SECONDS,
        )
    print("  time of a step:          " + "   ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    return wrong <= TOLERANCES[machine.dtype]


class FixedCache:
    """A KV cache that gives the same positions to every step, and forgets the step."""

    def __init__(self, kv: Tensor, k_pe: Tensor) -> None:
        self.kept: tuple[Tensor, Tensor] = (kv, k_pe)

    def update(self, kv: Tensor, k_pe: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cached positions and the new ones, `[B, 1, S + 1, C]` and `[B, 1, S + 1, R]`."""
        return torch.cat([self.kept[0], kv], dim=2), torch.cat([self.kept[1], k_pe], dim=2)


def summary(report: Report) -> str:
    """Format the verdict, the replaced subgraphs by kind, how many Inductor does faster, and each miss."""
    counts = Counter((row.family, in_words(row.what)) for row in report.replaced())
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
    """Time each function; return the median seconds, taken by turns so that a busy machine is unfair to none."""
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def progress(what: str, quiet: bool = False) -> Iterator[None]:
    """Show progress of a slow step: a clock on a terminal, else a line with its time; `quiet` leaves none."""
    start, done, live = time.perf_counter(), threading.Event(), sys.stdout.isatty()

    def tick() -> None:
        while not done.wait(0.2):
            print(clock_line(f"  {what}", start), end="", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    if live:
        clock.start()
    try:
        with only_clock():
            yield
    finally:
        done.set()
        if live:
            clock.join()
        seconds = time.perf_counter() - start
        said = "" if quiet else f"  {what}: {seconds:.1f} s\n"
        print(f"{chr(13) + chr(27) + '[K' if live else ''}{said}", end="", flush=True)
