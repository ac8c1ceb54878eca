# SPDX-License-Identifier: Apache-2.0
"""Constants and expressions by TVM's names; any other name is that of the tile language."""

from __future__ import annotations

import functools
from typing import Any

from torch_tile import language
from torch_tile.ir import expr
from torch_tile.ir.dtype import to_dtype
from torch_tile.language.program import PrimFunc as PrimFunc

PrimExpr = expr.Expr


def const(value: float | int | bool, dtype: object = None) -> expr.Expr:
    """Make a constant, of the given dtype or that of the Python number."""
    return expr.to_expr(value) if dtype is None else expr.const(value, to_dtype(dtype))


def IntImm(dtype: object, value: int) -> expr.Expr:
    """An integer constant."""
    return const(int(value), dtype)


def FloatImm(dtype: object, value: float) -> expr.Expr:
    """Make a constant of a floating type."""
    return const(float(value), dtype)


def all(*conditions: Any) -> expr.Expr:
    """Return whether all conditions hold."""
    return functools.reduce(lambda a, b: expr.binary("and", a, b), conditions, const(True))


def any(*conditions: Any) -> expr.Expr:
    """Return whether some condition holds."""
    return functools.reduce(lambda a, b: expr.binary("or", a, b), conditions, const(False))


def __getattr__(name: str) -> Any:
    return getattr(language, name)
