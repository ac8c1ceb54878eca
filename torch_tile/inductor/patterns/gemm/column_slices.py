# SPDX-License-Identifier: Apache-2.0
"""Read column slices of a product as products of their own: `gate, up = (x @ w).chunk(2, -1)`.

Models merge the weights of layers with one input, and Inductor does so where they are constants. Later operations
usually join the parts again (SwiGLU). Then one kernel computes all parts from slices of the weight.
"""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

from torch.fx import Node

from torch_tile.inductor.graph.nodes import VIEWS, Rewrite, arg, aten, is_call, known, only_user, same_shape, shape

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def width(node: Any) -> Any:
    """Return the number of columns of a tensor: its last size, or 1 if it has no dimensions."""
    return shape(node)[-1] if shape(node) else 1


def are_kept(node: Any) -> TypeGuard[Node]:
    """Return whether a node is a view with the same columns as its operand."""
    return is_call(node, *VIEWS) and known(width(node) == width(node.args[0]))


def part_of(node: Any) -> tuple[Node, int, int] | None:
    """Return `(x, start, end)` if a node is the columns of x from `start` to `end`; x is no view. Else None."""
    if is_call(node, operator.getitem) and is_call(node.args[0], *SPLITS):
        split: Any = node.args[0]
        source, index = split.args[0], int(node.args[1])  # type: ignore[arg-type]
        if arg(split, "dim") % len(shape(source)) != len(shape(source)) - 1:
            return None
        widths = [part.shape[-1] for part in split.meta["val"]]
        start = sum(widths[:index])
        bounds = (start, start + widths[index])
    elif is_call(node, aten.slice.Tensor):
        source = node.args[0]
        last = len(shape(source)) - 1
        if arg(node, "dim") % (last + 1) != last or arg(node, "step") != 1:
            return None
        width, size = shape(source)[-1], shape(node)[-1]
        start = arg(node, "start") or 0
        start = start + width if isinstance(start, int) and start < 0 else start
        bounds = (start, start + size) if isinstance(start, int) else (start, size)
    else:
        return None
    while are_kept(source):
        source = source.args[0]
    return (source, *bounds) if all(isinstance(b, int) for b in bounds) else None


def parts_of(product: Node) -> list[Node]:
    """Return the equally wide column slices that are the only readers of a product; else an empty list."""
    reader = product
    while are_kept(user := only_user(reader)):
        reader = user
    splits = [u for u in reader.users if is_call(u, *SPLITS)]
    parts = list(splits[0].users) if len(splits) == len(reader.users) == 1 else list(reader.users)
    found = {part: part_of(part) for part in parts}
    if len(parts) < 2 or any(f is None or f[0] is not product for f in found.values()):
        return []
    parts.sort(key=lambda part: found[part][1])  # type: ignore[index]
    same = all(same_shape(shape(part), shape(parts[0])) for part in parts)
    return parts if same else []


def columns_of(weight: Node, part: Node, rewrite: Rewrite) -> Node:
    """Slice the columns of a product's right operand that compute one part of the product."""
    found = part_of(part)
    assert found is not None, f"{part} is no part"
    return rewrite.call(aten.slice.Tensor, weight, len(shape(weight)) - 1, found[1], found[2])
