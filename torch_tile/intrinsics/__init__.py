# SPDX-License-Identifier: Apache-2.0
"""What a kernel can call: each intrinsic declared once, with its spelling per target and its meaning."""

from . import bulk, cpu, math, matrix, memory, wgmma
from .base import Access, Intrinsic, call, lookup, names

__all__ = ["Access", "Intrinsic", "bulk", "call", "cpu", "lookup", "math", "matrix", "memory", "names", "wgmma"]
