# SPDX-License-Identifier: Apache-2.0
"""Latent caches in float8, in FlashMLA's layout, and multi-head latent attention over them or over lists of positions.

A position is C float8_e4m3fn numbers, C / 128 float32 scales of runs of 128, and R bfloat16 numbers of the rotary part:
656 bytes for C of 512 and R of 64. Sparse attention (DeepSeek-V3.2) reads the positions that a list names for each
query. The kernel is that of dense decoding (decode.py).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.attention.arguments import empty_beside, placed_beside
from torch_tile.kernels.attention.forward import default_scale, softmax_with_lse
from torch_tile.kernels.common import all_into, compute_dtype, has_kernels, machine_of
from torch_tile.kernels.mla import decode
from torch_tile.kernels.mla.tiles import GROUP
from torch_tile.kernels.norm import quantize

E4M3 = torch.float8_e4m3fn
Results = tuple[torch.Tensor, torch.Tensor]


def bytes_of(latent: Any, rotary: Any) -> Any:
    """Return the bytes of one position of a cache."""
    return latent + 4 * (latent // GROUP) + 2 * rotary


def unpack(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the parts of a uint8 cache `[.., bytes]`: values `[.., C]`, rotary parts `[.., R]`, scales
    `[.., C / 128]`.
    """
    end = latent + 4 * (latent // GROUP)
    values, scales, rotary = cache[..., :latent], cache[..., latent:end], cache[..., end:]
    return values.view(E4M3), rotary.view(torch.bfloat16), scales.view(torch.float32)


def pack(kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Round latents `[.., C]` to float8 and put rotary parts `[.., R]` beside them: uint8 `[.., bytes]`.

    A scale is the largest magnitude of its run over 448, at least 2^-100.
    """
    values, scales = quantize.reference(kv, GROUP, E4M3)
    parts = (values, scales, k_pe.to(torch.bfloat16).contiguous())
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)


def wide(cache: torch.Tensor, latent: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents and the rotary parts of a packed cache in `dtype`."""
    values, rotary, scales = unpack(cache, latent)
    return (values.float() * scales.repeat_interleave(GROUP, -1)).to(dtype), rotary.to(dtype)


def fp8_reference(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
) -> Results:
    """Compute `decode.reference`, or with indices `sparse_reference`, over a packed cache uint8 `[B, S, bytes]` or
    `[pages, page, bytes]`.
    """
    kv, k_pe = wide(cache, q.shape[3], q.dtype)
    if indices is not None:
        return sparse_reference(q, q_pe, kv, k_pe, indices, block_table, seq_lens, scale)
    return decode.reference(q, q_pe, kv, k_pe, block_table, seq_lens, scale)


def sparse_reference(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    indices: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
) -> Results:
    """Compute attention of each query over the positions that its list names, summed as in `decode.reference`.

    q `[B, Sq, H, C]`, q_pe `[B, Sq, H, R]`; the cache as there; indices int32 `[B, Sq, n]`. Positions that do not
    exist, such as -1, are left out; one that stands twice counts twice. Returns out `[B, Sq, H, C]` and lse.
    """
    compute = compute_dtype(q.dtype)
    scale = default_scale(q.shape[3] + q_pe.shape[3]) if scale is None else scale
    latent, rotary = (decode.gather_pages(x, block_table).to(compute) for x in (kv, k_pe))
    length = latent.shape[1] if seq_lens is None else seq_lens.clamp(max=latent.shape[1])[:, None, None]
    keep = (indices >= 0) & (indices < length)
    at = indices.clamp(0, max(latent.shape[1] - 1, 0)).long()
    if not latent.shape[1]:
        return placed_beside(q.new_zeros(q.shape), q), q.new_full(q.shape[:3], float("-inf"), dtype=compute)
    of = torch.arange(q.shape[0], device=q.device)[:, None, None]
    chosen, beside = (torch.where(keep[..., None], x[of, at], 0.0) for x in (latent, rotary))
    s = torch.einsum("bthc,btkc->bthk", q.to(compute), chosen) + torch.einsum(
        "bthr,btkr->bthk", q_pe.to(compute), beside
    )
    p, lse = softmax_with_lse((s * scale).masked_fill(~keep.unsqueeze(2), float("-inf")))
    return placed_beside(torch.einsum("bthk,btkc->bthc", p, chosen), q), lse.contiguous()


def mla_decode_fp8(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    config: Any = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Results:
    """Decode over a packed cache as `fp8_reference` does. `config` overrides the choice of a tiling."""
    results = _results(q, out, lse)
    if has_kernels(q) and q.shape[3] and q_pe.shape[3]:
        kv, k_pe, scales = unpack(cache, q.shape[3])
        given = q, q_pe, kv, k_pe, scales, indices, block_table, seq_lens, scale, num_splits
        if _run(*given, results, config):
            return results
    all_into(results, fp8_reference(q, q_pe, cache, block_table, seq_lens, indices, scale))
    return results


def mla_sparse(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    indices: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    config: Any = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Results:
    """Compute attention over listed positions as `sparse_reference` does. `config` overrides the choice of a tiling."""
    results = _results(q, out, lse)
    given = q, q_pe, kv, k_pe, None, indices, block_table, seq_lens, scale, num_splits
    if has_kernels(q) and q.shape[3] and q_pe.shape[3] and _run(*given, results, config):
        return results
    all_into(results, sparse_reference(q, q_pe, kv, k_pe, indices, block_table, seq_lens, scale))
    return results


def _results(q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> Results:
    """Return the results that are given, or empty ones: the first one lies in memory as q does."""
    out = empty_beside(q, q.shape[3]) if out is None else out
    return out, q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype)) if lse is None else lse


def _run(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    scales: torch.Tensor | None,
    indices: torch.Tensor | None,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float | None,
    num_splits: int,
    results: Results,
    config: Any,
) -> bool:
    """Launch the kernel of decoding into the results. Return whether it has a tiling."""
    out, lse = results
    if not lse.numel():
        return True
    scale = default_scale(q.shape[3] + q_pe.shape[3]) if scale is None else scale
    options = block_table, seq_lens, scale, num_splits, None
    if indices is None:
        return decode.run(q, q_pe, kv, k_pe, *options, out, lse, machine_of(q), config, scales)
    if not indices.shape[2]:
        out.zero_()
        lse.fill_(float("-inf"))
        return True
    # Each query is a sequence of its own, beside those that read the same cache.
    target = out if out.is_contiguous() else q.new_empty(q.shape)
    q, q_pe, made = (x.flatten(0, 1)[:, None] for x in (q, q_pe, target))
    sums, lists = lse.flatten(0, 1)[:, None], indices.flatten(0, 1)
    done = decode.run(q, q_pe, kv, k_pe, *options, made, sums, machine_of(q), config, scales, lists)
    if done and target is not out:
        out.copy_(target)
    return done
