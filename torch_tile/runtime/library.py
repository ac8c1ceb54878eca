# SPDX-License-Identifier: Apache-2.0
"""Loads the shared library of a compiled program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def load_entry(path: Path, name: str) -> Callable[..., int]:
    """The function `name`: (pointers, numbers) -> 0, or the number of the assertion that failed. Releases the GIL."""
    entry = ctypes.CDLL(str(path))[name]
    entry.restype = ctypes.c_int64
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return entry
