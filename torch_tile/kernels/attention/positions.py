# SPDX-License-Identifier: Apache-2.0
"""Offsets and windows between positions, such that what kernels add up of them fits in 32 bits."""

from __future__ import annotations

FAR = 2**29
"""No query's offset is larger, nor a length."""


def bounded(window: int) -> int:
    """A window that hides what `window` does, which may be any number."""
    return min(window, 2 * FAR)
