# SPDX-License-Identifier: Apache-2.0
"""Find the gradients of batched products and of attention scores in a graph of forward and backward.

    C = A @ B:  dA = dC @ B^T,  dB = A^T @ dC

`of_product` finds a product's gradients by these two formulas. `is_gradient` tests the nodes between two products on
random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor import compat
from torch_tile.inductor.graph.axes import Axis, Group, leaves, trace
from torch_tile.inductor.graph.extract import Descendants
from torch_tile.inductor.graph.nodes import (
    CAST,
    Miss,
    arg,
    aten,
    constant,
    dtype,
    is_call,
    is_tensor,
    known,
    ordered,
    same_shape,
    shape,
)
from torch_tile.inductor.patterns.attention.rewrite import SOFTMAX
from torch_tile.inductor.patterns.attention.scores import aligned

FIX = "call F.scaled_dot_product_attention"


@dataclass
class OfProduct:
    """Gradients of a product: of its result and, where wanted, of its left and right operands."""

    result: Node
    left: Node | None
    right: Node | None


def of_product(node: Node, groups: Sequence[Group], inner: Group, backward: Collection[Node]) -> OfProduct:
    """Find the gradients of `A @ B` among the nodes of the backward.

    The product is a `bmm` with dimensions `groups` that sums over `inner`. Raises Miss unless exactly one result
    gradient fits.
    """
    *batch, m, n = groups
    a, b = node.args
    left: dict[Node, Node] = {}  # by the gradient of the result
    right: dict[Node, Node] = {}
    for each in node.graph.find_nodes(op="call_function", target=aten.bmm.default):
        if each not in backward:
            continue
        x, y = each.args
        transposed_b = [*batch, n, inner], [*batch, inner, n]
        transposed_a = [*batch, inner, m], [*batch, m, inner]
        if same_shape(shape(x), shape(node)) and _is(y, transposed_b[0], b, transposed_b[1]):
            left[x] = each
        if same_shape(shape(y), shape(node)) and _is(x, transposed_a[0], a, transposed_a[1]):
            right[y] = each
    results = left.keys() & right.keys() if left and right else left.keys() | right.keys()
    if len(results) != 1:
        raise Miss(f"of what looks like gradients of a product of attention there are {len(results)}", FIX, at=node)
    result = results.pop()
    return OfProduct(result, left.get(result), right.get(result))


def _is(x: Any, groups: list[Group], y: Any, others: list[Group]) -> bool:
    """Return whether `x`, with dimensions `groups`, is a view of the elements of `y`, with dimensions `others`."""
    if len(shape(x)) != len(groups):
        return False
    fresh: dict[Axis, Axis] = {}  # a wrong guess must not cut the axes of others
    groups, others = (
        [[fresh.setdefault(a, Axis(a.size)) for a in leaves(g)] for g in each] for each in (groups, others)
    )
    (root, have), (same, want) = trace(x, groups), trace(y, others)
    return root is same and list(map(leaves, have)) == list(map(leaves, want))


def only_for(olds: Collection[Node]) -> set[Node]:
    """Return `olds` and the nodes that only `olds` need."""
    found, pending = set(olds), list(olds)
    while pending:
        for x in pending.pop().all_input_nodes:
            if x not in found and x.op == "call_function" and all(u in found for u in x.users):
                found.add(x)
                pending.append(x)
    return found


# The function of scores that a graph computes, tried on a few numbers: does its backward have the gradient of its
# forward? Between two products of attention all operations are elementwise or in rows of keys. So a result for rows of
# eight random keys holds for all rows. Views do nothing here: dimensions are axes (axes.py), each shrunk to two
# elements, and a tensor has one dimension for each axis. Floating values are float64; casts between floating dtypes are
# left out. Any other node, or one that does not depend on the scores (positions, masks, biases), is unknown. It gets
# random numbers, the same for every reader.

MOST_AXES = 12
KEYS, OTHERS = 8, 2  # elements along the axes
CLOSE = 1e-6
SHIFTS = 0.0, 1.5, -1.5, 15.0, -15.0, 1e3, -1e3
SCALES = 1e-9, 1e30, math.nan
"""Centres of the scores and sizes of the gradients: one of them triggers each clipping or flush to 0."""
SHARES = 0.1, 0.5, 0.9
"""Shares of True in unknown masks, where either value may hide."""
TELLING = 0.25  # least share of gradients that must be finite and not 0 for a comparison
Dimensioned = tuple[Node, list[Group]]
_BESIDES = ("prims.fma.default",)  # pointwise, though not tagged so; Inductor's own, in newer versions
_REDUCTIONS: dict[Any, Any] = {
    aten.sum.dim_IntList: torch.sum,
    aten.amax.default: torch.amax,
    aten.amin.default: torch.amin,
}


def is_gradient(
    found: Node,
    scores: Dimensioned,
    of: Dimensioned,
    weights: Dimensioned,
    keys: Group,
    full: list[Group] | None = None,
) -> bool:
    """Return whether `found` is the gradient of `scores`, given the gradient `of` of `weights`.

    The weights are computed from the scores. Each tensor comes with its dimensions; `found` has those of the scores. If
    `full` is given, `found` has these dimensions, and is the gradient of the scores repeated to them. Raises Miss if
    the graph cannot be evaluated.
    """
    if len(leaves(keys)) != 1:
        raise Miss("the keys are several dimensions", FIX)
    telling, dependent = False, Descendants([scores[0], of[0]], ordered(found.graph))
    sizes = [*((shift, 1.0) for shift in SHIFTS), *((0.0, scale) for scale in SCALES)]
    with compat.nested_compile(), torch.enable_grad():
        for (shift, scale), share in product(sizes, SHARES):
            sample = partial(_Sample, [(*scores, full or scores[1]), (*of, of[1])], keys, dependent, share)
            have, want = _gradients_at_sample(sample, found, scores[0], of[0], weights, full or scores[1], shift, scale)
            unit = scale if math.isfinite(scale) else 1.0
            if want is None:
                return False
            have, want = torch.broadcast_tensors(have / unit, want / unit)  # torch 2.11's isclose does not
            if not torch.isclose(have, want, CLOSE, CLOSE, equal_nan=True).all():
                return False
            telling |= bool((want.isfinite() & (want != 0)).double().mean() >= TELLING)
    return telling


def _gradients_at_sample(
    fresh: Callable[[], _Sample],
    found: Node,
    scores: Node,
    of: Node,
    weights: Dimensioned,
    full: list[Group],
    shift: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Evaluate `found`, and the true gradient, for scores around `shift` and gradients of size `scale`."""
    for _ in range(3):  # an axis may be cut while it is in use
        sample = fresh()
        given, grad = sample.given[scores], sample.given[of]
        given += shift
        given.requires_grad_()
        grad.flatten()[0] *= scale
        if math.isfinite(scale):
            grad.flatten()[1:] *= scale
        have, made = sample.value(found, full), sample.value(*weights)
        if not any(axis.parts for axis in sample.places):
            break
    if not made.requires_grad:
        return have, None
    return have, torch.autograd.grad(made, given, grad.expand_as(made))[0]


