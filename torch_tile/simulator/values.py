# SPDX-License-Identifier: Apache-2.0
"""Compute arithmetic of one scalar type for the tile interpreter's expressions.

A value shared by all lanes of a loop nest is a Python int or bool. For floats it is a 0-d tensor. Any other value is a
tensor with one dimension per nest variable, right-aligned. Integers are computed in 64 bits: int32 wraps where
`ir/widths.py` says so, others after every operation. uint64 is held as its two's complement. Floats have the type of
their node; fp16, bf16 and fp8 are computed in float32 and rounded after every operation. x // 0 and x % 0 are
undefined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torch_tile.intrinsics import lookup
from torch_tile.ir.dtype import DType, converted, int64, limits, rounded_tensor, to_dtype
from torch_tile.ir.expr import COMPARISONS

Value = Any  # int, bool or torch.Tensor


def remainder(a: Any, b: Any) -> Any:
    """Return `a % b` of NumPy floats, exact before one rounding. torch.remainder of long tensors loses wide pairs."""
    with np.errstate(all="ignore"):
        rest = np.fmod(a, b)
        return np.asarray(np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest))


def floor_divide(a: Any, b: Any) -> Any:
    """Return `a // b` of NumPy's floats, as torch.floor_divide: from the exact remainder, since a / b may round up."""
    with np.errstate(all="ignore"):
        rest = np.fmod(a, b)
        quotient = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0)))
        down = np.floor(quotient)
        nearest = np.where(quotient - down > 0.5, down + 1, down).astype(quotient.dtype)
        zero = np.where(quotient == 0, np.copysign(np.zeros_like(quotient), a / b), nearest)
        return np.asarray(np.where(b == 0, a / b, zero))


_BOTH: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_INTEGER: dict[str, Callable[[Any, Any], Any]] = _BOTH | {
    "//": lambda a, b: a // _nonzero(b), "%": lambda a, b: a % _nonzero(b),
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "min": lambda a, b: pick(a < b, a, b), "max": lambda a, b: pick(a > b, a, b),
}  # fmt: skip
_ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "//": np.floor_divide, "%": np.remainder, "<": np.less, "<=": np.less_equal, ">": np.greater,
    ">=": np.greater_equal, "min": np.minimum, "max": np.maximum, ">>": np.right_shift,
}  # fmt: skip
_OF_UINT64 = {"maximum": "max", "minimum": "min", "abs": ""}  # intrinsics that depend on more than the lower bits
_FLOAT: dict[str, Callable[[Any, Any], Any]] = _BOTH | {
    "/": operator.truediv,
    "//": lambda a, b: torch.from_numpy(floor_divide(np.asarray(a), np.asarray(b))),
    "%": lambda a, b: torch.from_numpy(remainder(np.asarray(a), np.asarray(b))),
    # As on the targets, a NaN on either side gives NaN, and -0.0 is below 0.0.
    "min": lambda a, b: torch.where((a < b) | (a != a) | ((a == b) & torch.signbit(a)), a, b),
    "max": lambda a, b: torch.where((a > b) | (a != a) | ((a == b) & torch.signbit(b)), a, b),
}  # fmt: skip


def constant(value: bool | int | float, dtype: DType) -> Value:
    """Return the value of a literal."""
    if dtype.is_float:
        return rounded_tensor(torch.tensor(value, dtype=torch.float64), dtype)
    return bool(value) if dtype.kind == "bool" else wrap(int(value), dtype)


def binary(op: str, a: Value, b: Value, dtype: DType) -> Value:
    """Compute `a op b` for two operands of `dtype`."""
    if dtype.name == "uint64" and op in _ORDERED:
        return _by_numbers(op, a, b)
    if not dtype.is_float:
        return wrap_result(shared(_INTEGER[op](a, b)), dtype, op)
    if dtype.bits >= 32:
        return shared(_FLOAT[op](a, b))
    result = _FLOAT[op](a.float(), b.float())
    return shared(result) if op in COMPARISONS else rounded_tensor(result, dtype)


def _by_numbers(op: str, a: Value, b: Value) -> Value:
    """Compute a uint64 operator that depends on the upper bits, through NumPy, because torch lacks it."""
    x, y = (np.asarray(v if isinstance(v, torch.Tensor) else v % 2**64 - 2**64 * (v % 2**64 >= 2**63)) for v in (a, b))
    x, y = x.astype(np.int64).view(np.uint64), y.astype(np.int64).view(np.uint64)
    if op in ("//", "%"):
        y = np.where(y == 0, np.uint64(1), y)
    found = np.asarray(_ORDERED[op](x, y))
    return shared(torch.from_numpy(found if found.dtype == np.bool_ else found.view(np.int64)))


