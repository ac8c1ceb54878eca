# SPDX-License-Identifier: Apache-2.0
"""Latent caches in float8, in FlashMLA's layout, and multi-head latent attention over them or over lists of positions.

A position is C float8_e4m3fn numbers, C / 128 float32 scales of runs of 128, and R bfloat16 rotary numbers: 656 bytes
for C of 512 and R of 64. Sparse attention (DeepSeek-V3.2) reads the positions that a list names for each query. The
kernel is that of dense decoding (decode.py).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.kernels.attention.arguments import placed_beside
from torch_tile.kernels.attention.forward import softmax_with_lse
from torch_tile.kernels.common import compute_dtype, entry_function, machine_of, view_as
from torch_tile.kernels.mla import decode
from torch_tile.kernels.mla.args import MlaDecodeArgs, MlaDecodeFp8Args, MlaSparseArgs
from torch_tile.kernels.mla.tiles import GROUP
from torch_tile.kernels.norm import quantize

E4M3 = torch.float8_e4m3fn
Results = tuple[torch.Tensor, torch.Tensor]


def bytes_of(latent: Any, rotary: Any) -> Any:
    """Return the bytes of one position of a cache."""
    return latent + 4 * (latent // GROUP) + 2 * rotary


def unpack(cache: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a uint8 cache `[.., bytes]`: values `[.., C]`, rotary parts `[.., R]`, scales `[.., C / 128]`."""
    end = latent + 4 * (latent // GROUP)
    values, scales, rotary = cache[..., :latent], cache[..., latent:end], cache[..., end:]
    return values.view(E4M3), view_as(rotary, torch.bfloat16), view_as(scales, torch.float32)


def pack(kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Round latents `[.., C]` to float8, and put rotary parts `[.., R]` behind them: uint8 `[.., bytes]`."""
    values, scales = quantize.reference(kv, GROUP, E4M3)
    parts = (values, scales, k_pe.to(torch.bfloat16))
    return torch.cat([view_as(x.contiguous(), torch.uint8) for x in parts], -1)


def dequantize_cache(cache: torch.Tensor, latent: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents and the rotary parts of a packed cache in `dtype`."""
    values, rotary, scales = unpack(cache, latent)
    return (values.float() * scales.repeat_interleave(GROUP, -1)).to(dtype), rotary.to(dtype)


def fp8_reference(*given: Any, **named: Any) -> Results:
    """Compute `decode.reference`, or with indices `sparse_reference`, over a packed cache uint8 `[B, S, bytes]` or
    `[pages, page, bytes]`. Takes the arguments of `MlaDecodeFp8Args`.
    """
    args: MlaDecodeFp8Args[Any] = MlaDecodeFp8Args(*given, **named)
    kv, k_pe = dequantize_cache(args.cache, args.q.shape[3], args.q.dtype)
    options = args.block_table, args.seq_lens, args.scale
    if args.indices is not None:
        return sparse_reference(args.q, args.q_pe, kv, k_pe, args.indices, *options)
    return decode.reference(args.q, args.q_pe, kv, k_pe, *options)


def sparse_reference(*given: Any, **named: Any) -> Results:
    """Compute `tile.mla_sparse` and its lse in plain torch, summed as in `decode.reference`.

    Positions that do not exist, such as -1, are left out; one that stands twice counts twice.
    """
    args: MlaSparseArgs[Any] = MlaSparseArgs(*given, **named)
    q, q_pe, indices, compute = args.q, args.q_pe, args.indices, compute_dtype(args.q.dtype)
    latent, rotary = (decode.gather_pages(x, args.block_table).to(compute) for x in (args.kv, args.k_pe))
    length = latent.shape[1]
    if args.seq_lens is not None:
        length = args.seq_lens.clamp(max=length)[:, None, None]
    keep = (indices >= 0) & (indices < length)
    at = indices.clamp(0, max(latent.shape[1] - 1, 0)).long()
    if not latent.shape[1]:
        return placed_beside(q.new_zeros(q.shape), q), q.new_full(q.shape[:3], float("-inf"), dtype=compute)
    of = torch.arange(q.shape[0], device=q.device)[:, None, None]
    chosen, beside = (torch.where(keep[..., None], x[of, at], 0.0) for x in (latent, rotary))
    s = torch.einsum("bthc,btkc->bthk", q.to(compute), chosen) + torch.einsum(
        "bthr,btkr->bthk", q_pe.to(compute), beside
    )
    p, lse = softmax_with_lse((s * decode.scale_of(args)).masked_fill(~keep.unsqueeze(2), float("-inf")))
    return placed_beside(torch.einsum("bthk,btkc->bthc", p, chosen), q), lse.contiguous()


@entry_function(MlaDecodeFp8Args, fp8_reference, decode.empty_results)
def mla_decode_fp8(args: MlaDecodeFp8Args[Any], out: torch.Tensor, lse: torch.Tensor, config: Any = None) -> bool:
    """Decode over a packed cache as `fp8_reference` does. `config` overrides the choice of a tiling."""
    if not (args.q.shape[3] and args.q_pe.shape[3]):
        return False
    kv, k_pe, scales = unpack(args.cache, args.q.shape[3])
    return _run(args, kv, k_pe, scales, (out, lse), config)


@entry_function(MlaSparseArgs, sparse_reference, decode.empty_results)
def mla_sparse(args: MlaSparseArgs[Any], out: torch.Tensor, lse: torch.Tensor, config: Any = None) -> bool:
    """Compute attention over listed positions as `sparse_reference` does. `config` overrides the choice of a tiling."""
    able = args.q.shape[3] and args.q_pe.shape[3]
    return bool(able) and _run(args, args.kv, args.k_pe, None, (out, lse), config)


def _run(
    args: MlaDecodeFp8Args[Any] | MlaSparseArgs[Any],
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    scales: torch.Tensor | None,
    results: Results,
    config: Any,
) -> bool:
    """Launch the kernel of decoding into the results. Return whether it has a tiling."""
    (out, lse), q, indices = results, args.q, args.indices
    if not lse.numel():
        return True
    options = args.block_table, args.seq_lens, args.scale, args.num_splits
    if indices is None:
        whole: MlaDecodeArgs[Any] = MlaDecodeArgs(q, args.q_pe, kv, k_pe, *options)
        return decode.run(whole, out, lse, machine_of(q), config, scales)
    if not indices.shape[2]:
        out.zero_()
        lse.fill_(float("-inf"))
        return True
    # Each query is a sequence of its own, beside those that read the same cache.
    target = out if out.is_contiguous() else q.new_empty(q.shape)
    q, q_pe, made = (x.flatten(0, 1)[:, None] for x in (q, args.q_pe, target))
    sums, lists = lse.flatten(0, 1)[:, None], indices.flatten(0, 1)
    whole = MlaDecodeArgs(q, q_pe, kv, k_pe, *options)
    done = decode.run(whole, made, sums, machine_of(q), config, scales, lists)
    if done and target is not out:
        out.copy_(target)
    return done
