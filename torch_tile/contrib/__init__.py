# SPDX-License-Identifier: Apache-2.0
"""Modules of TileLang's `contrib` that files for it import."""

from torch_tile.contrib import cc, nvcc

__all__ = ["cc", "nvcc"]
