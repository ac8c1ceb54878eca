# SPDX-License-Identifier: Apache-2.0
"""What a tile op's `evaluate` may ask of the interpreter that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from torch_tile.ir.buffer import Region
    from torch_tile.ir.dtype import DType
    from torch_tile.ir.expr import Expr
    from torch_tile.ir.stmt import Block


class Env(Protocol):
    """The state of one block, seen tile by tile."""

    def read(self, region: Region) -> torch.Tensor:
        """A copy of the region, one dimension per buffer dimension; global elements outside the buffer read 0."""

    def write(self, region: Region, tile: torch.Tensor) -> None:
        """Overwrite the region with a tile of its shape; global elements outside the buffer are dropped."""

    def extents(self, region: Region) -> list[int]:
        """The region's extents, one per buffer dimension."""

    def value(self, expr: Expr) -> Any:
        """A scalar expression as a Python number."""

    def size(self, expr: Expr) -> int:
        """An integer expression as a Python int."""

    def full(self, shape: Sequence[int], value: Any, dtype: DType) -> torch.Tensor:
        """A constant tile."""

    def wide(self, dtype: DType) -> torch.dtype:
        """The type in which a reference computes for results of `dtype`: float64 or int64."""

    def block(self, block: Block) -> None:
        """Run statements."""
