# SPDX-License-Identifier: Apache-2.0
"""In a graph of forward and backward: what autograd made of a batched product, found by its two formulas.

    C = A @ B:  dA = dC @ B^T,  dB = A^T @ dC

Whether what lies between two products is the gradient of what lies between their forwards is not told here
(gradient_check.py tells it).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from torch_tile.inductor.graph.axes import Axis, Group, leaves, trace
from torch_tile.inductor.graph.nodes import Miss, aten, same_shape, shape

FIX = "call F.scaled_dot_product_attention"


@dataclass
class OfProduct:
    """Gradients of a product: of its result, and, where they are wanted, of its left and right operands."""

    result: Node
    left: Node | None
    right: Node | None


def backward_of(graph: Graph) -> set[Node]:
    """The nodes that gradients of outputs go into, and those that only such nodes read."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or (node.op != "output" and any(x in found for x in node.all_input_nodes)):
            found.add(node)
    if found:
        for node in reversed(graph.nodes):
            if node.op == "call_function" and node.users and all(u in found for u in node.users):
                found.add(node)
    return found


def of_product(node: Node, groups: Sequence[Group], inner: Group, backward: Collection[Node]) -> OfProduct:
    """Gradients of `A @ B`, a `bmm` with dimensions `groups` that sums over `inner`, among nodes of the backward.

    Raises Miss where they are not exactly one.
    """
    *batch, m, n = groups
    a, b = node.args
    left: dict[Node, Node] = {}  # by the gradient of the result
    right: dict[Node, Node] = {}
    for each in node.graph.find_nodes(op="call_function", target=aten.bmm.default):
        if each not in backward:
            continue
        x, y = each.args
        turned_b = [*batch, n, inner], [*batch, inner, n]
        turned_a = [*batch, inner, m], [*batch, m, inner]
        if same_shape(shape(x), shape(node)) and _is(y, turned_b[0], b, turned_b[1]):
            left[x] = each
        if same_shape(shape(y), shape(node)) and _is(x, turned_a[0], a, turned_a[1]):
            right[y] = each
    results = left.keys() & right.keys() if left and right else left.keys() | right.keys()
    if len(results) != 1:
        raise Miss(
            f"of what looks like gradients of a product of attention there are {len(results)}",
            FIX,
            at=node,
        )
    result = results.pop()
    return OfProduct(result, left.get(result), right.get(result))


def _is(x: Any, groups: list[Group], y: Any, others: list[Group]) -> bool:
    """Whether `x`, with dimensions `groups`, is a view of the elements of `y`, with dimensions `others`."""
    if len(shape(x)) != len(groups):
        return False
    fresh: dict[Axis, Axis] = {}  # a wrong guess must not cut the axes of others
    groups, others = (
        [[fresh.setdefault(a, Axis(a.size)) for a in leaves(g)] for g in each] for each in (groups, others)
    )
    (root, have), (same, want) = trace(x, groups), trace(y, others)
    return root is same and list(map(leaves, have)) == list(map(leaves, want))


def only_for(olds: Collection[Node]) -> set[Node]:
    """What nobody would read if nobody read `olds`: themselves, and what is computed for them alone."""
    found, pending = set(olds), list(olds)
    while pending:
        for x in pending.pop().all_input_nodes:
            if x not in found and x.op == "call_function" and all(u in found for u in x.users):
                found.add(x)
                pending.append(x)
    return found
