# SPDX-License-Identifier: Apache-2.0
"""Conversions that round and saturate as the author asks: T.cast(x, dtype, round=, sat=, rbits=).

They use the ordinary conversion, which rounds to nearest even. If that went the wrong way, the result's bits are moved
by one step. So every target has them, and constants are folded as anywhere else.
"""

from __future__ import annotations

import math
from typing import Any

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import bits, dtype as dt
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Const, Expr, binary, cast, const, select, to_expr

ROUNDINGS = {"rn": "rn", "rz": "rz", "ru": "ru", "rd": "rd", "rs": "rs", "rp": "ru", "rm": "rd"}  # PTX's names last
TO_INTEGER = {"rn": "round", "ru": "ceil", "rd": "floor"}
SATURATING = (None, False, "satfinite")
_OVERFLOWS = {"float8_e4m3fn": (">", 464.0, math.nan), "float8_e5m2": (">=", 61440.0, math.inf)}  # to nearest even
_FINITE = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
           "float64": 1.7976931348623157e308, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # fmt: skip


def greatest(to: DType) -> Const:
    """Return the greatest finite value of a type."""
    if to in dt.NARROW and to.is_float:
        return const(dt.NARROW_FORMATS[to.name][2], to)
    return const(_FINITE[to.name] if to.is_float else (True if to == dt.bool_ else dt.limits(to)[1]), to)


def least(to: DType) -> Const:
    """Return the least finite value of a type."""
    if to in dt.NARROW and to.is_float:
        return const(2.0**-127 if to == dt.float8_e8m0fnu else -dt.NARROW_FORMATS[to.name][2], to)
    return const(-_FINITE[to.name] if to.is_float else (False if to == dt.bool_ else dt.limits(to)[0]), to)


def cast_rounded(value: Any, to: DType, how: str | None, sat: str | bool | None, rbits: Any) -> Expr:
    """Convert `value` to `to`, rounded by `how` and saturated by `sat`, as float8 is unless `sat` is False."""
    if how is not None and how not in ROUNDINGS:
        why, fix = f"is {how!r}", f"Invalid round: give one of {', '.join(ROUNDINGS)}, or None"
        raise error("bad_argument", None, op="T.cast", name="round", why=why, fix=fix)
    if sat not in SATURATING:
        why, fix = f"is {sat!r}", "Invalid sat: give True, False, 'satfinite' or None"
        raise error("bad_argument", None, op="T.cast", name="sat", why=why, fix=fix)
    how = None if how is None else ROUNDINGS[how]
    if (rbits is None) == (how == "rs"):
        why, fix = f"is given with round={how!r}", 'leave it out: rbits is only valid with round="rs"'
        if rbits is None:
            why, fix = "is missing", 'give an expression of 32 random bits: rbits is required with round="rs"'
        raise error("bad_argument", None, op="T.cast", name="rbits", why=why, fix=fix)
    if how == "rs" and sat is False:
        why, fix = "is False with round='rs'", "leave it out: random rounding stays below infinity"
        raise error("bad_argument", None, op="T.cast", name="sat", why=why, fix=fix)
    if how is None and not sat and not (sat is False and to.name in _OVERFLOWS):
        return cast(value, to)
    sat = sat if to.name in _OVERFLOWS else sat or None
    x = to_expr(value, op="T.cast")
    if x.dtype in dt.NARROW and x.dtype.is_float:
        x = cast(x, dt.float32)
    if to in dt.NARROW and to.is_float:  # they saturate in any case
        if how not in (None, "rn"):
            why, fix = f"is {how!r} for {to}, which is rounded to nearest", "leave it out"
            raise error("bad_argument", None, op="T.cast", name="round", why=why, fix=fix)
        return cast(x, to)
    if to.kind == "bool" or not (x.dtype.is_float or to.is_float):
        return cast(_clamped(x, to) if sat is not None and to.is_integer else x, to)
    if to.is_integer:
        return _integer(x, to, how)
    if x.dtype.is_integer and x.dtype.bits == 64:
        why, fix = f"is asked for of {x.dtype}, of which no float holds every value", "cast to float64 before"
        raise error("bad_argument", None, op="T.cast", name="round", why=why, fix=fix)
    exact = "float64" in (x.dtype.name, to.name) or (x.dtype.is_integer and x.dtype.bits == 32)
    wide = dt.float64 if exact else dt.float32
    x = cast(x, wide)
    if sat == "satfinite" or (sat is None and to.name in _OVERFLOWS):
        x = _within(x, const(-_FINITE[to.name], wide), const(_FINITE[to.name], wide))
    nearest = cast(x, to) if sat is not False else _overflowing(x, to)
    if how in (None, "rn") or to.bits >= wide.bits:
        return nearest
    size, found = abs(x), abs(cast(nearest, wide))
    below, beyond = binary("<", found, size), binary(">", found, size)
    if to.name == "float8_e4m3fn":  # whose greatest value NaN follows, not infinity
        below = binary("and", below, binary("<", found, const(_FINITE[to.name], wide)))
    code = cast(bits.reinterpret(nearest, dt.BY_NAME[f"uint{to.bits}"]), dt.int32)
    if how == "rs":
        code = select(beyond, code - 1, code)
        near, far = (abs(cast(_of_code(c, to), wide)) for c in (code, code + 1))
        share = binary("/", size - near, far - near)
        random = cast(cast(to_expr(rbits, op="T.cast"), dt.uint32) >> 8, wide) * const(2.0**-24, wide)
        return _of_code(select(binary("<", random, share), code + 1, code), to)
    if how == "rz":
        return _of_code(select(beyond, code - 1, code), to)
    outwards = binary(">" if how == "ru" else "<", x, const(0, wide))  # codes grow with the magnitude
    return _of_code(select(outwards, select(below, code + 1, code), select(beyond, code - 1, code)), to)


def _overflowing(x: Expr, to: DType) -> Expr:
    """Convert a float to float8 as the formats' rules have it: too large gives infinity in e5m2, NaN in e4m3fn."""
    op, first, beyond = _OVERFLOWS[to.name]
    above, below = (binary(op, size, const(first, x.dtype)) for size in (x, -x))
    return select(above, const(beyond, to), select(below, const(-beyond, to), cast(x, to)))


def _integer(x: Expr, to: DType, how: str | None) -> Expr:
    """Convert a float to an integer, rounded as asked: saturated, NaN gives 0."""
    if how == "rs":
        why, fix = "is 'rs', which rounds to a float", 'give "rn", "rz", "ru" or "rd"'
        raise error("bad_argument", None, op="T.cast", name="round", why=why, fix=fix)
    if x.dtype.bits < 32:
        x = cast(x, dt.float32)
    if how in TO_INTEGER:
        x = intrinsics.call(TO_INTEGER[how], x)
    return cast(x, to)


def _clamped(x: Expr, to: DType) -> Expr:
    """Limit an integer to the values of an integer type."""
    if x.dtype.kind == "bool":
        return x
    (low, high), (least, most) = dt.limits(to), dt.limits(x.dtype)
    return _within(x, const(max(low, least), x.dtype), const(min(high, most), x.dtype))


def _within(x: Expr, low: Expr, high: Expr) -> Expr:
    """Limit `x` to [low, high]; NaN stays."""
    return select(binary(">", x, high), high, select(binary("<", x, low), low, x))


def _of_code(code: Expr, to: DType) -> Expr:
    """Return the float whose bits are those of a small integer."""
    return bits.reinterpret(cast(code, dt.BY_NAME[f"uint{to.bits}"]), to)