def unary(op: str, a: Value, dtype: DType) -> Value:
    """Compute `-a`, `~a` or `not a`."""
    if op == "not":
        return ~a if isinstance(a, torch.Tensor) else not a
    if dtype.is_float:
        return -a if dtype.bits >= 32 else (-a.float()).to(dtype.as_torch())
    return wrap_result(-a if op == "-" else ~a, dtype, op)


def call(name: str, args: Sequence[Value], operand: DType, result: DType) -> Value:
    """Compute an intrinsic on operands of one type."""
    if name == "reinterpret":
        return reinterpret(args[0], operand, result)
    meaning = lookup(name).evaluate
    assert meaning is not None
    if operand.name == "uint64" and name in _OF_UINT64:
        return args[0] if name == "abs" else _by_numbers(_OF_UINT64[name], *args)
    if not operand.is_float:
        args = [a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in args]
        return wrap_result(shared(meaning(*args)), result, name)
    wide = args if operand.bits >= 32 else [a.float() for a in args]
    found = meaning(*wide)
    return rounded_tensor(found, result) if result.is_float else shared(found)


def reinterpret(value: Value, source: DType, to: DType) -> Value:
    """Reinterpret the bits of `value` as the type `to` of the same width."""
    signed = getattr(torch, f"int{source.bits}")
    bits = value.view(signed) if source.is_float else torch.as_tensor(wrap(value, to_dtype(f"int{source.bits}")))
    if to.is_float:
        return bits.to(signed).view(to.as_torch())
    return wrap(shared(bits.to(torch.int64)), to)


def cast(value: Value, source: DType, to: DType) -> Value:
    """Convert `value`: to nearest even between floats, by `truncated` to an integer, wrapping between integers."""
    if to.kind == "bool":
        return shared(value != 0)
    if source.is_float and to.is_float:
        return converted(value, to)
    if source.is_float:
        found = np.asarray(truncated(value.double().numpy(), to))
        return wrap(shared(torch.from_numpy(found.view(np.int64) if to.bits == 64 else found.astype(np.int64))), to)
    if to.is_integer:
        return wrap(value.to(torch.int64) if isinstance(value, torch.Tensor) else int(value), to)
    number = value if isinstance(value, torch.Tensor) else torch.tensor(wrap(value, source))
    number = number.view(torch.uint64) if source.name == "uint64" else number
    return converted(number.to(torch.float32 if to.bits < 16 else to.as_torch()), to)


def truncated(value: Any, to: DType) -> Any:
    """Convert NumPy's floats to an integer type: truncated, saturated, 0 for NaN."""
    x, (low, high) = np.asarray(value, np.float64), limits(to)
    fits = (x >= low) & (x < high + 1)  # a power of two, which is exact
    found = np.where(fits, x, 0).astype(to.name)
    return np.where(x >= high + 1, np.array(high, to.name), np.where(x < low, np.array(low, to.name), found))


def pick(condition: Value, a: Value, b: Value) -> Value:
    """Select `a` where `condition` holds, else `b`; both have one type."""
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    return torch.where(condition, a, b)


def both(a: Value | None, b: Value) -> Value:
    """Compute `a and b` of two conditions; None means true everywhere."""
    if a is None or a is True:
        return b
    return a if b is True else a & b


def some(condition: Value) -> bool:
    """Return whether a condition holds in any lane."""
    return bool(condition.any()) if isinstance(condition, torch.Tensor) else bool(condition)


def shared(value: Value) -> Value:
    """Convert integers and bools without a lane dimension to Python values."""
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point():
        return value.item()
    return value


def wrap(value: Value, dtype: DType) -> Value:
    """Wrap an integer to the range of `dtype`."""
    if dtype.bits == 64:
        return value if isinstance(value, torch.Tensor) else (value + 2**63) % 2**64 - 2**63
    mask = (1 << dtype.bits) - 1
    if dtype.kind == "uint":
        return value & mask
    half = 1 << (dtype.bits - 1)
    return ((value + half) & mask) - half


def wrap_result(value: Value, dtype: DType, op: str) -> Value:
    """Wrap the result of an integer operation; narrow and unsigned types wrap at once."""
    if dtype.name == "int32" and type(value) is int:  # as tensors do
        return wrap(value, int64)
    wraps = dtype.kind == "uint" or (dtype.kind == "int" and dtype.bits != 32)
    return wrap(value, dtype) if wraps and op not in COMPARISONS else value


def _nonzero(divisor: Value) -> Value:
    """Replace zero divisors: division by zero is undefined, but must not stop lanes that never reach it."""
    if isinstance(divisor, torch.Tensor):
        return torch.where(divisor == 0, 1, divisor)
    return divisor or 1
