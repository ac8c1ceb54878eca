# SPDX-License-Identifier: Apache-2.0
"""Evaluate a mask of the graph at the symbolic index (b, h, q, k), as a sympy expression.

Models build causal and sliding-window masks from aranges, comparisons and indexing. Evaluating the graph at a symbolic
index recovers the rule for every size. A node that is not index arithmetic becomes an opaque `load`, which equals only
itself.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tile.inductor.graph.nodes import CASTS, COPIES, arg, aten, is_call, known, prims, shape, val
from torch_tile.inductor.graph.pointwise import call_of
from torch_tile.kernels.epilogue.functions import FUNCTIONS, bind

Index = tuple[Any, ...]


def symbol(name: str) -> Any:
    """Return the sympy symbol of an index into a tensor. Its name distinguishes it from symbols of sizes."""
    return sympy.Symbol(f"@{name}", integer=True, nonnegative=True)


def is_place(x: Any) -> bool:
    """Return whether `x` is an index symbol made by `symbol`."""
    return isinstance(x, sympy.Symbol) and x.name.startswith("@")


B, H, Q, K = (symbol(name) for name in "bhqk")
LOAD: Any = sympy.Function("load")

# Integer arithmetic that has no row in the table of pointwise functions.
_WHOLE: dict[Any, Callable[[Any, Any], Any]] = {
    aten.floor_divide: lambda a, b: _floored(a, b),
    aten.remainder: lambda a, b: a - b * _floored(a, b),
}
_LOGIC: dict[Any, Any] = {
    aten.bitwise_and: sympy.And,
    aten.logical_and: sympy.And,
    aten.bitwise_or: sympy.Or,
    aten.logical_or: sympy.Or,
}
_MOST_CASES = 16


def at(node: Any, index: Index) -> Any:
    """Return the value of `node` at `index` as a sympy expression."""
    if isinstance(node, bool):
        return sympy.true if node else sympy.false
    if not isinstance(node, Node):
        return _number(node)
    if not isinstance(val(node), torch.Tensor):
        return _number(val(node))
    result = _view(node, index) if node.op == "call_function" else None
    if result is None and node.op == "call_function":
        result = _compute(node, index)
    if result is None:
        return LOAD(sympy.Symbol(node.name), *index)
    return result if is_truth(result) or val(node).dtype != torch.bool else truth(result)


def _number(value: Any) -> Any:
    """Convert a Python number or a size to a sympy expression."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # sympy's 0.0 and 0 are not equal
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def _broadcast(operand: Any, index: Index) -> Index:
    """Return the index of an operand that broadcasts to a value at `index`."""
    if not isinstance(val(operand), torch.Tensor):
        return ()
    sizes = shape(operand)
    tail = index[len(index) - len(sizes) :]
    return tuple(sympy.Integer(0) if known(s == 1) else i for i, s in zip(tail, sizes, strict=True))


def _view(node: Node, index: Index) -> Any:
    """Return the value at `index` of a node that only moves values, else None."""
    x: Any = node.args[0] if node.args else None
    rank = len(index)
    if is_call(node, *COPIES):
        return at(x, index)
    if is_call(node, *CASTS):
        return _cast(at(x, index), val(x).dtype, val(node).dtype)
    if is_call(node, aten.repeat.default):
        tail = index[rank - len(shape(x)) :]
        return at(x, tuple(i if known(s == d) else i % _number(s) for i, s, d in _repeated(node, x, tail)))
    if is_call(node, aten.expand.default):
        return at(x, _broadcast(x, index))
    if is_call(node, aten.unsqueeze.default):
        d = arg(node, "dim") % rank
        return at(x, index[:d] + index[d + 1 :])
    if is_call(node, aten.permute.default):
        order: Any = node.args[1]
        source = [index[list(order).index(d)] for d in range(rank)]
        return at(x, tuple(source))
    if is_call(node, aten.slice.Tensor):
        d = arg(node, "dim") % rank
        start, step = arg(node, "start") or 0, arg(node, "step")
        if not isinstance(start, int) or start < 0 or not isinstance(step, int):
            return None
        return at(x, (*index[:d], index[d] * step + start, *index[d + 1 :]))
    if is_call(node, aten.select.int):
        d, i = arg(node, "dim") % (rank + 1), arg(node, "index")
        return at(x, (*index[:d], _number(i), *index[d:])) if isinstance(i, int) and i >= 0 else None
    if is_call(node, aten.view.default, aten.reshape.default):
        return _reshape(x, node, index)
    if is_call(node, aten.cat.default):
        return _cat(node, index)
    return None


def _repeated(node: Node, x: Any, tail: Index) -> Any:
    """Pair each index with the sizes of a dimension before and after `repeat`."""
    return zip(tail, shape(x), shape(node)[len(shape(node)) - len(tail) :], strict=True)


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """Convert a value between dtypes; return None where a cast to integer would cut off a fraction."""
    if after == torch.bool:
        return truth(value)
    if before.is_floating_point and not after.is_floating_point and not all(v.is_integer for v, _ in cases(value)):
        return None
    return _held(numeric(value), after)


