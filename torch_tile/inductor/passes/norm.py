# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm written out in PyTorch become `tile.rms_norm` and `tile.layer_norm`.

The anchor is the reciprocal root: `rsqrt(v)`, `v ** -0.5`, or a division by `sqrt(v)`. What stands above it (the mean
of squares, or a variance) says which norm it is; what stands below is followed to the last weight, bias and cast.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.passes.epilogue import Writer, grow
from torch_tile.inductor.passes.graph import (
    CAST,
    Miss,
    Rewrite,
    arg,
    aten,
    binary_with_scalar,
    dtype,
    equivalent,
    is_call,
    is_number,
    is_tensor,
    known,
    only_user,
    ordered,
    product,
    same_shape,
    shape,
    uncast,
    val,
)
from torch_tile.inductor.passes.manager import Context
from torch_tile.kernels.epilogue_rewrite import canonical

ADD = (aten.add.Tensor, aten.add.Scalar)
MUL = (aten.mul.Tensor, aten.mul.Scalar)


@dataclass
class Scale:
    """`value * (weight + offset)`: the multiplication, its vector operand without casts, and the offset."""

    node: Node
    weight: Node
    offset: float


def match(context: Context) -> None:
    """Replace every norm that is written out."""
    for node in list(context.graph.nodes):
        if not _is_root(node) or node.target is None:
            continue
        try:
            _match_one(context, node)
        except Miss as reason:
            if context.stage != "backward":  # which recomputes statistics; those are no norms
                context.miss("norm", node, reason)


def _is_root(node: Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == -0.5)
    return is_call(node, aten.rsqrt.default, aten.sqrt.default)


def _match_one(context: Context, root: Node) -> None:
    plus = root.args[0]
    if not is_call(plus, *ADD):
        return
    pair = binary_with_scalar(plus, *ADD)
    if pair is None:
        if is_call(plus.args[0], aten.mean.dim):
            raise Miss(
                "eps is a tensor",
                "make it a Python float",
            )
        return
    statistic, eps = pair
    centred = _variance_of(statistic)
    if centred is not None:
        _layer_norm(context, root, centred, eps)
        return
    h = _mean_square_of(statistic)
    if h is not None:
        _rms_norm(context, root, h, eps)


def _last_dim(node: Node, of: Any) -> bool:
    dims: Any = arg(node, 1, "dim", None)
    dims = [dims] if isinstance(dims, int) else dims
    rank = len(shape(of))
    return bool(dims) and [d % rank for d in dims] == [rank - 1]


def _mean_of(node: Any) -> Any:
    """`x` if `node` is `x.mean(-1, keepdim=True)`."""
    node = uncast(node)
    if not is_call(node, aten.mean.dim) or not _last_dim(node, node.args[0]):
        return None
    if not arg(node, 2, "keepdim", False):
        raise Miss("the mean drops its dimension", "write mean(-1, keepdim=True)", at=node)
    return node.args[0]


def _square_of(node: Any) -> Any:
    """`x` if `node` is `x ** 2`."""
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.square.default):
        return node.args[0]
    if is_call(node, aten.mul.Tensor) and equivalent(node.args[0], node.args[1]):
        return node.args[0]
    return None


def _mean_square_of(statistic: Any) -> Any:
    return _square_of(_mean_of(statistic))


def _variance_of(statistic: Any) -> Any:
    """`x` if `statistic` is the biased variance of x over its last dimension, in one of the forms it is written."""
    node = uncast(statistic)
    if is_call(node, operator.getitem) and node.args[1] == 0:
        node = node.args[0]
    if is_call(node, aten.var.correction, aten.var_mean.correction) and _last_dim(node, node.args[0]):
        if arg(node, 2, "correction", 1) != 0:
            raise Miss("the variance is unbiased", "write var(-1, correction=0, keepdim=True)", at=node)
        if not arg(node, 3, "keepdim", False):
            raise Miss("the variance drops its dimension", "write var(-1, correction=0, keepdim=True)", at=node)
        return node.args[0]
    centred = _mean_square_of(statistic)
    return _centred(centred)


