# SPDX-License-Identifier: Apache-2.0
"""Our kernels, in our language: one file per family, each with a plain-torch `reference` and its entry function."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def kernels(family: str) -> ModuleType:
    """The module `torch_tile.kernels.<family>`, imported when first asked for."""
    return importlib.import_module(f"torch_tile.kernels.{family}")
