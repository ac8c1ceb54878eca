# SPDX-License-Identifier: Apache-2.0
"""Symbols and named values as TIR spells them: T.Var, T.let, T.Let."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir.expr import Expr, Var as Symbol, Vector, cast, to_expr
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.stmt import Let as Named
from torch_tile.language.trace import Replaced, let as under_name, tracer
from torch_tile.language.values import dtype_of
from torch_tile.tileop.base import Scalar


class _VarMeta(type):
    """The metaclass of T.Var: a call makes a symbol, and `isinstance` holds for every symbol of the language."""

    def __call__(cls, name: str, dtype: Any = "int32") -> Any:
        of = dtype_of(dtype)
        if of.lanes == 1:
            return Symbol(name, of, "dim")
        return Vector([Symbol(f"{name}_{lane}", of.element, "dim") for lane in range(of.lanes)])

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Symbol)


class Var(metaclass=_VarMeta):
    """`T.Var("x", dtype)`: a symbol, for a size as T.dynamic, or for a name that T.let binds.

    A vector's dtype gives a vector of symbols, one for each lane.
    """


class _Let:
    """`T.let(x, value, body)`: `body` with `value` for x, a T.Var. Without `body` x is `value` from here on.

    `T.let(value)` names a value, so that it is computed once. In an annotation, `x: T.let[T.int32] = e` converts the
    value. Raises TileError for an x that is no T.Var.
    """

    def __getitem__(self, dtype: Any) -> Any:
        return dtype_of(dtype)

    def __call__(self, x: Any, value: Scalar = None, body: Scalar = None) -> Any:
        """Name `value`, as the class says."""
        if value is None:
            return under_name("t", to_expr(x, op="T.let"))
        symbol, meant = _bound("T.let", x, value)
        if body is not None:
            return _replace_in(body, {symbol: meant})
        at = tracer("T.let")
        object.__setattr__(symbol, "role", "let")
        at.emit(Named(symbol, meant))
        at.own(symbol)
        return symbol


let: _Let = _Let()


def Let(expr: Scalar, where: Mapping[Any, Scalar]) -> Any:
    """Substitute the values of `where` for symbols in `expr`, as in TIR: `T.Let(x * x, where={x: A[i]})`."""
    return _replace_in(expr, dict(_bound("T.Let", x, value) for x, value in where.items()))


def bind(value: Scalar) -> Any:
    """Name a value, so that it is computed once; `T.let(value)`."""
    return let(value)


def likely(condition: Scalar) -> Any:
    """Return `condition`. That it mostly holds is a hint of TIR's without effect."""
    return condition


def _bound(what: str, x: Any, value: Any) -> tuple[Symbol, Expr]:
    """Check a symbol and the value that it is bound to; convert the value to the symbol's dtype."""
    if not isinstance(x, Symbol):
        why, fix = f"is {x!r}"[:80], 'name it by T.Var("x", dtype)'
        raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    return x, cast(to_expr(value, x.dtype, what), x.dtype)


def _replace_in(body: Any, values: dict[Symbol, Expr]) -> Any:
    """Replace names by their values in a body."""
    known = IdMap((x, under_name(x.name, value)) for x, value in values.items())
    return Replaced(known)(body) if isinstance(body, Expr) else body
