# SPDX-License-Identifier: Apache-2.0
"""Decoding with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its weight-absorbed form.

All heads share one latent `kv`, which is both key (with the rotary part `k_pe` beside it) and value. Assumes that `ops`
checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.attention import default_scale, softmax_with_lse
from torch_tile.kernels.common import LOG2_E, compute_dtype, dense_last, has_kernels, strided


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


@dataclass(frozen=True)
class Config:
    """How decoding is cut: a block holds `block_h` rows (heads of one sequence) and steps over `block_kv` positions."""

    block_h: int = 16
    block_kv: int = 64
    threads: int = 128
    stages: int = 2


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its `Config`: the dtype, both widths, and whether the cache is paged."""

    dtype: torch.dtype
    latent: int
    rotary: int
    paged: bool

    def cache_shapes(self, batch: Any) -> tuple[Any, list[Any], Any]:
        """The first two sizes of the cache; the table's type, if paged; the number of positions that it covers."""
        pages, page, table_len = T.dynamic("pages, page, table_len")
        if self.paged:
            return (pages, page), [strided("block_table", (batch, table_len), torch.int32)], table_len * page
        return (batch, page), [], page


@T.macro
def load_latents(form: Form, cache: Any, table: Sequence[Any], tile: Any, bz: Any, first: Any, length: Any) -> None:
    """Positions `first..` of a sequence into a tile; zeros past its end, where memory may hold NaN."""
    keys, width = tile.shape
    for j, c in T.Parallel(keys, width):
        position = first + j
        if form.paged:
            page = T.clamp(table[0][bz, position // cache.shape[1]], 0, cache.shape[0] - 1)
            value = cache[page, position % cache.shape[1], c]
        else:
            value = cache[bz, position, c]
        tile[j, c] = T.if_then_else(position < length, value, T.cast(0, form.dtype))


@jit
def flash_mla(config: Config, form: Form) -> Any:
    """One share of each sequence's positions by running maxima and sums, as in `attention`: normalised sums and lse.

    Row r of a sequence is head `r % heads` of query `r // heads`. A block takes `block_h` rows and, of `splits` shares
    of the positions, one; `combine` joins the shares.
    """
    rows, keys = config.block_h, config.block_kv
    accum = compute_dtype(form.dtype)
    infinity = T.infinity(accum)
    batch, q_len, heads, splits = T.dynamic("batch, q_len, heads, splits")
    (d0, d1), table_types, covered = form.cache_shapes(batch)
    q_shape = (batch, q_len, heads)

    @T.prim_func
    def mla_decode(
        q: strided("q", (*q_shape, form.latent), form.dtype),
        q_pe: strided("q_pe", (*q_shape, form.rotary), form.dtype),
        kv: strided("kv", (d0, d1, form.latent), form.dtype),
        k_pe: strided("k_pe", (d0, d1, form.rotary), form.dtype),
        *table: table_types,
        seq_lens: T.Tensor((batch,), "int32"),
        part: T.Tensor((splits, *q_shape, form.latent), accum),
        part_lse: T.Tensor((splits, *q_shape), accum),
        scale: accum,
    ):
        with T.Kernel(T.ceildiv(q_len * heads, rows), splits, batch, threads=config.threads) as (bx, split, bz):
            q_tile = T.alloc_shared((rows, form.latent), form.dtype)
            q_pe_tile = T.alloc_shared((rows, form.rotary), form.dtype)
            kv_tile = T.alloc_shared((keys, form.latent), form.dtype)
            k_pe_tile = T.alloc_shared((keys, form.rotary), form.dtype)
            scores = T.alloc_fragment((rows, keys), accum)
            weights = T.alloc_fragment((rows, keys), form.dtype)
            sums = T.alloc_fragment((rows, form.latent), accum)
            peak = T.alloc_fragment((rows,), accum)
            old_peak = T.alloc_fragment((rows,), accum)
            base = T.alloc_fragment((rows,), accum)
            fade = T.alloc_fragment((rows,), accum)
            total = T.alloc_fragment((rows,), accum)
            block_total = T.alloc_fragment((rows,), accum)

            for i, c in T.Parallel(rows, form.latent):
                row = bx * rows + i
                q_tile[i, c] = q[bz, row // heads, row % heads, c]
            for i, c in T.Parallel(rows, form.rotary):
                row = bx * rows + i
                q_pe_tile[i, c] = q_pe[bz, row // heads, row % heads, c]
            T.clear(sums)
            T.clear(total)
            T.fill(peak, -infinity)

            length = T.min(seq_lens[bz], covered)
            share = T.ceildiv(T.ceildiv(length, keys), splits)
            end = T.min(split * share + share, T.ceildiv(length, keys))
            for step in T.Pipelined(split * share, end, num_stages=config.stages):
                load_latents(form, kv, table, kv_tile, bz, step * keys, length)
                load_latents(form, k_pe, table, k_pe_tile, bz, step * keys, length)
                T.gemm(q_tile, kv_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
                T.gemm(q_pe_tile, k_pe_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(rows, keys):
                    own = seq_lens[bz] - q_len + (bx * rows + i) // heads
                    seen = T.logical_and(step * keys + j <= own, step * keys + j < length)
                    scores[i, j] = T.if_then_else(seen, scores[i, j] * scale, -infinity)

                T.copy(peak, old_peak)
                T.reduce_max(scores, peak, dim=1, clear=False)
                for i in T.Parallel(rows):
                    base[i] = T.if_then_else(peak[i] == -infinity, 0.0, peak[i])  # a row that has seen nothing yet
                    fade[i] = T.exp2((old_peak[i] - base[i]) * LOG2_E)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = T.exp2((scores[i, j] - base[i]) * LOG2_E)
                T.reduce_sum(scores, block_total, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * fade[i] + block_total[i]
                for i, c in T.Parallel(rows, form.latent):
                    sums[i, c] *= fade[i]
                T.copy(scores, weights)
                T.gemm(weights, kv_tile, sums, policy=T.GemmWarpPolicy.FullCol)

            for i, c in T.Parallel(rows, form.latent):
                row = bx * rows + i
                mean = T.if_then_else(total[i] == 0.0, 0.0, sums[i, c] / total[i])
                part[split, bz, row // heads, row % heads, c] = mean
            for i in T.Parallel(rows):
                row = bx * rows + i
                part_lse[split, bz, row // heads, row % heads] = peak[i] + T.log(total[i])

    return mla_decode


@jit
def combine(dtype: torch.dtype, latent: int) -> Any:
    """`out = sum_s exp(lse_s - lse) part_s` with `lse = log sum_s exp(lse_s)`; rows that saw nothing: 0 and -inf."""
    accum = compute_dtype(dtype)
    infinity = T.infinity(accum)
    splits, rows = T.dynamic("splits, rows")

    @T.prim_func
    def combine(
        part: T.Tensor((splits, rows, latent), accum),
        part_lse: T.Tensor((splits, rows), accum),
        out: T.Tensor((rows, latent), dtype),
        lse: T.Tensor((rows,), accum),
    ):
        with T.Kernel(rows, threads=128) as row:
            sums = T.alloc_fragment((latent,), accum)
            peak = T.alloc_var(accum, -infinity)
            total = T.alloc_var(accum, 0.0)
            T.clear(sums)
            for split in T.serial(splits):
                peak = T.max(peak, part_lse[split, row])
            if peak > -infinity:
                for split in T.serial(splits):
                    weight = T.exp(part_lse[split, row] - peak)
                    total += weight
                    for c in T.Parallel(latent):
                        sums[c] += weight * part[split, row, c]
                for c in T.Parallel(latent):
                    sums[c] /= total
            T.copy(sums, out[row, 0])
            lse[row] = peak + T.log(T.max(total, 1.0))

    return combine


def config_for(rows: int) -> Config:
    """The cut for the CPU: as few rows as the queries fill."""
    return Config(block_h=4 if rows <= 4 else 16 if rows <= 16 else 32)


def splits_for(batch: int, row_blocks: int, positions: int) -> int:
    """How many shares to make of the positions: enough blocks for all threads, but shares of at least 256 positions."""
    wanted = -(-2 * torch.get_num_threads() // (batch * row_blocks))
    return max(1, min(wanted, positions // 256))


def mla_decode(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    num_splits: int = 0,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`; `config` overrides the choice of `config_for`."""
    if not has_kernels(q) or not (q.shape[3] and q_pe.shape[3]):
        return reference(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=compute_dtype(q.dtype), device=q.device)
    if lse.numel():
        scale = default_scale(q.shape[3] + q_pe.shape[3]) if scale is None else scale
        run(q, q_pe, kv, k_pe, block_table, seq_lens, scale, num_splits, out, lse, config)
    return out, lse


def run(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    num_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Config | None = None,
) -> None:
    """`mla_decode` into `out` and `lse`, which must be contiguous and not empty."""
    batch, q_len, heads, latent = q.shape
    positions = kv.shape[1] if block_table is None else block_table.shape[1] * kv.shape[1]
    if seq_lens is None:
        seq_lens = torch.full((batch,), positions, dtype=torch.int32, device=q.device)
    config = config or config_for(q_len * heads)
    splits = num_splits or splits_for(batch, -(-q_len * heads // config.block_h), positions)
    part = torch.empty((splits, *q.shape), dtype=lse.dtype, device=q.device)
    part_lse = torch.empty((splits, *lse.shape), dtype=lse.dtype, device=q.device)
    form = Form(q.dtype, latent, q_pe.shape[3], block_table is not None)
    tables = [] if block_table is None else [dense_last(block_table)]
    operands = [dense_last(x) for x in (q, q_pe, kv, k_pe)]
    flash_mla(config, form)(*operands, *tables, seq_lens.contiguous(), part, part_lse, float(scale))
    rows = batch * q_len * heads
    combine(q.dtype, latent)(
        part.view(splits, rows, latent), part_lse.view(splits, rows), out.view(rows, latent), lse.view(rows)
    )
