# SPDX-License-Identifier: Apache-2.0
"""What the kernel families share: the dtype of sums, parameter types of any stride, and which devices have kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import torch_tile.language as T

if TYPE_CHECKING:
    from torch_tile.language import TensorType

LOG2_E = math.log2(math.e)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 operands, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the compiler has a target for the tensor's device; elsewhere the families run their reference."""
    return x.device.type == "cpu"


def strided(name: str, shape: Sequence[Any], dtype: torch.dtype, unit: bool = True) -> TensorType:
    """The type of a parameter whose strides are known at run time only; with `unit` its last dimension is dense."""
    strides: list[Any] = [T.dynamic(f"{name}_stride{d}") for d in range(len(shape))]
    if unit:
        strides[-1] = 1
    return T.StridedTensor(shape, strides, dtype)


def is_unit(x: torch.Tensor) -> bool:
    """Whether the last dimension is dense."""
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def dense_last(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy whose last dimension is dense."""
    return x if is_unit(x) else x.contiguous()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as `[rows, N]` with dense rows: a view if the strides allow it, else a copy. `x` may be 0-d."""
    return dense_last(x.reshape(-1, x.shape[-1] if x.dim() else 1) if x.numel() else x.reshape(0, 1))


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`, and at least one."""
    return max(1, -(-value // multiple)) * multiple


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
