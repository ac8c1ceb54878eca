# SPDX-License-Identifier: Apache-2.0
"""The ATen that captured ops stand for: what Inductor gets back, and what our kernels are timed against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: Any = 0,
    aux: Sequence[torch.Tensor] | None = None,
    score: str = "",
) -> torch.Tensor:
    """`tile.attention` in torch's own terms."""
    at_zero = isinstance(q_offset, int) and q_offset == 0
    plain_causal = causal and not window and at_zero and mask is None and not score
    if not plain_causal and (causal or window):
        keys = torch.arange(k.shape[2], device=q.device)
        queries = torch.arange(q.shape[2], device=q.device)[:, None] + q_offset
        keep = keys <= queries if causal else keys == keys
        if window:
            keep = keep & (keys > queries - window)
        if mask is None:
            mask = keep
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = torch.where(keep, mask, -torch.inf)
    if score:
        return _with_scores(q, k, v, mask, scale, q_offset, aux or (), score)
    heads = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, plain_causal, scale=scale, **heads)


def _with_scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None, q_offset: Any,
    aux: Sequence[torch.Tensor], score: str,
) -> torch.Tensor:  # fmt: skip
    """Attention written out, as models do whose scores are modified."""
    from torch_tile.kernels.attention.forward import default_scale
    from torch_tile.kernels.attention.score_mod import modified

    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
    scale = default_scale(q.shape[3]) if scale is None else scale
    s = modified(score, torch.matmul(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale, aux, q_offset)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return torch.matmul(torch.softmax(s, -1).masked_fill(empty, 0.0).to(v.dtype), v)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    weight_offset: float = 0.0,
    cast_first: bool = True,
) -> torch.Tensor:
    """`tile.rms_norm` in torch's own terms."""
    h = x if x.dtype == torch.float64 else x.float()
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if cast_first:
        return (weight + weight_offset) * y.to(x.dtype) if weight_offset else weight * y.to(x.dtype)
    scale = weight.to(h.dtype)
    return (y * (scale + weight_offset if weight_offset else scale)).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """`tile.layer_norm` in torch's own terms."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tile.softmax` in torch's own terms."""
    return F.softmax(x, dim, dtype=dtype)


REFERENCES: dict[Any, tuple[str, Callable[..., torch.Tensor]]] = {
    torch.ops.tile.attention.default: ("attention", sdpa),
    torch.ops.tile.rms_norm.default: ("norm", rms_norm),
    torch.ops.tile.layer_norm.default: ("norm", layer_norm),
    torch.ops.tile.softmax.default: ("softmax", softmax),
}


IN_TRAINING = torch.ops.tile.attention_lse.default, torch.ops.tile.attention_backward.default
"""Decided on before autograd."""
