# SPDX-License-Identifier: Apache-2.0
"""Routing of tokens to experts: `python -m benchmarks.routing [--quick] [--only 256]`.

Each token chooses its experts, and the pairs of a token and an expert are sorted by expert. Rivals: torch's operators,
compiled by Inductor; on the CPU also alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import torch_tile.ops  # noqa: F401 - registers the operators
from benchmarks.problem import Case, Prepare, Problem, inductor
from benchmarks.runner import main

ON_GPU = (4096, 256, 8), (16384, 128, 8)  # tokens, experts, and how many a token chooses
ON_CPU = (256, 64, 4), (2048, 128, 8)
OPERATIONS = 4  # for each logit

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def problems(device: str) -> Iterator[Problem]:
    """Yield a problem for each size."""
    sizes = ON_GPU if device == "cuda" else ON_CPU
    for tokens, experts, chosen in sizes:
        moved = 4 * tokens * experts + 16 * tokens * chosen  # logits; weights, experts, order and place
        yield Problem(
            f"routing {tokens}x{experts} top {chosen}", "routing", torch.float32,
            float(OPERATIONS * tokens * experts), float(moved), partial(case, tokens, experts, chosen, device),
            {"Inductor": 2.0, "torch": 1.0}, quick=(tokens, experts, chosen) == sizes[0],
        )  # fmt: skip


def case(tokens: int, experts: int, chosen: int, device: str) -> Case:
    """Make one size. What is compared is a matrix of all weights, filled in the order of the sorted pairs."""
    logits = torch.randn(tokens, experts, device=device)

    def ours() -> Routed:
        weights, ids = torch.ops.tile.route(logits, None, chosen)
        order, _, ends = torch.ops.tile.group_tokens(ids, experts)
        return weights, ids, order, ends

    def matrix(found: Any) -> torch.Tensor:
        weights, _, order, ends = found
        counts = ends.long().diff(prepend=ends.new_zeros(1).long())
        by_expert = torch.arange(experts, device=device).repeat_interleave(counts)
        order = order.long()
        filled = weights.new_zeros(tokens, experts)
        filled[order // chosen, by_expert] = weights.flatten()[order]
        return filled

    def expected() -> torch.Tensor:
        weights, ids = torch.topk(logits.double().softmax(-1), chosen)
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, ids, weights / weights.sum(-1, keepdim=True))

    rivals: dict[str, Prepare] = {"Inductor": partial(inductor, in_torch, logits, chosen)}
    if device == "cpu":
        rivals["torch"] = lambda: partial(in_torch, logits, chosen)
    return Case(ours, rivals, lambda filled: filled, expected, read=matrix)


def in_torch(logits: torch.Tensor, chosen: int) -> Routed:
    """Route by torch's operators; return weights, experts, the sorted pairs and the ends of the experts among them."""
    weights, ids = torch.topk(logits.softmax(-1, dtype=torch.float32), chosen)
    order = torch.argsort(ids.flatten(), stable=True)
    ends = torch.bincount(ids.flatten(), minlength=logits.shape[1]).cumsum(0)
    return weights / weights.sum(-1, keepdim=True), ids, order, ends


if __name__ == "__main__":
    sys.exit(main(["routing"], __doc__))
