# SPDX-License-Identifier: Apache-2.0
"""Decoding with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its weight-absorbed form.

All heads share one latent `kv`, which is both key (with the rotary part `k_pe` beside it) and value. Assumes that `ops`
checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

import torch

from torch_tile.kernels.attention import default_scale, softmax_with_lse
from torch_tile.kernels.gemm import compute_dtype


def gather_pages(pages: torch.Tensor, block_table: torch.Tensor | None) -> torch.Tensor:
    """The cache as `[B, S, C]`: `pages` itself when contiguous, else the rows of `[pages, page, C]` in table order.

    Entries of the table outside `[0, pages)` (padding) read some page; positions past a sequence's length are not used.
    """
    if block_table is None:
        return pages
    batch, blocks = block_table.shape
    rows = pages[block_table.clamp(0, max(pages.shape[0] - 1, 0)).long()] if pages.shape[0] else pages[:0]
    return rows.reshape(batch, blocks * pages.shape[1] if pages.shape[0] else 0, pages.shape[2])


def visible(q_len: int, kv_len: int, seq_lens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Bool `[B or 1, Sq, S]`: query `t` stands at position `len - Sq + t` and sees the positions up to its own."""
    length = seq_lens.to(device)[:, None, None] if seq_lens is not None else kv_len
    position = length - q_len + torch.arange(q_len, device=device)[None, :, None]
    return torch.arange(kv_len, device=device)[None, None, :] <= position


def gather_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent `[B, S, C]` and rotary `[B, S, R]` in the summing dtype, and which positions each query sees."""
    compute = compute_dtype(q.dtype)
    latent, rotary = (gather_pages(cache, block_table).to(compute) for cache in (kv, k_pe))
    keep = visible(q.shape[1], latent.shape[1], seq_lens, q.device)
    # Memory past a sequence's end may hold NaN, which a zero weight would not cancel.
    used = keep.any(1).unsqueeze(-1)
    return torch.where(used, latent, 0.0), torch.where(used, rotary, 0.0), keep


def probabilities(
    q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax `[B, Sq, H, S]` and log-sum-exp `[B, Sq, H]` over a gathered cache, in the inputs' dtype."""
    s = torch.einsum("bthc,bsc->bths", q, kv) + torch.einsum("bthr,bsr->bths", q_pe, k_pe)
    return softmax_with_lse((s * scale).masked_fill(~keep.unsqueeze(2), float("-inf")))


def reference(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale (q kv^T + q_pe k_pe^T)) kv` per head, summed in float32 (float64 for float64 inputs).

    q `[B, Sq, H, C]`, q_pe `[B, Sq, H, R]`; kv `[B, S, C]` and k_pe `[B, S, R]`, or paged `[pages, page, C]` and
    `[pages, page, R]` with block_table int32 `[B, n]`; seq_lens int32 `[B]` (default: the whole cache). The Sq queries
    are the last Sq positions, causal among themselves. Returns out `[B, Sq, H, C]` in q's dtype and lse `[B, Sq, H]` in
    the summing dtype. `num_splits` only says how a kernel divides the work.
    """
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3] + q_pe.shape[3]) if scale is None else scale
    latent, rotary, keep = gather_cache(q, kv, k_pe, block_table, seq_lens)
    p, lse = probabilities(q.to(compute), q_pe.to(compute), latent, rotary, keep, scale)
    return torch.einsum("bths,bsc->bthc", p, latent).to(q.dtype).contiguous(), lse.contiguous()


def mla_decode(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`."""
    return reference(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits)
