# SPDX-License-Identifier: Apache-2.0
"""The few names of TVM that kernels written for TileLang use: dtypes, constants, targets and errors."""

from __future__ import annotations

from typing import Any

from torch_tile.compat.absent import absent
from torch_tile.compat.tvm import (
    error as error,
    target as target,
    testing as testing,
    tir as tir,
    transform as transform,
)
from torch_tile.compat.tvm.error import TVMError
from torch_tile.ir.dtype import DType, to_dtype

tirx = tir  # the same under its newer name


class _Made(type):
    """A class whose instances are dtypes of the language, made by calls."""

    def __call__(cls, dtype: object) -> DType:
        return to_dtype(dtype)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DType)


class DataType(metaclass=_Made):
    """`DataType("float16")` is T.float16, with `bits` and `itemsize`. Raises ValueError for what is no dtype."""


def __getattr__(name: str) -> Any:
    """Return what stands for a name that only TVM has: its use is an error."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return absent(f"tvm.{name}")


__all__ = ["DataType", "TVMError", "error", "target", "testing", "tir", "tirx", "transform"]
