# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention with masks, windows, grouped heads and unequal lengths.

Assumes that `ops` checked shapes and dtypes; takes tensors of any stride and returns fresh contiguous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import LOG2_E, compute_dtype, dense_last, has_kernels, is_unit, round_up, strided


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


@dataclass(frozen=True)
class Config:
    """How attention is cut: a block holds `block_q` rows (queries of a group of heads) and steps by `block_kv` keys."""

    block_q: int = 64
    block_kv: int = 64
    threads: int = 128
    stages: int = 2


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its `Config`.

    Tiles are `tile_d` and `tile_dv` wide; heads of exactly that size have `exact`, others end in zeros. `mask` is the
    mask's dtype, or None, and `mask_unit` says whether its last dimension is dense.
    """

    dtype: torch.dtype
    tile_d: int
    tile_dv: int
    exact: bool
    causal: bool
    windowed: bool
    mask: torch.dtype | None
    mask_unit: bool

    def mask_types(self, shape: Sequence[Any]) -> list[Any]:
        """The type of the mask, if there is one: bytes for bool, as compilers vectorise their comparison with 0."""
        if self.mask is None:
            return []
        return [strided("mask", shape, torch.uint8 if self.mask == torch.bool else self.mask, self.mask_unit)]

    def key_blocks(
        self, config: Config, first_query: Any, last_query: Any, q_offset: Any, window: Any, kv_len: Any
    ) -> Any:
        """The first block of keys that some of the queries may see, and the end of them."""
        first: Any = 0
        end = T.ceildiv(kv_len, config.block_kv)
        if self.causal:
            end = T.min(end, (last_query + q_offset) // config.block_kv + 1)
        if self.windowed:
            first = T.max(0, (first_query + q_offset - window + 1) // config.block_kv)
        return first, end

    def sees(self, query: Any, key: Any, q_offset: Any, window: Any, kv_len: Any) -> Any:
        """Whether a query may see a key, masks aside."""
        seen = key < kv_len
        if self.causal:
            seen = T.logical_and(seen, key <= query + q_offset)
        if self.windowed:
            seen = T.logical_and(seen, key > query + q_offset - window)
        return seen

    def score(self, product: Any, seen: Any, mask: Any = None) -> Any:
        """The scaled product of a query and a key under the mask; -inf where the query may not see the key."""
        if self.mask == torch.bool:
            seen = T.logical_and(seen, mask != 0)
        elif self.mask is not None:
            product = product + T.cast(mask, product.dtype)
        return T.if_then_else(seen, product, -T.infinity(product.dtype))


@jit
def flash_attention(config: Config, form: Form) -> Any:
    """Softmax over blocks of keys with running maxima and sums (FlashAttention-2, arXiv:2307.08691), in powers of two.

    The rows of a block are the `groups` query heads that share a key head, query by query, so that a short query fills
    a tile as well as it can: row r is query `r // groups` of head `r % groups`.
    """
    rows, keys = config.block_q, config.block_kv
    accum = compute_dtype(form.dtype)
    infinity = T.infinity(accum)
    batch, kv_heads, groups, q_len, kv_len = T.dynamic("batch, kv_heads, groups, q_len, kv_len")
    d, dv = (form.tile_d, form.tile_dv) if form.exact else T.dynamic("d, dv")
    q_shape = (batch, kv_heads, groups, q_len)
    mask_types = form.mask_types((*q_shape, kv_len))

    @T.prim_func
    def attention(
        q: strided("q", (*q_shape, d), form.dtype),
        k: strided("k", (batch, kv_heads, kv_len, d), form.dtype),
        v: strided("v", (batch, kv_heads, kv_len, dv), form.dtype),
        *mask: mask_types,
        out: T.Tensor((*q_shape, dv), form.dtype),
        lse: T.Tensor(q_shape, accum),
        scale: accum,
        q_offset: T.int32,
        window: T.int32,
    ):
        with T.Kernel(T.ceildiv(q_len * groups, rows), kv_heads, batch, threads=config.threads) as (bx, head, bz):
            q_tile = T.alloc_shared((rows, form.tile_d), form.dtype)
            k_tile = T.alloc_shared((keys, form.tile_d), form.dtype)
            v_tile = T.alloc_shared((keys, form.tile_dv), form.dtype)
            scores = T.alloc_fragment((rows, keys), accum)
            weights = T.alloc_fragment((rows, keys), form.dtype)
            sums = T.alloc_fragment((rows, form.tile_dv), accum)
            peak = T.alloc_fragment((rows,), accum)
            old_peak = T.alloc_fragment((rows,), accum)
            base = T.alloc_fragment((rows,), accum)
            fade = T.alloc_fragment((rows,), accum)
            total = T.alloc_fragment((rows,), accum)
            block_total = T.alloc_fragment((rows,), accum)

            for i, c in T.Parallel(rows, form.tile_d):
                row = bx * rows + i
                q_tile[i, c] = q[bz, head, row % groups, row // groups, c]
            T.clear(sums)
            T.clear(total)
            T.fill(peak, -infinity)

            first_query = (bx * rows) // groups
            last_query = T.min((bx * rows + rows - 1) // groups, q_len - 1)
            first, end = form.key_blocks(config, first_query, last_query, q_offset, window, kv_len)
            for step in T.Pipelined(first, end, num_stages=config.stages):
                T.copy(k[bz, head, step * keys, 0], k_tile)
                T.gemm(q_tile, k_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    group = (bx * rows + i) % groups
                    query = T.min((bx * rows + i) // groups, q_len - 1)
                    bias = [x[bz, head, group, query, step * keys + j] for x in mask]
                    scores[i, j] = form.score(
                        scores[i, j] * scale, form.sees(query, step * keys + j, q_offset, window, kv_len), *bias
                    )

                T.copy(peak, old_peak)
                T.reduce_max(scores, peak, dim=1, clear=False)
                for i in T.Parallel(rows):
                    base[i] = T.if_then_else(peak[i] == -infinity, 0.0, peak[i])  # a row that has seen no key yet
                    fade[i] = T.exp2((old_peak[i] - base[i]) * LOG2_E)
                for i, j in T.Parallel(rows, keys):
                    scores[i, j] = T.exp2((scores[i, j] - base[i]) * LOG2_E)
                T.reduce_sum(scores, block_total, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * fade[i] + block_total[i]
                for i, c in T.Parallel(rows, form.tile_dv):
                    sums[i, c] *= fade[i]
                T.copy(scores, weights)
                T.copy(v[bz, head, step * keys, 0], v_tile)
                T.gemm(weights, v_tile, sums, policy=T.GemmWarpPolicy.FullRow)

            for i, c in T.Parallel(rows, form.tile_dv):
                row = bx * rows + i
                mean = T.if_then_else(total[i] == 0.0, 0.0, sums[i, c] / total[i])
                out[bz, head, row % groups, row // groups, c] = T.cast(mean, form.dtype)
            for i in T.Parallel(rows):
                row = bx * rows + i
                lse[bz, head, row % groups, row // groups] = peak[i] + T.log(total[i])

    return attention


def config_for(rows: int, kv_len: int) -> Config:
    """The cut for the CPU: as few rows as the queries fill, and tiles of keys that stay in the second-level cache."""
    block_q = 4 if rows <= 4 else 16 if rows <= 16 else 64
    return Config(block_q=block_q, block_kv=64)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    q_offset: int = 0,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference`; `config` overrides the choice of `config_for`."""
    if not has_kernels(q):
        return reference(q, k, v, mask, causal, scale, window, q_offset)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    if lse.numel():
        scale = default_scale(q.shape[3]) if scale is None else scale
        run(q, k, v, mask, causal, scale, window, q_offset, out, lse, config)
    return out, lse


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    q_offset: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: Config | None = None,
) -> None:
    """`attention` into `out` and `lse`, which must be contiguous and not empty."""
    kv_heads, (head_dim, v_dim) = k.shape[1], (k.shape[3], v.shape[3])
    groups = q.shape[1] // kv_heads
    tile_d, tile_dv = round_up(head_dim, 16), round_up(v_dim, 16)
    masks = [] if mask is None else [mask.expand(*q.shape[:3], k.shape[2]).unflatten(1, (kv_heads, groups))]
    raw_masks = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in masks]
    form = Form(
        q.dtype, tile_d, tile_dv, (tile_d, tile_dv) == (head_dim, v_dim), causal, window > 0,
        None if mask is None else mask.dtype, mask is None or is_unit(masks[0]),
    )  # fmt: skip
    config = config or config_for(groups * q.shape[2], k.shape[2])
    grouped = (x.unflatten(1, (kv_heads, groups)) for x in (dense_last(q), out, lse))
    q, out, lse = grouped
    flash_attention(config, form)(
        q, dense_last(k), dense_last(v), *raw_masks, out, lse, float(scale), int(q_offset), int(window)
    )
