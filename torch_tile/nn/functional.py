# SPDX-License-Identifier: Apache-2.0
"""Attention with all options of the layers here, and rotary embeddings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

import torch

from torch_tile.kernels.epilogue.program import soft_cap

Tensor = torch.Tensor
log: logging.Logger = logging.getLogger("torch_tile")
_told: set[str] = set()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention whose last query is at the last key, as with a KV cache.

    Dropout, and sinks that need a gradient, are computed by plain torch, which is logged once for each.

    Args:
        q: `[B, H, Sq, D]`.
        k: `[B, Hkv, Skv, D]`, H a multiple of Hkv.
        v: `[B, Hkv, Skv, Dv]`.
        mask: broadcastable to `[B, H, Sq, Skv]`, bool (True: visible) or floating (added). It is used together with
            `causal` and `window`, not instead of them.
        causal: query `i` sees the keys `j <= i + Skv - Sq`.
        scale: of the scores; default `D ** -0.5`.
        window: if positive, query `i` sees only the keys `j > i + Skv - Sq - window`.
        dropout: probability of dropping a weight.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118).
        sinks: `[H]`, a score of each head that takes part in the softmax and brings no value (arXiv:2309.17453).

    Returns:
        `[B, H, Sq, Dv]` in q's dtype.
    """
    offset = k.shape[2] - q.shape[2]
    if dropout:
        _warn_once("dropout")
        return _plain(q, k, v, mask, causal, scale, window, dropout, softcap, sinks)
    cap = () if softcap is None else (None, soft_cap(softcap))
    if sinks is None:
        out: Tensor = torch.ops.tile.attention.default(q, k, v, mask, causal, scale, window, offset, *cap)
        return out
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, sinks)):
        _warn_once("sinks in training")  # the log-sum-exp of our kernel has no gradient
        return _plain(q, k, v, mask, causal, scale, window, dropout, softcap, sinks)
    out, lse = torch.ops.tile.attention_lse.default(q, k, v, mask, causal, scale, window, offset, *cap)
    # With the sink the denominator grows from exp(lse) to exp(lse) + exp(sink).
    return out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])[..., None].to(out.dtype)


def given_cache(cache: Any, past_key_values: Any, others: Mapping[str, Any]) -> Any:
    """The cache of an attention layer's call, under either of its names.

    Raises:
        TypeError: if one of the call's `others`, which are ignored, is a cache under a third name.
    """
    for name, other in others.items():
        if hasattr(other, "update") and not isinstance(other, Mapping | Set):
            raise TypeError(f"{name}= looks like a cache, and would be ignored: give it as cache=")
    return past_key_values if cache is None else cache


def _warn_once(what: str) -> None:
    """Warn once that a kernel is not used."""
    if not torch.compiler.is_compiling() and what not in _told:
        _told.add(what)
        log.warning("attention with %s is computed by plain torch, not by a tile kernel", what)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window: int,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`attend` in plain torch, in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups, sq, skv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (t.repeat_interleave(groups, dim=1).to(wide) for t in (k, v))
    scores = q.to(wide) @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(sq, device=q.device)[:, None] + (skv - sq)
    j = torch.arange(skv, device=q.device)
    if causal:
        scores = scores.masked_fill(j > i, float("-inf"))
    if window > 0:
        scores = scores.masked_fill(j <= i - window, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    empty = scores.amax(-1, keepdim=True) == float("-inf")
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    weights = torch.dropout(weights, dropout, dropout > 0)
    return (weights[..., :skv] @ v).to(q.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv:2104.09864).

    Args:
        x: `[B, H, S, R]`.
        cos: `[B, S, R]` or `[1, S, R]`, each angle twice: `cat([a, a])`.
        sin: as cos.
        interleaved: whether the pairs of x are `(0, 1), (2, 3), ...` instead of `(0, R/2), (1, R/2 + 1), ...`; the
            result has them in the second order either way.

    Returns:
        `[B, H, S, R]`.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
