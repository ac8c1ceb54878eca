# SPDX-License-Identifier: Apache-2.0
"""Pre-grad, training only: RMSNorm written out in Python becomes one `tile.rms_norm`, which carries its own backward.

After AOTAutograd the forward would keep its parts for the backward, and no kernel could take them. The graph here may
mutate, so a match must be a closed run of nodes with no in-place operation among them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    dtype,
    is_number,
    is_tensor,
    known,
    ordered,
    same_shape,
    shape,
    val,
)

_FUNCTIONS: dict[Any, str] = {
    operator.add: "add",
    torch.add: "add",
    operator.mul: "mul",
    torch.mul: "mul",
    operator.pow: "pow",
    torch.pow: "pow",
    torch.square: "square",
    torch.mean: "mean",
    torch.rsqrt: "rsqrt",
}
_METHODS = ("add", "mul", "pow", "square", "mean", "rsqrt", "to", "float", "type_as", "half", "bfloat16")
_CASTS = ("to", "float", "type_as", "half", "bfloat16")


def word(node: Any) -> str:
    """Return the name of a Dynamo node's operation, or an empty string if no norm has it."""
    if not isinstance(node, Node) or not is_tensor(node):
        return ""
    if node.op == "call_method":
        return str(node.target) if node.target in _METHODS else ""
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


@dataclass
class Match:
    """A matched norm: its input, the nodes to erase, its result, and the op's arguments."""

    x: Node
    inside: list[Node]
    out: Node
    weight: Node | None
    eps: float
    offset: float
    cast_first: bool


@family("norm", "pre_grad", 40)
def capture_norms(context: Context) -> None:
    """Replace every written-out RMSNorm whose result needs a gradient."""
    if context.settings.select != "tile" or not torch.is_grad_enabled():
        return
    for node in list(context.graph.nodes):
        if word(node) != "rsqrt" or not val(node).requires_grad:
            continue
        match = _match(node)
        if match is None or not _closed(match):
            continue
        options: dict[str, Any] = {"eps": match.eps, "weight_offset": match.offset, "cast_first": match.cast_first}
        with context.graph.inserting_before(match.out):
            new = context.graph.call_function(torch.ops.tile.rms_norm.default, (match.x, match.weight), options)
        new.meta.update(match.out.meta)
        match.out.replace_all_uses_with(new)
        for dead in sorted(match.inside, key=ordered(context.graph).__getitem__, reverse=True):
            context.graph.erase_node(dead)
        context.captured("norm", "tile.rms_norm", new)


def _match(root: Node) -> Match | None:
    """Match a written-out RMSNorm around an `rsqrt` of a Dynamo graph."""
    plus = root.args[0]
    if word(plus) != "add" or len(plus.args) != 2 or plus.kwargs:  # type: ignore[union-attr]
        return None
    a, b = plus.args  # type: ignore[union-attr]
    mean, eps = (a, b) if is_number(b) else (b, a)
    h = _mean_square(mean)
    if h is None or not is_number(eps):
        return None
    x = h.args[0] if word(h) in _CASTS else h
    products = {root, h}, {root, x}  # T5 widens its input for the mean only
    y = next((u for u in root.users if word(u) == "mul" and set(u.args) in products), None)
    if y is None or not same_shape(shape(y), shape(h)):
        return None
    if not is_tensor(x) or not dtype(x).is_floating_point:
        return None
    square = mean.args[0]  # type: ignore[union-attr]
    inside = [square, mean, plus, root, y]
    tail = _casts(y)
    narrowed = dtype(x) != dtype(y) and any(dtype(n) == dtype(x) for n in [y, *tail])
    weight, offset, cast_first = None, 0.0, False
    scaled = _weighted([y, *tail][-1])
    if scaled is not None:
        product, weight, offset = scaled
        cast_first = narrowed
        tail = [*tail, product, *_casts(product)]
    out = [y, *tail][-1]
    inside = [*inside, *tail]
    result = torch.promote_types(dtype(x), dtype(weight)) if weight is not None and cast_first else dtype(x)
    if dtype(out) != result:
        return None
    return Match(x, inside, out, weight, float(eps), offset, cast_first)  # type: ignore[arg-type]


def _mean_square(mean: Any) -> Any:
    """Return `h` if `mean` is `h.pow(2).mean(-1, keepdim=True)`, else None."""
    if word(mean) != "mean" or mean.kwargs.get("keepdim", mean.args[2] if len(mean.args) > 2 else False) is not True:
        return None
    dim = mean.kwargs.get("dim", mean.args[1] if len(mean.args) > 1 else None)
    square = mean.args[0]
    if dim not in (-1, [-1], (-1,), len(shape(square)) - 1):
        return None
    if word(square) == "square" or (word(square) == "pow" and square.args[1] == 2):
        return square.args[0]
    if word(square) == "mul" and square.args[0] is square.args[1]:
        return square.args[0]
    return None


def _casts(node: Node) -> list[Node]:
    """Return the casts that follow, each the only user of the node before."""
    found: list[Node] = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        if word(user) not in _CASTS or user.args[0] is not node or not dtype(user).is_floating_point:
            break
        found.append(user)
        node = user
    return found


def _weighted(node: Node) -> tuple[Node, Node, float] | None:
    """Return (product, weight, number) of a product with a weight vector, or with a number plus it; else None."""
    if len(node.users) != 1:
        return None
    product = next(iter(node.users))
    if word(product) != "mul" or len(product.args) != 2:
        return None
    weight: Any = product.args[1] if product.args[0] is node else product.args[0]
    offset = 0.0
    if word(weight) == "add" and len(weight.args) == 2 and not weight.kwargs:
        a, b = weight.args
        weight, number = (a, b) if is_number(b) else (b, a)
        if not is_number(number):
            return None
        offset = float(number)
    if word(weight) in _CASTS:
        weight = weight.args[0]
    ok = is_tensor(weight) and val(weight).dim() == 1 and known(shape(weight)[0] == shape(node)[-1])
    return (product, weight, offset) if ok and dtype(weight).is_floating_point else None


def _closed(match: Match) -> bool:
    """Return whether nothing else reads the parts, and no in-place operation runs among them."""
    inside = set(match.inside)
    if any(u not in inside for n in inside if n is not match.out for u in n.users):
        return False
    position = ordered(match.out.graph)
    start, end = min(position[n] for n in inside), position[match.out]
    span = [n for n, i in position.items() if start <= i <= end]
    return not any(_mutates(n) for n in span)


def _mutates(node: Node) -> bool:
    """Return whether a node may change a tensor in place."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "setitem"
        or name.startswith("__i")
        or (name[:1] == "i" and hasattr(operator, f"__{name}__"))
    )
