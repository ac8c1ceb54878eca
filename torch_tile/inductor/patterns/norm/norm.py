# SPDX-License-Identifier: Apache-2.0
"""Replace RMSNorm and LayerNorm written out in PyTorch by `tile.rms_norm` and `tile.layer_norm`.

The anchor is the reciprocal root, `rsqrt(v)`, which normalize.py makes of every spelling. The statistic above it (the
mean of squares, or a variance) defines the kind of norm. Below it, the match follows the last weight, bias and cast.

In training, norms are replaced in the joint graph, where the readers of their parts in the backward are known: these
keep the parts, which the partitioner computes again from the input.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    CAST,
    Miss,
    Rewrite,
    aten,
    backward_of,
    binary_with_scalar,
    bind,
    dtype,
    is_call,
    is_floating_cast,
    is_number,
    is_tensor,
    known,
    name_of,
    nodes_under,
    only_user,
    ordered,
    same_shape,
    shape,
    uncast,
    val,
)
from torch_tile.inductor.patterns.gemm.epilogue import Writer, grow
from torch_tile.inductor.patterns.norm import fused_norm
from torch_tile.inductor.patterns.norm.fused_norm import ACTIVATIONS, Norm, left_to_inductor
from torch_tile.inductor.patterns.norm.statistics import (
    centred,
    follow,
    mean_of,
    mean_square_of,
    one_per_row,
    per_row,
    reduces_last,
    same_value,
    square_of,
    tell_length,
    variance_of,
)
from torch_tile.inductor.patterns.normalize import normalize_graph
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.norm.args import AddRmsNormArgs, RmsNormArgs


@dataclass
class Scale:
    """`value * (weight + offset)`: the multiplication, its vector operand without casts, and the offset."""

    node: Node
    weight: Node
    offset: float


@family("norm", "joint", 30)
def match_in_training(context: Context) -> None:
    """Replace the written-out norms of the forward, if the user takes our kernels untimed.

    Nothing in the backward changes, so any backward is right. What has no kernel is reported after the partitioning.
    """
    backward = backward_of(context.graph)
    if context.settings.select != "tile" or not backward:
        return
    normalize_graph(context.graph, backward)
    for root in context.graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        if root in backward:
            continue
        with contextlib.suppress(Miss):
            norm = read_norm(root, backward)
            if norm is not None and norm.factor == 1:
                new = _call(Rewrite(norm.out), norm)
                norm.out.replace_all_uses_with(new)
                context.captured("norm", name_of(new), new)


@family("norm", "post_grad", 410)
def match(context: Context) -> None:
    """Replace every norm that is written out."""
    for node in list(context.graph.nodes):
        if not node.users or not is_call(node, aten.rsqrt.default, aten.sqrt.default):
            continue
        try:
            norm = read_norm(node)
            if norm is not None:
                _replace(context, norm, node)
        except Miss as reason:
            if context.stage != "backward":  # which recomputes statistics; those are no norms
                context.miss("norm", node, reason)


def read_norm(root: Node, backward: Collection[Node] = ()) -> Norm | None:
    """Return the norm around a root, if any, without reads in `backward`. Raises Miss if it has no kernel."""
    plus = root.args[0]
    if not is_call(plus, aten.add.Tensor):
        if variance_of(plus) is not None:
            raise Miss(
                "eps is not added to the variance",
                "write (x - mean) / torch.sqrt(var + eps): eps in front of the root, not behind it",
            )
        tell_length(root)
        return None
    pair = binary_with_scalar(plus, aten.add.Tensor)
    if pair is None:
        if mean_of(plus.args[0]) is not None:
            raise Miss("eps is a tensor", "make it a Python float")
        return None
    statistic, eps = pair
    x = variance_of(statistic)
    if x is not None:
        return _layer_norm(root, x, eps, backward)
    h = mean_square_of(statistic)
    if h is not None:
        return _rms_norm(root, h, eps, backward)
    return _of_length_one(root, statistic, eps, backward)


def _of_length_one(root: Node, statistic: Node, eps: float, backward: Collection[Node]) -> Norm | None:
    """Read `x * rsqrt(sum(x ** 2) + eps)` as an RMSNorm with `eps / n`, times `n ** -0.5` (linear attention)."""
    total = per_row(statistic)
    x = square_of(total.args[0]) if is_call(total, aten.sum.dim_IntList) else None
    if x is None or not reduces_last(total) or not isinstance(n := shape(x)[-1], int):
        tell_length(root)
        return None
    try:
        return _rms_norm(root, x, eps / n, backward, n**-0.5)
    except Miss:
        tell_length(root)
        raise


@dataclass
class Normalised:
    """The node that scales an input by a reciprocal root, and a weight that multiplied the input before."""

    node: Node
    weight: Node | None


def _accepted(node: Any, accept: Callable[[Any], bool]) -> tuple[bool, Node | None]:
    """Return whether `accept` takes a factor, or its product with a vector; return the vector too."""
    if accept(node):
        return True, None
    product = uncast(node)
    if is_call(product, aten.mul.Tensor):
        for x, other in (product.args, product.args[::-1]):
            weight = _vector(other, shape(product)[-1]) if accept(x) else None
            if weight is not None:
                return True, weight
    return False, None


def _normalised(root: Node, x: Node, accept: Callable[[Any], bool], backward: Collection[Node]) -> Normalised:
    """Find the one product of an accepted input with the reciprocal root of a statistic of x; raises Miss."""
    if is_call(root, aten.sqrt.default):  # not a mere divisor, or it were a reciprocal root by now
        raise _used_elsewhere(root)
    found = []
    chain = follow(root, backward)
    readers = [(node, user) for user in chain for node in user.users if node not in backward and node not in chain]
    for node, user in readers:
        if is_call(node, aten.mul.Tensor) and one_per_row(user, x):
            taken, weight = _accepted(node.args[1] if node.args[0] is user else node.args[0], accept)
            if taken and same_shape(shape(node), shape(x)):
                found.append(Normalised(node, weight))
    if len(found) != 1:
        raise Miss(
            f"the reciprocal root scales the input {len(found)} times",
            "multiply once, x * rsqrt(mean(x ** 2) + eps), by the same x that was squared",
            at=root,
        )
    if any(node is not found[0].node for node, _ in readers):
        raise _used_elsewhere(root)
    return found[0]


def _used_elsewhere(root: Node) -> Miss:
    """Make the Miss for a statistic with other readers."""
    return Miss(
        "the statistic is used elsewhere (returned, or saved for the backward?)",
        "use the root for the normalised tensor alone; in training call F.rms_norm or F.layer_norm",
        at=root,
    )


def _through_casts(node: Node, backward: Collection[Node]) -> list[Node]:
    """Return the node and the chain of casts on it, each the only user of the node before."""
    chain = [node]
    while is_floating_cast(user := only_user(chain[-1], backward)):
        chain.append(user)
    return chain


def _vector(node: Any, last: Any) -> Any:
    """Return the 1-D tensor of length `last` under casts and leading dimensions of one, else None."""
    for under in nodes_under(node, casts=True, views=True):
        if is_tensor(under) and val(under).dim() <= 1:
            ok = val(under).dim() == 1 and known(shape(under)[0] == last) and dtype(under).is_floating_point
            return uncast(under) if ok else None
    return None


def _scaled(chain: list[Node], backward: Collection[Node]) -> Scale | None:
    """Return the multiplication by a weight (plus a number) that is the only user of the chain, else None."""
    user = only_user(chain[-1], backward)
    if not is_call(user, aten.mul.Tensor) or user.args[0] is user.args[1]:
        return None
    other: Any = user.args[1] if user.args[0] is chain[-1] else user.args[0]
    offset = 0.0
    plus = binary_with_scalar(uncast(other), aten.add.Tensor)
    if plus is not None:
        other, offset = plus
    weight = _vector(other, shape(user)[-1])
    return Scale(user, weight, offset) if weight is not None and same_shape(shape(user), shape(chain[-1])) else None


def _rms_norm(root: Node, h: Node, eps: float, backward: Collection[Node], factor: float = 1.0) -> Norm:
    """Read the RMSNorm around a root, with its weight and casts."""
    y = _normalised(root, h, lambda x: same_value(x, h), backward)
    casts = _through_casts(y.node, backward)
    scale = _scaled(casts, backward) if y.weight is None else None
    x = uncast(h)
    # Narrowed before the weight: transformers' order. Otherwise the weight multiplies in float32, as F.rms_norm does.
    cast_first = scale is not None and any(dtype(n) == dtype(x) for n in casts) and dtype(x) != dtype(y.node)
    out = _through_casts(scale.node, backward)[-1] if scale else casts[-1]
    weight, offset = (scale.weight, scale.offset) if scale else (y.weight, 0.0)
    source = x if cast_first or dtype(out) == dtype(x) else h
    return Norm(out, x, weight, None, offset, eps, False, factor, source, cast_first)


def _layer_norm(root: Node, x: Node, eps: float, backward: Collection[Node]) -> Norm:
    """Read the LayerNorm around a root, with its weight, bias and casts."""

    def is_centred(node: Any) -> bool:
        source = centred(node)
        return source is not None and same_value(source, x)

    y = _normalised(root, x, is_centred, backward)
    chain = _through_casts(y.node, backward)
    scale = _scaled(chain, backward) if y.weight is None else None
    if scale is not None and scale.offset:
        raise Miss("a number is added to the weight", "store the sum as the weight of the LayerNorm", at=scale.node)
    weight = scale.weight if scale else y.weight
    out, bias = (_through_casts(scale.node, backward), None) if scale else (chain, None)
    user = only_user(out[-1], backward)
    if is_call(user, aten.add.Tensor) and user.kwargs.get("alpha", 1) == 1:
        other = user.args[1] if user.args[0] is out[-1] else user.args[0]
        bias = _vector(other, shape(user)[-1]) if not is_number(other) else None
        if bias is not None:
            out = _through_casts(user, backward)
    last, source = out[-1], uncast(x)
    return Norm(last, source, weight, bias, 0.0, eps, True, 1.0, source if dtype(source) == dtype(last) else x)


def _replace(context: Context, norm: Norm, root: Node) -> None:
    """Replace a norm that was read, with what stands around it or alone, unless Inductor keeps it."""
    if fused_norm.fuse(context, norm, root):
        return
    what = _describe("tile.layer_norm" if norm.centred else "tile.rms_norm", norm.out)
    has_activation = not norm.centred and _activation_behind(context, norm.out) is not None
    if not has_activation and left_to_inductor(context, what, norm.out, norm.x, root):
        return
    rewrite = Rewrite(norm.out)
    context.replace(rewrite, "norm", [(norm.out, _call(rewrite, norm))], what, root)


def _call(rewrite: Rewrite, norm: Norm) -> Node:
    """Insert the op of a norm that was read; return its result in the norm's dtype."""
    if norm.centred:
        new = rewrite.call(torch.ops.tile.layer_norm.default, norm.source, norm.weight, norm.bias, norm.eps)
    else:
        args = RmsNormArgs(norm.source, norm.weight, norm.eps, "none", norm.offset, norm.cast_first)
        new = rewrite.call(torch.ops.tile.rms_norm.default, *args)
    return new if dtype(new) == dtype(norm.out) else rewrite.call(CAST, new, dtype(norm.out))