def _centred(node: Any) -> Any:
    """`x` if `node` is `x` minus its mean over the last dimension."""
    if not is_call(node, aten.sub.Tensor):
        return None
    x, mean = node.args[0], node.args[1]
    if is_call(mean, operator.getitem) and is_call(mean.args[0], aten.var_mean.correction) and mean.args[1] == 1:
        return x if equivalent(mean.args[0].args[0], x) else None
    source = _mean_of(mean)
    return x if source is not None and _same_value(source, x) else None


def _same_value(a: Any, b: Any) -> bool:
    """Equal up to casts between floating dtypes, the narrowest of which both start from."""
    return equivalent(a, b) or equivalent(uncast(a), uncast(b))


def _normalised(root: Node, accept: Any) -> Node:
    """The node that multiplies by the reciprocal root (or divides by the root) what `accept` accepts."""
    found = []
    for user in _through_casts(root):
        for node in user.users:
            if is_call(node, aten.div.Tensor) and is_call(root, aten.sqrt.default):
                if node.args[1] is user and accept(node.args[0]):
                    found.append(node)
            elif is_call(node, aten.mul.Tensor) and not is_call(root, aten.sqrt.default):
                other = node.args[1] if node.args[0] is user else node.args[0]
                if accept(other):
                    found.append(node)
    if len(found) != 1:
        raise Miss(
            f"the reciprocal root scales the input {len(found)} times",
            "multiply once, x * rsqrt(mean(x ** 2) + eps), by the same x that was squared",
            at=root,
        )
    if any(u is not found[0] for u in root.users if not is_call(u, CAST)):
        raise Miss(
            "the statistic is used elsewhere (returned, or saved for the backward?)",
            "return only the normalised tensor; in training use F.rms_norm or F.layer_norm",
            at=root,
        )
    return found[0]


def _through_casts(node: Node) -> list[Node]:
    """The node and the chain of casts on it, as long as each is the only user."""
    chain = [node]
    while (user := only_user(chain[-1])) is not None and is_call(user, CAST) and dtype(user).is_floating_point:
        chain.append(user)
    return chain


def _vector(node: Any, last: Any) -> Any:
    """The 1-D tensor of length `last` under casts and leading dimensions of one, else None."""
    node = uncast(node)
    while is_call(node, aten.unsqueeze.default, aten.view.default, aten.reshape.default) and len(shape(node)) > 1:
        if not known(product(shape(node)) == last):
            return None
        node = uncast(node.args[0])
    ok = is_tensor(node) and val(node).dim() == 1 and known(shape(node)[0] == last) and dtype(node).is_floating_point
    return node if ok else None


def _scaled(chain: list[Node]) -> Scale | None:
    """The multiplication by a weight, or by a number plus a weight, that alone uses the end of the chain."""
    user = only_user(chain[-1])
    if not is_call(user, aten.mul.Tensor) or user.args[0] is user.args[1]:
        return None
    other: Any = user.args[1] if user.args[0] is chain[-1] else user.args[0]
    offset = 0.0
    plus = binary_with_scalar(uncast(other), *ADD)
    if plus is not None:
        other, offset = plus
    weight = _vector(other, shape(user)[-1])
    return Scale(user, weight, offset) if weight is not None and same_shape(shape(user), shape(chain[-1])) else None


def _rms_norm(context: Context, root: Node, h: Node, eps: float) -> None:
    y = _normalised(root, lambda x: _same_value(x, h))
    if not same_shape(shape(y), shape(h)):
        raise Miss("the product with the reciprocal root broadcasts", "normalise x before it is expanded", at=y)
    casts = _through_casts(y)
    scale = _scaled(casts)
    x = uncast(h)
    # Narrowed before the weight: transformers' order. Otherwise the weight multiplies in float32, as F.rms_norm does.
    cast_first = scale is not None and any(dtype(n) == dtype(x) for n in casts) and dtype(x) != dtype(y)
    out = _through_casts(scale.node)[-1] if scale else casts[-1]
    weight, offset = (scale.weight, scale.offset) if scale else (None, 0.0)
    rewrite = Rewrite(out)
    source = x if cast_first or dtype(out) == dtype(x) else h
    new = rewrite.call(torch.ops.tile.rms_norm.default, source, weight, eps, "none", offset, cast_first)
    if dtype(new) != dtype(out):
        new = rewrite.call(CAST, new, dtype(out))
    context.replace(rewrite, "norm", [(out, new)], _describe("tile.rms_norm", new), root)


