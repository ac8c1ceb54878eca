# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over rows of logits, alone and with its gradient: `python -m benchmarks.loss [--only 128256]`.

It is bound by memory: the logits are read once, and with the gradient twice and written once. Rivals: quack, where a
module `rivals` offers it, and Inductor; on the CPU torch's own kernels as well.

The linear loss begins at the hidden states and also computes the gradients of these and of the head. Its products bound
it. Rivals: Liger, where a module `rivals` offers it, and torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.problem import Case, Prepare, Problem, inductor, rival, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile import nn
from torch_tile.kernels.loss.cross_entropy import cross_entropy, cross_entropy_backward

ON_GPU = (8192, 32000), (8192, 128256), (4096, 50257)
ON_CPU = (512, 32000), (64, 1000)
LINEAR_ON_GPU = ((8192, 4096, 128256),)  # rows, width and classes
LINEAR_ON_CPU = ((300, 64, 1000),)
OPERATIONS = 6  # for each logit
ROUNDINGS = 2.0  # of logits and of their slopes
PART = 512  # rows that are computed in float64 at a time
MEMORY = 2**30  # bytes above inputs that are asked for the linear loss; its gradients alone take 1.04 GiB


def problems(device: str) -> Iterator[Problem]:
    """The loss, and the loss with its gradient, of each size."""
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for m, k, n in LINEAR_ON_GPU if on_gpu else LINEAR_ON_CPU:
        yield Problem(
            f"linear loss {m}x{k}x{n} {name_of(dtype)}", "linear loss", dtype, 6.0 * m * k * n,
            2.0 * (m + n) * k * dtype.itemsize, partial(linear_case, m, k, n, dtype, device),
            {"Liger": 1.0, "torch": 1.0}, memory=MEMORY,
        )  # fmt: skip
    for m, n in ON_GPU if on_gpu else ON_CPU:
        for kind, passes in (("loss", 1), ("loss and gradient", 3)):
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
    rivals: dict[str, Prepare] = {"Inductor": partial(inductor, in_torch, kind, x, y)}
    if device == "cpu":
        rivals["torch"] = lambda: partial(in_torch, kind, x, y)
    else:
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


def quack(kind: str, x: torch.Tensor, y: torch.Tensor) -> Call:
    """quack's kernels."""
    forward, backward = (
        rival(name, "rivals.quack_kernels_thin") for name in ("cross_entropy", "cross_entropy_backward")
    )
    if kind == "loss":
        return partial(forward, x, y)
    each = torch.full((len(x),), 1 / len(x), device=x.device)
    return lambda: backward(x, y, each, forward(x, y)[1])


def linear_case(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> Case:
    """Make one size of the linear loss. Rows of both gradients are compared."""
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(n, k, device=device) * k**-0.5).to(dtype).requires_grad_()
    y = torch.randint(0, n, (m,), device=device)
    rows, classes = sample_of(m, 128, device), sample_of(n, 128, device)

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            loss = function(x, weight, y)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    def liger() -> Call:
        function = rival("liger_linear_cross_entropy")

        def call() -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                return function(x, weight, y)  # type: ignore[no-any-return]

        return call

    def expected() -> torch.Tensor:
        wide, of_x, of_weight = weight.detach().double(), x.new_zeros(m, k).double(), x.new_zeros(len(classes), k)
        of_weight = of_weight.double()
        for start in range(0, m, PART):
            part = slice(start, start + PART)
            slopes = ((x[part].detach().double() @ wide.mT).softmax(-1) - F.one_hot(y[part], n)) / m
            of_x[part] = slopes @ wide
            of_weight += slopes[:, classes].mT @ x[part].detach().double()
        return torch.cat([of_x[rows], of_weight])

    def sample(both: torch.Tensor) -> torch.Tensor:
        return torch.cat([both[:m][rows], both[m:][classes]])

    rivals: dict[str, Prepare] = {"Liger": liger}
    if device == "cpu":
        rivals = {"torch": lambda: partial(gradients, lambda x, w, y: F.cross_entropy(x @ w.mT, y))}
    ours = partial(gradients, nn.linear_cross_entropy)
    return Case(ours, rivals, sample, expected, read=lambda out: torch.cat(out[1:]), leeway=ROUNDINGS)


if __name__ == "__main__":
    sys.exit(main(["loss"], __doc__))