class _Sample:
    """Values of nodes on a few random elements.

    `given` lists nodes with random values: each node, its dimensions, and the dimensions of its values. `share` of the
    elements of a bool mask is True.
    """

    def __init__(
        self, given: list[tuple[Node, list[Group], list[Group]]], keys: Group, dependent: Descendants, share: float
    ) -> None:
        self.keys, self.dependent, self.share = keys, dependent, share
        self.places: dict[Axis, int] = {}
        self.generator = torch.Generator().manual_seed(1)
        self.values: dict[Any, torch.Tensor] = {}
        self.of_given = {node: groups for node, groups, _ in given}
        self.given: Mapping[Node, torch.Tensor] = {node: self._unknown(node, full) for node, _, full in given}

    def value(self, node: Any, groups: list[Group]) -> torch.Tensor:
        """Return the value of a tensor whose dimensions are `groups`."""
        root, groups = trace(node, groups, casts=True)
        if root in self.given:
            if groups != list(map(leaves, self.of_given[root])):
                raise Miss("scores are turned before they are used again", FIX, at=node)
            return self.given[root]
        key = root, tuple(map(tuple, groups))
        if key not in self.values:
            self.values[key] = self._compute(root, groups)
        return self.values[key]

    def _compute(self, node: Node, groups: list[Group]) -> torch.Tensor:
        """Compute the value of a node; nodes that cannot be evaluated get random values."""
        number = constant(node)
        if number is not None:
            return torch.full([1] * MOST_AXES, number, dtype=_wide(dtype(node)))
        tags = getattr(node.target, "tags", ())
        if node not in self.dependent or torch.Tag.nondeterministic_seeded in tags:
            return self._unknown(node, groups)
        if is_call(node, SOFTMAX):
            return torch.softmax(self.value(node.args[0], groups), self._places(self.keys)[0])
        if node.target in _REDUCTIONS and self._over_keys(node):
            return self._reduced(node, groups)
        if is_call(node, CAST):
            return self.value(node.args[0], groups).to(_wide(dtype(node)))
        if torch.Tag.pointwise in tags or str(node.target) in _BESIDES:
            args = [self.value(x, aligned(x, groups)) if is_tensor(x) else x for x in node.args]
            if not any(isinstance(x, Node) for x in (*args, *node.kwargs.values())):
                result: torch.Tensor = node.target(*args, **node.kwargs)  # type: ignore[operator]
                return result.to(_wide(result.dtype))
        return self._unknown(node, groups)

    def _reduced(self, node: Node, groups: list[Group]) -> torch.Tensor:
        """Compute a reduction over the keys."""
        args: Any = node.args
        d = args[1][0] % len(shape(args[0]))
        inside = [*groups[:d], self.keys, *groups[d + bool(arg(node, "keepdim")) :]]
        result: torch.Tensor = _REDUCTIONS[node.target](
            self.value(args[0], inside), self._places(self.keys), keepdim=True
        )
        return result

    def _over_keys(self, node: Node) -> bool:
        """Return whether a reduction folds one dimension, as long as that of the keys: others give wrong values."""
        dims: Any = node.args[1]
        return len(dims) == 1 and known(shape(node.args[0])[dims[0]] == leaves(self.keys)[0].size)

    def _places(self, group: Group) -> list[int]:
        """Return the tensor dimensions of the axes of a group; a new axis gets a free dimension."""
        found = []
        for axis in leaves(group):
            place = self.places.setdefault(axis, len(self.places))
            if place >= MOST_AXES:
                raise Miss("scores have too many dimensions", FIX)
            found.append(place)
        return found

    def _unknown(self, node: Node, groups: list[Group]) -> torch.Tensor:
        """Draw random values for a node, with a few elements along each axis."""
        sizes = [1] * MOST_AXES
        keys = leaves(self.keys)
        for group in groups:
            for axis, place in zip(leaves(group), self._places(group), strict=True):
                sizes[place] = KEYS if axis in keys else OTHERS
        drawn = torch.rand(sizes, generator=self.generator, dtype=torch.float64)
        kind = dtype(node)
        if kind.is_floating_point:
            return 2 * drawn - 1
        return drawn < self.share if kind == torch.bool else (4 * drawn).to(torch.int64)


def _wide(kind: torch.dtype) -> torch.dtype:
    """Return the widest dtype of the same kind: float64, int64 or bool."""
    return torch.float64 if kind.is_floating_point else torch.bool if kind == torch.bool else torch.int64
