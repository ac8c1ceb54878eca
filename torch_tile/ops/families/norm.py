# SPDX-License-Identifier: Apache-2.0
"""`tile.rms_norm`, `tile.add_rms_norm` and `tile.layer_norm`, over the last dimension.

The forward runs the kernel; the backward is plain torch and recomputes the statistics.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.ops import checks
from torch_tile.ops.checks import require
from torch_tile.ops.registration import register


def _check_rms_norm(
    op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, activation: str
) -> None:
    checks.check_floating(op, x=x, residual=residual, weight=weight)
    require(x.dim() >= 1, lambda: f"tile.{op}: x has 0 dimensions; expected at least 1: [..., N]")
    if residual is not None:
        checks.check_same_dtype(op, x=x, residual=residual)
        checks.check_dims(op, "residual", residual, x.dim(), "as x")
        for dim, size in enumerate(x.shape):
            checks.check_size(op, "residual", residual, dim, size, "as x")
    checks.check_vector(op, "weight", weight, x.shape[-1], "x's last dimension")
    checks.check_activation(op, activation)


def _rms_norm_dtype(x: torch.Tensor, weight: torch.Tensor | None, cast_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype


def _fake_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> torch.Tensor:
    _check_rms_norm("rms_norm", x, None, weight, activation)
    return x.new_empty(x.shape, dtype=_rms_norm_dtype(x, weight, cast_first))


def _fake_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rms_norm("add_rms_norm", x, residual, weight, activation)
    return x.new_empty(x.shape, dtype=_rms_norm_dtype(x, weight, cast_first)), x.new_empty(x.shape)


def _rms_norm_gradients(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    activation: str,
    weight_offset: float,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x (in the computing dtype) and of the weight (in its own)."""
    from torch_tile.kernels.epilogue.autodiff import vjp
    from torch_tile.kernels.gemm.gemm import compute_dtype

    compute = compute_dtype(x.dtype)
    s = x.to(compute)
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    normalised = s * rstd
    factor = normalised.new_ones(()) if weight is None else weight.to(compute) + weight_offset
    upstream = grad.to(compute)
    if activation != "none":
        upstream = vjp(f"v0={activation}(acc0);ret v0", {"acc0": normalised * factor}, upstream)["acc0"]
    inner = upstream * factor
    grad_x = rstd * (inner - normalised * (inner * normalised).mean(-1, keepdim=True))
    if weight is None:
        return grad_x, None
    return grad_x, (upstream * normalised).sum_to_size(weight.shape).to(weight.dtype)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps, ctx.activation, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _rms_norm_gradients(x, weight, ctx.eps, ctx.activation, ctx.weight_offset, grad)
    return grad_x.to(x.dtype), grad_weight, None, None, None, None


def _save_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, weight, ctx.eps, ctx.activation, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight)


def _add_rms_norm_backward(ctx: Any, grad: torch.Tensor | None, grad_sum: torch.Tensor | None) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    grad_x: torch.Tensor | None = grad_sum
    grad_weight: torch.Tensor | None = None
    if grad is not None:
        inner, grad_weight = _rms_norm_gradients(total, weight, ctx.eps, ctx.activation, ctx.weight_offset, grad)
        grad_x = (inner if grad_sum is None else inner + grad_sum).to(total.dtype)
    return grad_x, grad_x, grad_weight, None, None, None, None


register(
    "rms_norm",
    fake=_fake_rms_norm,
    backward=_rms_norm_backward,
    setup_context=_save_rms_norm,
    full_precision_cuda=True,
)
register(
    "add_rms_norm",
    fake=_fake_add_rms_norm,
    backward=_add_rms_norm_backward,
    setup_context=_save_add_rms_norm,
    full_precision_cuda=True,
)


def _check_layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    checks.check_floating("layer_norm", x=x, weight=weight, bias=bias)
    require(x.dim() >= 1, lambda: "tile.layer_norm: x has 0 dimensions; expected at least 1: [..., N]")
    checks.check_vector("layer_norm", "weight", weight, x.shape[-1], "x's last dimension")
    checks.check_vector("layer_norm", "bias", bias, x.shape[-1], "x's last dimension")


def _fake_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    _check_layer_norm(x, weight, bias)
    return x.new_empty(x.shape)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _layer_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    from torch_tile.kernels.gemm.gemm import compute_dtype

    x, weight = ctx.saved_tensors
    compute = compute_dtype(x.dtype)
    centred = x.to(compute)
    centred = centred - centred.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + ctx.eps)
    normalised, upstream = centred * rstd, grad.to(compute)
    inner = upstream if weight is None else upstream * weight.to(compute)
    projection = normalised * (inner * normalised).mean(-1, keepdim=True)
    grad_x = rstd * (inner - inner.mean(-1, keepdim=True) - projection)
    last = x.shape[-1:]
    grad_weight = None if weight is None else (upstream * normalised).sum_to_size(last).to(weight.dtype)
    grad_bias = None if ctx.bias_dtype is None else upstream.sum_to_size(last).to(ctx.bias_dtype)
    return grad_x.to(x.dtype), grad_weight, grad_bias, None


register(
    "layer_norm",
    fake=_fake_layer_norm,
    backward=_layer_norm_backward,
    setup_context=_save_layer_norm,
    full_precision_cuda=True,
)
