# SPDX-License-Identifier: Apache-2.0
"""Compute values of the thread interpreter: a NumPy array with one value per thread, or one number for all threads.

Integers have the width of their type and wrap; shared ones are Python ints. Floats are float64 or float32: fp16, bf16
and fp8 are float32 numbers that their type can hold, rounded after every operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from torch_tile.intrinsics import lookup
from torch_tile.ir.dtype import DType, rounded_tensor, saturated
from torch_tile.ir.expr import COMPARISONS, Scalar
from torch_tile.simulator.values import floor_divide, remainder, truncated

Value = Any  # int, bool, np.floating, or an array with one element per thread
Function = Callable[..., Value]

_NAN_MARK = np.uint32(1)  # in the bits of a float32 NaN that stands for one of bfloat16 or e5m2 in memory
_OF_BFLOAT16 = np.uint32(0xFFFF0000)  # the bits of a float32 that bfloat16 has
_FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@cache
def carrier(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type in which values of `dtype` are computed."""
    if dtype.is_float:
        return np.dtype(np.float64 if dtype.bits == 64 else np.float32)
    return np.dtype(np.bool_ if dtype.kind == "bool" else dtype.name)


@cache
def stored(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy type of raw elements of `dtype` in memory."""
    if dtype.name == "bfloat16":
        return np.dtype(np.uint16)
    return np.dtype(np.uint8) if dtype.name in _FP8 or dtype.kind == "bool" else np.dtype(dtype.name)


@cache
def _table(name: str) -> Any:
    """Return all values of an 8-bit float type. A NaN of e5m2 carries its bits and `_NAN_MARK`, as copies keep them."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(_FP8[name]).float().numpy()
    if name == "float8_e5m2":
        bits = codes.numpy().astype(np.uint32)
        marked = (bits & 0x80) << 24 | np.uint32(0x7F800000) | (bits & 3) << 21 | _NAN_MARK
        values = np.where(np.isnan(values), marked, values.view(np.uint32)).view(np.float32)
    return values


def decode(raw: Any, dtype: DType) -> Any:
    """Convert raw elements of memory to values."""
    if dtype.name == "float16":
        return raw.astype(np.float32)
    if dtype.name == "bfloat16":
        bits = raw.astype(np.uint32) << np.uint32(16)
        return np.where(np.isnan(bits.view(np.float32)), bits | _NAN_MARK, bits).view(np.float32)
    if dtype.name in _FP8:
        return _table(dtype.name)[raw]
    return raw != 0 if dtype.kind == "bool" else raw


def encode(value: Value, dtype: DType) -> Any:
    """Convert values to raw elements of memory; floats round to nearest even."""
    x = np.asarray(value)
    if dtype.name == "bfloat16":
        return _bfloat16(np.asarray(x, np.float32))
    if dtype.name in _FP8:
        wide = np.ascontiguousarray(x, np.float32)
        found = rounded_tensor(torch.from_numpy(wide), dtype).view(torch.uint8).numpy()
        if dtype.name == "float8_e5m2":
            bits = wide.view(np.uint32)
            kept = np.isnan(wide) & (bits & np.uint32(0x1FFFFF) == _NAN_MARK)
            found = np.where(kept, bits >> 24 & 0x80 | np.uint32(0x7C) | bits >> 21 & 3, found).astype(np.uint8)
        return found.reshape(x.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite
        return x.astype(stored(dtype))


def _bfloat16(x: Any) -> Any:
    """Round float32 values to bfloat16. A NaN from memory keeps its bits, as copies on a GPU keep them."""
    bits = x.view(np.uint32)
    upper = bits >> np.uint32(16)
    nearest = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    nan = np.where(bits & ~_OF_BFLOAT16 == _NAN_MARK, upper, np.uint32(0x7FC0))  # arithmetic gives either sign
    return np.where(np.isnan(x), nan, nearest).astype(np.uint16)


def _unmarked(x: Value) -> Value:
    """Return values of bfloat16 as float32: NaN has its bits and no mark."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    found = np.where(np.isnan(x), bits & _OF_BFLOAT16, bits).view(np.float32)
    return found if isinstance(x, np.ndarray) else found[()]


def number(value: Value, dtype: DType) -> Value:
    """Convert a NumPy scalar to the form of shared values; leave arrays as they are."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if dtype.is_float:
        return carrier(dtype).type(value)
    return bool(value) if dtype.kind == "bool" else int(value)


def rounded(value: Value, dtype: DType) -> Value:
    """Round floats to the nearest value of `dtype`."""
    if dtype.bits >= 32:
        return number(np.asarray(value, carrier(dtype)), dtype)
    return number(decode(encode(value, dtype), dtype), dtype)


def constant(value: Scalar, dtype: DType) -> Value:
    """Return the value of a literal."""
    return rounded(float(value), dtype) if dtype.is_float else number(value, dtype)


def wrapped(value: int, dtype: DType) -> int:
    """Wrap a shared integer to the range of `dtype`."""
    if dtype.kind == "uint":
        return value & ((1 << dtype.bits) - 1)
    half = 1 << (dtype.bits - 1)
    return value if -half <= value < half else (value + half) % (2 * half) - half


def _floor(f: Callable[[Any, Any], Any]) -> Function:
    """Divide with rounding down. Division by zero is undefined and must not stop threads that never reach it."""

    def divide(a: Value, b: Value) -> Value:
        if isinstance(b, np.ndarray):
            return f(a, np.where(b == 0, np.ones_like(b), b))
        return f(a, b or 1)

    return divide


def _lesser(a: Value, b: Value) -> Value:
    """Return the smaller values, as CUDA's `a < b ? a : b`."""
    return np.where(a < b, a, b) if isinstance(a < b, np.ndarray) else a if a < b else b


def _greater(a: Value, b: Value) -> Value:
    """Return the greater values, as CUDA's `a > b ? a : b`."""
    return np.where(a > b, a, b) if isinstance(a > b, np.ndarray) else a if a > b else b


_BOTH: dict[str, Function] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "min": _lesser, "max": _greater,
}  # fmt: skip
_INTEGER = _BOTH | {
    "//": _floor(operator.floordiv), "%": _floor(operator.mod), "<<": operator.lshift, ">>": operator.rshift,
    "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_FLOAT: dict[str, Function] = _BOTH | {
    "/": operator.truediv, "//": floor_divide, "%": remainder,
    # As on the targets, a NaN on either side gives NaN, and -0.0 is below 0.0.
    "min": lambda a, b: np.where((a < b) | (a != a) | ((a == b) & np.signbit(a)), a, b),
    "max": lambda a, b: np.where((a > b) | (a != a) | ((a == b) & np.signbit(b)), a, b),
}  # fmt: skip


_UNSIGNED: dict[str, Function] = {
    "maximum": np.maximum, "minimum": np.minimum, "fmax": np.maximum, "fmin": np.minimum, "abs": np.positive,
}  # fmt: skip


def binary(op: str, dtype: DType) -> Function:
    """Return the function `a op b` for operands of `dtype`."""
    f = (_FLOAT if dtype.is_float else _INTEGER)[op]
    if op in COMPARISONS:
        return lambda a, b: c if isinstance(c := f(a, b), np.ndarray) else bool(c)
    if dtype.is_float:
        return lambda a, b: rounded(f(a, b), dtype)
    pick: Any = {"min": min, "max": max}.get(op, f)

    def integers(a: Value, b: Value) -> Value:
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return f(a, b)
        found = pick(a, b)
        return found if isinstance(found, bool) else wrapped(found, dtype)

    return integers


def unary(op: str, dtype: DType) -> Function:
    """Return the function `op a`."""
    if op == "not":
        return lambda a: ~a if isinstance(a, np.ndarray) else not a
    f = operator.neg if op == "-" else operator.invert
    if dtype.is_float:
        return f
    return lambda a: f(a) if isinstance(a, np.ndarray) else wrapped(f(a), dtype)


def cast(source: DType, to: DType) -> Function:
    """Return the function that converts numbers of `source` to `to`.

    Floats round to nearest even; float to integer truncates and saturates; integers wrap.
    """
    if to.kind == "bool":
        return lambda a: a != 0 if isinstance(a, np.ndarray) else bool(a != 0)
    if to.is_float:
        exact = _unmarked if source.name == "bfloat16" and to.bits >= 32 else lambda a: a
        return lambda a: rounded(saturated(exact(a), to), to)
    width = carrier(to)
    if source.is_float:
        return lambda a: number(truncated(a, to).astype(width), to)
    return lambda a: a.astype(width) if isinstance(a, np.ndarray) else wrapped(int(a), to)


def mathematics(name: str, operand: DType, result: DType) -> Function:
    """Return the function of a scalar intrinsic, computed by the intrinsic's declared meaning."""
    if name == "reinterpret":
        return lambda a: number(decode(np.asarray(encode(a, operand)).view(stored(result)), result), result)
    meaning, on_arrays = lookup(name).evaluate, lookup(name).meaning
    if on_arrays is not None:
        return lambda *args: rounded(on_arrays(*args, ()), result) if result.is_float else on_arrays(*args, ())
    if meaning is None:
        raise KeyError(name)

    if name in _UNSIGNED and operand.kind == "uint":  # torch has no such functions of unsigned types
        ordered = _UNSIGNED[name]
        return lambda *args: number(np.asarray(ordered(*(np.asarray(a, carrier(operand)) for a in args))), result)

    def call(*args: Value) -> Value:
        found = meaning(*(torch.from_numpy(np.array(a, carrier(operand))) for a in args)).numpy()
        return rounded(found, result) if result.is_float else number(found.astype(carrier(result)), result)

    return call
