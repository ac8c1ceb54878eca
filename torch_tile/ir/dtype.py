# SPDX-License-Identifier: Apache-2.0
"""Scalar types: names, widths, promotion. `float16(x)` is a cast, as in the language.

Promotion: floats win over integers, the wider wins; fp16 with bf16 (and any fp8 pair that differs) gives float32; a
signed and an unsigned integer of one width give the signed one of twice the width, at most int64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class DType(str):
    """A scalar type. There is one object for each name. It is a string, its name, as TileLang's are.

    `kind` is one of bool, int, uint, float. It equals its name and the types of torch and NumPy of that name, and
    hashes as the name does.
    """

    kind: str
    bits: int  # of a lane
    lanes: int
    element: DType  # of a vector, the type of its lanes; else the type itself

    def __new__(cls, name: str, kind: str, bits: int, lanes: int = 1) -> DType:
        """The type `name`, made once, below."""
        made = super().__new__(cls, name)
        made.kind, made.bits, made.lanes, made.element = kind, bits, lanes, made
        return made

    @property
    def name(self) -> str:
        """Return the name as plain text."""
        return str(self)

    def __repr__(self) -> str:
        return f"T.{self.name}"

    to_language = __repr__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, str):
            return not isinstance(other, DType) and str.__eq__(self, other)
        if (found := name_of(other)) is None:
            return NotImplemented
        return str.__eq__(self, found)

    def __ne__(self, other: object) -> bool:
        found = self.__eq__(other)
        return found if found is NotImplemented else not found

    __hash__: ClassVar[Callable[..., int]] = str.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return to_dtype, (self.name,)  # copies are the same object

    def __call__(self, value: Any = None, *lanes: Any) -> Any:
        """`T.float32(x)`: `x` converted to this type. `T.float32()`: a name for T.let.

        `T.float32x2(x, y)` is a vector of these lanes, and `T.float32x2(x)` has `x` in each. As an annotation,
        `x: T.float32()` is the type.
        """
        return converters[-1]((value, *lanes) if lanes else value, self)

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return (self.bits * self.lanes + 7) // 8

    bytes = itemsize

    @property
    def is_float(self) -> bool:
        """Return whether it is a floating type, fp8 included."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Return whether it is an integer, signed or unsigned, and not bool."""
        return self.kind in ("int", "uint")

    def as_torch(self) -> torch.dtype:
        """Return the torch dtype of the same name; of a packed type, that of the bytes which tensors hold."""
        import torch

        found = getattr(torch, TORCH_NAMES.get(self.name, self.name), torch.uint8)
        assert isinstance(found, torch.dtype)
        return found


bool_: DType = DType("bool", "bool", 8)
int8: DType = DType("int8", "int", 8)
int16: DType = DType("int16", "int", 16)
int32: DType = DType("int32", "int", 32)
int64: DType = DType("int64", "int", 64)
uint8: DType = DType("uint8", "uint", 8)
uint16: DType = DType("uint16", "uint", 16)
uint32: DType = DType("uint32", "uint", 32)
uint64: DType = DType("uint64", "uint", 64)
float16: DType = DType("float16", "float", 16)
float32: DType = DType("float32", "float", 32)
float64: DType = DType("float64", "float", 64)
bfloat16: DType = DType("bfloat16", "float", 16)
float8_e4m3fn: DType = DType("float8_e4m3fn", "float", 8)
float8_e5m2: DType = DType("float8_e5m2", "float", 8)

converters: list[Callable[[Any, DType], Any]] = []
"""What calls of types do: ir/expr.py puts its `converted_by_call` here."""

ALL = (
    bool_, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
    float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2,
)  # fmt: skip

