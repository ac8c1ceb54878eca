# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over rows of logits, alone and with its gradient: `python -m benchmarks.loss [--only 128256]`.

It is bound by memory: the logits are read once, and with the gradient twice and written once. Rivals: quack, where a
module `rivals` offers it, and Inductor; on the CPU torch's own kernels as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.problem import Case, Prepare, Problem, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.loss.cross_entropy import cross_entropy, cross_entropy_backward

ON_GPU = (8192, 32000), (8192, 128256), (4096, 50257)
ON_CPU = (512, 32000), (64, 1000)
OPERATIONS = 6  # for each logit


def problems(device: str) -> Iterator[Problem]:
    """The loss, and the loss with its gradient, of each size."""
    on_gpu = device == "cuda"
    for m, n in ON_GPU if on_gpu else ON_CPU:
        for kind, passes in (("loss", 1), ("loss and gradient", 3)):
            dtype = torch.bfloat16 if on_gpu else torch.float32
            yield Problem(
                f"{kind} {m}x{n} {name_of(dtype)}", kind, dtype, float(OPERATIONS * passes * m * n),
                float(passes * m * n * dtype.itemsize), partial(case, kind, m, n, dtype, device),
                {"quack": 1.0} if on_gpu else {"torch": 1.0}, quick=n == (32000 if on_gpu else 1000),
            )  # fmt: skip


def case(kind: str, m: int, n: int, dtype: torch.dtype, device: str) -> Case:
    """One size, with gradients or without."""
    x, y = torch.randn(m, n, device=device, dtype=dtype), torch.randint(0, n, (m,), device=device)
    upstream = torch.full((), 1 / m, device=device).expand(m)
    rows = sample_of(m, 128, device)
    rivals: dict[str, Prepare] = {"Inductor": partial(inductor, kind, x, y)}
    if device == "cpu":
        rivals["torch"] = lambda: partial(in_torch, kind, x, y)
    elif importlib.util.find_spec("rivals") is not None:
        rivals["quack"] = partial(quack, kind, x, y)

    def both() -> torch.Tensor:
        _, lse = cross_entropy(x, y)
        return cross_entropy_backward(upstream, x, y, lse)

    def gradient() -> torch.Tensor:
        wide = x[rows].double()
        return (wide.softmax(-1) - F.one_hot(y[rows], n)) / m

    if kind == "loss":
        wanted = lambda: F.cross_entropy(x[rows].double(), y[rows], reduction="none")  # noqa: E731
        return Case(partial(cross_entropy, x, y), rivals, lambda out: out[rows], wanted)
    return Case(both, rivals, lambda out: out[rows], gradient)


def in_torch(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The losses of rows, or the gradient of their mean."""
    if kind == "loss":
        return F.cross_entropy(x.float(), y, reduction="none")
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), y), leaf)[0]


def inductor(kind: str, x: torch.Tensor, y: torch.Tensor) -> Call:
    """The same, compiled."""
    torch.compiler.reset()
    return partial(torch.compile(in_torch, dynamic=False), kind, x, y)


def quack(kind: str, x: torch.Tensor, y: torch.Tensor) -> Call:
    """quack's kernels."""
    module: Any = importlib.import_module("rivals.quack_kernels_thin")
    if kind == "loss":
        return partial(module.cross_entropy, x, y)
    each = torch.full((len(x),), 1 / len(x), device=x.device)
    return lambda: module.cross_entropy_backward(x, y, each, module.cross_entropy(x, y)[1])


if __name__ == "__main__":
    sys.exit(main(["loss"], __doc__))
