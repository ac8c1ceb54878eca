# SPDX-License-Identifier: Apache-2.0
"""TileLang's `engine.callback`: decorators of functions that change generated text before it is compiled."""

from __future__ import annotations

from typing import Any

from torch_tile.compiler import postprocess


def register_cuda_postproc_callback(func: Any = None, override: bool = True) -> Any:
    """Decorate `func(code, target)`, which returns the CUDA C++ to compile instead of `code`.

    It serves all kernels that are compiled from now on. Without `override` an earlier function stays.
    """
    if func is None:
        return lambda function: register_cuda_postproc_callback(function, override)
    if override or not postprocess.has_function():
        postprocess.choose(func)
    return func


def register_hip_postproc_callback(func: Any = None, override: bool = True) -> Any:
    """Decorate a function for AMD's GPUs, for which nothing is compiled here: it is never called."""
    return func if func is not None else lambda function: function


__all__ = ["register_cuda_postproc_callback", "register_hip_postproc_callback"]
