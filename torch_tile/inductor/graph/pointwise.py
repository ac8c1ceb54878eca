# SPDX-License-Identifier: Apache-2.0
"""Translate pointwise nodes into functions of the epilogue table (kernels/epilogue/functions.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.graph.nodes import aten
from torch_tile.kernels.epilogue.functions import FUNCTIONS, Call

WORDS = "write it with arithmetic, comparisons, torch.where, exp, log and tanh"
"""Advice for an op that has no row in the table."""

_BINDERS = {getattr(aten, x.packet): x.bind for row in FUNCTIONS.values() for x in row.spellings()}


def call_of(node: Any) -> Call | None:
    """Return the call of table functions that a node computes from nodes and numbers; None if no row describes it."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    bind = _BINDERS.get(getattr(node.target, "overloadpacket", None))
    call = None if bind is None else bind(*node.args, **node.kwargs)
    return call if call is not None and all(isinstance(x, Node | int | float) for x in call.leaves()) else None


def is_wordless(node: Node) -> bool:
    """Return whether a node is pointwise and has no row in the table."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and call_of(node) is None
