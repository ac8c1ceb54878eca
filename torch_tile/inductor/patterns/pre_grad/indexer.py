# SPDX-License-Identifier: Apache-2.0
"""Pre-grad: say in `explain` why an indexer that lists each query's positions (DeepSeek-V3.2) stays as it is written.

    scores = (weights[..., None, :] @ relu(q @ k^T)).squeeze(-2) under a mask;  positions = scores.topk(n).indices

`tile.lightning_index` computes this without the products of all heads in memory, but knows causal masks only. What the
mask of a model hides is a value, which no graph shows.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, val
from torch_tile.inductor.patterns.pre_grad.router import argument, called

PRODUCTS = "matmul", "bmm", "einsum", "__matmul__"
BETWEEN = {
    "masked_fill", "where", "add", "iadd", "mul", "imul", "truediv", "squeeze", "sum", "float", "to", "type", "getitem",
    *PRODUCTS,
}  # fmt: skip
"""What models do to the products of all heads before they choose positions."""


@family("mla", "pre_grad", 28)
def report_indexers(context: Context) -> None:
    """Report each choice of positions by sums of rectified products of queries and keys."""
    for node in context.graph.nodes:
        if called(node) == "topk" and _sums_rectified_products(argument(node, 0, "input")):
            why = Miss(
                "the mask of the indexer's scores is a tensor; tile.lightning_index hides by causality only",
                "call tile.lightning_index(q, k, scale * weights, top, seq_lens), then tile.mla_sparse on its lists",
            )
            context.miss("mla", node, why)


def _sums_rectified_products(scores: Node) -> bool:
    """Return whether scores `[B, Sq, S]` come from rectified products `[B, Sq, H, S]` or `[B, H, Sq, S]`."""
    if not _has_dimensions(scores, 3):
        return False
    seen: set[Node] = set()
    waiting = [scores]
    while waiting:
        one = waiting.pop()
        if called(one) == "relu":
            inner = argument(one, 0, "input")
            while called(inner) in ("mul", "imul", "truediv"):
                inner = argument(inner, 0, "input")
            if called(inner) in PRODUCTS and _has_dimensions(one, 4) and val(one).shape[-1] == val(scores).shape[-1]:
                return True
        elif called(one) in BETWEEN and one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def _has_dimensions(node: Node, count: int) -> bool:
    """Return whether a node is a tensor of so many dimensions."""
    return isinstance(node, Node) and isinstance(val(node), torch.Tensor) and val(node).dim() == count
