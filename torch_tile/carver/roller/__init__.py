# SPDX-License-Identifier: Apache-2.0
"""The parts of a suggested tiling, by TileLang's names."""

from torch_tile.carver.roller.hint import Hint
from torch_tile.carver.roller.rasterization import NoRasterization, Rasterization2DColumn, Rasterization2DRow

__all__ = ["Hint", "NoRasterization", "Rasterization2DColumn", "Rasterization2DRow"]
