# SPDX-License-Identifier: Apache-2.0
"""Write what a model computes on scores between product and softmax as text for `tile.attention`.

The computation is read as a sympy expression (index_expr.py) of the product, the score's index, and loads of tensors.
It is then written in the epilogue language. A load is an operand of the op: its dimensions are some of the scores'
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import Group, arrange, extent, leaves, trace
from torch_tile.inductor.graph.nodes import (
    CAST,
    Miss,
    Rewrite,
    dtype,
    expression,
    is_call,
    is_tensor,
    known,
    name_of,
    ordered,
    shape,
)
from torch_tile.inductor.graph.pointwise import WORDS
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.patterns.attention.scores import Modified, NoMatch, Product, addend_of, aligned
from torch_tile.kernels.epilogue.canonicalize import canonical

SCORE = sympy.Symbol("score")
"""The product of a query and a key, times the op's `scale`."""

POSITION = sympy.Symbol("position", integer=True)
"""Position of a query among the keys: its index plus the op's offset."""

MOST_STATEMENTS = 32
_RELATIONS = {
    sympy.Eq: "eq", sympy.Ne: "ne", sympy.Lt: "lt", sympy.Le: "le", sympy.Gt: "gt", sympy.Ge: "ge",
}  # fmt: skip


class Unwritable(Miss):
    """Reason why an expression has no text in the epilogue language."""


def read(modified: Modified, product: Product, places: Places, rewrite: Rewrite) -> Any:
    """Return the expression that computes `modified` from `product`, including its scale and factors."""
    position = ordered(rewrite.graph)
    inside = _nodes_between(product.node, modified.node, position)
    values: dict[Any, Any] = {}

    def value(node: Any, groups: list[Group]) -> Any:
        """Return the expression of a node, whose dimensions are `groups`."""
        if not is_tensor(node):
            return index_expr.at(node, ())
        root, groups = trace(node, groups)
        here = (root, tuple(map(tuple, groups)))
        if here in values:
            return values[here]
        if root is product.node:
            if groups != [leaves(g) for g in product.groups]:
                raise NoMatch(
                    "scores of different queries and keys are combined", "change each score by itself", at=root
                )
            result = _product(root, value, groups)
        elif root not in inside:
            return _value_at_score(root, groups, places, rewrite)
        elif is_call(root, CAST) and dtype(root).is_floating_point:
            result = index_expr.numeric(value(root.args[0], groups))
        else:
            operands = index_expr.pointwise_operands(root)
            result = None
            if operands is not None:
                result = index_expr.combine(
                    root, [value(x, aligned(x, groups) if is_tensor(x) else []) for x in operands]
                )
            if result is None:
                raise NoMatch(
                    f"{name_of(root)} in a modification of the scores has no word in the kernel's language",
                    WORDS,
                    at=root,
                )
        values[here] = result
        return result

    return value(modified.node, modified.groups)


