# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention with masks, windows, grouped heads and unequal lengths.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

import torch

from torch_tile.kernels.gemm import compute_dtype


def visible(
    q_len: int, kv_len: int, causal: bool, window: int, q_offset: int, device: torch.device
) -> torch.Tensor | None:
    """Bool `[q_len, kv_len]`: may query `i` see key `j`? None when every query sees every key.

    Causal: `j <= i + q_offset`. Window `w > 0`: `j > i + q_offset - w`.
    """
    if not causal and not window:
        return None
    reach = torch.arange(q_len, device=device)[:, None] + q_offset
    key = torch.arange(kv_len, device=device)[None, :]
    if not window:
        return key <= reach
    return (key <= reach) & (key > reach - window) if causal else key > reach - window


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    q_offset: int,
) -> torch.Tensor:
    """`scale * q k^T + mask` with `-inf` where a query may not see a key: `[B, H, Sq, Skv]`, in `q`'s dtype.

    q `[B, H, Sq, D]` and k `[B, Hkv, Skv, D]` in the dtype to compute in; query head `h` reads key head
    `h // (H / Hkv)`.
    """
    batch, kv_heads, kv_len, _ = k.shape
    heads, q_len = q.shape[1], q.shape[2]
    groups = heads // kv_heads if kv_heads else 1
    grouped = q.reshape(batch, kv_heads, groups, q_len, q.shape[3])
    s = torch.matmul(grouped * scale, k.unsqueeze(2).mT).reshape(batch, heads, q_len, kv_len)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    keep = visible(q_len, kv_len, causal, window, q_offset, q.device)
    return s if keep is None else s.masked_fill(~keep, float("-inf"))


def softmax_with_lse(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension and its log-sum-exp; a row of `-inf` (or of no keys) gives 0 and `-inf`."""
    lse = torch.logsumexp(s, -1)
    # exp(s - lse) would be NaN in a row that sees nothing; any finite stand-in for lse gives exp(-inf) = 0 there.
    return (s - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp(), lse


def default_scale(head_dim: int) -> float:
    """`1 / sqrt(head_dim)`, and 1 for heads of no elements."""
    return float(head_dim) ** -0.5 if head_dim else 1.0


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale q k^T + mask) v`, summed in float32 (float64 for float64 inputs).

    q `[B, H, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`; mask bool (True: visible) or floating (added),
    broadcastable to `[B, H, Sq, Skv]`. Returns out `[B, H, Sq, Dv]` in q's dtype and lse `[B, H, Sq]`, the natural
    logarithm of the softmax's denominator in the summing dtype. See `visible` for the causal rule and the window.
    A query that sees no key gets 0 and `-inf`.
    """
    compute = compute_dtype(q.dtype)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    scale = default_scale(head_dim) if scale is None else scale
    p, lse = softmax_with_lse(scores(q.to(compute), k.to(compute), mask, causal, scale, window, q_offset))
    grouped = p.reshape(batch, kv_heads, heads // kv_heads if kv_heads else 1, q_len, kv_len)
    out = torch.matmul(grouped, v.to(compute).unsqueeze(2)).reshape(batch, heads, q_len, v_dim)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    return reference(q, k, v, mask, causal, scale, window, q_offset)
