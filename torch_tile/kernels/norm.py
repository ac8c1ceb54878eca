# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the last dimension: RMS norm (arXiv:1910.07467) and layer norm (arXiv:1607.06450).

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

import torch

from torch_tile.kernels.epilogue import torch_functions
from torch_tile.kernels.gemm import compute_dtype


def rms_norm_dtype(x: torch.dtype, weight: torch.dtype | None, cast_first: bool) -> torch.dtype:
    """The dtype of `rms_norm`'s y: x's, but promoted with the weight's where the product comes after the cast."""
    return torch.promote_types(x, weight) if weight is not None and cast_first else x


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`activation(s / sqrt(mean(s^2) + eps) * (weight + weight_offset))` of `s = x + residual`, by rows.

    x and residual `[..., N]`, of one dtype; weight `[N]`. `s` is rounded to x's dtype before it is normalised in
    float32 (float64 for float64). With `cast_first` the normalised row is rounded to x's dtype and then multiplied, in
    the promoted dtype of x and weight (transformers' order); else it is multiplied first and rounded once, as
    `F.rms_norm` does. The activation is computed in float32, before the last rounding.
    Returns y `[..., N]`, rstd `[rows]` (float32 or float64) and `s`, None without a residual.
    """
    compute = compute_dtype(x.dtype)
    total = x if residual is None else x + residual
    s = total.to(compute)
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    y = s * rstd
    dtype = rms_norm_dtype(x.dtype, None if weight is None else weight.dtype, cast_first)
    if weight is not None:
        if cast_first:
            y = y.to(x.dtype).to(dtype) * (weight + weight_offset if weight_offset else weight).to(dtype)
        else:
            y = y * (weight.to(compute) + weight_offset)
    if activation != "none":
        y = torch_functions()[activation](y.to(compute))
    return y.to(dtype).contiguous(), rstd.reshape(-1), None if residual is None else total.contiguous()


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension, in float32 (float64 for float64).

    x `[..., N]`, weight and bias `[N]`. Returns y in x's dtype, mean and rstd `[rows]` (float32 or float64).
    """
    compute = compute_dtype(x.dtype)
    s = x.to(compute)
    mean = s.mean(-1, keepdim=True)
    rstd = torch.rsqrt((s - mean).square().mean(-1, keepdim=True) + eps)
    y = (s - mean) * rstd
    if weight is not None:
        y = y * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype).contiguous(), mean.reshape(-1), rstd.reshape(-1)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `rms_norm_reference`."""
    return rms_norm_reference(x, weight, residual, eps, activation, weight_offset, cast_first)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `layer_norm_reference`."""
    return layer_norm_reference(x, weight, bias, eps)
