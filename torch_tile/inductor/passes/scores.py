# SPDX-License-Identifier: Apache-2.0
"""Around a softmax: which matrix products made its scores, how scaled and masked, and which product it feeds.

Attention and absorbed MLA decode both start here. Dimensions are axes (see views.py), so the shapes that matmul and
einsum put around their `bmm` do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from torch_tile.inductor.passes.graph import (
    CAST,
    VIEWS,
    Miss,
    Rewrite,
    aten,
    binary_with_scalar,
    constant,
    dtype,
    is_call,
    is_tensor,
    name_of,
    only_user,
    shape,
)
from torch_tile.inductor.passes.views import Group, arrange, axes_of, leaves, trace, unify

PRODUCTS = (aten.bmm.default, aten.mm.default)
_VIEW_LIKE = (
    *(*VIEWS, aten.expand.default, aten.clone.default, aten.permute.default, aten.transpose.int),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
)


class NoMatch(Miss):
    """Why a softmax is not that of an attention we know; `near` if one side of it did look like one."""

    near = True


@dataclass
class Operand:
    """A tensor under views: `root`, whose dimensions are `groups`."""

    root: Node
    groups: list[Group]

    def axes(self) -> set[Any]:
        """Every axis that the root really has; the others of its use are broadcast."""
        return {a for g in self.groups for a in leaves(g)}


@dataclass
class Term:
    """One product that adds to the scores: `scale * sum_k left * right`."""

    left: Operand
    right: Operand
    inner: Group
    scale: float


@dataclass
class Mask:
    """Something that hides scores. `additive`: a floating tensor is added; else True keeps and False gives `fill`."""

    node: Node
    additive: bool
    fill: float = float("-inf")
    inverted: bool = False


@dataclass
class Pattern:
    """A softmax with its neighbours. `dims` are the softmax's dimensions; the last one is reduced."""

    softmax: Node
    dims: list[Group]
    terms: list[Term]
    masks: list[Mask]
    value: Operand
    value_inner: Group
    output: Node
    output_dims: list[Group]


@dataclass
class _Scores:
    products: list[tuple[Node, list[Group], float]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)


def read(softmax: Node) -> Pattern:
    """Read the neighbourhood of a `tile.softmax`; raises NoMatch."""
    rank = len(shape(softmax))
    axis: Any = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim", -1)
    dims = axes_of(shape(softmax))
    scores, output = _sides(softmax, dims)
    if axis % rank != rank - 1 or rank < 2:
        raise NoMatch(
            "the softmax is not over the last dimension",
            "lay the scores out as [..., queries, keys] and take softmax(dim=-1)",
            at=softmax,
        )
    left: Any = output.args[0]
    rows = axes_of(shape(left))
    root, groups = trace(left, rows, casts=True)
    if is_call(root, aten.where.self):  # the guard that _consumer accepted
        root, groups = trace(root.args[2], groups, casts=True)
    if root is not softmax or not all(unify(a, b) for a, b in zip(dims, groups, strict=True)):
        raise NoMatch(
            "the probabilities are rearranged before the product with the values",
            "multiply them as they are, softmax(...) @ v, and rearrange the result",
            at=output,
        )
    inner = axes_of(shape(output)[-1:])
    right: Any = output.args[1]
    value = Operand(*trace(right, [*rows[:-2], rows[-1], *inner], casts=True))
    terms = [_term(product, groups, scale) for product, groups, scale in scores.products]
    return Pattern(softmax, dims, terms, scores.masks, value, inner[0], output, [*rows[:-1], *inner])


def _sides(softmax: Node, dims: list[Group]) -> tuple[_Scores, Node]:
    """The scores and the product with the values; a miss is near if only one of them is missing."""
    scores: _Scores | NoMatch
    output: Node | NoMatch
    try:
        scores = _scores(softmax.args[0], dims, top=True)
    except NoMatch as reason:
        scores = reason
    try:
        output = _consumer(softmax)
    except NoMatch as reason:
        output = reason
    if isinstance(scores, NoMatch):
        scores.near = isinstance(output, Node)
        raise scores
    if isinstance(output, NoMatch):
        raise output
    return scores, output


def _term(product: Node, groups: list[Group], scale: float) -> Term:
    left: Any = product.args[0]
    right: Any = product.args[1]
    inner = axes_of(shape(left)[-1:])
    a = Operand(*trace(left, [*groups[:-1], *inner], casts=True))
    b = Operand(*trace(right, [*groups[:-2], *inner, groups[-1]], casts=True))
    return Term(a, b, inner[0], scale)