# Types that targets hold in others (language/narrow.py): how many elements of a packed one share a byte of global
# memory.
int4: DType = DType("int4", "int", 4)
int2: DType = DType("int2", "int", 2)
uint4: DType = DType("uint4", "uint", 4)
uint2: DType = DType("uint2", "uint", 2)
float4_e2m1fn: DType = DType("float4_e2m1fn", "float", 4)
float8_e4m3fnuz: DType = DType("float8_e4m3fnuz", "float", 8)
float8_e5m2fnuz: DType = DType("float8_e5m2fnuz", "float", 8)
float8_e8m0fnu: DType = DType("float8_e8m0fnu", "float", 8)
tfloat32: DType = DType("tfloat32", "float", 32)
NARROW = (
    int4, int2, uint4, uint2, float4_e2m1fn, float8_e4m3fnuz, float8_e5m2fnuz, float8_e8m0fnu, tfloat32,
)  # fmt: skip
TORCH_NAMES = {
    "int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8", "float4_e2m1fn": "float4_e2m1fn_x2",
    "tfloat32": "float32", "float4_e2m1fnx2": "float4_e2m1fn_x2",
}  # fmt: skip

ALIASES = {
    "float": float32, "half": float16, "double": float64, "int": int32, "uint": uint32, "short": int16, "long": int64,
    "float8_e4m3": float8_e4m3fn, "e4m3": float8_e4m3fn, "e5m2": float8_e5m2, "boolean": bool_,
    "e4m3_float8": float8_e4m3fn, "e5m2_float8": float8_e5m2, "float4_e2m1fn_x2": float4_e2m1fn,
}  # fmt: skip
BY_NAME = {t.name: t for t in (*ALL, *NARROW)} | ALIASES

# Significant bits (the hidden one included) and exponent bits of the floating types.
FORMATS = {
    "float64": (53, 11), "float32": (24, 8), "float16": (11, 5), "bfloat16": (8, 8), "float8_e4m3fn": (4, 4),
    "float8_e5m2": (3, 5),
}  # fmt: skip

# What conversions to float8 end at: larger numbers, infinities included, become it, as on GPUs. NaN stays NaN.
SATURATED = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# Narrow floats: significant bits (the hidden one included), the least exponent of a normal number, the greatest number.
# None of them has an infinity; conversions saturate.
NARROW_FORMATS = {
    "float4_e2m1fn": (2, 0, 6.0), "float8_e4m3fnuz": (4, -7, 240.0), "float8_e5m2fnuz": (3, -15, 57344.0),
    "float8_e8m0fnu": (1, -127, 2.0**127), "tfloat32": (11, -126, math.ldexp(2 - 2.0**-10, 127)),
}  # fmt: skip


def rounded(value: float, dtype: DType) -> float:
    """Round `value` to a floating type, halves to even; too large gives inf (448 in e4m3fn)."""
    if dtype.name in NARROW_FORMATS:
        return _narrowed(value, dtype)
    digits, exponent_bits = FORMATS[dtype.name]
    bias = (1 << (exponent_bits - 1)) - 1
    has_inf = dtype.name != "float8_e4m3fn"
    finite = math.ldexp(2 - math.ldexp(1, 1 - digits), bias) if has_inf else 448.0
    if math.isfinite(value) and value != 0 and dtype.bits < 64:
        step = max(math.frexp(value)[1] - 1, 1 - bias) - (digits - 1)  # the exponent of the last bit kept
        value = math.copysign(math.ldexp(round(math.ldexp(abs(value), -step)), step), value)
    return math.copysign(math.inf if has_inf else finite, value) if abs(value) > finite else value


def saturated(value: Any, dtype: DType) -> Any:
    """Limit a number, NumPy array or tensor of torch as a conversion to `dtype` does before it rounds. NaN stays."""
    most = SATURATED.get(dtype.name)
    if most is None:
        return value
    return value.clip(-most, most) if hasattr(value, "clip") else max(min(value, most), -most)


def limits(dtype: DType) -> tuple[int, int]:
    """Return the least and the greatest value of an integer type."""
    half = 1 << (dtype.bits - 1)
    return (0, 2 * half - 1) if dtype.kind == "uint" else (-half, half - 1)


