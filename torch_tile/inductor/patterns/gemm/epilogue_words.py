# SPDX-License-Identifier: Apache-2.0
"""Which pointwise ops the epilogue language (kernels/epilogue/program.py) has words for, and what they read."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torch_tile.inductor.graph.nodes import CAST, aten, constant, is_call, is_tensor
from torch_tile.kernels.epilogue.functions import FUNCTIONS

BINARY = {getattr(aten, spelling): name for name, row in FUNCTIONS.items() if row.arity == 2 for spelling in row.aten}
UNARY = {
    getattr(aten, spelling.removesuffix(".default")).default: name
    for name, row in FUNCTIONS.items()
    if row.arity == 1
    for spelling in row.aten
}


def operands_of(node: Node) -> list[Any] | None:
    """The values a pointwise op reads, numbers included; None if the epilogue language has no word for the op, or one
    of them is a number that the graph does not know (a size).
    """
    target: Any = node.target
    if not all(map(is_tensor, node.all_input_nodes)):
        return None
    if target in (*UNARY, aten.gelu.default, aten.clamp.default):
        return [node.args[0]]
    if target is aten.where.self:
        return list(node.args)
    if getattr(target, "overloadpacket", None) in BINARY and "rounding_mode" not in node.kwargs:
        pair = list(node.args[:2])
        return pair if len(pair) == 2 and all(isinstance(x, Node | int | float) for x in pair) else None
    return None


def tensors_of(node: Node) -> list[Node]:
    """What a pointwise op or a cast computes with, numbers left out; nothing for other nodes."""
    operands = [node.args[0]] if is_call(node, CAST) else operands_of(node) or ()
    return [x for x in operands if isinstance(x, Node) and constant(x) is None]
