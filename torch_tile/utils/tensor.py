# SPDX-License-Identifier: Apache-2.0
"""Tensors to try kernels on, by TileLang's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_tile.ir.dtype import to_dtype
from torch_tile.profiler import TensorSupplyType as TensorSupplyType, made_up
from torch_tile.testing import torch_assert_close as torch_assert_close

if TYPE_CHECKING:
    import torch


def get_tensor_supply(supply_type: TensorSupplyType = TensorSupplyType.Integer) -> Callable[[Any], torch.Tensor]:
    """Return a function that makes a tensor for a parameter of a kernel: on the GPU if there is one.

    It takes one of `kernel.params`, and raises LaunchError where a size is known only at run time.
    """

    def supply(param: Any) -> torch.Tensor:
        import torch

        return made_up(param, supply_type, "cuda" if torch.cuda.is_available() else "cpu")

    return supply


def map_torch_type(dtype: object) -> torch.dtype:
    """Return the torch dtype of a name. Raises ValueError for any other name."""
    return to_dtype(dtype).as_torch()


def is_float8_dtype(dtype: torch.dtype) -> bool:
    """Return whether a torch dtype is a floating type of 8 bits."""
    return dtype.is_floating_point and dtype.itemsize == 1


__all__ = ["TensorSupplyType", "get_tensor_supply", "is_float8_dtype", "map_torch_type", "torch_assert_close"]