def truncated(value: float, dtype: DType) -> int:
    """Convert a float to an integer type: truncated, at its least or greatest value beyond the ends, 0 for NaN."""
    if math.isnan(value):
        return 0
    low, high = limits(dtype)
    return int(min(max(value, low), high))


def rounded_tensor(tensor: Any, dtype: DType) -> Any:
    """Round a tensor of torch as `rounded` does: too large gives 448 in e4m3fn, where torch before 2.13 gives NaN."""
    if dtype.name == "float8_e4m3fn" and tensor.dtype != dtype.as_torch():
        return converted(tensor, dtype)
    return tensor.to(dtype.as_torch())


def converted(tensor: Any, dtype: DType) -> Any:
    """Convert a tensor of torch as a cast does: to float8 saturated, whatever torch's own conversion does."""
    to = dtype.as_torch()
    if dtype.name not in SATURATED or tensor.dtype == to:
        return tensor.to(to)
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch limits no float8
    return saturated(wide, dtype).to(to)


def _narrowed(value: float, dtype: DType) -> float:
    """Round to a type without infinity: too large gives the greatest number."""
    digits, least, greatest = NARROW_FORMATS[dtype.name]
    if dtype == float8_e8m0fnu:
        value = max(abs(value), math.ldexp(1, least)) if math.isfinite(value) else math.nan
    if dtype == float4_e2m1fn and math.isnan(value):
        return greatest
    if math.isfinite(value) and value != 0:
        step = max(math.frexp(value)[1] - 1, least) - (digits - 1)
        scaled = math.ldexp(abs(value), -step)
        whole = math.floor(scaled + 0.5) if dtype == tfloat32 else round(scaled)
        value = math.copysign(math.ldexp(whole, step), value)
    if abs(value) > greatest and not (dtype == tfloat32 and math.isinf(value)):
        value = math.copysign(greatest, value)
    return abs(value) if value == 0 and dtype.name.endswith("fnuz") else value


def name_of(value: object) -> str | None:
    """Return the name of a dtype of torch or NumPy, or of a NumPy scalar class; None of anything else."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return value.__name__.rstrip("_") if value.__module__ in ("numpy", "ml_dtypes") else None
    if kind.__module__.startswith("numpy") and hasattr(value, "itemsize") and hasattr(value, "fields"):
        return str(getattr(value, "name", ""))
    return None


def to_dtype(value: object) -> DType:
    """Convert `value` to a DType: one, a name, a dtype of torch or NumPy, or Python's type. Else ValueError."""
    if isinstance(value, DType):
        return value
    python = {bool: bool_, int: int32, float: float32}
    if isinstance(value, type) and value in python:
        return python[value]
    name = value if isinstance(value, str) else name_of(value)
    if name in BY_NAME:
        return BY_NAME[name]
    element, _, lanes = (name or "").rpartition("x")
    if element in BY_NAME and lanes.isdecimal() and 1 < int(lanes) <= MOST_LANES:
        return vector_of(BY_NAME[element], int(lanes))
    raise ValueError(f"{value!r} is not a dtype")


MOST_LANES = 64


@functools.cache
def vector_of(element: DType, lanes: int) -> DType:
    """Return the vector type of so many values of `element`, such as float32x4."""
    found = DType(f"{element.name}x{lanes}", "vector", element.bits, lanes)
    found.element = element
    return found


def promote(a: DType, b: DType) -> DType:
    """Return the type of an arithmetic result of `a` and `b`."""
    if a == b:
        return a
    if a.is_float or b.is_float:
        if not b.is_float:
            return a
        if not a.is_float:
            return b
        if a.bits == b.bits:
            return float32
        return a if a.bits > b.bits else b
    if a.kind == "bool" or b.kind == "bool":
        return b if a.kind == "bool" else a
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    return signed if signed.bits > unsigned.bits else BY_NAME[f"int{min(64, 2 * unsigned.bits)}"]
