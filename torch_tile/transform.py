# SPDX-License-Identifier: Apache-2.0
"""Provide what TileLang kernels import from `transform`: pass options, and a decorator that changes nothing.

The passes of this compiler are in torch_tile.lowering, and work on its own programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch_tile.options import PassConfigKey as PassConfigKey

Function = TypeVar("Function", bound=Callable[..., object])


def simplify_prim_func(func: Function) -> Function:
    """Return `func` unchanged: kernels are always simplified."""
    return func


__all__ = ["PassConfigKey", "simplify_prim_func"]
