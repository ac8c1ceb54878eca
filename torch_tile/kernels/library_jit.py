# SPDX-License-Identifier: Apache-2.0
"""Declare the kernels of the library. They compile with what their tilings were measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

from torch_tile.jit import JITFunction
from torch_tile.options import CompileOptions, pass_options


def library_jit(func: Callable[..., Any] | None = None, **options: Unpack[CompileOptions]) -> Any:
    """Decorate a kernel of the library, as `torch_tile.jit` does, with the switch `measured` of `PassOptions`."""
    switches = replace(pass_options("jit", **options), measured=True)
    if func is None:
        return lambda f: JITFunction(f, options=switches)
    return JITFunction(func, options=switches)
