# SPDX-License-Identifier: Apache-2.0
"""The order in which blocks are visited: row by row, or in panels, as T.use_swizzle says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rasterization:
    """The order in which blocks take output tiles."""

    panel_width: int = 1


class NoRasterization(Rasterization):
    """Blocks in row-major order."""


class Rasterization2DRow(Rasterization):
    """Blocks in panels of so many, along rows."""


class Rasterization2DColumn(Rasterization):
    """Blocks in panels of so many, along columns."""


__all__ = ["NoRasterization", "Rasterization", "Rasterization2DColumn", "Rasterization2DRow"]
