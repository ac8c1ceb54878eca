# SPDX-License-Identifier: Apache-2.0
"""Layers as products with an epilogue: what `linear` and `swiglu` ask of `gemm`."""

from __future__ import annotations

import math

import torch


def linear_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of `linear`'s result."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def linear_as_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], str, str]:
    """Return the arguments of `tile.gemm`, up to the dtype, that compute a linear layer."""
    from torch_tile.kernels.epilogue.program import of_layer

    rows = None if residual is None else flattened(residual)
    aux = [t for t in (bias, rows) if t is not None]
    kinds = ("" if bias is None else "r") + ("" if residual is None else "t")
    text = of_layer(activation, bias is not None, residual is not None)
    return flattened(x), [weight.mT], aux, kinds, text


def flattened(x: torch.Tensor) -> torch.Tensor:
    """View `[..., K]` as `[M, K]`, also where K is 0 and -1 would be ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def swiglu_text(activation: str) -> str:
    """Return the epilogue that computes `swiglu` from two products."""
    return "v0=mul(acc0,acc1);ret v0" if activation == "none" else f"v0={activation}(acc0);v1=mul(v0,acc1);ret v1"
