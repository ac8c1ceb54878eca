# SPDX-License-Identifier: Apache-2.0
"""The order in which blocks are visited: row by row, or in panels, as T.use_swizzle says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rasterization:
    """An order of blocks."""

    panel_width: int = 1


class NoRasterization(Rasterization):
    """Row by row."""


class Rasterization2DRow(Rasterization):
    """In panels of so many blocks, along rows."""


class Rasterization2DColumn(Rasterization):
    """In panels of so many blocks, along columns."""


__all__ = ["NoRasterization", "Rasterization", "Rasterization2DColumn", "Rasterization2DRow"]
