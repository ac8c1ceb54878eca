# SPDX-License-Identifier: Apache-2.0
"""Suggest tile sizes by TileLang's `carver`: templates of common kernels give the best of our cost model."""

from torch_tile.carver.arch import CPU, CUDA, TileDevice
from torch_tile.carver.roller.hint import Hint
from torch_tile.carver.template import ElementwiseTemplate, MatmulTemplate

__all__ = ["CPU", "CUDA", "ElementwiseTemplate", "Hint", "MatmulTemplate", "TileDevice"]
