# SPDX-License-Identifier: Apache-2.0
"""Facts about attention that operators need without its kernels: the result's memory order and bounds of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def order_of(strides: Sequence[Any]) -> list[int]:
    """Return the dimensions by falling stride, the outermost first. Dimensions of equal strides keep their order.

    Strides may be symbols: where two without a value cannot be told apart, the dimensions stay as they are counted.
    """
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = len(order)
        while place and _exceeds(stride, strides[order[place - 1]]):
            place -= 1
        order.insert(place, dim)
    return order


def empty_beside(q: torch.Tensor, width: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty dense tensor `[*q.shape[:-1], width]` with its dimensions in q's memory order. It has q's dtype
    or the one that is given.

    The last dimension is always the innermost; the others lie by falling stride in q (`order_of`).
    """
    shape = (*q.shape[:-1], width)
    order = order_of(q.stride()[:-1])
    if order == sorted(order):
        return q.new_empty(shape, dtype=dtype)
    strides, step = [1] * len(shape), width
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return q.new_empty_strided(shape, strides, dtype=dtype)


def placed_beside(values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Copy `values` into a tensor of q's dtype, laid out by `empty_beside`. Only the last dimension may differ."""
    return empty_beside(q, values.shape[-1]).copy_(values)


def _exceeds(a: Any, b: Any) -> bool:
    """Return whether `a > b` is known; False for undecided symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a > b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(a > b))


# Limits of offsets and windows between positions, so that kernels' sums of them fit in 32 bits.

FAR = 2**29
"""No query's offset is larger, nor a length."""


def bounded(window: int) -> int:
    """Limit a window to a bound that hides the same keys. The given window may be any number."""
    return min(window, 2 * FAR)
