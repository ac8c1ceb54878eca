# SPDX-License-Identifier: Apache-2.0
"""What a chain of one operator joins."""

from __future__ import annotations

from collections.abc import Iterator

from torch_tile.ir.expr import Binary, Expr


def terms_of(op: str, expr: Expr) -> Iterator[Expr]:
    """From left to right: of `a and b and c` those three, by "and"; an expression of another kind is one term."""
    if isinstance(expr, Binary) and expr.op == op:
        yield from terms_of(op, expr.a)
        yield from terms_of(op, expr.b)
    else:
        yield expr
