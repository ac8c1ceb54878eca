# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile bench`: a short table of operators by eager torch, Inductor and this package, by turns.

`python -m benchmarks` of the repository measures much more; this one takes a minute and needs nothing but torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from torch_tile.inductor import compat
from torch_tile.tools.demo import TOLERANCES, error, medians, progress

Tensor = torch.Tensor
SECONDS = 1.0  # of timing for each case


@dataclass(frozen=True)
class Case:
    """One operator: what torch computes, what this package computes, and the shapes of both functions' arguments."""

    name: str
    reference: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]


def cases(size: int) -> list[Case]:
    """Return the cases; `size` is the number of rows, keys and columns that they grow with."""
    tile, heads, wide = torch.ops.tile, 8, 4 * size
    keys = (1, heads, size, 64)
    return [
        Case("linear", F.linear, tile.linear, [(size, size), (wide, size)]),
        Case("linear, bias, GELU", _gelu_linear, partial(_linear, "gelu"), [(size, size), (wide, size), (wide,)]),
        Case("SwiGLU", _swiglu, tile.swiglu, [(size, size), (wide, size), (wide, size)]),
        Case("RMS norm", _rms_norm, tile.rms_norm, [(wide, size), (size,)]),
        Case("layer norm", _layer_norm, tile.layer_norm, [(wide, size), (size,), (size,)]),
        Case("softmax", partial(torch.softmax, dim=-1), partial(tile.softmax, dim=-1), [(wide, size)]),
        Case("attention, causal", _attention, partial(tile.attention, causal=True), [keys, keys, keys]),
        Case("attention, one query", F.scaled_dot_product_attention, tile.attention, [(1, heads, 1, 64), keys, keys]),
    ]


def bench(size: int = 0, compiled: bool = True) -> int:
    """Print a row for each case: errors against float64 and times. Returns 1 if a result is wrong.

    `size` is 512 on a CPU and 4096 on a GPU by default. Without `compiled` Inductor is left out.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = size or (4096 if device == "cuda" else 512)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {device} ({where}), {str(dtype).rpartition('.')[2]}, size {size}\n")
    columns = ["eager", *(["Inductor"] if compiled else []), "ours"]
    titles = "".join(f"{name:>12}" for name in columns)
    print(f"{'time in ms':<22}{titles}{'error':>10}{'best rival / ours':>19}")
    good = True
    with torch.no_grad():
        for case in cases(size):
            times, wrong = measure(case, device, dtype, compiled)
            good &= wrong <= TOLERANCES[dtype]
            rival = min(value for name, value in times.items() if name != "ours")
            row = "".join(f"{times[name] * 1e3:12.3f}" for name in columns)
            print(f"{case.name:<22}{row}{wrong:10.1e}{rival / times['ours']:19.2f}", flush=True)
    print("\nabove 1 in the last column this package is faster than the best of the others")
    if not good:
        print("some result is wrong: see the column of errors")
    return 0 if good else 1


def measure(case: Case, device: str, dtype: torch.dtype, compiled: bool) -> tuple[dict[str, float], float]:
    """Return the median times in seconds, and the error of our result against float64."""
    generator = torch.Generator().manual_seed(0)
    exact_args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes]
    exact_args = [x / math.sqrt(x.shape[-1]) if x.dim() == 2 and n else x for n, x in enumerate(exact_args)]
    args = [x.to(device, dtype) for x in exact_args]
    exact = case.reference(*[x.to("cpu").double() for x in args])
    runs: dict[str, Callable[[], Any]] = {"eager": partial(case.reference, *args)}
    with progress(f"compiling {case.name}", quiet=True):
        if compiled:
            torch._dynamo.reset()
            with compat.no_graph_caches():
                inductor = torch.compile(case.reference)
                inductor(*args)
            runs["Inductor"] = partial(inductor, *args)
        runs["ours"] = partial(case.ours, *args)
        wrong = error(runs["ours"]().cpu(), exact)
    return medians(runs, SECONDS), wrong


def _linear(activation: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Call our linear layer with an activation."""
    out: Tensor = torch.ops.tile.linear(x, weight, bias, None, activation)
    return out


def _gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute torch's linear layer with GELU."""
    return F.gelu(F.linear(x, weight, bias))


def _swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute torch's SwiGLU."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute torch's RMS norm."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute torch's layer norm."""
    return F.layer_norm(x, weight.shape, weight, bias)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute torch's causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
