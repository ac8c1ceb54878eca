# SPDX-License-Identifier: Apache-2.0
"""Constants, expressions and their classes by TVM's names; any other name is that of the tile language, if it has it.

A class here tells the objects of this language that are of that kind, by `isinstance`. Its call makes one.
"""

from __future__ import annotations

import functools as _functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_tile import language as _language
from torch_tile.compat.absent import absent
from torch_tile.ir import expr as _expr
from torch_tile.ir.buffer import SPELLINGS, Buffer as _Buffer, Region as _Region
from torch_tile.ir.dtype import to_dtype
from torch_tile.language.misuse import UnknownName
from torch_tile.language.program import PrimFunc as PrimFunc
from torch_tile.language.trace import is_tracing, tracer
from torch_tile.language.values import Handle as _Handle, TensorType, dtype_of, shape_of

PrimExpr = _expr.Expr


class _VirtualClass(type):
    """A metaclass for names of TIR: `isinstance` asks `has`, a call asks `make`, and no object has the class itself."""

    has: Callable[[Any], bool]
    make: Callable[..., Any]

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return cls.make(*args, **named)

    def __instancecheck__(cls, value: object) -> bool:
        return bool(cls.has(value))


def _kind(name: str, has: Callable[[Any], bool], make: Callable[..., Any]) -> Any:
    """Name a kind of objects."""
    doc = (make.__doc__ or "").strip()
    return _VirtualClass(name, (), {"has": staticmethod(has), "make": staticmethod(make), "__doc__": doc})


def const(value: float | int | bool, dtype: object = None) -> _expr.Expr:
    """Make a constant, of the given dtype or that of the Python number."""
    return _expr.to_expr(value) if dtype is None else _expr.const(value, to_dtype(dtype))


def _int_imm(dtype: object, value: int) -> _expr.Expr:
    """Return an integer constant."""
    return const(int(value), dtype)


def _float_imm(dtype: object, value: float) -> _expr.Expr:
    """Return a constant of a floating type."""
    return const(float(value), dtype)


def _same(value: Any) -> Any:
    """Return an object that exists already."""
    return value


def _is_constant(types: type | tuple[type, ...]) -> Callable[[Any], bool]:
    """Return a predicate: whether an expression is a constant whose Python value is of these types."""
    return lambda e: isinstance(e, _expr.Const) and isinstance(e.value, types)


def _is(op: str) -> Callable[[Any], bool]:
    """Return a predicate: whether an expression is a `Binary` or `Unary` of this operator."""
    return lambda e: isinstance(e, _expr.Binary | _expr.Unary) and e.op == op


def _binary(op: str) -> Any:
    """Return the class of results of an operator of two operands."""

    def make(a: Any, b: Any) -> Any:
        return _expr.binary(op, a, b)

    make.__doc__ = f"`a {op} b`."
    return _kind(op, _is(op), make)


IntImm: Any = _kind("IntImm", _is_constant(int), _int_imm)
FloatImm: Any = _kind("FloatImm", _is_constant(float), _float_imm)
Var = _language.Var
SizeVar = Var
Call: Any = _kind("Call", lambda e: isinstance(e, _expr.Call), _same)
Cast: Any = _kind("Cast", lambda e: isinstance(e, _expr.Cast), _language.Cast)
Select: Any = _kind("Select", lambda e: isinstance(e, _expr.Select), _language.if_then_else)
Ramp: Any = _kind("Ramp", lambda e: isinstance(e, _expr.Vector), _language.Ramp)
Broadcast: Any = _kind("Broadcast", lambda e: isinstance(e, _expr.Vector), _language.Broadcast)
BufferLoad: Any = _kind(
    "BufferLoad", lambda e: isinstance(e, _expr.Load), lambda buffer, indices: buffer[tuple(indices)]
)
BufferRegion: Any = _kind("BufferRegion", lambda e: isinstance(e, _Region), _same)
Buffer: Any = _kind("Buffer", lambda e: isinstance(e, _Buffer | _Handle), _same)
Add: Any
Sub: Any
Mul: Any
Div: Any
Add, Sub, Mul, Div = (_binary(op) for op in ("+", "-", "*", "/"))
FloorDiv: Any
FloorMod: Any
FloorDiv, FloorMod = _binary("//"), _binary("%")
EQ, NE, LT, LE, GT, GE = (_binary(op) for op in ("==", "!=", "<", "<=", ">", ">="))
And: Any
Or: Any
And, Or = _binary("and"), _binary("or")
Not: Any = _kind("Not", _is("not"), lambda a: _expr.unary("not", _expr.truth(a)))
Min: Any = _kind("Min", _is("min"), _expr.minimum)
Max: Any = _kind("Max", _is("max"), _expr.maximum)


def all(*conditions: Any) -> _expr.Expr:
    """Return whether all conditions hold."""
    return _functools.reduce(lambda a, b: _expr.binary("and", a, b), conditions, const(True))


def any(*conditions: Any) -> _expr.Expr:
    """Return whether some condition holds."""
    return _functools.reduce(lambda a, b: _expr.binary("or", a, b), conditions, const(False))


def decl_buffer(
    shape: Any,
    dtype: Any = "float32",
    name: str = "buffer",
    data: Any = None,
    strides: Any = None,
    elem_offset: Any = None,
    scope: str = "",
    data_alignment: int = -1,
    offset_factor: int = 0,
) -> _Handle:
    """Describe a buffer outside of kernels, for layouts and questions; inside of them it is T.decl_buffer."""
    if is_tracing() and tracer().scopes:
        return _language.decl_buffer(shape, dtype, data, strides, elem_offset, scope or "global")
    kind = TensorType(shape_of(shape, "a buffer's shape"), dtype_of(dtype)).buffer(name)
    return _Handle(replace(kind, scope=SPELLINGS[scope or "global"]))


def __getattr__(name: str) -> Any:
    """Return a name of the language, else what stands for a name that only TVM has."""
    try:
        return getattr(_language, name)
    except UnknownName:
        return absent(f"tvm.tirx.{name}")