def _nodes_between(product: Node, last: Node, position: dict[Node, int]) -> set[Node]:
    """Return the nodes that depend on `product` and that `last` depends on, both included."""
    above: set[Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node not in above and position[node] >= position[product]:
            above.add(node)
            stack.extend(node.all_input_nodes)
    inside = {product}
    for node in sorted(above, key=position.__getitem__):
        if any(x in inside for x in node.all_input_nodes):
            inside.add(node)
    return inside


def _product(node: Node, value: Any, groups: list[Group]) -> Any:
    """Return the expression of a product: SCORE, with its addend if it has one."""
    found = addend_of(node)
    if found is None:
        return SCORE
    addend, beta, alpha = found
    scaled = alpha * SCORE
    return (
        index_expr.add(scaled, index_expr.mul(sympy.sympify(beta), value(addend, aligned(addend, groups))))
        if beta
        else scaled
    )


def _value_at_score(node: Node, groups: list[Group], places: Places, rewrite: Rewrite) -> Any:
    """Return a tensor's value at a score: index arithmetic and small tensors if possible, else a load of the tensor."""
    index = places.index(groups)
    try:
        value = index_expr.at(node, index)
        if all(is_operand(load, places, rewrite) for load in loads(value)):
            return value
    except (TypeError, ValueError, NotImplementedError):
        pass  # sympy cannot represent it
    load = index_expr.LOAD(sympy.Symbol(node.name), *index)
    return index_expr.truth(load) if dtype(node) == torch.bool else load


def loads(value: Any) -> set[Any]:
    """Return the loads of an expression."""
    return set(value.atoms(index_expr.LOAD))


def is_operand(load: Any, places: Places, rewrite: Rewrite) -> bool:
    """Return whether a load has one element per combination of some dimensions, of a floating dtype or bool."""
    node = node_named(rewrite, load.args[0].name)
    if node is None or not is_tensor(node) or not (dtype(node).is_floating_point or dtype(node) == torch.bool):
        return False
    have = [places.group(i) for i in load.args[1:]]
    return all(g is not None and known(extent(g) == size) for g, size in zip(have, shape(node), strict=True))


def compared(value: Any, rewrite: Rewrite) -> Any:
    """Replace comparisons of integer tensors with numbers by loads of bool tensors that the rewrite computes.

    Kernels read bool tensors but no integer tensors.
    """
    found = {}
    for relation in value.atoms(sympy.core.relational.Relational):
        load, number = relation.args
        if load.func != index_expr.LOAD or not number.is_Integer or type(relation) not in _RELATIONS:
            continue
        node = node_named(rewrite, load.args[0].name)
        if node is not None and not (dtype(node).is_floating_point or dtype(node) == torch.bool):
            packet = getattr(torch.ops.aten, _RELATIONS[type(relation)])
            new = rewrite.call(packet.Scalar, node, int(number))
            found[relation] = index_expr.truth(index_expr.LOAD(sympy.Symbol(new.name), *load.args[1:]))
    return value.xreplace(found)


def is_small(value: Any, places: Places, rewrite: Rewrite) -> bool:
    """Return whether no tensor in an expression has both queries and keys."""
    both = {index_expr.Q, index_expr.K}
    return all(is_operand(x, places, rewrite) and not both <= set(x.args[1:]) for x in loads(value))


def reads_sizes(value: Any) -> bool:
    """Return whether an expression contains symbolic sizes."""
    names = {load.args[0] for load in loads(value)}
    return any(not index_expr.is_place(x) and x != SCORE and x not in names for x in value.free_symbols)


def last_at_last(dims: Sequence[Group]) -> Any:
    """Return the offset that aligns the last query with the last key: key length less query length (`Rule.offset`)."""
    difference = expression(extent(dims[3])) - expression(extent(dims[2]))
    return int(difference) if difference.is_Integer else difference


def node_named(rewrite: Rewrite, name: str) -> Node | None:
    """Return the node of a graph with this name, or None."""
    return next((n for n in rewrite.graph.nodes if n.name == name), None)


def split_scale(value: Any) -> tuple[float, Any]:
    """Split `value` into `(c, f)` with `value = f(c * SCORE)`. c is 1 unless all uses have one positive factor."""
    found: set[Any] = set()

    def visit(e: Any) -> None:
        if e == SCORE:
            found.add(sympy.Integer(1))
        elif e.is_Mul and SCORE in e.args:
            found.add(sympy.Mul(*(a for a in e.args if a.is_number)))
            for a in e.args:
                if a != SCORE:
                    visit(a)
        else:
            for a in e.args:
                visit(a)

    visit(value)
    number = float(found.pop()) if len(found) == 1 else 1.0
    if not 0 < number < math.inf or number == 1:
        return 1.0, value
    bare = value.replace(
        lambda e: e.is_Mul and SCORE in e.args, lambda e: sympy.Mul(*(a for a in e.args if not a.is_number))
    )
    return number, bare


def _without_fractions(*sides: Any) -> list[Any]:
    """Multiply both sides of a relation by their common denominator, since integers are not rounded."""
    factors = [term.as_coeff_Mul()[0] for side in sides for term in sympy.Add.make_args(side)]
    common = sympy.ilcm(1, *(factor.q for factor in factors if factor.is_Rational))
    return [sympy.Add(*(common * term for term in sympy.Add.make_args(side))) for side in sides]


class Text:
    """Text of an expression, and its operands, collected during writing. `i2` counts queries plus `offset`."""

    rewrite: Rewrite
    places: Places
    dims: Sequence[Group]

    def __init__(self, rewrite: Rewrite, places: Places, dims: Sequence[Group], offset: Any) -> None:
        self.rewrite, self.places, self.dims = rewrite, places, dims
        self.offset = offset
        self.aux: list[Node] = []
        self.statements: list[str] = []
        self._names: dict[Any, str] = {}

    def write(self, value: Any) -> str:
        """Return the canonical text; empty if the expression is the score itself."""
        if value == SCORE:
            return ""
        if value.is_number:
            raise Unwritable(f"all scores are {value}")
        held = {load: sympy.Dummy() for load in loads(value)}  # operands are counted by queries, not by positions
        value = value.xreplace(held).subs(index_expr.Q, POSITION - self.offset)
        name = self.say(value.xreplace({dummy: load for load, dummy in held.items()}))
        if len(self.statements) > MOST_STATEMENTS:
            raise Unwritable(f"a modification of the scores by {len(self.statements)} operations")
        return canonical(";".join([*self.statements, f"ret {name}"]))

    def say(self, e: Any) -> str:
        """Return the name or number of an expression; write its statements on first use."""
        if e not in self._names:
            self._names[e] = self._say(e)
        return self._names[e]

    def _call(self, function: str, *operands: str) -> str:
        """Write a statement that calls a function of the table; return its name."""
        self.statements.append(f"v{len(self.statements)}={function}({','.join(operands)})")
        return f"v{len(self.statements) - 1}"

    def _say(self, e: Any) -> str:
        """Write the statements of an expression; return its name or number."""
        if e.is_number and not index_expr.is_truth(e):
            return repr(float(e))
        if e in (sympy.true, sympy.false):
            return "1.0" if e else "0.0"
        if e.is_Symbol:
            return self._write_symbol(e)
        if isinstance(e, sympy.Add):
            return self._write_sum(e)
        if isinstance(e, sympy.Mul):
            return self._write_fold("mul", sorted(e.args, key=lambda a: a.is_number))
        if isinstance(e, sympy.Pow):
            return self._write_power(*e.args)
        if isinstance(e, sympy.Piecewise):
            return self._write_cases(e)
        if isinstance(e, sympy.And | sympy.Or):
            return self._write_fold("mul" if isinstance(e, sympy.And) else "max", e.args)
        if isinstance(e, sympy.Not):
            return self._call("eq", self.say(e.args[0]), "0.0")
        if type(e) in _RELATIONS:
            return self._write_relation(e)
        if isinstance(e, sympy.floor):
            return self._write_floor(e.args[0])
        if e.func == index_expr.LOAD:
            return self._operand(e)
        name = str(e.func)
        if name.startswith("tile_"):
            return self._call(name.removeprefix("tile_"), *map(self.say, e.args))
        raise Unwritable(f"{name} in a modification of the scores")

    def _write_symbol(self, e: Any) -> str:
        """Return the name of the score or of an index. Raises Unwritable for other symbols."""
        known = {SCORE: "acc0", index_expr.B: "i0", index_expr.H: "i1", POSITION: "i2", index_expr.K: "i3"}
        if e not in known:
            raise Unwritable(f"the size {e} in a modification of the scores", "fix this size")
        return known[e]

    def _write_fold(self, function: str, parts: Sequence[Any]) -> str:
        """Write nested calls of a function of two operands over several parts."""
        first, *rest = map(self.say, parts)
        for part in rest:
            first = self._call(function, first, part)
        return first

    def _write_sum(self, e: Any) -> str:
        """Write a sum; subtract the terms with a negative factor after the other terms."""
        plus = [a for a in e.args if not a.could_extract_minus_sign()]
        minus = [-a for a in e.args if a.could_extract_minus_sign()]
        total = self._write_fold("add", sorted(plus, key=lambda a: a.is_number)) if plus else "0.0"
        for term in minus:
            total = self._call("sub", total, self.say(term))
        return total

    def _write_power(self, base: Any, exponent: Any) -> str:
        """Write a power, as a square or reciprocal where possible."""
        if exponent == 2:
            return self._call("square", self.say(base))
        if exponent == -1:
            return self._call("reciprocal", self.say(base))
        return self._call("pow", self.say(base), self.say(exponent))

    def _write_cases(self, e: Any) -> str:
        """Write a Piecewise as nested `where` calls."""
        *cases, (last, always) = e.args
        if always != sympy.true:
            raise Unwritable("a modification of the scores that is not defined everywhere")
        total = self.say(last)
        for case, condition in reversed(cases):
            total = self._call("where", self.say(condition), self.say(case), total)
        return total

    def _write_relation(self, e: Any) -> str:
        """Write a comparison; a bool load is its own result."""
        left, right = e.args
        if (
            isinstance(e, sympy.Ne)
            and right == 0
            and left.func == index_expr.LOAD
            and dtype(self._node(left)) == torch.bool
        ):
            return self.say(left)  # 0 or 1 already
        left, right = _without_fractions(left, right)
        return self._call(_RELATIONS[type(e)], self.say(left), self.say(right))

    def _write_floor(self, e: Any) -> str:
        """Write a floor. An integer quotient is moved halfway between two integers, which no rounding reaches."""
        top, bottom = sympy.fraction(sympy.together(e))
        if not (top.is_integer and bottom.is_Integer):
            return self._call("floor", self.say(e))
        return self._call("floor", self._call("div", self._call("add", self.say(top), "0.5"), repr(float(bottom))))

    def _node(self, load: Any) -> Node:
        """Return the graph node that a load reads."""
        node = node_named(self.rewrite, load.args[0].name)
        assert node is not None, f"{load} is of no node"
        return node

    def _operand(self, load: Any) -> str:
        """Add the tensor of a load as an operand; return its name."""
        node = self._node(load)
        if not is_operand(load, self.places, self.rewrite):
            raise Unwritable("a modification of the scores reads a tensor at computed places", at=node)
        have = [self.places.group(i) or [] for i in load.args[1:]]
        present = {a for g in have for a in leaves(g)}
        want = [g if present & set(leaves(g)) else [] for g in self.dims]
        new = arrange(self.rewrite, node, have, want)
        if new is None:
            raise Unwritable("a modification of the scores reads a tensor with other dimensions", at=node)
        self.aux.append(self.rewrite.reshape(new, [extent(g) for g in want]))
        return f"x{len(self.aux) - 1}"
