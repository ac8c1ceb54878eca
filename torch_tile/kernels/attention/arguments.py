# SPDX-License-Identifier: Apache-2.0
"""What operators know of attention without its kernels: its result's order in memory, bounds of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def order_of(strides: Sequence[Any]) -> list[int]:
    """Dimensions by falling stride, the outermost first; those of equal strides as they are counted.

    Strides may be symbols: where two without a value cannot be told apart, the dimensions stay as they are counted.
    """
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = len(order)
        while place and _exceeds(stride, strides[order[place - 1]]):
            place -= 1
        order.insert(place, dim)
    return order


def empty_beside(q: torch.Tensor, width: Any) -> torch.Tensor:
    """An empty dense tensor `[*q.shape[:-1], width]` of q's dtype, whose dimensions lie in memory in q's order.

    The last dimension is always the innermost; the others lie by falling stride in q (`order_of`).
    """
    shape = (*q.shape[:-1], width)
    order = order_of(q.stride()[:-1])
    if order == sorted(order):
        return q.new_empty(shape)
    strides, step = [1] * len(shape), width
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return q.new_empty_strided(shape, strides)


def placed_beside(values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`values`, which has q's shape but for the last dimension, in q's dtype and laid out as `empty_beside` has it."""
    return empty_beside(q, values.shape[-1]).copy_(values)


def _exceeds(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a > b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(a > b))


# Offsets and windows between positions, such that what kernels add up of them fits in 32 bits.

FAR = 2**29
"""No query's offset is larger, nor a length."""


def bounded(window: int) -> int:
    """A window that hides what `window` does, which may be any number."""
    return min(window, 2 * FAR)
