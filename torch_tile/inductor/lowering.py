# SPDX-License-Identifier: Apache-2.0
"""How Inductor calls a tile op: straight from the generated code, in Python (direct.py) or C++ (cpp_call.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_tile.inductor import compat, tile_call
from torch_tile.ops import direct


@functools.cache
def register() -> None:
    """Register the lowerings, once per process."""
    for name in direct.NAMES:
        op = getattr(torch.ops.tile, name).default
        compat.register_lowering(op, _lowering(op, name))


def _lowering(op: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: tile_call.lower(op, name, args, kwargs)
