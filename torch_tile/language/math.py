# SPDX-License-Identifier: Apache-2.0
"""Scalar expressions of the language: math functions, casts, min/max, constants."""

from __future__ import annotations

import math as python_math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import bits, dtype as dt
from torch_tile.ir.bounds import Interval, Ranges, dtype_interval
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import (
    Call,
    Const,
    Expr,
    Load,
    Var,
    binary,
    cast as cast_expr,
    const,
    extremum,
    is_number,
    maximum,
    minimum,
    pair,
    select,
    to_expr,
    to_number,
)
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import children
from torch_tile.ir.polynomial import EXACT
from torch_tile.ir.stmt import Let
from torch_tile.language.rounding import cast_rounded, greatest, least
from torch_tile.language.trace import is_tracing, tracer
from torch_tile.language.values import dtype_of
from torch_tile.tileop.base import Scalar, need_choice

# Those of ieee.py and random.py are called by functions of their own, T.ieee_add(x, y, rounding_mode).
OTHERS = re.compile(rf"ieee_.*|own_rows_.*|table_nibble|table_place|{intrinsics.random.NAME}")
FUNCTIONS = tuple(
    n for n in intrinsics.names() if intrinsics.lookup(n).evaluate is not None and not OTHERS.fullmatch(n)
)


def function(name: str) -> Callable[..., Expr]:
    """Build the language's function for an intrinsic."""

    def of_one(x: Scalar) -> Expr:
        return intrinsics.call(name, x)

    def of_two(x: Scalar, y: Scalar) -> Expr:
        return intrinsics.call(name, x, y)

    def of_three(x: Scalar, y: Scalar, z: Scalar) -> Expr:
        return intrinsics.call(name, x, y, z)

    arity = intrinsics.lookup(name).arity
    functions: tuple[Callable[..., Expr], ...] = of_one, of_two, of_three
    apply = functions[arity - 1]
    apply.__name__ = apply.__qualname__ = name
    given = ", ".join("xyz"[:arity])
    apply.__doc__ = f"`{name}({given})` of numbers or expressions: of an element in each iteration of T.Parallel."
    return apply


FAST = ("exp", "log", "log2", "log10", "sin", "cos", "tan")  # and exp10, which no intrinsic is


def fast(name: str, whole: Callable[..., Expr]) -> Callable[..., Expr]:
    """Return `T.__name` of a function `whole`: the same of floats, and an error for other types, as TileLang has it."""

    def of_floats(x: Scalar) -> Expr:
        value = to_expr(x, op=f"T.__{name}")
        if not value.dtype.is_float or value.dtype.bits < 16:
            raise error("only_floats", None, name=f"__{name}", dtype=value.dtype, whole=name)
        return whole(x)

    of_floats.__name__ = of_floats.__qualname__ = f"__{name}"
    of_floats.__doc__ = f"T.{name}(x) of a float16, bfloat16, float32 or float64. Raises TileTypeError for other types."
    return of_floats


def round(x: Scalar, rounding_mode: str = "ties-to-even") -> Any:
    """Round to the nearest integer: halves to even, or away from zero for `rounding_mode="ties-away-from-zero"`.

    Raises TileError for another mode.
    """
    need_choice("round", "rounding_mode", rounding_mode, ("ties-to-even", "ties-away-from-zero"))
    value = to_expr(x, op="T.round")
    if rounding_mode == "ties-to-even" or not value.dtype.is_float:
        return intrinsics.call("round", value)
    whole = intrinsics.call("trunc", value)
    one = intrinsics.call("copysign", const(1, value.dtype), value)
    return select(intrinsics.call("abs", value - whole) >= 0.5, whole + one, whole)


def max(*values: Scalar) -> Any:
    """Return the largest of two or more values: NaN if one is, and -0.0 is below 0.0."""
    return _fold(values, maximum, "max")


def min(*values: Scalar) -> Any:
    """Return the smallest of two or more values: NaN if one is, and -0.0 is below 0.0."""
    return _fold(values, minimum, "min")


