# SPDX-License-Identifier: Apache-2.0
"""Which masks the attention kernel knows by rule: causal with an offset, sliding window, or a tensor.

A rule is used instead of a tensor only when it is proved to say the same for every index. A mask that also depends on
data (padding, packed sequences) stays a tensor.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tile.inductor.passes import lift
from torch_tile.inductor.passes.graph import Rewrite, aten, constant, dtype, is_call, known, shape
from torch_tile.inductor.passes.lift import K, Q
from torch_tile.inductor.passes.views import Group, arrange, leaves


@dataclass
class Rule:
    """`k <= q + offset` if causal, and `k > q + offset - window` if a window; `complete` if the mask says no more."""

    causal: bool
    window: int
    offset: Any
    complete: bool = True

    def offset_argument(self, rewrite: Rewrite, q: Node, k: Node) -> Any:
        """The offset as an argument: a number, or a node computing the key length minus the query length."""
        if isinstance(self.offset, int):
            return self.offset
        sizes = [rewrite.call(aten.sym_size.int, x, 2) for x in (k, q)]
        return rewrite.call(operator.sub, *sizes)


HEADS_THEN_QUERIES = (lift.B, lift.H, Q, K)
QUERIES_THEN_HEADS = (lift.B, Q, lift.H, K)


def _lifted(mask: Node, inverted: bool, order: lift.Index) -> Any:
    """What a boolean mask says, or None if it cannot be read."""
    if dtype(mask) != torch.bool or len(shape(mask)) > 4:
        return None
    try:
        value = lift.lift(mask, order)
    except (TypeError, ValueError, NotImplementedError):
        return None  # sympy cannot represent it
    return sympy.Not(value) if inverted else value


def classify(
    mask: Node, queries: Any, keys: Any, inverted: bool = False, order: lift.Index = HEADS_THEN_QUERIES
) -> Rule | None:
    """The rule of a boolean mask (True: visible), or None if it has none. Sizes may be symbolic."""
    value = _lifted(mask, inverted, order)
    if value is None:
        return None
    rule = Rule(False, 0, 0)
    upper: list[Any] = []
    lower: list[Any] = []
    for part in value.args if isinstance(value, sympy.And) else (value,):
        if part == sympy.true or _always(part, keys):
            continue
        bound = _bound(part, queries)
        if bound is None:
            rule.complete = False
        else:
            (upper if bound[0] == "upper" else lower).append(bound[1])
    if len(upper) > 1 or len(lower) > 1:
        return None
    return _rule(rule, upper, lower, _expr(keys) - _expr(queries))


def _rule(rule: Rule, upper: list[Any], lower: list[Any], difference: Any) -> Rule | None:
    """From `k - q <= upper` and `k - q >= lower`. Only a number or the length difference can be an offset."""
    if upper:
        rule.causal = True
        if upper[0].is_Integer:
            rule.offset = int(upper[0])
        elif sympy.expand(upper[0] - difference) == 0:
            rule.offset = upper[0]
        else:
            return None
    if lower:
        if not rule.causal:
            return None
        window = sympy.expand(upper[0] - lower[0] + 1)
        if not window.is_Integer or int(window) < 1:
            return None
        rule.window = int(window)
    return rule if rule.causal or rule.complete else None


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _bound(part: Any, queries: Any) -> tuple[str, Any] | None:
    """`("upper", c)` for `k - q <= c`, `("lower", c)` for `k - q >= c`; a single query is q = 0."""
    if not isinstance(part, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt) or part.has(lift.LOAD):
        return None
    strict = isinstance(part, sympy.Lt | sympy.Gt)
    less = isinstance(part, sympy.Le | sympy.Lt)
    expr = sympy.expand(part.lhs - part.rhs)
    slope = expr.coeff(K)
    if slope not in (1, -1):
        return None
    wanted = {-slope} | ({sympy.Integer(0)} if known(queries == 1) else set())
    if expr.coeff(Q) not in wanted:
        return None
    rest = sympy.expand(expr - slope * K - expr.coeff(Q) * Q)
    if rest.free_symbols & {lift.B, lift.H, Q, K}:
        return None
    # slope * (k - q) + rest <= 0 (or < 0, >= 0, > 0), all integers
    if less == (slope == 1):
        return "upper", -slope * rest - (1 if strict else 0)
    return "lower", -slope * rest + (1 if strict else 0)


def _always(part: Any, keys: Any) -> bool:
    """Whether a bound on `k` alone holds because keys are counted from 0 to the key length."""
    if not isinstance(part, sympy.Le | sympy.Lt) or part.has(lift.LOAD):
        return False
    gap = sympy.expand(part.rhs - part.lhs)
    if gap.free_symbols & {lift.B, lift.H, Q} or gap.coeff(K) != -1:
        return False
    slack = sympy.expand(gap + K - (_expr(keys) - 1))
    return bool(slack.is_Integer and (slack > 0 if isinstance(part, sympy.Lt) else slack >= 0))


def combine(rewrite: Rewrite, pattern: Any, dims: list[Group]) -> tuple[Node | None, bool, int, Any]:
    """The mask operand, causal, window and q_offset for a written-out attention with dimensions [B, H, Sq, Skv]."""
    queries, keys = shape(pattern.softmax)[-2], shape(pattern.softmax)[-1]
    natural = _natural(pattern, dims)
    rule = Rule(False, 0, 0)
    tensor: Node | None = None
    for mask in pattern.masks:
        node, fill, inverted, additive = condition_of(mask)
        found = None if additive or not natural or rule.causal else classify(node, queries, keys, inverted)
        if found is not None and found.complete and isinstance(found.offset, int) and exact(found, fill, queries, keys):
            rule = found
            continue
        tensor = _join(rewrite, tensor, _as_operand(rewrite, pattern, node, fill, inverted, additive))
    if tensor is not None and not natural:
        tensor = _arranged(rewrite, tensor, pattern, dims)
    return tensor, rule.causal, rule.window, rule.offset


def condition_of(mask: Any) -> tuple[Any, float, bool, bool]:
    """(tensor, fill, inverted, additive) of a mask, where `where(condition, 0, fill)` that is added is a condition."""
    node = mask.node
    if mask.additive and is_call(node, aten.where.self):
        yes, no = constant(node.args[1]), constant(node.args[2])
        if yes == 0.0 and no is not None:
            return node.args[0], no, False, False
        if no == 0.0 and yes is not None:
            return node.args[0], yes, True, False
    return node, mask.fill, mask.inverted, mask.additive


def lengths(mask: Node, inverted: bool) -> tuple[str, int] | None:
    """`(name, c)` if the mask says `k < lens[b] + c` with `lens` the tensor node of that name and nothing else."""
    value = _lifted(mask, inverted, HEADS_THEN_QUERIES)
    if not isinstance(value, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
        return None
    strict, less = isinstance(value, sympy.Lt | sympy.Gt), isinstance(value, sympy.Le | sympy.Lt)
    gap = sympy.expand(value.rhs - value.lhs if less else value.lhs - value.rhs)  # > 0, or >= 0
    loads = list(gap.atoms(lift.LOAD))
    if len(loads) != 1 or gap.coeff(K) != -1 or gap.coeff(loads[0]) != 1:
        return None
    name, *index = loads[0].args
    rest = sympy.expand(gap + K - loads[0])
    if not rest.is_Integer or [i for i in index if i != 0] != [lift.B]:
        return None
    return str(name), int(rest) + (0 if strict else 1)


def _natural(pattern: Any, dims: list[Group]) -> bool:
    """Whether the softmax already is [B, H, Sq, Skv]."""
    own = pattern.dims
    return len(own) == 4 and all(leaves(a) == leaves(b) for a, b in zip(own, dims, strict=True))


def exact(rule: Rule, fill: float, queries: Any, keys: Any) -> bool:
    """Whether hiding is the same as adding `fill`: always for -inf; for a large number if every query sees a key."""
    if fill == -math.inf:
        return True
    sees_itself = not rule.window or known(rule.offset + queries <= keys)
    return fill < -1e4 and rule.offset >= 0 and bool(sees_itself)


def _as_operand(rewrite: Rewrite, pattern: Any, node: Node, fill: float, inverted: bool, additive: bool) -> Node:
    """The mask as a tensor that `tile.attention` takes: bool, or floating to be added."""
    if additive:
        return node
    if inverted:
        node = rewrite.call(aten.logical_not.default, node)
    if fill == -math.inf:
        return node
    like = {"dtype": dtype(pattern.value.root), "device": node.meta["val"].device}
    zero = rewrite.call(aten.full.default, [], 0.0, **like)
    low = rewrite.call(aten.full.default, [], fill, **like)
    return rewrite.call(aten.where.self, node, zero, low)


def _join(rewrite: Rewrite, a: Node | None, b: Node) -> Node:
    """Both masks."""
    if a is None:
        return b
    if dtype(a) == torch.bool and dtype(b) == torch.bool:
        return rewrite.call(aten.bitwise_and.Tensor, a, b)
    if dtype(a) == torch.bool or dtype(b) == torch.bool:
        keep, bias = (a, b) if dtype(a) == torch.bool else (b, a)
        low = rewrite.call(aten.full.default, [], -math.inf, dtype=dtype(bias), device=bias.meta["val"].device)
        return rewrite.call(aten.where.self, keep, bias, low)
    return rewrite.call(aten.add.Tensor, a, b)


def _arranged(rewrite: Rewrite, mask: Node, pattern: Any, dims: list[Group]) -> Node:
    """A mask in the softmax's shape as one in attention's."""
    sizes = shape(mask)
    own = pattern.dims[len(pattern.dims) - len(sizes) :]
    have = [[] if known(s == 1) else leaves(g) for g, s in zip(own, sizes, strict=True)]
    new = arrange(rewrite, mask, have, dims)
    if new is None:
        from torch_tile.inductor.passes.scores import NoMatch

        raise NoMatch(
            "the mask has other dimensions than attention's",
            "make it broadcastable to [batch, heads, queries, keys]",
            at=mask,
        )
    return new
