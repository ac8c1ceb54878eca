# SPDX-License-Identifier: Apache-2.0
"""Count and find bits of integers: T.popcount, T.clz, T.__ffs, T.__fns.

They are made of shifts and sums, which every target has.
"""

from __future__ import annotations

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Expr, binary, cast, const, select, to_expr
from torch_tile.language.trace import is_tracing, let
from torch_tile.tileop.base import Scalar

NONE_FOUND = 0xFFFFFFFF  # the result of T.__fns if there is no such bit


def popcount(x: Scalar) -> Expr:
    """Count the bits of an integer that are set, in its own type."""
    word, dtype = _zero_extended("T.popcount", x)
    return cast(_ones(word), dtype)


def clz(x: Scalar) -> Expr:
    """Count the leading zero bits, as an int32: all bits of the type for 0."""
    word, dtype = _zero_extended("T.clz", x)
    for step in (1, 2, 4, 8, 16, 32)[: 5 + (word.dtype.bits == 64)]:
        word = _bind(word | (word >> step))
    return binary("-", const(dtype.bits, dt.int32), cast(_ones(word), dt.int32))


def ffs(x: Scalar) -> Expr:
    """Return the position of the lowest set bit, an int32 counted from 1, or 0 if no bit is set."""
    word, _ = _zero_extended("T.__ffs", x)
    below = (word & (~word + const(1, word.dtype))) - const(1, word.dtype)  # the bits below it; all if there is none
    found = cast(_ones(_bind(below)), dt.int32) + 1
    return select(binary("==", word, const(0, word.dtype)), const(0, dt.int32), found)


def fns(mask: Scalar, base: Scalar, offset: Scalar) -> Expr:
    """Return the position of the `offset`-th set bit of a 32-bit `mask`, a uint32 counted from 0, as CUDA's __fns.

    The count starts at bit `base`, which is included. It goes down if `offset` is negative. With offset 0 only bit
    `base` is tested. The result is 0xFFFFFFFF if there is no such bit.
    """
    word, _ = _zero_extended("T.__fns", cast(to_expr(mask, op="T.__fns"), dt.uint32))
    first, number = (_bind(cast(to_expr(value, op="T.__fns"), dt.int32)) for value in (base, offset))
    one = const(1, dt.uint32)
    up_to = one << cast(first, dt.uint32)
    lower = _bind(cast(_ones(word & (up_to - one)), dt.int32))  # bits that are set below `base`
    own = _bind(word & up_to)
    here = cast(binary("!=", own, const(0, dt.uint32)), dt.int32)
    # Number k of all bits that are set, counted from 1.
    rank = _bind(select(number > 0, lower + number, lower + here + number + 1))
    rank = _bind(select(binary("==", number, 0), select(here > 0, lower + 1, const(0, dt.int32)), rank))
    place: Expr = const(0, dt.int32)
    left, rest = rank, word
    for half in (16, 8, 4, 2, 1):
        part = rest & const((1 << half) - 1, dt.uint32)
        count = _bind(cast(_ones(part), dt.int32))
        above = _bind(left > count)
        place = _bind(select(above, place + half, place))
        left = _bind(select(above, left - count, left))
        rest = _bind(select(above, rest >> half, part))
    total = cast(_ones(word), dt.int32)
    is_there = binary("and", rank > 0, binary("<=", rank, total))
    return select(is_there, cast(place, dt.uint32), const(NONE_FOUND, dt.uint32))


def _zero_extended(what: str, x: Scalar) -> tuple[Expr, DType]:
    """Zero-extend an integer to an unsigned one of 32 or 64 bits. Return it with the original type."""
    value = to_expr(x, op=what)
    if not value.dtype.is_integer:
        why, fix = f"is a {value.dtype}", "give an integer, or the bits of a float by T.reinterpret"
        raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    own = cast(value, dt.BY_NAME[f"uint{value.dtype.bits}"])
    return _bind(cast(own, dt.uint64 if value.dtype.bits == 64 else dt.uint32)), value.dtype


def _ones(word: Expr) -> Expr:
    """Count the set bits of a uint32 or uint64 by adding pairs, then groups of four, then bytes."""
    size = word.dtype.bits // 8
    twos, fours, bytes_, each = (const(int(byte * size, 16), word.dtype) for byte in ("55", "33", "0f", "01"))
    word = _bind(word - ((word >> 1) & twos))
    word = _bind((word & fours) + ((word >> 2) & fours))
    word = _bind((word + (word >> 4)) & bytes_)
    return _bind((word * each) >> (word.dtype.bits - 8))


def _bind(value: Expr) -> Expr:
    """Name `value`, so that it is computed once."""
    return let("bits", value) if is_tracing() else value
