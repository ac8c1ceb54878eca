# SPDX-License-Identifier: Apache-2.0
"""Our kernels, in our language, by family.

A module has the entry functions of its kernels and a plain-torch `reference`.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch


@functools.cache
def kernels(module: str) -> ModuleType:
    """Import a module of this folder, such as "gemm.grouped", when it is first asked for."""
    return importlib.import_module(f"torch_tile.kernels.{module}")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 operands, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