def _held(value: Any, kind: torch.dtype) -> Any:
    """Return the value, or None if an integer of fewer than 32 bits may not hold it."""
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or kind.itemsize >= 4:
        return value
    limits = torch.iinfo(kind)
    return value if all(v.is_Integer and limits.min <= v <= limits.max for v, _ in cases(value)) else None


def _reshape(x: Any, node: Node, index: Index) -> Any:
    """Return the value of a reshape that only adds or drops dimensions of size one, else None."""
    kept = [i for i, s in zip(index, shape(node), strict=True) if not known(s == 1)]
    sizes = shape(x)
    wide = [s for s in sizes if not known(s == 1)]
    have = [s for s in shape(node) if not known(s == 1)]
    if len(wide) != len(have) or not all(known(a == b) for a, b in zip(wide, have, strict=True)):
        return None
    queue = iter(kept)
    return at(x, tuple(sympy.Integer(0) if known(s == 1) else next(queue) for s in sizes))


def _cat(node: Node, index: Index) -> Any:
    """Return the value of a concatenation: a Piecewise with one case per part."""
    parts: Any = node.args[0]
    d = arg(node, "dim") % len(index)
    offset: Any = sympy.Integer(0)
    cases: list[tuple[Any, Any]] = []
    for part in parts:
        size = _number(shape(part)[d])
        here = sympy.Eq(index[d], offset) if size == 1 else index[d] < offset + size
        cases.append((numeric(at(part, (*index[:d], index[d] - offset, *index[d + 1 :]))), here))
        offset = offset + size
    cases[-1] = (cases[-1][0], sympy.true)
    return sympy.Piecewise(*cases)


def _compute(node: Node, index: Index) -> Any:
    """Return the value at `index` of a node that computes, else None."""
    target: Any = node.target
    if target is prims.iota.default:
        return sympy.Integer(node.kwargs["start"]) + sympy.Integer(node.kwargs["step"]) * index[0]
    if target is aten.full.default:
        return at(node.args[1], ())
    if target is aten.scalar_tensor.default:
        return at(node.args[0], ())
    if target is aten.index.Tensor:
        return _gather(node, index)
    if target is aten.cumsum.default:
        return _cumsum(node, index)
    operands = pointwise_operands(node)
    value = None if operands is None else combine(node, [at(x, _broadcast(x, index)) for x in operands])
    return None if value is None else _held(value, val(node).dtype)


def opaque(name: str) -> Any:
    """Return an opaque sympy function for a function of the epilogue language. `abs`, `max` and `min` keep integers."""
    kept = name in ("abs", "max", "min")
    return lambda *xs: sympy.Function(f"tile_{name}", integer=(kept and all(x.is_integer for x in xs)) or None)(*xs)


