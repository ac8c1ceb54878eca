# SPDX-License-Identifier: Apache-2.0
"""Compute sizes on Python's integers, by TileLang's names."""

from __future__ import annotations

from torch_tile.diagnostics.arguments import names_parameters


def cdiv(a: int, b: int) -> int:
    """Return `a / b`, rounded up."""
    return -(-a // b)


@names_parameters
def next_power_of_2(x: int) -> int:
    """Return the least power of two that is not below `x`; 1 if `x` is below 1."""
    return 1 << int(max(x - 1, 0)).bit_length()
