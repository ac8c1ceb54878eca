# SPDX-License-Identifier: Apache-2.0
"""The emitter of warpgroups' products, by the name that TileLang gives it in this module."""

from __future__ import annotations

import math

from torch_tile.language.emitters import WGMMATensorCoreIntrinEmitter as TensorCoreIntrinEmitter

__path__: list[str] = []  # TileLang's module of this name has names that ours lacks: compat

WIDEST = 256  # columns of one wgmma


def select_wgmma_inst_n(warp_col_tiles: int) -> int:
    """Return the widest wgmma whose columns divide `warp_col_tiles`; its widths are multiples of 16 here, or 8."""
    if warp_col_tiles % 16:
        return math.gcd(warp_col_tiles, WIDEST)
    return next(n for n in range(min(warp_col_tiles, WIDEST), 0, -16) if warp_col_tiles % n == 0)


__all__ = ["TensorCoreIntrinEmitter", "select_wgmma_inst_n"]
