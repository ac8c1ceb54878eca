# SPDX-License-Identifier: Apache-2.0
"""Fold constant branches, empty loops and arithmetic that the ranges of loop variables decide."""

from __future__ import annotations

from torch_tile.ir.simplify import simplify_stmt
from torch_tile.ir.stmt import Program


def simplify_program(program: Program) -> Program:
    """Simplify every expression and statement; values do not change."""
    return simplify_stmt(program)