def _describe(name: str, node: Node) -> str:
    """Name a norm for the report."""
    return f"{name}([..., {shape(node)[-1]}])"


@family("norm", "post_grad", 430)
def fuse_activation(context: Context) -> None:
    """Fuse `silu(rms_norm(x))` and similar activations into one kernel, however the activation is written."""
    for node in list(context.graph.nodes):
        if not is_call(node, torch.ops.tile.rms_norm.default):
            continue
        plain = bind(node, RmsNormArgs[Any])
        if plain.activation != "none":
            continue
        found = _activation_behind(context, node)
        if found is None:
            continue
        out, activation = found
        rewrite = Rewrite(out)
        new = rewrite.call(torch.ops.tile.rms_norm.default, *plain._replace(activation=activation))
        new = rewrite.reshape(new, shape(out))
        settled = node in context.handled
        what = f"{_describe('tile.rms_norm', node)} and {activation}"
        if not context.replace(rewrite, "norm", [(out, new)], what, node) and not settled:
            context.handled.discard(node)  # alone it is another question


def _activation_behind(context: Context, node: Node) -> tuple[Node, str] | None:
    """Return the activation of a tensor, and its name, if nothing else reads the tensor."""
    found = grow(node, ordered(context.graph), alone=True)
    if found is None or dtype(found[1]) != dtype(node):
        return None
    region, out = found
    name = ACTIVATIONS.get(canonical(Writer(region).text(out)))
    return None if name is None else (out, name)


@family("norm", "post_grad", 610)
def fuse_residual(context: Context) -> None:
    """Replace `rms_norm(a + b)` by `add_rms_norm(a, b)`, which also returns the sum."""
    for node in list(context.graph.nodes):
        if not is_call(node, torch.ops.tile.rms_norm.default):
            continue
        plain = bind(node, RmsNormArgs[Any])
        total = plain.x
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
        rewrite, won_alone = Rewrite(node), node in context.handled
        op = torch.ops.tile.add_rms_norm.default
        both = rewrite.call(op, *AddRmsNormArgs(residual=b, **plain._replace(x=a)._asdict()))
        y, added = rewrite.call(operator.getitem, both, 0), rewrite.call(operator.getitem, both, 1)
        what = f"tile.add_rms_norm([..., {shape(total)[-1]}])"
        if not context.replace(rewrite, "norm", [(node, y), (total, added)], what, node) and not won_alone:
            context.left.add(node)  # Inductor fuses the sum and the norm, unless the norm is a call of ours