def _describe(name: str, node: Node) -> str:
    node = uncast(node)
    size = shape(node)[-1]
    return f"{name}([..., {size}])"


def _layer_norm(context: Context, root: Node, x: Node, eps: float) -> None:
    def centred(node: Any) -> bool:
        source = _centred(uncast(node))
        return source is not None and _same_value(source, x)

    y = _normalised(root, centred)
    chain = _through_casts(y)
    scale = _scaled(chain)
    if scale is not None and scale.offset:
        raise Miss("a number is added to the weight", "store the sum as the weight of the LayerNorm", at=scale.node)
    out, bias = (_through_casts(scale.node), None) if scale else (chain, None)
    user = only_user(out[-1])
    if is_call(user, aten.add.Tensor) and user.kwargs.get("alpha", 1) == 1:
        other = user.args[1] if user.args[0] is out[-1] else user.args[0]
        bias = _vector(other, shape(user)[-1]) if not is_number(other) else None
        if bias is not None:
            out = _through_casts(user)
    source = uncast(x)
    last = out[-1]
    if dtype(source) != dtype(last):
        source = x
    rewrite = Rewrite(last)
    new = rewrite.call(torch.ops.tile.layer_norm.default, source, scale.weight if scale else None, bias, eps)
    if dtype(new) != dtype(last):
        new = rewrite.call(CAST, new, dtype(last))
    context.replace(rewrite, "norm", [(last, new)], _describe("tile.layer_norm", new), root)


# Epilogue texts, in their canonical form, of the activations that the kernels know.
ACTIVATIONS = {canonical(f"v0={name}(acc0);ret v0"): name for name in ("relu", "silu", "gelu", "gelu_tanh")}


def take_activation(context: Context) -> None:
    """`silu(rms_norm(x))` and the like become one kernel, however the activation is written."""
    for node in list(context.graph.nodes):
        if not is_call(node, torch.ops.tile.rms_norm.default) or arg(node, 3, "activation", "none") != "none":
            continue
        found = grow(node, ordered(context.graph), alone=True)
        if found is None or dtype(found[1]) != dtype(node):
            continue
        region, out = found
        activation = ACTIVATIONS.get(canonical(Writer(region).text(out)))
        if activation is None:
            continue
        rewrite = Rewrite(out)
        x, weight, eps, _, offset, cast_first = (
            arg(node, i, name, default)
            for i, (name, default) in enumerate(zip(_RMS_ARGUMENTS, _RMS_DEFAULTS, strict=True))
        )
        new = rewrite.call(torch.ops.tile.rms_norm.default, x, weight, eps, activation, offset, cast_first)
        new = rewrite.reshape(new, shape(out))
        settled = node in context.handled
        what = f"{_describe('tile.rms_norm', node)} and {activation}"
        if not context.replace(rewrite, "norm", [(out, new)], what, node) and not settled:
            context.handled.discard(node)  # alone it is another question


_RMS_ARGUMENTS = ("x", "weight", "eps", "activation", "weight_offset", "cast_first")
_RMS_DEFAULTS = (None, None, 1e-6, "none", 0.0, True)


def take_residual(context: Context) -> None:
    """`rms_norm(a + b)` becomes `add_rms_norm(a, b)`, which also returns the sum."""
    for node in list(context.graph.nodes):
        if not is_call(node, torch.ops.tile.rms_norm.default):
            continue
        total = node.args[0]
        if not is_call(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
            continue
        a, b = total.args[0], total.args[1]
        if not (is_tensor(a) and is_tensor(b)) or not same_shape(shape(a), shape(b)):
            continue
        if not dtype(a) == dtype(b) == dtype(total):
            continue
        position = ordered(context.graph)
        if any(position[u] < position[node] for u in total.users):
            continue
        rewrite = Rewrite(node)
        op = torch.ops.tile.add_rms_norm.default
        both = rewrite.call(op, a, b, *node.args[1:], **{k: v for k, v in node.kwargs.items() if k != "x"})
        y, added = rewrite.call(operator.getitem, both, 0), rewrite.call(operator.getitem, both, 1)
        size = shape(total)[-1]
        context.replace(rewrite, "norm", [(node, y), (total, added)], f"tile.add_rms_norm([..., {size}])", node)
