# SPDX-License-Identifier: Apache-2.0
"""Bring the spellings of squares, roots, means and numbers into one form, so that patterns read that form alone.

Where one node becomes one node, it is edited in place: it keeps its name, its metadata and its place in the graph.

| written | becomes |
|---|---|
| `x ** 2`, `square(x)`, `x * y` with y equal to x | `x * x` |
| `v ** 0.5`, `v ** -0.5` | `sqrt(v)`, `rsqrt(v)` |
| `1 / sqrt(v)`, `x / sqrt(v)` with a root that broadcasts | `rsqrt(v)`, `x * rsqrt(v)` |
| `sum(x, dims) / n`, `sum(x, dims) * (1 / n)` | `mean(x, dims)` |
| `add.Scalar` and the like | `add.Tensor` with a number |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    CAST,
    REPEATS,
    UNITS,
    VIEWS,
    WRITTEN,
    Rewrite,
    arg,
    aten,
    constant,
    dtype,
    equivalent,
    erase_dead,
    is_call,
    is_floating_cast,
    is_tensor,
    known,
    look_through,
    nodes_under,
    only_user,
    product,
    same_shape,
    shape,
    times_number,
    val,
)

_OF_NUMBERS = {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}
_ROOTS = {0.5: aten.sqrt.default, -0.5: aten.rsqrt.default}


@family(None, "post_grad", 140)
def normalize(context: Context) -> None:
    """Bring the graph into the form that patterns read."""
    normalize_graph(context.graph)


def normalize_graph(graph: Graph, backward: Collection[Node] = ()) -> None:
    """Normalize the nodes of a graph outside `backward`, whose reads do not count either."""
    for node in [n for n in graph.nodes if n.op == "call_function" and n not in backward and is_tensor(n)]:
        if node._erased:
            continue
        node.target = _OF_NUMBERS.get(node.target, node.target)
        _normalize_square(node)
        _normalize_power(node)
        _normalize_mean(node)
        _drop_factor_of_one(node)
        if is_call(node, aten.sqrt.default):
            _multiply_by_reciprocal(node, backward)


def _retarget(node: Node, target: Any, *args: Any) -> None:
    """Let a node call `target` instead, for the same value."""
    inputs = node.all_input_nodes
    node.meta.setdefault(WRITTEN, node.target)
    node.target, node.args, node.kwargs = target, args, {}
    for old in inputs:
        erase_dead(old)


def _normalize_square(node: Node) -> None:
    """Write `x * x` and `x ** 2` as `square(x)`."""
    x, y = (*node.args, None, None)[:2]
    is_product = is_call(node, aten.mul.Tensor) and x is not y and equivalent(x, y)
    is_power = is_call(node, aten.pow.Tensor_Scalar) and y == 2
    if (is_product or is_power or is_call(node, aten.square.default)) and dtype(x) == dtype(node):
        _retarget(node, aten.mul.Tensor, x, x)


def _normalize_power(node: Node) -> None:
    """Write powers of one half and minus one half as `sqrt` and `rsqrt`."""
    exponent: Any = node.args[1] if is_call(node, aten.pow.Tensor_Scalar) else None
    if exponent in _ROOTS:
        _retarget(node, _ROOTS[exponent], node.args[0])


def _normalize_mean(node: Node) -> None:
    """Turn a sum divided by the number of its terms into a mean. The number may be a size of the graph."""
    if not is_call(node, aten.div.Tensor, aten.mul.Tensor):
        return
    pair = times_number(node)
    total = look_through(pair[0] if pair else node.args[0], casts=True, views=True)
    if not is_call(total, aten.sum.dim_IntList) or not dtype(total.args[0]).is_floating_point:
        return
    dims: Any = arg(total, "dim") or range(len(shape(total.args[0])))
    count, divisor = product(shape(total.args[0])[d] for d in dims), val(node.args[1])
    if pair is not None:
        is_mean = isinstance(count, int) and abs(pair[1] * count - 1) < 1e-6
    else:
        is_mean = is_call(node, aten.div.Tensor) and isinstance(divisor, torch.SymInt) and known(divisor == count)
    if is_mean:
        rewrite = Rewrite(node)
        mean = rewrite.call(aten.mean.dim, *total.args, **total.kwargs)
        node.replace_all_uses_with(_shaped_like(rewrite, mean, node))
        erase_dead(node)


def _shaped_like(rewrite: Rewrite, new: Node, node: Node) -> Node:
    """Return `new` in the shape and dtype of `node`."""
    new = rewrite.reshape(new, shape(node))
    return new if dtype(new) == dtype(node) else rewrite.call(CAST, new, dtype(node))


def _drop_factor_of_one(node: Node) -> None:
    """Drop the factor of `1 / x`, which Dynamo writes as `reciprocal(x) * 1`."""
    x = node.args[0] if is_call(node, aten.mul.Tensor) and constant(node.args[1]) == 1 else None
    if is_call(x, aten.reciprocal.default, aten.rsqrt.default) and only_user(x) is node and dtype(x) == dtype(node):
        node.replace_all_uses_with(x)
        erase_dead(node)


def _multiply_by_reciprocal(root: Node, backward: Collection[Node]) -> None:
    """Let each division by a square root that nothing else reads multiply by the reciprocal root."""
    divisions = _divisions(root, backward)
    if not divisions or any(same_shape(shape(n), shape(root)) for n in divisions if is_call(n, aten.div.Tensor)):
        return  # not for elementwise divisions: the reciprocal is to be computed less often
    inverse = Rewrite(root).call(aten.rsqrt.default, root.args[0])
    for node in divisions:
        rewrite, new = Rewrite(node), inverse
        path = list(nodes_under(node.args[-1], casts=True, views=True, broadcasts=True))
        for step in reversed(path[: path.index(root)]):
            new = rewrite.call(step.target, new, *step.args[1:], **step.kwargs)
        if is_call(node, aten.div.Tensor):
            new = rewrite.call(aten.mul.Tensor, node.args[0], new)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in backward)
        erase_dead(node)


def _divisions(node: Node, backward: Collection[Node]) -> list[Node] | None:
    """Return the divisions by a node, also through casts and views, and its reciprocals; None if others read it."""
    found: list[Node] = []
    for user in node.users:
        if user in backward:
            continue
        more: list[Node] | None = None
        if is_call(user, aten.reciprocal.default):
            more = [user]
        elif is_call(user, aten.div.Tensor):
            more = [user] if user.args[0] is not node else None
        elif is_floating_cast(user) or is_call(user, *VIEWS, *UNITS, *REPEATS):
            more = _divisions(user, backward)
        if more is None:
            return None
        found += more
    return found
