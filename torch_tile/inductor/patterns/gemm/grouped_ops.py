# SPDX-License-Identifier: Apache-2.0
"""Recognise calls that multiply groups of rows by matrices of their own, or that compute gradients of such matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from torch_tile.inductor.graph.nodes import arg, aten, is_call, val

# transformers calls these where torch has no kernel for a dtype under torch.compile: they loop over the groups on the
# host, which waits for the offsets.
LOOP, LOOP_BACKWARD = "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"


class Grouped(NamedTuple):
    """`a` `[S, K]` and `b` `[G, K, N]`, or, if summed over rows, `a` `[M, S]` and `b` `[S, N]`; where groups end."""

    a: Node
    b: Node
    offsets: Node


def by_rows(node: Any) -> Grouped | None:
    """Return the operands of a product of groups of rows; None for other nodes."""
    if is_call(node, aten._grouped_mm.default):
        return _of_torch(node, (2, 3))
    return Grouped(*node.args[:3]) if operator_of(node) == LOOP else None


def by_k(node: Any) -> Grouped | None:
    """Return the operands of a sum over each group's rows; None for other nodes."""
    return _of_torch(node, (2, 2)) if is_call(node, aten._grouped_mm.default) else None


def is_grouped(node: Any) -> bool:
    """Return whether a node is a grouped product or sum, of any shapes."""
    return is_call(node, aten._grouped_mm.default) or operator_of(node) in (LOOP, LOOP_BACKWARD)


def operator_of(node: Any) -> str:
    """Return the name of the operator that a node calls, with its namespace."""
    target: Any = getattr(node, "target", None)
    return f"{target.namespace}::{target._opname}" if hasattr(target, "_opname") else ""


def _of_torch(node: Node, dims: tuple[int, int]) -> Grouped | None:
    """Read torch's `_grouped_mm` with operands of these ranks; None for other forms."""
    a, b, offsets, bias = node.args[0], node.args[1], arg(node, "offs"), arg(node, "bias")
    if (val(a).dim(), val(b).dim()) != dims or not isinstance(offsets, Node) or bias is not None:
        return None
    return Grouped(a, b, offsets)  # type: ignore[arg-type]
