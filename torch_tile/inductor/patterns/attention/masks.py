# SPDX-License-Identifier: Apache-2.0
"""Read masks as rules of the attention kernel: causal with an offset, or sliding window; others stay tensors.

A rule replaces a tensor only when it is proved equal for every index. A mask that also depends on data (padding, packed
sequences) stays a tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import Group, arrange, extent, leaves
from torch_tile.inductor.graph.index_expr import K, Q
from torch_tile.inductor.graph.nodes import (
    CAST,
    Rewrite,
    arg,
    aten,
    constant,
    dtype,
    equivalent,
    expression,
    is_call,
    known,
    same_shape,
    shape,
    uncast,
)
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.patterns.attention import score_program
from torch_tile.inductor.patterns.attention.scores import Mask, NoMatch
from torch_tile.inductor.patterns.norm.statistics import reduced


@dataclass
class Rule:
    """Rule of a mask: `k <= q + offset` if causal, `k > q + offset - window` if `window`, and the condition `rest`."""

    causal: bool
    window: int
    offset: Any
    rest: Any = sympy.true

    @property
    def complete(self) -> bool:
        """Return whether the rule states the whole mask."""
        return bool(self.rest == sympy.true)

    def offset_argument(self, rewrite: Rewrite, q: Node, k: Node) -> Any:
        """Return the offset as an argument: a number, or a node that computes key length minus query length."""
        if isinstance(self.offset, int):
            return self.offset
        sizes = [rewrite.call(aten.sym_size.int, x, 2) for x in (k, q)]
        return rewrite.call(operator.sub, *sizes)


def what_it_says(mask: Mask, places: Places) -> tuple[Any, float] | None:
    """Return the condition under which a key is visible, and the fill or addend of hidden scores, else None."""
    try:
        value = index_expr.at(mask.node, places.index(mask.groups))
    except (TypeError, ValueError, NotImplementedError):
        return None  # sympy cannot represent it
    if not mask.additive:
        truth = index_expr.truth(value)
        return sympy.Not(truth) if mask.inverted else truth, mask.fill
    visible, fills = [], set()
    for case, condition in index_expr.cases(value):
        if case == 0:
            visible.append(condition)
        else:
            fills.add(case)
    if len(fills) != 1 or not visible or not (fill := fills.pop()).is_number or fill is sympy.nan:
        return None
    return sympy.Or(*visible), float(fill) * mask.scale


def classify(visible: Any, queries: Any, keys: Any) -> Rule | None:
    """Find the rule of a condition on an index; None if there is no rule. Sizes may be symbolic."""
    rule = Rule(False, 0, 0)
    upper: list[Any] = []
    lower: list[Any] = []
    held: dict[Any, Any] = {}
    visible = sympy.to_nnf(visible, simplify=False)
    for part in visible.args if isinstance(visible, sympy.And) else (visible,):
        if part == sympy.true or _always_holds(part, keys):
            continue
        bound = _bound(part, queries)
        if bound is None:
            rule.rest = sympy.And(rule.rest, part)
        else:
            held |= {part: sympy.true, part.negated: sympy.false}
            (upper if bound[0] == "upper" else lower).append(bound[1])
    if len(upper) > 1 or len(lower) > 1:
        return None
    rule.rest = rule.rest.xreplace(held)
    return _rule(rule, upper, lower, expression(keys) - expression(queries))


def _rule(rule: Rule, upper: list[Any], lower: list[Any], difference: Any) -> Rule | None:
    """Build a rule from `k - q <= upper` and `k - q >= lower`. An offset is a number or the length difference."""
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


def _bound(part: Any, queries: Any) -> tuple[str, Any] | None:
    """Return `("upper", c)` for `k - q <= c` and `("lower", c)` for `k - q >= c`. A single query is q = 0."""
    if not isinstance(part, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt) or part.has(index_expr.LOAD):
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
    if any(index_expr.is_place(x) for x in rest.free_symbols):
        return None
    # slope * (k - q) + rest <= 0 (or < 0, >= 0, > 0), all integers
    if less == (slope == 1):
        return "upper", -slope * rest - (1 if strict else 0)
    return "lower", -slope * rest + (1 if strict else 0)


def _always_holds(part: Any, keys: Any) -> bool:
    """Return whether a bound on the key index `k` is true for all keys."""
    if not isinstance(part, sympy.Le | sympy.Lt) or part.has(index_expr.LOAD):
        return False
    gap = sympy.expand(part.rhs - part.lhs)
    if any(index_expr.is_place(x) and x != K for x in gap.free_symbols) or gap.coeff(K) != -1:
        return False
    slack = sympy.expand(gap + K - (expression(keys) - 1))
    return bool(slack.is_Integer and (slack > 0 if isinstance(part, sympy.Lt) else slack >= 0))


@dataclass
class Said:
    """Meaning of all masks: a rule, a tensor for the rest, and an expression of the score (score_program.py)."""

    rule: Rule
    tensor: Node | None
    score: Any


def combine(
    rewrite: Rewrite, masks: Sequence[Mask], dims: Sequence[Group], score: Any, places: Places, in_text: bool = True
) -> Said:
    """Apply masks in their order to the expression `score`. The scores have dimensions `dims`, [B, H, Sq, Skv].

    With `in_text`, a mask that is computed from positions and small tensors becomes part of the expression.
    """
    queries, keys = extent(dims[2]), extent(dims[3])
    said = Said(Rule(False, 0, 0), None, score)
    for mask in masks:
        seen = None if said.rule.causal else what_it_says(mask, places)
        found = None if seen is None else classify(seen[0], queries, keys)
        if seen is None or found is None or not exact(found, seen[1], queries, keys):
            found = None
        elif found.complete:
            said.rule = found
            continue
        hides = found is not None and (found.causal or found.window > 0) and seen is not None and seen[1] == -math.inf
        rest = found.rest if found is not None and hides else None
        after = None
        if in_text and said.tensor is None:
            after = _masked_score(rewrite, mask, said.score, rest, places, dims)
        if after is not None:
            said.score = after
        else:
            said.tensor = _with(rewrite, said.tensor, mask, dims)
        if found is not None and hides and (after is not None or not mask.additive):
            said.rule = found
    return said


def _masked_score(rewrite: Rewrite, mask: Mask, score: Any, rest: Any, places: Places, dims: Sequence[Group]) -> Any:
    """Apply a mask with both queries and keys to the expression of the score. With `rest`, apply only that part of the
    mask.

    Returns None if the mask reads a tensor with both queries and keys. Such a mask stays a tensor.
    """
    own = {a for g in mask.groups for a in leaves(g)}
    if not all(set(leaves(dims[d])) <= own for d in (2, 3)):
        return None
    try:
        value = index_expr.at(mask.node, places.index(mask.groups)) if rest is None else rest
    except (TypeError, ValueError, NotImplementedError):
        return None  # sympy cannot represent it
    value = score_program.compared(value, rewrite)
    if not score_program.is_small(value, places, rewrite) or sympy.count_ops(value) > score_program.MOST_STATEMENTS:
        return None
    if rest is None and mask.additive:
        return index_expr.add(score, index_expr.mul(sympy.sympify(mask.scale), index_expr.numeric(value)))
    keep = index_expr.truth(value)
    if rest is None and mask.inverted:
        keep = sympy.Not(keep)
    return sympy.Piecewise((score, keep), (sympy.Float(mask.fill) if rest is None else -sympy.oo, True))


def _as_condition(mask: Mask) -> Mask:
    """Turn a mask that adds `where(condition, 0, -inf)` into a mask by that condition."""
    node = mask.node
    if mask.additive and is_call(node, aten.where.self) and isinstance(node.args[0], Node):
        condition, yes, no = node.args[0], constant(node.args[1]), constant(node.args[2])
        for zero, fill, inverted in ((yes, no, False), (no, yes, True)):
            hides = fill is not None and fill * mask.scale == -math.inf
            if zero == 0.0 and hides and same_shape(shape(condition), shape(node)):
                return Mask(condition, mask.groups, False, -math.inf, inverted)
    return mask


def lengths(visible: Any) -> tuple[str, int] | None:
    """Return `(name, c)` if a condition is `k < lens[b] + c`, with `lens` the tensor node `name`, else None."""
    if not isinstance(visible, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
        return None
    strict, less = isinstance(visible, sympy.Lt | sympy.Gt), isinstance(visible, sympy.Le | sympy.Lt)
    gap = sympy.expand(visible.rhs - visible.lhs if less else visible.lhs - visible.rhs)  # > 0, or >= 0
    loads = list(gap.atoms(index_expr.LOAD))
    if len(loads) != 1 or gap.coeff(K) != -1 or gap.coeff(loads[0]) != 1:
        return None
    name, *index = loads[0].args
    rest = sympy.expand(gap + K - loads[0])
    if not rest.is_Integer or [i for i in index if i != 0] != [index_expr.B]:
        return None
    return str(name), int(rest) + (0 if strict else 1)


ENOUGH = -1e4
"""Threshold of a mask: a number below it hides a score, whether it is added to the score or replaces it."""


def exact(rule: Rule, fill: float, queries: Any, keys: Any) -> bool:
    """Return whether hiding a score equals adding `fill`: -inf, or very negative where every query sees a key."""
    if fill == -math.inf or not (rule.causal or rule.window):
        return True
    if not fill <= ENOUGH or not isinstance(rule.offset, int):
        return False
    sees_itself = not rule.window or known(rule.offset + queries <= keys)
    return rule.offset >= 0 and bool(sees_itself)


def _with(rewrite: Rewrite, before: Node | None, mask: Mask, dims: Sequence[Group]) -> Node:
    """Add a mask to `before`, as a bool or floating tensor for `tile.attention` that broadcasts to `dims`."""
    mask = _as_condition(mask)
    node = _arranged(rewrite, mask.node, mask.groups, dims)
    if mask.additive:
        if not dtype(node).is_floating_point:  # a bool tensor would hide, not be added
            node = rewrite.call(CAST, node, torch.float32)
        node = node if mask.scale == 1 else rewrite.call(aten.mul.Tensor, node, float(mask.scale))
        return _join(rewrite, before, node)
    if mask.inverted:
        node = rewrite.call(aten.logical_not.default, node)
    if mask.fill == -math.inf:
        return _join(rewrite, before, node)
    if not mask.fill <= ENOUGH:
        raise NoMatch(f"scores are replaced by {mask.fill}, which does not hide them", "mask with -inf", at=mask.node)
    if before is not None and dtype(before) == torch.bool:
        before = _hidden(rewrite, before, None, -math.inf)
    # A query that sees no key weighs all keys equally: the lowest number absorbs the score, as in the model.
    return _hidden(rewrite, node, before, torch.finfo(torch.float32).min)


def _hidden(rewrite: Rewrite, keep: Node, bias: Node | None, low: float) -> Node:
    """Return `bias` (None: 0) in at least float32 where `keep` is true, `low` elsewhere."""
    kind = torch.float32 if bias is None else torch.promote_types(dtype(bias), torch.float32)
    like = {"dtype": kind, "device": keep.meta["val"].device}
    if bias is None:
        bias = rewrite.call(aten.full.default, [], 0.0, **like)
    elif dtype(bias) != kind:
        bias = rewrite.call(CAST, bias, kind)
    return rewrite.call(aten.where.self, keep, bias, rewrite.call(aten.full.default, [], low, **like))


def _join(rewrite: Rewrite, a: Node | None, b: Node) -> Node:
    """Combine two masks into one; a bool mask hides, a floating mask is added."""
    if a is None:
        return b
    if dtype(a) == torch.bool and dtype(b) == torch.bool:
        return rewrite.call(aten.bitwise_and.Tensor, a, b)
    if dtype(a) == torch.bool or dtype(b) == torch.bool:
        keep, bias = (a, b) if dtype(a) == torch.bool else (b, a)
        low = rewrite.call(aten.full.default, [], -math.inf, dtype=dtype(bias), device=bias.meta["val"].device)
        return rewrite.call(aten.where.self, keep, bias, low)
    return rewrite.call(aten.add.Tensor, a, b)


def _arranged(rewrite: Rewrite, mask: Node, groups: list[Group], dims: Sequence[Group]) -> Node:
    """Make a mask with dimensions `groups` broadcast to `dims`; return the mask itself if it already does."""
    tail = dims[len(dims) - len(groups) :] if len(groups) <= len(dims) else []
    if tail and all(not leaves(g) or leaves(g) == leaves(d) for g, d in zip(groups, tail, strict=True)):
        return mask
    new = arrange(rewrite, mask, groups, list(dims))
    if new is None:
        raise NoMatch(
            "the mask has other dimensions than attention's",
            "make it broadcastable to [batch, heads, queries, keys]",
            at=mask,
        )
    return new


# Attention sinks, as gpt-oss writes them (arXiv:2309.17453): each row has one more score that takes part in the softmax
# and has no value.
#
# p = softmax(cat([scores, sink], -1))[..., :-1];  out = p @ v
#
# That is attention without the sink, times a share of its weights: with s the log-sum-exp of a row's scores, the
# weights shrink by exp(s) / (exp(s) + exp(sink)) = sigmoid(s - sink).

LSE = torch.ops.tile.attention_lse.default


@dataclass
class Sunk:
    """A softmax over scores `[..., keys]` and a sink `[..., 1]`, and its probabilities `[..., keys]`."""

    scores: Node
    sink: Node
    probabilities: Node


def read_sink(softmax: Node) -> Sunk | None:
    """Read a `tile.softmax` whose last column is a sink that a slice cuts off; None for any other softmax."""
    last = len(shape(softmax)) - 1
    joined: Any = _shifted(softmax.args[0], last)
    if arg(softmax, "dim") not in (-1, last) or not is_call(joined, aten.cat.default):
        return None
    parts: Any = joined.args[0]
    if arg(joined, "dim") not in (-1, last) or len(parts) != 2 or not known(shape(parts[1])[last] == 1):
        return None
    scores, sink = parts
    for node in (softmax, *(u for u in softmax.users if is_call(u, CAST))):
        cut = next((u for u in node.users if is_call(u, aten.slice.Tensor)), None)
        if cut is None or arg(cut, "dim") not in (-1, last) or arg(cut, "start") not in (0, None):
            continue
        if same_shape(shape(cut), shape(scores)):
            if len(node.users) > 1 or len(softmax.users) > 1:
                raise NoMatch(
                    "the attention probabilities are used more than once (saved for the backward?)",
                    "do not return the weights; in training there is no kernel with sinks",
                    at=softmax,
                )
            return Sunk(scores, sink, cut)
    return None


def _shifted(scores: Any, last: int) -> Any:
    """Return the scores from which the row maximum is subtracted; without a subtraction, the scores."""
    if is_call(scores, aten.sub.Tensor):
        top = reduced(scores.args[1], aten.amax.default, aten.max.dim)
        if top is not None and top[1] == last and equivalent(uncast(top[0]), uncast(scores.args[0])):
            return uncast(scores.args[0])
    return uncast(scores)


def with_sink(rewrite: Rewrite, arguments: Sequence[Any], sink: Node) -> Node:
    """Insert `tile.attention(*arguments)`, `[B, H, Sq, Dv]`, with sinks `[B, H, Sq, 1]`."""
    both = rewrite.call(LSE, *arguments)
    out, lse = (rewrite.call(operator.getitem, both, i) for i in range(2))
    lse = rewrite.call(aten.unsqueeze.default, lse, -1)
    sink = sink if dtype(sink) == dtype(lse) else rewrite.call(CAST, sink, dtype(lse))
    share = rewrite.call(aten.sigmoid.default, rewrite.call(aten.sub.Tensor, lse, sink))
    scaled = rewrite.call(aten.mul.Tensor, out, share)
    return scaled if dtype(scaled) == dtype(out) else rewrite.call(CAST, scaled, dtype(out))
