# SPDX-License-Identifier: Apache-2.0
"""What a boolean tensor of the graph says at index (b, h, q, k), as a sympy expression.

Models build causal and sliding-window masks from aranges, comparisons and indexing; evaluating the graph at a symbolic
index gets the rule back, for every size. What is not index arithmetic becomes an opaque `load`, which equals only
itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tile.inductor.passes.graph import CAST, arg, aten, is_call, known, prims, shape, val

Index = tuple[Any, ...]

B, H, Q, K = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhqk")
LOAD: Any = sympy.Function("load")

_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    aten.add: operator.add,
    aten.sub: operator.sub,
    aten.mul: operator.mul,
}
_COMPARISON: dict[Any, Any] = {
    aten.le: sympy.Le,
    aten.lt: sympy.Lt,
    aten.ge: sympy.Ge,
    aten.gt: sympy.Gt,
    aten.eq: sympy.Eq,
    aten.ne: sympy.Ne,
}
_LOGIC: dict[Any, Any] = {
    aten.bitwise_and: sympy.And,
    aten.logical_and: sympy.And,
    aten.bitwise_or: sympy.Or,
    aten.logical_or: sympy.Or,
}
_SAME = (CAST, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten._to_copy.default)


def lift(node: Node, order: Index = (B, H, Q, K)) -> Any:
    """The value of a tensor of rank up to 4, whose dimensions are the last ones of `order`."""
    sizes = shape(node)
    index = order[4 - len(sizes) :]
    return at(node, tuple(sympy.Integer(0) if known(s == 1) else i for i, s in zip(index, sizes, strict=True)))


def at(node: Any, index: Index) -> Any:
    """The value of `node` at `index`."""
    if isinstance(node, bool):
        return sympy.true if node else sympy.false
    if not isinstance(node, Node):
        return _number(node)
    if not isinstance(val(node), torch.Tensor):
        return _number(val(node))
    result = _view(node, index) if node.op == "call_function" else None
    if result is None and node.op == "call_function":
        result = _compute(node, index)
    return LOAD(sympy.Symbol(node.name), *index) if result is None else result


def _number(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def _broadcast(operand: Any, index: Index) -> Index:
    """The index of an operand that broadcasts to a value at `index`."""
    if not isinstance(val(operand), torch.Tensor):
        return ()
    sizes = shape(operand)
    tail = index[len(index) - len(sizes) :]
    return tuple(sympy.Integer(0) if known(s == 1) else i for i, s in zip(tail, sizes, strict=True))


def _view(node: Node, index: Index) -> Any:
    """Nodes that only move values."""
    x: Any = node.args[0] if node.args else None
    rank = len(index)
    if is_call(node, *_SAME):
        return at(x, index)
    if is_call(node, aten.expand.default):
        return at(x, _broadcast(x, index))
    if is_call(node, aten.unsqueeze.default):
        d = arg(node, 1) % rank
        return at(x, index[:d] + index[d + 1 :])
    if is_call(node, aten.permute.default):
        order: Any = node.args[1]
        source = [index[list(order).index(d)] for d in range(rank)]
        return at(x, tuple(source))
    if is_call(node, aten.slice.Tensor):
        d = arg(node, 1, "dim", 0) % rank
        start, step = arg(node, 2, "start", 0) or 0, arg(node, 4, "step", 1)
        if not isinstance(start, int) or start < 0 or not isinstance(step, int):
            return None
        return at(x, (*index[:d], index[d] * step + start, *index[d + 1 :]))
    if is_call(node, aten.select.int):
        d, i = arg(node, 1) % (rank + 1), arg(node, 2)
        return at(x, (*index[:d], _number(i), *index[d:])) if isinstance(i, int) and i >= 0 else None
    if is_call(node, aten.view.default, aten.reshape.default):
        return _reshape(x, node, index)
    if is_call(node, aten.cat.default):
        return _cat(node, index)
    return None


def _reshape(x: Any, node: Node, index: Index) -> Any:
    """Reshapes that add or drop dimensions of one."""
    kept = [i for i, s in zip(index, shape(node), strict=True) if not known(s == 1)]
    sizes = shape(x)
    wide = [s for s in sizes if not known(s == 1)]
    have = [s for s in shape(node) if not known(s == 1)]
    if len(wide) != len(have) or not all(known(a == b) for a, b in zip(wide, have, strict=True)):
        return None
    queue = iter(kept)
    return at(x, tuple(sympy.Integer(0) if known(s == 1) else next(queue) for s in sizes))


def _cat(node: Node, index: Index) -> Any:
    parts: Any = node.args[0]
    d = arg(node, 1, "dim", 0) % len(index)
    offset: Any = sympy.Integer(0)
    cases: list[tuple[Any, Any]] = []
    for part in parts:
        size = _number(shape(part)[d])
        here = sympy.Eq(index[d], offset) if size == 1 else index[d] < offset + size
        cases.append((at(part, (*index[:d], index[d] - offset, *index[d + 1 :])), here))
        offset = offset + size
    cases[-1] = (cases[-1][0], sympy.true)
    return sympy.Piecewise(*cases)


def _compute(node: Node, index: Index) -> Any:
    """Nodes that calculate."""
    target: Any = node.target
    if target is prims.iota.default:
        return sympy.Integer(node.kwargs["start"]) + sympy.Integer(node.kwargs["step"]) * index[0]
    if target is aten.full.default:
        return at(node.args[1], ())
    if target is aten.scalar_tensor.default:
        return at(node.args[0], ())
    if target in (aten.bitwise_not.default, aten.logical_not.default):
        return sympy.Not(_truth(at(node.args[0], index)))
    if target is aten.index.Tensor:
        return _gather(node, index)
    if target is aten.cumsum.default:
        return _cumsum(node, index)
    packet = getattr(target, "overloadpacket", None)
    if packet not in _ARITHMETIC and packet not in _COMPARISON and packet not in _LOGIC:
        return None
    if node.kwargs.get("alpha", 1) != 1:
        return None
    a, b = (at(x, _broadcast(x, index)) for x in node.args[:2])
    if packet in _LOGIC:
        if val(node).dtype != torch.bool:
            return None
        return _LOGIC[packet](_truth(a), _truth(b))
    if _is_truth(a) or _is_truth(b):
        return None  # arithmetic on booleans
    return _fold((_ARITHMETIC.get(packet) or _COMPARISON[packet])(a, b))


def _gather(node: Node, index: Index) -> Any:
    """Advanced indexing with one index tensor per dimension."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    if any(i is None for i in indices) or len(indices) != len(shape(x)):
        return None
    if any(val(i).dtype == torch.bool for i in indices):
        return None
    return at(x, tuple(at(i, _broadcast(i, index)) for i in indices))


def _cumsum(node: Node, index: Index) -> Any:
    """A running sum of what is false everywhere is 0; any other is opaque."""
    d = arg(node, 1) % len(index)
    position = sympy.Symbol("_position", integer=True, nonnegative=True)
    term = at(node.args[0], (*index[:d], position, *index[d + 1 :]))
    return sympy.Integer(0) if term in (sympy.false, 0) else None


def _is_truth(value: Any) -> bool:
    return isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol)


def _truth(value: Any) -> Any:
    return value if _is_truth(value) else sympy.Ne(value, 0)


def _fold(value: Any) -> Any:
    """Push an operation into the cases of a `cat`; equal cases become one."""
    if not (hasattr(value, "has") and value.has(sympy.Piecewise)):
        return value
    value = sympy.piecewise_fold(value)
    if not isinstance(value, sympy.Piecewise):
        return value
    cases = [(e.subs(c.lhs, c.rhs) if isinstance(c, sympy.Eq) and c.lhs.is_Symbol else e, c) for e, c in value.args]
    return cases[0][0] if len({e for e, _ in cases}) == 1 else sympy.Piecewise(*cases)
