# SPDX-License-Identifier: Apache-2.0
"""Name the float8 types of the platform by TileLang's functions: NVIDIA's types, which CPUs have, too."""

from __future__ import annotations

from typing import Any

from torch_tile.ir.dtype import DType, to_dtype

_TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def determine_fp8_type(fp8_format: str = "e4m3") -> DType:
    """Return the float8 type of a format, "e4m3" or "e5m2". Raises ValueError for another format."""
    if fp8_format not in _TYPES:
        raise ValueError(f"fp8_format is one of {', '.join(_TYPES)}, got {fp8_format!r}")
    return to_dtype(_TYPES[fp8_format])


def determine_torch_fp8_type(fp8_format: str = "e4m3") -> Any:
    """Return torch's float8 type of a format. Raises ValueError for a format that is neither "e4m3" nor "e5m2"."""
    return determine_fp8_type(fp8_format).as_torch()


__all__ = ["determine_fp8_type", "determine_torch_fp8_type"]
