# SPDX-License-Identifier: Apache-2.0
"""Provide what TileLang kernels import from `transform`: pass options, and a decorator that changes nothing.

The passes of this compiler are in torch_tile.lowering, and work on its own programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_tile.options import PassConfigKey as PassConfigKey

Function = TypeVar("Function", bound=Callable[..., object])


def simplify_prim_func(func: Function) -> Function:
    """Return `func` unchanged: kernels are always simplified."""
    return func


def apply_simplify(stmt: Any, inline_let: bool = False) -> Any:
    """Return `stmt` unchanged: kernels are always simplified."""
    return stmt


__all__ = ["PassConfigKey", "apply_simplify", "simplify_prim_func"]
