# SPDX-License-Identifier: Apache-2.0
"""Small C++ programs around the headers, called through ctypes on tensors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_tile.runtime.host_compiler import compile_shared

sys.path.insert(0, str(Path(__file__).parent))  # for cuda_shim.py
C_NAMES = {
    torch.bool: "bool", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
    torch.uint8: "uint8_t", torch.uint16: "uint16_t", torch.uint32: "uint32_t", torch.uint64: "uint64_t",
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "float", torch.float64: "double",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip


class Library:
    """A compiled source; functions are called with tensors (passed as pointers) and ints (passed as int64_t)."""

    def __init__(self, source: str):
        self._library = ctypes.CDLL(str(compile_shared(source)))

    def __call__(self, name: str, *args: torch.Tensor | int) -> None:
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int64(a) for a in args]
        function: Callable[..., Any] = self._library[name]
        function(*values)


@pytest.fixture(scope="session")
def library() -> Callable[[str], Library]:
    return Library


@pytest.fixture(scope="session")
def c_names() -> dict[torch.dtype, str]:
    return C_NAMES
