# SPDX-License-Identifier: Apache-2.0
"""How long the runs of neighbouring elements are that a buffer keeps together, aligned to their own length."""

from __future__ import annotations

import math

from ..ir.buffer import Buffer
from ..ir.layout import row_major


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