def _fold(values: tuple[Any, ...], step: Callable[[Any, Any], Expr], name: str) -> Any:
    """Combine several values two by two."""
    if len(values) < 2:
        raise error(
            "bad_argument",
            None,
            op=f"T.{name}",
            name="values",
            why="is a single value",
            fix=f"give two or more; T.reduce_{name}(tile, out, dim) folds a tile",
        )
    if all(is_number(v) for v in values):
        return reduce(partial(_of_numbers, name), map(to_number, values))
    total = values[0]
    for value in values[1:]:
        total = step(total, value)
    return total


def _of_numbers(name: str, a: Any, b: Any) -> Any:
    """Return the extremum of two Python numbers."""
    if a == b and isinstance(a, float) != isinstance(b, float):  # 0 and -0.0 meet as floats
        a, b = float(a), float(b)
    return extremum(name, a, b)


def clamp(dst: Scalar, min_val: Scalar, max_val: Scalar) -> Any:
    """Return the value `dst` limited to [min_val, max_val]; NaN if one of the three is."""
    return min(max(dst, min_val), max_val)


def table_nibble(word: Scalar, byte: Scalar, upper: Scalar, values: Sequence[float]) -> Expr:
    """Look up one of 16 float32 `values` by the index `T.nibble(word, byte, upper)`."""
    if len(values) != 16:
        why = f"has {len(values)} numbers"
        raise error("bad_argument", None, op="T.table_nibble", name="values", why=why, fix="give 16, one for each code")
    return intrinsics.call(
        "table_nibble", word, byte, upper, *(bits.reinterpret(const(value, dt.float32), dt.int32) for value in values)
    )


def table_place(word: Scalar, byte: Scalar, lane: Scalar, part: Scalar) -> Expr:
    """Return the place in a table `[256, lanes, 2]` of number `part` of a lane's pair for a byte of `word`."""
    return intrinsics.call("table_place", word, byte, lane, part)


def exp10(x: Scalar) -> Expr:
    """Compute 10 to the power of `x`."""
    base = to_expr(x, op="T.exp10")
    return intrinsics.call("pow", const(10, base.dtype if base.dtype.is_float else dt.float32), base)


def fast_rcp(x: Scalar) -> Expr:
    """Return `1 / x`."""
    return 1.0 / to_expr(x, op="T.fast_rcp")


def if_then_else(condition: Any, a: Any, b: Any) -> Expr:
    """Return `a` where `condition` holds, else `b`; the other is not evaluated."""
    return select(condition, a, b)


Select = if_then_else


def cast(
    value: Scalar, dtype: Any, round: str | None = None, sat: str | bool | None = None, rbits: Scalar = None
) -> Expr:
    """Return `value` converted to `dtype`: floats round to nearest even, float to integer truncates.

    `round` asks for another rounding: "rn" to nearest even, "rz" to zero, "ru" up, "rd" down; "rs" away from zero with
    a probability that grows with the distance, by `rbits`, 32 random bits. With sat="satfinite", or True, what is too
    large for `dtype` becomes its greatest finite value. NaN becomes 0 in an integer. Conversions to float8 saturate so
    in any case, as TileLang's do, and keep NaN; with sat=False float8_e5m2 takes infinities and float8_e4m3fn NaN.
    Raises TileError for other names, and for sat=False with "rs", which stays below infinity.
    """
    if isinstance(value, str):
        fix = f"write T.cast(x, {value!r}): the value goes before the dtype"
        raise error("bad_argument", None, op="T.cast", name="value", why=f"is the text {value!r}", fix=fix)
    wanted = "satfinite" if sat is True else sat
    return cast_rounded(value, dtype_of(dtype), round or None, wanted, rbits)


def Cast(dtype: Any, value: Any) -> Expr:
    """Convert as `cast` does; the dtype stands in front, as in TIR and TileLang. Either order is taken."""
    if isinstance(dtype, Expr) or is_number(dtype):
        dtype, value = value, dtype
    return cast(value, dtype)


