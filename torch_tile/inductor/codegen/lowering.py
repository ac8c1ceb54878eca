# SPDX-License-Identifier: Apache-2.0
"""Lower tile ops in Inductor: generated code calls them directly, in Python (launchers.py) or C++ (cpp_wrapper.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch_tile.inductor import compat
from torch_tile.inductor.codegen import python_wrapper
from torch_tile.ops.registry import OPERATORS


@functools.cache
def register() -> None:
    """Register the lowerings, once per process."""
    for name, operator in OPERATORS.items():
        compat.register_lowering(operator.overload, _lowering(operator.overload, name))


def _lowering(op: Any, name: str) -> Callable[..., Any]:
    """Return Inductor's lowering of an operator."""
    return lambda *args, **kwargs: python_wrapper.lower(op, name, args, kwargs)
