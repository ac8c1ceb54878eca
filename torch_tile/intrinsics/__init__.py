# SPDX-License-Identifier: Apache-2.0
"""Functions that a kernel can call: each intrinsic is declared once, with its spelling per target and its meaning."""

from torch_tile.intrinsics import bulk, foreign, ieee, math, matrix, memory, random, wgmma
from torch_tile.intrinsics.base import Access, Intrinsic, call, lookup, names

__all__ = [
    "Access", "Intrinsic", "bulk", "call", "cpu", "foreign", "ieee", "lookup", "math", "matrix", "memory", "names",
    "random", "wgmma",
]  # fmt: skip
