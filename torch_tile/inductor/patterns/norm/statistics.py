# SPDX-License-Identifier: Apache-2.0
"""Recognise the statistics of norms: the mean of squares, or the variance, over the last dimension, after normalize.py.

Casts, and views that only restore the reduced dimension, may stand anywhere between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch.fx import Node

from torch_tile.inductor.graph.nodes import (
    REPEATS,
    UNITS,
    VIEWS,
    Miss,
    arg,
    aten,
    binary_with_scalar,
    equivalent,
    is_call,
    is_floating_cast,
    is_tensor,
    known,
    only_user,
    same_shape,
    shape,
    uncast,
)


def same_value(a: Any, b: Any) -> bool:
    """Return whether two nodes are equal up to casts between floating dtypes."""
    return equivalent(a, b) or equivalent(uncast(a), uncast(b))


def one_per_row(node: Any, of: Any) -> bool:
    """Return whether a tensor has one value for each row of `of`: its last dimension is 1 or repeats."""
    sizes, full = shape(node), shape(of)
    return same_shape(sizes, (*full[:-1], 1)) or same_shape(sizes, full)


def per_row(node: Any) -> Any:
    """Return the node under casts and under views that restore or repeat the last dimension."""
    node = uncast(node)
    while puts_back(node):
        node = uncast(node.args[0])
    return node


def puts_back(node: Any) -> bool:
    """Return whether a node is a view that only adds or repeats the last dimension."""
    if not is_call(node, *VIEWS, *UNITS, *REPEATS) or not is_tensor(node.args[0]):
        return False
    new, old = shape(node), shape(node.args[0])
    if len(new) == len(old) + 1:
        return known(new[-1] == 1) and same_shape(new[:-1], old)
    return len(new) == len(old) > 0 and same_shape(new[:-1], old[:-1]) and known(old[-1] == 1)


def reduced(node: Any, *targets: Any) -> tuple[Node, int] | None:
    """Return `(x, dim)` if `node` is x reduced by one of `targets` over one dimension and broadcasts back to x."""
    plain = node if is_call(node, *targets) else per_row(node)
    if is_call(plain, operator.getitem) and plain.args[1] == 0:
        plain = plain.args[0]
    if not is_call(plain, *targets):
        return None
    x: Any = plain.args[0]
    dims: Any = arg(plain, "dim") or []
    dims = [dims] if isinstance(dims, int) else dims
    if len(dims) != 1 or len(shape(node)) != len(shape(x)) or not shape(x):
        return None
    dim = dims[0] % len(shape(x))
    return (x, dim) if arg(plain, "keepdim") or dim == len(shape(x)) - 1 else None


def mean_of(node: Any) -> Any:
    """Return `x` if `node` is the mean of x over its last dimension, kept or not; else None."""
    node = per_row(node)
    return node.args[0] if is_call(node, aten.mean.dim) and reduces_last(node) else None


def reduces_last(node: Node) -> bool:
    """Return whether a reduction is over the last dimension alone; raises Miss for another single dimension."""
    dims: Any = arg(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    rank = len(shape(node.args[0]))
    if not dims or len(dims) != 1 or not rank:
        return False
    if dims[0] % rank == rank - 1:
        return True
    raise Miss(
        f"normalises over dimension {dims[0] % rank} of {rank}, whose elements lie apart",
        "keep that dimension last (channels last), where kernels read whole rows; Inductor's own reads this well",
        at=node,
    )


def square_of(node: Any) -> Any:
    """Return `x` if `node` is the square of x, else None."""
    node = uncast(node)
    return node.args[0] if is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1] else None


def mean_square_of(statistic: Any) -> Any:
    """Return `x` if `statistic` is the mean of the squares of x, else None."""
    return square_of(mean_of(statistic))


def variance_of(statistic: Any) -> Any:
    """Return `x` if `statistic` is the biased variance of x over its last dimension, else None."""
    node = per_row(statistic)
    if is_call(node, operator.getitem) and node.args[1] == 0:
        node = node.args[0]
    if is_call(node, aten.var.correction, aten.var_mean.correction) and reduces_last(node):
        if arg(node, "correction") != 0:
            raise Miss("the variance is unbiased", "write var(-1, correction=0, keepdim=True)", at=node)
        return node.args[0]
    if is_call(node, aten.sub.Tensor):  # E[x^2] - E[x]^2
        x, same = mean_square_of(node.args[0]), mean_of(square_of(node.args[1]))
        return x if x is not None and same is not None and same_value(x, same) else None
    return centred(mean_square_of(statistic))


def centred(node: Any) -> Any:
    """Return `x` if `node` is `x` minus its mean over the last dimension, else None."""
    node = uncast(node)
    if not is_call(node, aten.sub.Tensor):
        return None
    x, mean = node.args[0], per_row(node.args[1])
    if is_call(mean, operator.getitem) and is_call(mean.args[0], aten.var_mean.correction) and mean.args[1] == 1:
        source = mean.args[0].args[0]
    else:
        source = mean_of(mean)
    return x if source is not None and same_value(source, x) and one_per_row(node.args[1], x) else None


# Follow roots of statistics to their use, and report norms without eps under the root.
#
# A division by the length itself, as in `F.normalize` and `x / x.norm()`, is another function for rows that are nearly
# zero. So it is reported and not replaced.

_SCALE = (aten.mul.Tensor, aten.div.Tensor)
_CLAMP = (aten.clamp_min.default, aten.clamp.default, aten.maximum.default)


def follow(root: Node, backward: Collection[Node]) -> list[Node]:
    """Follow a root through casts and views that restore its dimension, each the one user outside `backward`."""
    chain = [root]
    while (user := only_user(chain[-1], backward)) is not None and (is_floating_cast(user) or puts_back(user)):
        chain.append(user)
    return chain


def tell_length(root: Node) -> None:
    """Raise `Miss` if a tensor is divided by its own length and eps is outside the root of a mean."""
    under: Any = root.args[0]
    bounded = is_call(under, *_CLAMP)
    pair = binary_with_scalar(under, aten.add.Tensor)
    total = per_row(pair[0] if pair else under.args[0] if bounded else under)
    if not is_call(total, aten.sum.dim_IntList, aten.mean.dim):
        return
    x = square_of(total.args[0])
    passed = _path_to_division(root, x) if x is not None else None
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
    elif any(is_call(n, aten.add.Tensor) for n in passed):
        reason = "eps is added to the length, not under the root"
    else:
        reason = "no eps is added under the root"
    fix = "write F.rms_norm(x, x.shape[-1:], weight, eps), times n ** -0.5 if rows are to have length 1; "
    raise Miss(reason, fix + "only rows near 0 differ", at=total)


def _path_to_division(root: Node, x: Any) -> list[Node] | None:
    """Return the path from a root to the division of x by it, or to the product with its reciprocal; else None."""
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
    """Return whether a node still holds one length per row: cast, viewed, scaled, bounded or inverted."""
    if is_call(node, *VIEWS, *UNITS, *REPEATS, *_CLAMP, aten.reciprocal.default):
        return True
    return is_floating_cast(node) or binary_with_scalar(node, aten.add.Tensor, *_SCALE) is not None
