# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: what the tensor memory accelerator is told of a tensor in global memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Expr


@dataclass(frozen=True, eq=False, repr=False)
class TensorMap(Expr):
    """A global buffer as the tensor memory accelerator sees it; an operand of target-level calls only.

    `sizes` and `strides` (in elements; the last is 1) have one entry per dimension of the tensor, outermost first, and
    keep what a flattened buffer no longer shows. One copy moves a `box`, whose rows lie in shared memory swizzled over
    `swizzle` bytes (0, 32, 64 or 128). The launcher makes the map that the hardware reads; the kernel gets its address.
    """

    buffer: Buffer
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def dtype(self) -> DType:
        """The type of the value."""
        return dt.int64