def _in_order(name: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Apply an operation to two numbers, but keep it opaque where sympy would expand a sum of fractions.

    `s + (1 - x) * -1e9` is not `s - 1e9 + x * 1e9`, because the latter loses `s` to rounding.
    """
    sums = [x for x in (a, b) if x.is_Add]
    parts = sums if name in ("add", "sub") else (a, b, operation(a, b))
    return opaque(name)(a, b) if sums and not all(x.is_integer for x in parts) else operation(a, b)


# Functions of the table on sympy expressions. A row names its function in `index`.


def add(a: Any, b: Any) -> Any:
    """Return the sum of two numbers without reordering either."""
    return _in_order("add", operator.add, numeric(a), numeric(b))


def sub(a: Any, b: Any) -> Any:
    """Return the difference of two numbers without reordering either."""
    return _in_order("sub", operator.sub, numeric(a), numeric(b))


def mul(a: Any, b: Any) -> Any:
    """Return the product of two numbers without reordering either."""
    return _in_order("mul", operator.mul, numeric(a), numeric(b))


def div(a: Any, b: Any) -> Any:
    """Return the quotient by a constant that is not 0; any other quotient is opaque."""
    a, b = numeric(a), numeric(b)
    return _in_order("div", operator.truediv, a, b) if b.is_number and b != 0 else opaque("div")(a, b)


def power(a: Any, b: Any) -> Any:
    """Return a power with the exponent 1, 2 or 3; any other power is opaque."""
    a, b = numeric(a), numeric(b)
    return a**b if b.is_Integer and 0 < b <= 3 else opaque("pow")(a, b)


def negative(a: Any) -> Any:
    """Return the negated number."""
    return -numeric(a)


def floor(a: Any) -> Any:
    """Return an integer unchanged; any other floor is opaque, since sympy would move integer terms out of it."""
    a = numeric(a)
    return a if a.is_integer else opaque("floor")(a)


def _relation(relation: Any) -> Callable[[Any, Any], Any]:
    """Return a function that compares two numbers and gives a condition."""
    return lambda a, b: _compare(relation, numeric(a), numeric(b))


gt, ge, lt, le, eq, ne = map(_relation, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le, sympy.Eq, sympy.Ne))


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where a condition holds, else `no`. The result is a condition if either of the two is one."""
    condition = truth(condition)
    if is_truth(yes) or is_truth(no):
        return sympy.Or(sympy.And(condition, truth(yes)), sympy.And(sympy.Not(condition), truth(no)))
    return _fold(sympy.Piecewise((yes, condition), (no, sympy.true)))


def _apply(name: str, operands: Sequence[Any]) -> Any:
    """Apply a function of the epilogue table to sympy expressions."""
    row = FUNCTIONS[name]
    if row.index is not None:
        value = bind(row.index, sys.modules[__name__])(*operands)
    else:
        value = opaque(name)(*map(numeric, operands))
        if len(operands) == 1:
            return value
    return value if is_truth(value) else _fold(value)


def _floored(a: Any, b: Any) -> Any:
    """Return the floor of a quotient; a quotient of non-integers stays opaque under the floor."""
    whole = a.is_integer and b.is_integer
    return sympy.floor(a / b if whole else opaque("div")(a, b))


def pointwise_operands(node: Node) -> list[Any] | None:
    """Return the operands of a node that `combine` can evaluate; None for other nodes."""
    target: Any = node.target
    if target in (aten.bitwise_not.default, aten.logical_not.default):
        return [node.args[0]]
    if _floors(node) or getattr(target, "overloadpacket", None) in (*_WHOLE, *_LOGIC):
        return list(node.args[:2])
    call = call_of(node)
    return None if call is None else list(call.leaves())


def combine(node: Node, values: Sequence[Any]) -> Any:
    """Compute the value of a node from the values of its `pointwise_operands`; None if it has no expression."""
    target: Any = node.target
    if target in (aten.bitwise_not.default, aten.logical_not.default):
        return sympy.Not(truth(values[0])) if val(node).dtype == torch.bool else None
    packet = target.overloadpacket
    if packet in _LOGIC:
        return _LOGIC[packet](*map(truth, values)) if val(node).dtype == torch.bool else None
    if _floors(node):
        packet = aten.floor_divide
    if packet in _WHOLE:
        return _fold(_WHOLE[packet](*map(numeric, values)))
    call, rest = call_of(node), iter(values)
    return None if call is None else call.reduce(lambda _: next(rest), _apply)


def _floors(node: Node) -> bool:
    """Return whether a node is a quotient that is rounded down."""
    return getattr(node.target, "overloadpacket", None) is aten.div and node.kwargs.get("rounding_mode") == "floor"


def _gather(node: Node, index: Index) -> Any:
    """Return the value of advanced indexing with one index tensor per dimension. None if an index may be negative."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    if any(i is None for i in indices) or len(indices) != len(shape(x)):
        return None
    if any(val(i).dtype == torch.bool for i in indices):
        return None
    places = tuple(at(i, _broadcast(i, index)) for i in indices)
    return at(x, places) if all(p.is_nonnegative for p in places) else None


def _cumsum(node: Node, index: Index) -> Any:
    """Return 0 for a running sum of values that are all false, else None (opaque)."""
    d = arg(node, "dim") % len(index)
    position = sympy.Symbol("_position", integer=True, nonnegative=True)
    term = at(node.args[0], (*index[:d], position, *index[d + 1 :]))
    return sympy.Integer(0) if term in (sympy.false, 0) else None


def is_truth(value: Any) -> bool:
    """Return whether a value is a sympy condition."""
    return isinstance(value, sympy.logic.boolalg.Boolean) and not isinstance(value, sympy.Symbol)


def truth(value: Any) -> Any:
    """Convert a value to a condition: any value except 0 is true."""
    return value if is_truth(value) else _compare(sympy.Ne, value, sympy.Integer(0))


def numeric(value: Any) -> Any:
    """Convert a value to a number: 1 where a condition holds, else 0."""
    return choose(value, sympy.Integer(1), sympy.Integer(0)) if is_truth(value) else value


def cases(value: Any) -> list[tuple[Any, Any]]:
    """List the possible values of an expression, each with its condition. Exactly one condition holds."""
    if not isinstance(value, sympy.Piecewise):
        return [(value, sympy.true)]
    found, before = [], sympy.false
    for case, condition in value.args:
        found.append((case, sympy.And(condition, sympy.Not(before))))
        before = sympy.Or(before, condition)
    if len(found) > _MOST_CASES:
        raise NotImplementedError("too many cases")
    return found


def _compare(relation: Any, a: Any, b: Any) -> Any:
    """Compare two values case by case."""
    a, b = (sympy.piecewise_fold(x) if hasattr(x, "has") and x.has(sympy.Piecewise) else x for x in (a, b))
    return sympy.Or(*(sympy.And(p, q, relation(x, y)) for x, p in cases(a) for y, q in cases(b)))


def _fold(value: Any) -> Any:
    """Push an operation into the cases of a `cat`; merge equal cases into one."""
    if not (hasattr(value, "has") and value.has(sympy.Piecewise)):
        return value
    value = sympy.piecewise_fold(value)
    if not isinstance(value, sympy.Piecewise):
        return value
    cases = [(e.subs(c.lhs, c.rhs) if isinstance(c, sympy.Eq) and c.lhs.is_Symbol else e, c) for e, c in value.args]
    return cases[0][0] if len({e for e, _ in cases}) == 1 else sympy.Piecewise(*cases)
