# SPDX-License-Identifier: Apache-2.0
"""Roles of warps as branches on the thread's index, and the registers that their threads have."""

from __future__ import annotations

from collections.abc import Sequence

from torch_tile.hardware import equal_share
from torch_tile.ir.stmt import Role


def condition(role: Role, before: Sequence[Role], threads: int, thread: str) -> str:
    """Whether `thread` of so many, which has none of the roles `before`, has this one, as C++ text; empty if always."""
    end = role.first + role.count
    if sum(r.count for r in before) + role.count == threads:
        return ""
    is_least = sum(r.count for r in before if r.first < role.first) == role.first
    is_greatest = sum(r.count for r in before if r.first >= end) == threads - end
    tests = ([] if is_least else [f"{thread} >= {role.first}"]) + ([] if is_greatest else [f"{thread} < {end}"])
    return " && ".join(tests)


def registers_call(role: Role, threads: int, blocks: int = 1) -> str:
    """C++ text that gives a role's threads their registers; empty if they keep the equal share of `threads`.

    Of `blocks` such blocks, all have room on a multiprocessor.
    """
    share = equal_share(threads, blocks)
    if role.registers in (0, share):
        return ""
    return f"tile::set_registers<{role.registers}, {str(role.registers > share).lower()}>();"
