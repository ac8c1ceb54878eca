# SPDX-License-Identifier: Apache-2.0
"""What a kernel can call: each intrinsic declared once, with its spelling per target and its meaning."""

from . import cpu, math
from .base import Intrinsic, call, lookup, names

__all__ = ["Intrinsic", "call", "cpu", "lookup", "math", "names"]
