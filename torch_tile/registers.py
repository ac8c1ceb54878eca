# SPDX-License-Identifier: Apache-2.0
"""How the registers of a multiprocessor are shared out: among its blocks, and among the threads of a block."""

from __future__ import annotations

REGISTERS = 65536  # of a multiprocessor, 4 bytes each
PER_THREAD = 255  # that a thread can have
UNIT = 8  # threads are given multiples of it
WHOLE = 128  # threads: the registers of a block are counted as if it had whole warpgroups


def equal_share(threads: int, blocks: int = 1) -> int:
    """What each thread of a block may have at its start, where so many blocks shall fit on a multiprocessor at once."""
    return REGISTERS // blocks // (-(-threads // WHOLE) * WHOLE) // UNIT * UNIT


def most_blocks(threads: int, registers: int) -> int:
    """For how many blocks a multiprocessor has room whose threads have so many registers each at their start."""
    return REGISTERS // (-(-threads // WHOLE) * WHOLE * (-(-registers // UNIT) * UNIT))
