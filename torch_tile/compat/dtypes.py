# SPDX-License-Identifier: Apache-2.0
"""Serve TileLang's module of dtypes: the types of the language, and its table from torch's types to names."""

from __future__ import annotations

from typing import Any

import torch

from torch_tile import language
from torch_tile.ir.dtype import ALL, NARROW, DType, to_dtype as dtype

_TORCH_DTYPE_TO_STR = {getattr(torch, t.name): t.name for t in (*ALL, *NARROW) if hasattr(torch, t.name)}

_all_dtypes = [name for name in dir(language) if isinstance(getattr(language, name), DType)]


def resolve_torch_storage_dtype(kind: Any) -> Any:
    """Return the type of a torch tensor's elements that hold values of this type: int8 for int4."""
    return dtype(str(dtype(kind).as_torch()).removeprefix("torch.").replace("_x2", "x2"))


def __getattr__(name: str) -> Any:
    """Return a name of the language."""
    return getattr(language, name)


__all__ = ["dtype", "resolve_torch_storage_dtype"]
