# SPDX-License-Identifier: Apache-2.0
"""Read the scores above a softmax: the matrix products that make them, and their scales and masks.

Dimensions are axes (see axes.py), and each result carries its own. The shapes that matmul and einsum put around their
`bmm` do not matter. Neither does the place of a mask between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import Group, leaves, trace
from torch_tile.inductor.graph.nodes import (
    CAST,
    Miss,
    aten,
    constant,
    equivalent,
    is_call,
    is_tensor,
    known,
    look_through,
    name_of,
    shape,
    times_number,
    val,
)
from torch_tile.inductor.patterns.norm.statistics import reduced

PRODUCTS = (aten.bmm.default, aten.mm.default)
_WITH_ADDEND = (aten.baddbmm.default, aten.addmm.default)


class NoMatch(Miss):
    """Reason why a softmax is no known attention; `near` if one side of the softmax did look like one."""

    near = True


@dataclass
class Factor:
    """A tensor that scales scores equally for every key: a multiplier, or a divisor if `divides`."""

    node: Node
    groups: list[Group]
    divides: bool


@dataclass
class Product:
    """A matrix product that adds to the scores, with its dimensions, scale and factors."""

    node: Node
    groups: list[Group]
    scale: float = 1.0
    factors: list[Factor] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Node, Node]:
        """Return the left and right operands of the product."""
        left, right = self.node.args[-2:]
        return left, right  # type: ignore[return-value]


@dataclass
class Modified:
    """A tensor computed elementwise from the product, in more ways than scales and masks, with its dimensions."""

    node: Node
    groups: list[Group]


@dataclass
class Mask:
    """A tensor that hides scores; `groups` are its dimensions.

    `additive`: `scale` times a floating tensor is added. Otherwise True keeps a score (False, if `inverted`), and the
    other value replaces it by `fill`.
    """

    node: Node
    groups: list[Group]
    additive: bool
    fill: float = -math.inf
    inverted: bool = False
    scale: float = 1.0


@dataclass
class Scores:
    """A sum of products, or a tensor computed from one product, then its masks in their order."""

    products: list[Product] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    modified: Modified | None = None

    def raised(self, at: Node, dims: list[Group]) -> Scores:
        """Return the scores as a tensor computed from their product, with its result at `at`."""
        return Scores([Product(self.products[0].node, self.products[0].groups)], [], Modified(at, dims))

    def scaled(self, number: float, at: Node, dims: list[Group]) -> Scores:
        """Multiply all products and masks by a number."""
        if self.modified:
            return self.raised(at, dims)
        if number <= 0 and any(not m.additive for m in self.masks):
            raise NoMatch("masked scores are scaled by a negative number", "scale before masking", at=at)
        products = [replace(p, scale=p.scale * number) for p in self.products]
        masks = [replace(m, scale=m.scale * number, fill=m.fill * number) for m in self.masks]
        return Scores(products, masks)

    def masked(self, mask: Mask) -> Scores:
        """Return the scores under one more mask."""
        return Scores(self.products, [*self.masks, mask], self.modified)


def aligned(node: Any, dims: list[Group]) -> list[Group]:
    """Return the dimensions of a tensor that broadcasts to `dims`."""
    sizes = shape(node)
    tail = dims[len(dims) - len(sizes) :]
    return [[] if known(s == 1) else g for g, s in zip(tail, sizes, strict=True)]


def read_scores(node: Any, dims: list[Group], keys: Group) -> Scores:
    """Walk up from `node`, whose dimensions are `dims`, to the products. The softmax reduces over `keys`."""
    try:
        return _read_node(node, dims, keys)
    except NoMatch:
        product = _only_product(node, dims, keys)
        if product is None:
            raise
        return Scores([product]).raised(node, dims)


def _only_product(node: Any, dims: list[Group], keys: Group) -> Product | None:
    """Find the one product that has the keys and from which `node` is computed elementwise; else None."""
    found: dict[Node, Product] = {}
    seen: set[Node] = set()
    stack = [(node, dims)]
    while stack:
        root, groups = trace(*stack.pop(), casts=True)
        if not is_tensor(root) or root in seen:
            continue
        seen.add(root)
        if is_call(root, *PRODUCTS, *_WITH_ADDEND):
            if set(leaves(keys)) & {a for g in groups for a in leaves(g)}:
                found[root] = Product(root, groups)
        elif root.op == "call_function":
            operands = [x for x in index_expr.pointwise_operands(root) or [] if is_tensor(x)]
            stack += [(x, aligned(x, groups)) for x in operands]
    return next(iter(found.values())) if len(found) == 1 else None


def addend_of(node: Node) -> tuple[Any, float, float] | None:
    """Return `(addend, beta, alpha)` of a product `beta * addend + alpha * left @ right`; None for other nodes."""
    if not is_call(node, *_WITH_ADDEND):
        return None
    return node.args[0], _keyword_factor(node, "beta"), _keyword_factor(node, "alpha")


def _keyword_factor(node: Node, name: str) -> float:
    """Return the keyword factor of a sum, 1 by default; raises NoMatch for a size."""
    factor: Any = node.kwargs.get(name, 1)
    if isinstance(factor, Node):
        raise NoMatch("a size is a factor of scores, and the graph does not know it", "fix this size", at=node)
    return factor  # type: ignore[no-any-return]


def _read_node(node: Any, dims: list[Group], keys: Group) -> Scores:
    """Read the scores at one node; recurse into its operands."""
    if is_call(node, *PRODUCTS):
        return Scores([Product(node, dims)])
    if is_call(node, *_WITH_ADDEND):
        return _product_and_mask(node, dims)
    if is_call(node, CAST):
        return read_scores(node.args[0], dims, keys)
    if (pair := times_number(node)) is not None:
        return read_scores(pair[0], dims, keys).scaled(pair[1], node, dims)
    if is_call(node, aten.mul.Tensor, aten.div.Tensor):
        return _times_tensor(node, dims, keys)
    if is_call(node, aten.sub.Tensor) and _is_own_maximum(node.args[1], node.args[0], dims, keys):
        return read_scores(node.args[0], dims, keys)  # a softmax ignores a number that all keys share
    if is_call(node, aten.add.Tensor, aten.sub.Tensor):
        return _sum(node, dims, keys)
    if is_call(node, aten.where.self):
        return _where(node, dims, keys)
    root, groups = trace(node, dims)
    if root is node:
        what = f"{name_of(node)}()" if isinstance(node, Node) and node.op == "call_function" else name_of(node)
        raise NoMatch(f"the scores come from {what}, where a matrix product was looked for", _PLAIN, at=node)
    return read_scores(root, groups, keys)


_PLAIN = "between q @ k.mT and softmax only pointwise operations and views may stand"


def _product_and_mask(node: Node, dims: list[Group]) -> Scores:
    """Read `beta * addend + alpha * left @ right`; the addend is an additive mask."""
    addend, beta, alpha = addend_of(node)  # type: ignore[misc]
    found = Scores([Product(node, dims)]).scaled(alpha, node, dims)
    if beta == 0:
        return found
    return found.masked(Mask(addend, aligned(addend, dims), additive=True, scale=beta))


def _times_tensor(node: Node, dims: list[Group], keys: Group) -> Scores:
    """Read scores times (or over) a tensor that is equal for every key, such as a learned temperature."""
    own = set(leaves(keys))
    divides = is_call(node, aten.div.Tensor)
    for scores, other in (node.args[:2],) if divides else (node.args[:2], node.args[1::-1]):
        if not is_tensor(scores) or not is_tensor(other):
            continue
        groups = aligned(other, dims)
        if own & {a for g in groups for a in leaves(g)}:
            continue
        found = read_scores(scores, aligned(scores, dims), keys)
        if found.modified:
            return found.raised(node, dims)
        if found.masks:
            raise NoMatch("the scores are scaled by a tensor after they are masked", "scale before masking", at=node)
        factor = Factor(other, groups, divides)
        return Scores([replace(p, factors=[*p.factors, factor]) for p in found.products])
    raise NoMatch("the scores are scaled by a tensor that differs from key to key", _PLAIN, at=node)


def _is_own_maximum(node: Any, scores: Any, dims: list[Group], keys: Group) -> bool:
    """Return whether `node` is the maximum of `scores` over the keys."""
    node = look_through(node, copies=True)
    found = reduced(node, aten.amax.default, aten.max.dim) if is_tensor(node) else None
    return found is not None and leaves(dims[found[1]]) == leaves(keys) and equivalent(found[0], scores)


def _sum(node: Node, dims: list[Group], keys: Group) -> Scores:
    """Read a sum of two products, or of a product and a mask."""
    alpha = _keyword_factor(node, "alpha")
    sign = -alpha if is_call(node, aten.sub.Tensor) else alpha
    sides: list[Scores | None] = []
    first: NoMatch | None = None
    for side, factor in zip(node.args[:2], (1, sign), strict=True):
        try:
            found = read_scores(side, aligned(side, dims), keys) if is_tensor(side) else None
            sides.append(found.scaled(factor, node, dims) if found and factor != 1 else found)
        except NoMatch as reason:
            sides.append(None)
            first = first or reason
    a, b = sides
    if a and b and _has_keys(a, keys) != _has_keys(b, keys):  # a bias that is made of products itself
        a, b = (found if _has_keys(found, keys) else None for found in (a, b))
    if a and b:
        if a.modified or b.modified or any(p.node is q.node for p in a.products for q in b.products):
            raise NoMatch("the scores are a sum of what is made of products", _PLAIN, at=node)
        return Scores([*a.products, *b.products], [*a.masks, *b.masks])
    found, other, factor = (a, node.args[1], sign) if a else (b, node.args[0], 1)
    if found is None or not is_tensor(other):
        raise first or NoMatch(
            "the scores are a number added to something else than q @ k.mT", "add a mask to the product itself", at=node
        )
    if val(other).device != val(node).device:
        raise NoMatch("a number on another device is added to the scores", "leave it out: softmax ignores it", at=node)
    return found.masked(Mask(other, aligned(other, dims), additive=True, scale=factor))


def _has_keys(scores: Scores, keys: Group) -> bool:
    """Return whether the keys are one dimension of all products, unlike relative positions in 2D."""
    return all(any(leaves(g) == leaves(keys) for g in p.groups[-2:]) for p in scores.products)


def _where(node: Node, dims: list[Group], keys: Group) -> Scores:
    """Read a `where`: scores masked by a number, or a guard around equal scores."""
    condition, yes, no = node.args
    for kept, fill, inverted in ((yes, no, False), (no, yes, True)):
        number = constant(fill)
        if number is not None and is_tensor(condition):
            found = read_scores(kept, aligned(kept, dims), keys)
            return found.masked(Mask(condition, aligned(condition, dims), False, number, inverted))
    if is_tensor(yes) and is_tensor(no):  # Inductor guards its own rewriting of softmax so
        a, b = (read_scores(x, aligned(x, dims), keys) for x in (yes, no))
        if _are_equal(a, b):
            return a
    raise NoMatch(
        "where() puts values of another tensor into the scores",
        "mask with a number: scores.masked_fill(mask, -inf), or add a floating mask",
        at=node,
    )


def _are_equal(a: Scores, b: Scores) -> bool:
    """Return whether two readings are equal up to rounding."""
    if a.masks or b.masks or a.modified or b.modified or len(a.products) != len(b.products):
        return False
    return all(
        all(map(equivalent, p.operands, q.operands))
        and math.isclose(p.scale, q.scale, rel_tol=1e-6)
        and [f.node for f in p.factors] == [f.node for f in q.factors]
        for p, q in zip(a.products, b.products, strict=True)
    )
