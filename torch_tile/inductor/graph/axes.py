# SPDX-License-Identifier: Apache-2.0
"""View algebra: describe the dimensions of an operand by the axes of the tensor under its views.

A dimension is a list of axes, outermost first. An axis has a size and, once a reshape has cut it, parts. The trace
walks back from an operand through reshape, permute, expand and similar views. It ends at a root tensor whose dimensions
are lists of the same axes; axes that the root lacks were broadcast. So one function reads `reshape(expand(unsqueeze(k,
2)))`, the grouped heads of attention, and all views that `einsum` puts around its `bmm`. It is exact, also for symbolic
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.graph.nodes import (
    COPIES,
    REPEATS,
    UNITS,
    VIEWS,
    Rewrite,
    aten,
    dtype,
    is_call,
    is_floating_cast,
    is_tensor,
    known,
    product,
    quotient,
    shape,
)

REPEATING = *REPEATS, aten.repeat.default


class Axis:
    """One digit of an index, compared by identity. `parts` is set when the axis is cut or merged with another."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Any) -> None:
        self.size: Any = size
        self.parts: tuple[Axis, ...] = ()


Group = list[Axis]


def axes_of(sizes: Sequence[Any]) -> list[Group]:
    """Make one fresh axis per dimension; dimensions of size one get none."""
    return [[] if known(size == 1) else [Axis(size)] for size in sizes]


def leaves(group: Sequence[Axis]) -> Group:
    """Return the uncut axes of a group, outermost first."""
    out: Group = []
    for axis in group:
        out.extend(leaves(axis.parts) if axis.parts else [axis])
    return out


def extent(group: Sequence[Axis]) -> Any:
    """Return the size of a group."""
    return product(axis.size for axis in group)


def _cut_axis(axis: Axis, outer: Any) -> None:
    """Cut an axis into an outer axis of size `outer` and an inner axis of the remaining size."""
    axis.parts = (Axis(outer), Axis(quotient(axis.size, outer)))


def regroup(axes: Sequence[Axis], sizes: Sequence[Any]) -> list[Group] | None:
    """Group axes, in row-major order, into dimensions of these sizes; cut axes where needed. None if impossible."""
    queue = leaves(axes)
    groups: list[Group] = []
    for size in sizes:
        group: Group = []
        have: Any = 1
        while not known(have == size):
            if not queue:
                return None
            axis = queue.pop(0)
            if known(size % (have * axis.size) == 0):
                group.append(axis)
                have = have * axis.size
            elif known(size % have == 0) and known((have * axis.size) % size == 0):
                _cut_axis(axis, quotient(size, have))
                group.append(axis.parts[0])
                queue.insert(0, axis.parts[1])
                have = size
            else:
                return None
        groups.append(group)
    return groups if not queue else None


def unify(a: Sequence[Axis], b: Sequence[Axis]) -> bool:
    """Make two descriptions of one dimension the same axes, cutting both as needed; False if they cannot agree."""
    left, right = leaves(a), leaves(b)
    while left and right:
        x, y = left[0], right[0]
        if x is y or known(x.size == y.size):
            if x is not y:
                y.parts = (x,)
            left.pop(0)
            right.pop(0)
        elif known(x.size % y.size == 0):
            _cut_axis(x, y.size)
            left[:1] = x.parts
        elif known(y.size % x.size == 0):
            _cut_axis(y, x.size)
            right[:1] = y.parts
        else:
            return False
    return not left and not right


def _squeezed(node: Node) -> list[int]:
    """Return the dimensions of the input that a squeeze removes."""
    rank = len(shape(node.args[0]))
    if len(node.args) == 1:
        return [d for d, s in enumerate(shape(node.args[0])) if known(s == 1)]
    dims: Any = node.args[1]
    dims = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in dims if known(shape(node.args[0])[d] == 1)]


def _step(node: Node, groups: list[Group]) -> list[Group] | None:
    """Return the dimensions of a view's input, given those of its output; None if the node is no known view."""
    args: Any = node.args
    if is_call(node, *COPIES):
        return groups
    if is_call(node, aten.permute.default):
        source: list[Group] = [[] for _ in groups]
        for i, d in enumerate(args[1]):
            source[d % len(groups)] = groups[i]
        return source
    if is_call(node, aten.transpose.int):
        source = list(groups)
        source[args[1]], source[args[2]] = source[args[2]], source[args[1]]
        return source
    if is_call(node, aten.t.default):
        return groups[::-1]
    if is_call(node, aten.unsqueeze.default):
        d = args[1] % len(groups)
        return groups[:d] + groups[d + 1 :]
    if is_call(node, *UNITS):
        source = list(groups)
        for d in sorted(_squeezed(node)):
            source.insert(d, [])
        return source
    if is_call(node, aten.expand.default):
        sizes = shape(args[0])
        kept = groups[len(groups) - len(sizes) :]
        return [[] if known(s == 1) else g for s, g in zip(sizes, kept, strict=True)]
    if is_call(node, aten.repeat.default):
        return _repeated(groups, shape(args[0]))
    if is_call(node, *VIEWS):
        flat = [axis for group in groups for axis in group]
        return regroup(flat, shape(args[0]))
    return None


