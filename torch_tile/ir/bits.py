# SPDX-License-Identifier: Apache-2.0
"""The bits of a value, read as a value of another type of the same width."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dtypes
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Call, Const, Expr, Vector, cast, const

_PACKED = {"float16": "<e", "float32": "<f", "float64": "<d"}


def reinterpret(value: Expr, to: DType) -> Expr:
    """Reinterpret `value`'s bits as a value of `to`, literals folded; an author error where the widths differ."""
    of = value.dtype
    if "bool" in (of.kind, to.kind):
        why, fix = "is bool, whose bits mean nothing", "convert it: T.cast(x, 'uint8'), or `x != 0`"
        raise error("bad_argument", value.span, op="T.reinterpret", name="dtype" if to.kind == "bool" else "value",
                    why=why, fix=fix)  # fmt: skip
    if of.bits != to.bits:
        why = f"{to} has {to.bits} bits, but the value is of dtype {of}, which has {of.bits}"
        fix = f"take a dtype of {of.bits} bits, or convert the value by T.cast first"
        raise error("bad_argument", value.span, op="T.reinterpret", name="dtype", why=why, fix=fix)
    if of == to:
        return value
    folded = _fold(value, to) if isinstance(value, Const) else None
    return Call("reinterpret", (value,), to) if folded is None else folded


def _fold(value: Const, to: DType) -> Const | None:
    """Return the literal of the same bits; not for NaN, of which there are many, nor for types of 8 bits."""
    if value.type.bits == 8 and (to.is_float or value.type.is_float):
        return None
    found = _number(_bits(value), to)
    is_nan = any(isinstance(x, float) and math.isnan(x) for x in (found, value.value))
    return None if is_nan else const(found, to)


def _bits(value: Const) -> int:
    """Return the bits of a literal as a non-negative number."""
    of = value.type
    if not of.is_float:
        return int(value.value) & ((1 << of.bits) - 1)
    if of.name == "bfloat16":
        return int.from_bytes(struct.pack("<f", value.value), "little") >> 16
    return int.from_bytes(struct.pack(_PACKED[of.name], value.value), "little")


def _number(bits: int, to: DType) -> int | float:
    """Return the number that bits mean in `to`; integers still to be wrapped."""
    if not to.is_float:
        return bits
    name, bits = ("float32", bits << 16) if to.name == "bfloat16" else (to.name, bits)
    found: float = struct.unpack(_PACKED[name], bits.to_bytes(struct.calcsize(_PACKED[name]), "little"))[0]
    return found


def reinterpreted(value: Any, dtype: object) -> Any:
    """Reinterpret a scalar or vector as a scalar or vector of as many bits, the first lane lowest."""
    to = dtypes.to_dtype(dtype)
    lanes = value.lanes if isinstance(value, Vector) else (value,)
    of = lanes[0].dtype
    if of.bits * len(lanes) != to.bits * to.lanes:
        why = f"{to} has {to.bits * to.lanes} bits, and the value has {of.bits * len(lanes)}"
        raise error("bad_argument", None, op="T.reinterpret", name="dtype", why=why, fix="take one of as many bits")
    if of.bits == to.bits:
        found = [reinterpret(lane, to.element) for lane in lanes]
        return Vector(found) if to.lanes > 1 else found[0]
    unit = min(of.bits, to.bits)
    wide = dtypes.uint64 if max(of.bits, to.bits) == 64 else dtypes.uint32
    parts: list[Expr] = []
    for lane in lanes:
        word = cast(reinterpret(lane, _unsigned(of.bits)), wide)
        parts += [(word >> (unit * k)) & ((1 << unit) - 1) for k in range(of.bits // unit)]
    count = to.bits // unit
    found = []
    for first in range(0, len(parts), count):
        word = reduce(lambda a, b: a | b, (part << (unit * k) for k, part in enumerate(parts[first : first + count])))
        found.append(reinterpret(cast(word, _unsigned(to.bits)), to.element))
    return Vector(found) if to.lanes > 1 else found[0]


def _unsigned(width: int) -> DType:
    """Return the unsigned integer type of a width in bits."""
    return dtypes.BY_NAME[f"uint{width}"]


# Shared memory's 32 banks of four bytes: the number of passes of a warp's access.

BANKS, WORD = 32, 4


def passes(addresses: Sequence[int], width: int) -> int:
    """Count the passes of shared memory for the addresses of a warp; 1 is free of bank conflicts.

    `addresses` are the bytes at which the lanes of a warp begin to read or write `width` bytes each. Lanes are served
    together as long as they ask for at most 128 bytes: 32 lanes of 4 bytes, 16 of 8, 8 of 16. Different words of one
    bank are served one after another, the same word at once.
    """
    group = max(1, min(32, BANKS * WORD // max(width, WORD)))
    worst = 1
    for first in range(0, len(addresses), group):
        words = {
            byte // WORD for a in addresses[first : first + group] for byte in range(a, a + width, min(WORD, width))
        }
        counts = [0] * BANKS
        for word in words:
            counts[word % BANKS] += 1
        worst = max(worst, *counts)
    return worst
