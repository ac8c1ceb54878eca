# SPDX-License-Identifier: Apache-2.0
"""Roots of statistics: which nodes are some, what stands for them further down, and norms that have no eps under one.

`x / sqrt(v)`, `x / v ** 0.5`, `x * rsqrt(v)` and `x * (1 / sqrt(v))` are one form. A division by the length itself, as
`F.normalize` and `x / x.norm()` have it, is another function for rows that are nearly zero, so it is told, not taken.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torch_tile.inductor.graph.nodes import (
    CAST,
    VIEWS,
    Miss,
    aten,
    binary_with_scalar,
    dtype,
    is_call,
    only_user,
)
from torch_tile.inductor.patterns.norm.statistics import (
    per_row,
    puts_back,
    reduces_last,
    same_value,
    square_of,
)

_ADD = (aten.add.Tensor, aten.add.Scalar)
_SCALE = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_CLAMP = (aten.clamp_min.default, aten.clamp.default, aten.maximum.default)


def is_root(node: Node) -> bool:
    """Whether a node is a root, or the reciprocal of one."""
    return divides(node) or is_call(node, aten.rsqrt.default) or _is_power(node, -0.5)


def divides(node: Node) -> bool:
    """Whether a root is what a norm divides by, not what it multiplies by."""
    return is_call(node, aten.sqrt.default) or _is_power(node, 0.5)


def _is_power(node: Node, exponent: float) -> bool:
    return is_call(node, aten.pow.Tensor_Scalar) and bool(node.args[1] == exponent)


def follow(root: Node) -> dict[Node, bool]:
    """The root and what stands for it further down, each the only user of the one before: casts, views that put back
    or repeat the dimension that the statistic is over, a reciprocal. The values are whether a norm divides by it.
    """
    chain, node = {root: divides(root)}, root
    while (user := only_user(node)) is not None:
        divisor = chain[node]
        if is_call(user, aten.reciprocal.default) and divisor:
            divisor = False
        elif not (_is_cast(user) or puts_back(user) or _times_one(user)):
            break
        chain[user], node = divisor, user
    return chain


def _is_cast(node: Node) -> bool:
    return is_call(node, CAST) and dtype(node).is_floating_point


def _times_one(node: Node) -> bool:
    """What `1 / x` leaves behind its reciprocal."""
    pair = binary_with_scalar(node, aten.mul.Tensor, aten.mul.Scalar)
    return pair is not None and pair[1] == 1


def tell_length(root: Node) -> None:
    """Raise `Miss` where a tensor is divided by its own length with eps anywhere but under the root of a mean."""
    under: Any = root.args[0]
    bounded = is_call(under, *_CLAMP)
    pair = binary_with_scalar(under, *_ADD)
    total = per_row(pair[0] if pair else under.args[0] if bounded else under)
    if not is_call(total, aten.sum.dim_IntList, aten.mean.dim):
        return
    x = square_of(total.args[0])
    passed = _passed(root, x) if x is not None else None
    if passed is None or not reduces_last(total):
        return
    if pair:
        raise Miss(
            "the root is of a sum of squares, not of their mean",
            "write F.rms_norm(x, x.shape[-1:], eps=eps / n) * n ** -0.5, n being the length of a row",
            at=total,
        )
    if bounded or any(is_call(n, *_CLAMP) for n in passed):
        reason = "eps bounds the length from below, it is not added under the root"
    elif any(is_call(n, *_ADD) for n in passed):
        reason = "eps is added to the length, not under the root"
    else:
        reason = "no eps is added under the root"
    fix = "write F.rms_norm(x, x.shape[-1:], weight, eps), times n ** -0.5 if rows are to have length 1; "
    raise Miss(reason, fix + "only rows near 0 differ", at=total)


def _passed(root: Node, x: Any) -> list[Node] | None:
    """What a root goes through until x is divided by it, or multiplied by its reciprocal; None if x never is."""
    paths = [[root]]
    while paths:
        path = paths.pop()
        for user in path[-1].users:
            if is_call(user, aten.div.Tensor, aten.mul.Tensor) and same_value(user.args[0], x):
                return path
            if is_call(user, aten.mul.Tensor) and same_value(user.args[1], x):
                return path
            if len(path) < 8 and _keeps_rows(user):
                paths.append([*path, user])
    return None


def _keeps_rows(node: Node) -> bool:
    """Whether a node is still a length for each row: cast, viewed, scaled, bounded or inverted."""
    if is_call(node, *VIEWS, *_CLAMP, aten.unsqueeze.default, aten.expand.default, aten.reciprocal.default):
        return True
    return _is_cast(node) or binary_with_scalar(node, *_ADD, *_SCALE) is not None