def _repeated(groups: list[Group], sizes: Sequence[Any]) -> list[Group] | None:
    """Return the dimensions under a `repeat`, whose output dimensions are (copies, own size), row-major."""
    source: list[Group] = []
    for group, size in zip(groups[len(groups) - len(sizes) :], sizes, strict=True):
        cut = regroup(group, [quotient(extent(group), size), size])
        if cut is None:
            return None
        source.append(cut[1])
    return source


def read_views(node: Node, groups: list[Group]) -> list[tuple[Node, list[Group]]]:
    """Find the views of a tensor, with their dimensions, that a node other than a view reads, or that repeat."""
    found, pending = [], [node]
    while pending:
        view = pending.pop()
        further = [u for u in view.users if not is_call(u, *REPEATING) and _is_view(u)]
        if len(further) < len(view.users):
            root, have = trace(view, dims := axes_of(shape(view)))
            if root is node and all(unify(a, b) for a, b in zip(groups, have, strict=True)):
                found.append((view, dims))
            else:
                return [(node, groups)]
        pending += further
    return found


def views_of(nodes: Iterable[Node]) -> tuple[set[Node], list[Node]]:
    """Return the views among `nodes` and in front of them, and the tensors under these views."""
    views: set[Node] = set()
    tensors: dict[Node, None] = {}
    for node in nodes:
        while not is_call(node, *COPIES) and _is_view(node):
            views.add(node)
            node = node.args[0]  # type: ignore[assignment]
        tensors[node] = None
    return views, list(tensors)


def _is_view(node: Node) -> bool:
    """Return whether a node is a view that `_step` knows."""
    return is_tensor(node) and node.op == "call_function" and _step(node, axes_of(shape(node))) is not None


def trace(node: Any, groups: list[Group], casts: bool = False) -> tuple[Any, list[Group]]:
    """Walk back from a node to the tensor under its views; return that tensor, and the dimensions of the node in it.

    groups: the node's dimensions. With `casts`, the walk also passes conversions between floating dtypes. A tensor
    without elements is a root, since 0 has no digits.
    """
    while (
        isinstance(node, Node)
        and node.op == "call_function"
        and not any(isinstance(s, int) and s == 0 for s in shape(node))
    ):
        source = groups if casts and is_floating_cast(node) else _step(node, groups)
        if source is None:
            break
        node, groups = node.args[0], source
    return node, [leaves(g) for g in groups]


def trace_unrounded(node: Any, groups: list[Group]) -> tuple[Any, list[Group]]:
    """Do as `trace`, and also walk through casts between floating dtypes that widen and so keep every value."""
    node, groups = trace(node, groups)
    while isinstance(node, Node) and node.op == "call_function" and is_floating_cast(node):
        source: Any = node.args[0]
        if torch.promote_types(dtype(source), dtype(node)) != dtype(node):
            break
        node, groups = trace(source, groups)
    return node, groups


def arrange(rewrite: Rewrite, root: Node, have: list[Group], want: list[Group]) -> Node | None:
    """Insert the views that turn `root`, with dimensions `have`, into a tensor with dimensions `want`.

    Axes in `want` that the root lacks are broadcast (a stride of zero). Returns None if the root has axes that `want`
    lacks.
    """
    flat = [a for g in have for a in leaves(g)]
    wanted = [leaves(g) for g in want]
    target = [a for g in wanted for a in g]
    if len(set(target)) != len(target) or not set(flat) <= set(target):
        return None
    node = rewrite.reshape(root, [a.size for a in flat])
    node = rewrite.permute(node, [flat.index(a) for a in target if a in flat])
    if len(flat) < len(target):
        present = set(flat)
        node = rewrite.reshape(node, [a.size if a in present else 1 for a in target])
        node = rewrite.call(aten.expand.default, node, [a.size for a in target])
    return rewrite.reshape(node, [extent(g) for g in wanted])