def _consumer(softmax: Node) -> Node:
    """The product whose left operand is the softmax, through casts and views used by nothing else."""
    node = softmax
    while True:
        user = only_user(node)
        if user is None:
            raise NoMatch(
                "the attention probabilities are used more than once (returned, or saved for the backward?)",
                "do not return the weights (need_weights=False, output_attentions=False); in training call "
                "F.scaled_dot_product_attention",
                at=node,
            )
        if is_call(user, *PRODUCTS):
            if user.args[0] is not node or user.args[1] is node:
                raise NoMatch(
                    "the probabilities are the right operand of their product",
                    "write softmax(...) @ v, with the probabilities on the left",
                    at=user,
                )
            return user
        if is_call(user, aten.where.self) and user.args[2] is node and _guards_empty_rows(user, softmax):
            node = user
            continue
        if not is_call(user, CAST, *_VIEW_LIKE):
            raise NoMatch(
                f"{name_of(user)} between softmax and the product with the values",
                f"move {name_of(user)} behind the product, or leave it out (dropout: p=0, or model.eval())",
                at=user,
            )
        node = user


def _guards_empty_rows(where: Node, softmax: Node) -> bool:
    """Whether a `where` only puts 0 in rows whose scores are all -inf, as torch's own attention and ours do."""
    condition: Any = where.args[0]
    if constant(where.args[1]) != 0.0 or not is_call(condition, aten.logical_not.default):
        return False
    some: Any = condition.args[0]
    if not is_call(some, aten.any.dim) or not is_call(some.args[0], aten.logical_not.default):
        return False
    equal: Any = some.args[0].args[0]
    return is_call(equal, aten.eq.Scalar) and equal.args == (softmax.args[0], float("-inf"))


def _scores(node: Any, dims: list[Group], top: bool) -> _Scores:
    """Walk up from the softmax's input (`top`: still in its shape, where masks are added) to the products."""
    if is_call(node, *PRODUCTS):
        return _Scores([(node, dims, 1.0)])
    if is_call(node, CAST):
        return _scores(node.args[0], dims, top)
    for target, invert in ((aten.mul.Tensor, False), (aten.mul.Scalar, False), (aten.div.Tensor, True)):
        pair = binary_with_scalar(node, target)
        if pair is not None and not (invert and pair[0] is not node.args[0]):
            return _scaled(_scores(pair[0], dims, top), 1 / pair[1] if invert else pair[1])
    if is_call(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
        return _sum(node, dims, top)
    if is_call(node, aten.where.self):
        return _where(node, dims, top)
    root, groups = trace(node, dims)
    if root is node:
        raise NoMatch(
            f"the scores come from {name_of(node)}",
            "scores may be scaled by a number, added to a mask, or masked by where; apply anything else to q or k",
            at=node,
        )
    return _scores(root, groups, False)


def _scaled(scores: _Scores, factor: float) -> _Scores:
    if any(m.additive or m.fill != float("-inf") for m in scores.masks) or (factor <= 0 and scores.masks):
        raise NoMatch("the scores are scaled after the mask is added", "scale first: softmax(q @ k.mT * scale + mask)")
    return _Scores([(p, g, s * factor) for p, g, s in scores.products], scores.masks)


def _sum(node: Node, dims: list[Group], top: bool) -> _Scores:
    """A sum of two products, or of a product and a mask."""
    sides: list[_Scores | None] = []
    first: NoMatch | None = None
    for side in node.args[:2]:
        try:
            sides.append(_scores(side, dims, top))
        except NoMatch as reason:
            sides.append(None)
            first = first or reason
    a, b = sides
    if a and b:
        return _Scores([*a.products, *b.products], [*a.masks, *b.masks])
    found, other = (a, node.args[1]) if a else (b, node.args[0])
    if found is None or not is_tensor(other):
        raise first or NoMatch(
            "the scores are a number added to something else than q @ k.mT", "add a mask to the product itself", at=node
        )
    if not top:
        raise NoMatch(
            "the mask is added in another shape than the softmax's",
            "view the scores as [batch, heads, queries, keys] before the mask is added",
            at=node,
        )
    return _Scores(found.products, [*found.masks, Mask(other, additive=True)])


def _where(node: Node, dims: list[Group], top: bool) -> _Scores:
    condition, yes, no = node.args
    for kept, fill, inverted in ((yes, no, False), (no, yes, True)):
        number = constant(fill)
        if number is not None and isinstance(condition, Node):
            found = _scores(kept, dims, top)
            if not top:
                raise NoMatch(
                    "the mask is applied in another shape than the softmax's",
                    "view the scores as [batch, heads, queries, keys] before they are masked",
                    at=node,
                )
            return _Scores(found.products, [*found.masks, Mask(condition, False, number, inverted)])
    raise NoMatch(
        "where() puts values of another tensor into the scores",
        "mask with a number: where(mask, scores, -inf)",
        at=node,
    )


def place(rewrite: Rewrite, operand: Operand, want: list[Group]) -> Node:
    """The operand as a tensor with dimensions `want`."""
    node = arrange(rewrite, operand.root, operand.groups, want)
    if node is None:
        raise NoMatch(
            f"{name_of(operand.root)} has dimensions that attention's operands have not",
            "make q, k and v [batch, heads, length, head size], with no dimension that is summed or repeated otherwise",
            at=operand.root,
        )
    return node


def same_dtype(nodes: list[Node]) -> bool:
    """Whether all nodes have one dtype."""
    return len({dtype(n) for n in nodes}) == 1
