# SPDX-License-Identifier: Apache-2.0
"""The experts of mixtures: `python -m benchmarks.grouped [--quick] [--only mixtral] [--json FILE]`.

Gate and up products with SwiGLU, the product that follows with the weight of each row, and the gradient of its
matrices, against `torch._grouped_mm` with torch's own pointwise kernels. Rows choose their experts at random, evenly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.problem import Case, Prepare, Problem, sample_of, sample_of_groups
from benchmarks.runner import main
from benchmarks.timer import name_of
from torch_tile.kernels.gemm.grouped import grouped_gemm, reference
from torch_tile.kernels.gemm.grouped_wgrad import k_grouped_gemm

SWIGLU, WEIGHTED = "v0=silu(acc0);v1=mul(v0,acc1);ret v1", "v0=mul(acc0,x0);ret v0"


@dataclass(frozen=True)
class Experts:
    """How many there are, how many a token goes to, and their sizes."""

    count: int
    chosen: int
    width: int
    hidden: int


MODELS = {
    "mixtral": Experts(8, 2, 4096, 14336),
    "qwen3 30b": Experts(128, 8, 2048, 768),
    "deepseek-v3 eighth": Experts(32, 1, 7168, 2048),  # of its 256 experts what one of eight GPUs has
}
TOKENS = (1, 16, 128, 2048, 16384)
SMALL = {"tiny": (Experts(4, 2, 64, 96), (20,)), "small": (Experts(8, 2, 256, 512), (8, 512))}  # on the CPU


def problems(device: str) -> Iterator[Problem]:
    gpu = device != "cpu"
    models = {name: (experts, TOKENS) for name, experts in MODELS.items()} if gpu else SMALL
    for name, (experts, counts) in models.items():
        for tokens in counts:
            for part in ("gate up", "down", "gradient"):
                if part != "gradient" or tokens >= 128:
                    yield problem(device, name, experts, tokens, part, gpu)


def problem(device: str, name: str, experts: Experts, tokens: int, part: str, gpu: bool) -> Problem:
    """One product for so many tokens."""
    rows, (k, n) = tokens * experts.chosen, (experts.width, experts.hidden)
    matrices = (2 if part == "gate up" else 1) * min(experts.count, rows)
    return Problem(
        f"grouped {name} {part} m{tokens} {name_of(torch.bfloat16)}", f"grouped {part}", torch.bfloat16,
        2.0 * rows * k * n * (2 if part == "gate up" else 1), 2.0 * (matrices * k * n + rows * (k + n)),
        partial(case, device, experts, rows, part), asked={"torch": 1.0},
        quick=(name == "tiny") or (gpu and name == "mixtral" and tokens in (16, 2048)),
    )  # fmt: skip


def case(device: str, experts: Experts, rows: int, part: str) -> Case:
    """Operands, and what torch computes of them."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    chosen = torch.randint(experts.count, (rows,), device=device).sort().values
    ends = torch.bincount(chosen, minlength=experts.count).cumsum(0).int()
    k, n = (experts.hidden, experts.width) if part == "down" else (experts.width, experts.hidden)
    a, bs = make(rows, k), [make(experts.count, n, k).mT / k**0.5 for _ in range(2 if part == "gate up" else 1)]
    grad, weight = make(rows, n), make(rows, 1)
    looked_at, own_ends = sample_of_groups(chosen, experts.count)
    columns = sample_of(k, 8, device)  # of a, for gradients

    def torchs() -> torch.Tensor:
        if part == "gradient":
            return torch._grouped_mm(a.mT, grad, offs=ends)
        products = [torch._grouped_mm(a, b, offs=ends) for b in bs]
        return F.silu(products[0]) * products[1] if part == "gate up" else products[0] * weight

    def expected() -> torch.Tensor:
        if part == "gradient":
            each = chosen == torch.arange(experts.count, device=device)[:, None]
            return torch.stack([a[own][:, columns].double().mT @ grad[own].double() for own in each])
        weights = [weight[looked_at].double()] if part == "down" else []
        text = SWIGLU if part == "gate up" else WEIGHTED
        return reference(a[looked_at].double(), bs, own_ends, weights, "c" * len(weights), text, torch.float64)

    if part == "gradient":
        ours = partial(k_grouped_gemm, a, grad, ends, a.dtype)
    elif part == "gate up":
        ours = partial(grouped_gemm, a, bs, ends, [], "", SWIGLU, a.dtype)
    else:
        ours = partial(grouped_gemm, a, bs, ends, [weight], "c", WEIGHTED, a.dtype)
    rivals: dict[str, Prepare] = {"torch": lambda: torchs}
    return Case(ours, rivals, lambda out: out[:, columns] if part == "gradient" else out[looked_at], expected)


if __name__ == "__main__":
    sys.exit(main(["grouped"], __doc__))
