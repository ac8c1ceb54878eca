# SPDX-License-Identifier: Apache-2.0
"""The operations on whole tiles; importing this package declares them all."""

from . import arrive, async_loop, atomic, copy, copy_async, copy_tma, fill, gemm, reduce, results, scale, scan
from .base import RegisteredOp, tile_ops

__all__ = [
    "RegisteredOp",
    "arrive",
    "async_loop",
    "atomic",
    "copy",
    "copy_async",
    "copy_tma",
    "fill",
    "gemm",
    "reduce",
    "results",
    "scale",
    "scan",
    "tile_ops",
]
