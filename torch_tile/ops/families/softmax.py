# SPDX-License-Identifier: Apache-2.0
"""`tile.softmax`, over any one dimension."""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.ops import checks
from torch_tile.ops.checks import require_type
from torch_tile.ops.registration import register


def _check_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> None:
    checks.check_floating("softmax", x=x)
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"tile.softmax: dim is {dim}; expected {-rank} to {rank - 1} for shape {checks.shape_of(x)}")
    require_type(
        dtype is None or dtype in checks.FLOATING,
        lambda: f"tile.softmax: dtype is {dtype}; expected float16, bfloat16, float32 or float64",
    )


def _fake_softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    _check_softmax(x, dim, dtype)
    return x.new_empty(x.shape, dtype=x.dtype if dtype is None else dtype)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dim, _ = inputs
    ctx.input_dtype = x.dtype
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    compute = torch.promote_types(torch.promote_types(y.dtype, ctx.input_dtype), torch.float32)
    p, upstream = y.to(compute), grad.to(compute)
    grad_x = p * (upstream - (upstream * p).sum(ctx.dim, keepdim=True))
    return grad_x.to(ctx.input_dtype), None, None


register(
    "softmax",
    fake=_fake_softmax,
    backward=_softmax_backward,
    setup_context=_save_softmax,
    full_precision_cuda=True,
)
