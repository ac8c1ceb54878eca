# SPDX-License-Identifier: Apache-2.0
"""Shared memory's 32 banks of four bytes: in how many passes a warp's access is served."""

from __future__ import annotations

from collections.abc import Sequence

BANKS, WORD = 32, 4


def passes(addresses: Sequence[int], width: int) -> int:
    """Passes per group of lanes that the hardware serves at once; 1 is free of conflicts.

    `addresses` are the bytes at which the lanes of a warp begin to read or write `width` bytes each. Lanes are served
    together as long as they ask for at most 128 bytes: 32 lanes of 4 bytes, 16 of 8, 8 of 16. Different words of one
    bank are served one after another, the same word at once.
    """
    group = max(1, min(32, BANKS * WORD // max(width, WORD)))
    worst = 1
    for first in range(0, len(addresses), group):
        words = {
            byte // WORD for a in addresses[first : first + group] for byte in range(a, a + width, min(WORD, width))
        }
        counts = [0] * BANKS
        for word in words:
            counts[word % BANKS] += 1
        worst = max(worst, *counts)
    return worst
