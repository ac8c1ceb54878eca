# SPDX-License-Identifier: Apache-2.0
"""Softmax over any one dimension.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns a fresh contiguous one.
"""

from __future__ import annotations

import torch

from torch_tile.kernels.gemm import compute_dtype


def reference(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax of x (any shape) over `dim`, in float32 (float64 if x or `dtype` is), rounded once to `dtype` or x's."""
    dtype = x.dtype if dtype is None else dtype
    compute = compute_dtype(torch.promote_types(x.dtype, dtype))
    return torch.softmax(x.to(compute), dim).to(dtype).contiguous()


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See `reference`."""
    return reference(x, dim, dtype)