def reinterpret(value: Any, dtype: Any) -> Any:
    """Return the bits of `value` as a value of `dtype`, which is as wide; the older order, dtype first, is taken, too.

    TIR's null pointer, 0 as a "handle", is None: the language has no pointers.
    """
    if not isinstance(value, Expr) and not is_number(value):
        dtype, value = value, dtype
    if isinstance(dtype, str) and dtype == "handle" and isinstance(value, Const) and value.value == 0:
        return None
    to = dtype_of(dtype)
    if is_number(value) and not isinstance(to_number(value), float):  # the bits themselves
        value = const(to_number(value), dt.BY_NAME[f"int{to.bits}"])
    return bits.reinterpret(to_expr(value, op="T.reinterpret"), to)


def ceildiv(a: Any, b: Any) -> Any:
    """Return `a / b` rounded up, for all values and divisors of either sign; a Python integer if both are."""
    if is_number(a) and is_number(b):
        a, b = to_number(a), to_number(b)
    for name, value in (("a", a), ("b", b)):
        if isinstance(value, str | list | tuple | dict) or value is None:
            fix = "give an integer or an expression"
            raise error("bad_argument", None, op="T.ceildiv", name=name, why=f"is {value!r}"[:80], fix=fix)
    if is_number(b) and b == 0:
        fix = "divide by the size of a tile, a positive number"
        raise error("bad_argument", None, op="T.ceildiv", name="b", why="is 0", fix=fix)
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return -(-a // b)
    x, y = pair(a, b, "T.ceildiv")
    if _has_room(x, y):
        return (x + (y - const(1, y.dtype))) // y
    quotient = x // y
    return quotient + cast_expr(x % y != 0, quotient.dtype)


def _has_room(a: Expr, b: Expr) -> bool:
    """Return whether `b` is positive and `a + (b - 1)` stays in its type.

    Sizes and positions do not reach the top of their type. Literals and elements beside them may: an index that counts
    or unrolls to a literal leaves a sum of literals.
    """
    dtype = a.dtype
    if dtype.is_float or dtype.kind == "bool":
        return False
    ranges, parts = _value_ranges(a, b)
    if ranges.interval(b).low < 0:
        return False
    far = 1 << dtype.bits // 2  # from the top of the type, whatever sizes multiply
    sizes = (isinstance(part, Var) or (isinstance(part, Const) and -far <= part.value <= far) for part in parts)
    if dtype in EXACT and all(sizes):
        return True
    most, whole = ranges.interval(a) + ranges.interval(b) + Interval(-1, -1), dtype_interval(dtype)
    # Beside the number of a block, elements of 32 bits are computed in 64: what is too low does not wrap to the top.
    widened = dtype == dt.int32 and any(isinstance(part, Var) and part.role == "block" for part in parts)
    return most.high <= whole.high if widened else most.within(whole)


def _value_ranges(*values: Expr) -> tuple[Ranges, list[Expr]]:
    """Return the value ranges of the names in `values`, and the variables, elements and literals that they depend on.

    Sizes and positions count as far from the top of their type.
    """
    lets = IdMap[Var, Expr]()
    for scope in tracer("T.ceildiv").scopes if is_tracing() else ():
        lets.update((s.var, s.value) for s in scope.stmts if isinstance(s, Let))
    ranges, parts, defined = Ranges(), list[Expr](), IdSet[Var]()

    def visit(value: Expr) -> None:
        nonlocal ranges
        for part in _parts(value):
            if not isinstance(part, Var) or part not in lets:
                parts.append(part)
            if not isinstance(part, Var) or part in defined:
                continue
            defined.add(part)
            if part in lets:
                visit(lets[part])
                ranges = ranges.define(part, lets[part])
            elif part.dtype in EXACT:
                most = 1 << part.dtype.bits // 4
                ranges = ranges.loop(part, const(-most, part.dtype), const(most + 1, part.dtype))

    for value in values:
        visit(value)
    return ranges, parts


def _parts(value: Expr) -> Iterator[Expr]:
    """Return the variables, elements, calls and literals that a value is computed from, without indices of elements."""
    if isinstance(value, Var | Load | Call | Const):
        yield value
    else:
        for child in children(value):
            if isinstance(child, Expr):
                yield from _parts(child)


def _ieee(name: str, *operands: Scalar, rounding_mode: str) -> Expr:
    """Build an operation with an explicit rounding mode, on float32 or float64. Rounding to nearest, float16 and
    bfloat16 are computed in float32, and rounded again.
    """
    what = f"T.ieee_{name}"
    if rounding_mode not in intrinsics.ieee.MODES:
        fix = f"Invalid rounding mode: give one of {', '.join(intrinsics.ieee.MODES)}"
        raise error("bad_argument", None, op=what, name="rounding_mode", why=f"is {rounding_mode!r}", fix=fix)
    like = next((x.dtype for x in operands if isinstance(x, Expr)), dt.float32)
    values = [to_expr(x, like if like.is_float else dt.float32, what) for x in operands]
    if like in (dt.float16, dt.bfloat16) and rounding_mode == "rn" and all(x.dtype == like for x in values):
        return cast_expr(_ieee(name, *(cast_expr(x, dt.float32) for x in values), rounding_mode="rn"), like)
    if like in (dt.float16, dt.bfloat16) and rounding_mode != "rn":
        why = f"is {rounding_mode!r} for a {like}"
        fix = "Only rounding mode 'rn' is available for half precision: cast to float32"
        raise error("bad_argument", None, op=what, name="rounding_mode", why=why, fix=fix)
    for value in values:
        if value.dtype not in (dt.float32, dt.float64) or value.dtype != values[0].dtype:
            why, fix = f"is a {value.dtype}", "cast all operands to float32, or all to float64"
            raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    return intrinsics.call(f"ieee_{name}_{rounding_mode}", *values)


def ieee_add(x: Scalar, y: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `x + y` of float32 or float64 with its own rounding, never fused with a product.

    `rounding_mode` is "rn" to nearest even, "rz" to zero, "ru" up or "rd" down.

    For float16 and bfloat16 only "rn": the result in float32 is rounded to nearest again. Raises TileError for other
    modes and types.
    """
    return _ieee("add", x, y, rounding_mode=rounding_mode)


def ieee_sub(x: Scalar, y: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `x - y`, rounded by itself as T.ieee_add says."""
    return _ieee("sub", x, y, rounding_mode=rounding_mode)


def ieee_mul(x: Scalar, y: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `x * y`, rounded by itself as T.ieee_add says."""
    return _ieee("mul", x, y, rounding_mode=rounding_mode)


def ieee_fmaf(x: Scalar, y: Scalar, z: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `x * y + z`, rounded once as T.ieee_add says."""
    return _ieee("fmaf", x, y, z, rounding_mode=rounding_mode)


def ieee_frcp(x: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `1 / x`, rounded as T.ieee_add says."""
    return _ieee("frcp", x, rounding_mode=rounding_mode)


def ieee_fsqrt(x: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return the square root of `x`, rounded as T.ieee_add says."""
    return _ieee("fsqrt", x, rounding_mode=rounding_mode)


def ieee_frsqrt(x: Scalar) -> Expr:
    """Return `1 / sqrt(x)`, rounded to nearest even."""
    return _ieee("frsqrt", x, rounding_mode="rn")


def ieee_fdiv(x: Scalar, y: Scalar, rounding_mode: str = "rn") -> Expr:
    """Return `x / y`, rounded as T.ieee_add says."""
    return _ieee("fdiv", x, y, rounding_mode=rounding_mode)


def fmul(x: Scalar, y: Scalar) -> Expr:
    """Return `x * y` with its own rounding, never fused with a sum. For float32 and float64."""
    return _ieee("mul", x, y, rounding_mode="rn")


def floordiv(a: Scalar, b: Scalar) -> Any:
    """Return `a // b`, rounded down."""
    return a // b


def floormod(a: Scalar, b: Scalar) -> Any:
    """Return `a % b`, with the sign of b."""
    return a % b


def truncdiv(a: Any, b: Any) -> Any:
    """Return `a / b` of integers, rounded to zero."""
    if is_number(a) and is_number(b):
        return a // b + (a % b != 0 and (a < 0) != (b < 0))
    x, y = pair(a, b, "T.truncdiv")
    if (x // y).dtype.kind == "uint":
        return x // y
    is_below = logical_and(x % y != 0, (x < 0) != (y < 0))  # a negative quotient that is no integer
    return select(is_below, x // y + const(1, x.dtype), x // y)


def truncmod(a: Any, b: Any) -> Any:
    """Return the remainder of T.truncdiv, with the sign of `a`."""
    if is_number(a) and is_number(b):
        return a - truncdiv(a, b) * b
    x, y = pair(a, b, "T.truncmod")
    return x - truncdiv(x, y) * y


def index_to_coordinates(index: Scalar, shape: Sequence[Any]) -> list[Any]:
    """Return the coordinates of element number `index` of a row-major box of `shape`, modulo its size."""
    found: list[Any] = []
    for size in reversed(shape):
        found.append(index % size)
        index = index // size
    return found[::-1]


def align_up(a: Any, b: Any) -> Any:
    """Return `a` rounded up to a multiple of `b`."""
    return ceildiv(a, b) * b


def shift_left(a: Any, b: Any) -> Any:
    """Return `a << b`."""
    return to_expr(a) << b


def shift_right(a: Any, b: Any) -> Any:
    """Return `a >> b`."""
    return to_expr(a) >> b


def bitwise_and(a: Any, b: Any) -> Any:
    """Return `a & b`."""
    return to_expr(a) & b


def bitwise_or(a: Any, b: Any) -> Any:
    """Return `a | b`."""
    return to_expr(a) | b


def bitwise_xor(a: Any, b: Any) -> Any:
    """Return `a ^ b`."""
    return to_expr(a) ^ b


def bitwise_not(a: Any) -> Any:
    """Invert all bits: `~a`."""
    return ~to_expr(a)


def logical_and(a: Any, b: Any) -> Any:
    """Return `a and b`, computed on the device."""
    return binary("and", a, b)


def logical_or(a: Any, b: Any) -> Any:
    """Return `a or b`, computed on the device."""
    return binary("or", a, b)


def logical_not(a: Scalar) -> Any:
    """Return `not a`, computed on the device; a bool of Python's for one."""
    from torch_tile.ir.expr import truth, unary

    return unary("not", truth(a)) if isinstance(a, Expr) else not a


def And(a: Any, b: Any) -> Any:
    """Return `a and b`, computed on the device, as TIR spells it."""
    return logical_and(a, b)


def Or(a: Any, b: Any) -> Any:
    """Return `a or b`, computed on the device, as TIR spells it."""
    return logical_or(a, b)


def Not(a: Any) -> Any:
    """Return `not a`, computed on the device, as TIR spells it."""
    return logical_not(a)


def _of_limit(what: str, dtype: Any) -> DType:
    """Return the dtype whose limit is asked for."""
    if is_number(dtype) or isinstance(dtype, Expr):
        fix = f'give a dtype, {what}("float32"), or x.dtype for that of a value'
        raise error("bad_argument", None, op=what, name="dtype", why=f"is {dtype!r}"[:80], fix=fix)
    return dtype_of(dtype)


def infinity(dtype: Any = "float32") -> Const:
    """Return positive infinity in `dtype`."""
    return const(python_math.inf, _of_limit("T.infinity", dtype))


def max_value(dtype: Any) -> Const:
    """Return the greatest finite value of `dtype`."""
    return greatest(_of_limit("T.max_value", dtype))


def min_value(dtype: Any) -> Const:
    """Return the least finite value of `dtype`."""
    return least(_of_limit("T.min_value", dtype))
