# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbouring elements that a buffer keeps together, aligned to their own length; and its strides."""

from __future__ import annotations

import math

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, binary, const
from torch_tile.ir.layout import row_major


def aligned_run(buffer: Buffer) -> int:
    """Elements along the last dimension, for a buffer on chip: every multiple of this starts such a run in memory."""
    layout = buffer.layout
    if layout is None:
        shape = buffer.static_shape
        if shape is None:
            return 1
        layout = row_major(shape)
    layout = layout.canonical
    strides = [d.stride for digits in layout.dims for d in digits if d.axis == "m" and d.stride > 1]
    return math.gcd(layout.vector_width(), *strides)


def strides_of(buffer: Buffer) -> tuple[Expr, ...]:
    """Elements between neighbours in each dimension."""
    if buffer.strides is not None:
        return buffer.strides
    steps: list[Expr] = []
    step: Expr = const(1, dt.int32)
    for size in reversed(buffer.shape):
        steps.insert(0, step)
        step = binary("*", step, size)
    return tuple(steps)
