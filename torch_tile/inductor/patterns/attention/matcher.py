# SPDX-License-Identifier: Apache-2.0
"""Read a softmax with its scores and the product that it feeds: the start of attention and absorbed MLA.

The sums define the roles of dimensions, not their order. The keys are the dimension that the softmax reduces, wherever
it stands. Either operand of a product may be transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from torch_tile.inductor.graph.axes import Group, arrange, axes_of, leaves, trace, trace_unrounded, unify
from torch_tile.inductor.graph.nodes import (
    CAST,
    COPIES,
    LAYOUT,
    Rewrite,
    aten,
    constant,
    dtype,
    is_call,
    is_tensor,
    known,
    name_of,
    product,
    shape,
)
from torch_tile.inductor.patterns.attention.masks import Sunk, read_sink
from torch_tile.inductor.patterns.attention.scores import (
    PRODUCTS,
    Factor,
    Mask,
    NoMatch,
    Product,
    Scores,
    aligned,
    read_scores,
)

MOST_STEPS = 6  # pointwise ones and views, between probabilities and the product that reads them


@dataclass
class Operand:
    """A tensor under views: the tensor `root`, whose dimensions are `groups`."""

    root: Node
    groups: list[Group]

    def axes(self) -> set[Any]:
        """Return all axes of the root; further axes of its use are broadcast."""
        return {a for g in self.groups for a in leaves(g)}


@dataclass
class Term:
    """One product that adds to the scores: `scale * sum_inner query * key`, times `factors`."""

    query: Operand
    key: Operand
    inner: Group
    scale: float
    factors: list[Factor] = field(default_factory=list)


@dataclass
class Pattern:
    """A softmax of `dims`, the reduced one last: its scores, values, output, and `sink` of the rows or None."""

    softmax: Node
    dims: list[Group]
    terms: list[Term]
    masks: list[Mask]
    value: Operand
    value_inner: Group
    output: Node
    output_dims: list[Group]
    scores: Scores
    sink: Operand | None = None

    def values_on_left(self) -> bool:
        """Return whether the last product is values times probabilities, both transposed."""
        return self.output_dims[-1] is not self.value_inner


def read(softmax: Node, backward: Collection[Node] = ()) -> Pattern:
    """Read the surroundings of a `tile.softmax`; raises NoMatch. Readers in `backward` do not count."""
    sunk = read_sink(softmax) or Sunk(softmax.args[0], None, softmax)  # type: ignore[arg-type]
    dims = axes_of(shape(sunk.probabilities))
    axis: Any = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim", -1)
    keys = dims[axis]
    scores, output, probabilities = _sides(softmax, sunk, dims, keys, backward)
    sizes = shape(probabilities)
    rows = axes_of(sizes)
    root, groups = trace(probabilities, rows, casts=True)
    if is_call(root, aten.where.self):  # the guard that _consumer accepted
        root, groups = trace(root.args[2], groups, casts=True)
    if root is not sunk.probabilities or not all(unify(a, b) for a, b in zip(dims, groups, strict=True)):
        raise NoMatch(
            "the probabilities are rearranged before the product with the values",
            "multiply them as they are, softmax(...) @ v, and rearrange the result",
            at=output,
        )
    *batch, m, n = rows
    on_left = output.args[0] is probabilities
    if leaves(n if on_left else m) != leaves(keys):
        raise NoMatch(
            "the product with the values does not sum over the keys",
            "take the softmax over the dimension that is summed with v",
            at=output,
        )
    out = axes_of(shape(output))
    other: Any = output.args[1 if on_left else 0]
    inner = out[-1] if on_left else out[-2]
    value = Operand(*trace_unrounded(other, [*batch, n, inner] if on_left else [*batch, inner, m]))
    terms = [_term(p, keys) for p in scores.products]
    outer = [g for g in dims if g is not keys]
    placed = [*batch, m, inner] if on_left else [*batch, inner, n]
    sink = None if sunk.sink is None else Operand(*trace_unrounded(sunk.sink, aligned(sunk.sink, dims)))
    return Pattern(softmax, [*outer, keys], terms, scores.masks, value, inner, output, placed, scores, sink)


def _sides(
    softmax: Node, sunk: Sunk, dims: list[Group], keys: Group, backward: Collection[Node]
) -> tuple[Scores, Node, Node]:
    """Return the scores, the product with the values, and its operand. Raises NoMatch, `near` if one is missing."""
    scores: Scores | NoMatch
    output: tuple[Node, Node] | NoMatch
    try:
        scores = read_scores(sunk.scores, dims, keys)
    except NoMatch as reason:
        scores = reason
    try:
        output = _consumer(softmax, sunk.probabilities, backward)
    except NoMatch as reason:
        output = reason
        output.near = _feeds_product(sunk.probabilities, backward)
    if isinstance(scores, NoMatch):
        scores.near = not isinstance(output, NoMatch)
        raise scores
    if isinstance(output, NoMatch):
        raise output
    return scores, *output


def _term(product: Product, keys: Group) -> Term:
    """Read the query and key of a product of the scores."""
    *batch, m, n = product.groups
    a, b = product.operands
    inner = axes_of(shape(a)[-1:])[0]
    left = Operand(*trace_unrounded(a, [*batch, m, inner]))
    right = Operand(*trace_unrounded(b, [*batch, inner, n]))
    if keys_on_left(product, keys):
        left, right = right, left
    return Term(left, right, inner, product.scale, product.factors)


def keys_on_left(product: Product, keys: Group) -> bool:
    """Return whether scores are keys times queries, both transposed. Raises NoMatch if neither operand has the keys."""
    *_, m, n = map(leaves, product.groups)
    if leaves(keys) not in (m, n):
        raise NoMatch(
            "the softmax is over another dimension than the keys of its scores",
            "take it over the dimension of q @ k.mT that comes from k",
        )
    return n != leaves(keys)


def _consumer(softmax: Node, probabilities: Node, backward: Collection[Node]) -> tuple[Node, Node]:
    """Return the product that reads the probabilities through casts and views with one reader, and its operand."""
    node = probabilities
    while True:
        users = [u for u in node.users if u not in backward]
        if len(users) != 1:
            raise NoMatch(
                "the attention probabilities are used more than once (returned, or saved for the backward?)",
                "do not return the weights (need_weights=False, output_attentions=False); in training call "
                "F.scaled_dot_product_attention",
                at=node,
            )
        user = users[0]
        if is_call(user, *PRODUCTS):
            if user.args[0] is user.args[1]:
                raise NoMatch("the probabilities are multiplied by themselves", "multiply them by v", at=user)
            return user, node
        if is_call(user, aten.where.self) and user.args[2] is node and _guards_empty_rows(user, softmax):
            node = user
            continue
        if not is_call(user, CAST, *LAYOUT, *COPIES):
            raise NoMatch(
                f"{name_of(user)} between softmax and the product with the values",
                f"move {name_of(user)} behind the product, or leave it out (dropout: p=0, or model.eval())",
                at=user,
            )
        node = user


def _feeds_product(softmax: Node, backward: Collection[Node]) -> bool:
    """Return whether a product reads the probabilities, changed or not. It does not for a classifier or a router."""
    count = product(shape(softmax))
    nodes = [softmax]
    for _ in range(MOST_STEPS):
        users = [u for n in nodes for u in n.users if u not in backward]
        if any(is_call(u, *PRODUCTS) for u in users):
            return True
        nodes = [u for u in users if is_tensor(u) and known(product(shape(u)) == count)]
    return False


def _guards_empty_rows(where: Node, softmax: Node) -> bool:
    """Return whether a `where` only writes 0 to rows whose scores are all -inf, as torch's attention and ours do."""
    condition: Any = where.args[0]
    if constant(where.args[1]) != 0.0 or not is_call(condition, aten.logical_not.default):
        return False
    some: Any = condition.args[0]
    if not is_call(some, aten.any.dim) or not is_call(some.args[0], aten.logical_not.default):
        return False
    equal: Any = some.args[0].args[0]
    return is_call(equal, aten.eq.Scalar) and equal.args == (softmax.args[0], float("-inf"))


def place(rewrite: Rewrite, operand: Operand, want: list[Group]) -> Node:
    """Insert the views that give an operand the dimensions `want`."""
    node = arrange(rewrite, operand.root, operand.groups, want)
    if node is None:
        raise NoMatch(
            "an operand has dimensions that attention does not",
            "make q, k and v [batch, heads, length, head size]",
            at=operand.root,
        )
    return node


def place_query(rewrite: Rewrite, term: Term, want: list[Group]) -> Node:
    """Return the query of a term with dimensions `want`, times the tensors that scale its scores."""
    node = place(rewrite, term.query, want)
    for factor in term.factors:
        # One number stays as it is: it may be on the CPU.
        by = place(rewrite, Operand(factor.node, factor.groups), [*want[:-1], []]) if factor.groups else factor.node
        scaled = rewrite.call(aten.div.Tensor if factor.divides else aten.mul.Tensor, node, by)
        node = scaled if dtype(scaled) == dtype(node) else rewrite.call(CAST, scaled, dtype(node))
    return node


def same_dtype(nodes: Sequence[Node]) -> bool:
    """Return whether all nodes have one dtype."""
    return len({dtype(n) for n in nodes}) == 1
