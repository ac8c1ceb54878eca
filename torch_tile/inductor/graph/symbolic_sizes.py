# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes: exact quotients, and nodes of a graph that compute a size.

Sizes are ints or SymInts. Views of views leave expressions such as `a*b//b`; kept simple, they stay comparable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod


def quotient(a: Any, b: Any) -> Any:
    """`a // b` where b divides a, without the division if the expressions cancel."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    symbolic = a if isinstance(a, torch.SymInt) else b
    shape_env = symbolic.node.shape_env
    ratio = sympy.cancel(expression(a) / expression(b))
    if sympy.denom(ratio) != 1 or ratio.has(FloorDiv, Mod, PythonMod):
        return a // b
    if ratio.is_Integer:
        return int(ratio)
    value = a // b
    hint = value.node.hint if isinstance(value, torch.SymInt) else value
    return shape_env.create_symintnode(ratio, hint=hint)


def expression(size: Any) -> Any:
    """A size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}


def compute(expr: Any, leaf: Callable[[Any], Node | None], call: Callable[..., Node]) -> Any:
    """A node (or int) of value `expr`.

    `leaf` finds a node that already has the value of an expression; `call` inserts `operator` calls on such nodes.
    Raises LookupError if a symbol has no node, or the expression has an operation that graphs have no word for.
    """
    if expr.is_Integer:
        return int(expr)
    found = leaf(expr)
    if found is not None:
        return found
    parts = [compute(part, leaf, call) for part in expr.args] if expr.args else []
    if isinstance(expr, sympy.Add | sympy.Mul):
        word = operator.add if isinstance(expr, sympy.Add) else operator.mul
        return reduce(lambda x, y: call(word, x, y), parts)
    if isinstance(expr, sympy.Pow) and isinstance(parts[1], int) and parts[1] > 0:
        return reduce(lambda x, y: call(operator.mul, x, y), [parts[0]] * parts[1])
    if type(expr) in _BINARY:
        return call(_BINARY[type(expr)], *parts)
    raise LookupError(f"no node of the graph has the size {expr}")
