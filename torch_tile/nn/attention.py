# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention with rotary embeddings, as Llama, Mistral and Qwen3 have it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from torch_tile.diagnostics.arguments import Count, FloatDtype, Size, Window, explains_misfits, names_parameters
from torch_tile.nn.decoder_keywords import DecoderKeywords, check_decoder_keywords
from torch_tile.nn.functional import attend, check_hidden_states, rotate
from torch_tile.nn.linear import Linear
from torch_tile.nn.norm import RMSNorm

Tensor = torch.Tensor


class Attention(nn.Module):
    """Grouped-query attention layer: projections, rotary embedding, attention (arXiv:2305.13245), output projection.

    Parameters are named as in transformers: `q_proj k_proj v_proj o_proj`, and `q_norm k_norm` with `qk_norm`.

    Args:
        hidden_size: of input and output.
        num_heads: of the queries.
        num_kv_heads: of keys and values; default num_heads.
        head_dim: default `hidden_size // num_heads`.
        bias: whether q, k and v have one.
        output_bias: whether the output projection has one; default `bias`.
        causal: whether a position sees only itself and earlier ones.
        window: if positive, it sees only that many, itself included; 0 and None mean all.
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        eps: of these norms.
        scale: of the scores; default `head_dim ** -0.5`.
        layer_idx: this layer's number in a cache.
        device: of all parameters.
        dtype: of all parameters.
    """

    causal: bool
    window: int
    layer_idx: int

    @names_parameters
    def __init__(
        self,
        hidden_size: Count,
        num_heads: Count,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        *,
        bias: bool = False,
        output_bias: bool | None = None,
        causal: bool = True,
        window: Window | None = 0,
        qk_norm: bool = False,
        eps: float = 1e-6,
        scale: float | None = None,
        layer_idx: int = 0,
        device: torch.device | str | int | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, which is {num_kv_heads}"
            )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size is {hidden_size}; it must be a multiple of num_heads {num_heads}, or give head_dim"
            )
        self.head_dim: int = head_dim or hidden_size // num_heads
        self.causal, self.window, self.layer_idx = causal, int(window or 0), layer_idx
        self.scale: Any | float = self.head_dim**-0.5 if scale is None else scale
        self.q_proj: Linear = Linear(hidden_size, num_heads * self.head_dim, bias, **factory)
        self.k_proj: Linear = Linear(hidden_size, num_kv_heads * self.head_dim, bias, **factory)
        self.v_proj: Linear = Linear(hidden_size, num_kv_heads * self.head_dim, bias, **factory)
        self.o_proj: Linear = Linear(
            num_heads * self.head_dim, hidden_size, bias if output_bias is None else output_bias, **factory
        )
        self.q_norm: RMSNorm | None = RMSNorm(self.head_dim, eps, cast_first=True, **factory) if qk_norm else None
        self.k_norm: RMSNorm | None = RMSNorm(self.head_dim, eps, cast_first=True, **factory) if qk_norm else None

    @explains_misfits
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        **keywords: Unpack[DecoderKeywords],
    ) -> tuple[Tensor, None]:
        """Compute attention of the new positions over themselves and the cached ones.

        Args:
            hidden_states: `[B, S, hidden_size]`.
            position_embeddings: cos and sin, `[B or 1, S, head_dim]` or `[S, head_dim]`; None for no rotation.
            attention_mask: None, or broadcastable to `[B, num_heads, S, keys]`, bool (True: visible) or floating
                (added); it says everything, so `causal` and `window` do not apply beside it.
            cache: a cache with transformers' `update(k, v, layer_idx) -> (k, v)`.
            past_key_values: the same, as transformers before 5.24 calls it.
            **keywords: what decoder layers of transformers pass, too (`DecoderKeywords`). They have no effect.

        Returns:
            `[B, S, hidden_size]`, and None where transformers has the attention weights.

        Raises:
            TypeError: on other keywords.
            ValueError: on a keyword's value that would change the result.
        """
        check_decoder_keywords(type(self).__name__, keywords, self.causal, attention_mask)
        cache = past_key_values if cache is None else cache
        check_hidden_states(self, hidden_states, self.q_proj)
        q, k, v = (p(hidden_states) for p in (self.q_proj, self.k_proj, self.v_proj))
        # No -1 for the heads, which may be fewer on this rank: torch cannot tell their number of an empty batch.
        q, k, v = (x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if position_embeddings is not None:
            q, k = (rotate(x, *position_embeddings) for x in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if attention_mask is None:
            out = attend(q, k, v, causal=self.causal, scale=self.scale, window=self.window)
        else:
            out = attend(q, k, v, attention_mask[..., : k.shape[2]], scale=self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def extra_repr(self) -> str:
        """Return the options that the children do not show."""
        return f"head_dim={self.head_dim}, causal={self.causal}, window={self.window}"


# A paged cache of latents: sequences of different lengths share one pool of memory.


class PagedLatents:
    """The latent cache of `MLAAttention` for several sequences, in pages that a table assigns to them.

    The caller owns the table. Before a step it assigns pages to the positions that the step will write. After the last
    layer of a step, `advance` counts them.

    Args:
        layers: how many layers share the table.
        pages: how many pages each layer has.
        page: positions in a page.
        kv_lora_rank: C, size of the latent.
        qk_rope_head_dim: R, size of the rotated key.
        block_table: `[B, n]` int32, the page of each block of `page` positions; unused entries may be -1.
        device: of the pools.
        dtype: of the pools.

    Attributes:
        kv: `[layers, pages, page, C]`.
        k_pe: `[layers, pages, page, R]`.
        seq_lens: `[B]` int32, positions of each sequence that are complete.
        is_empty: whether no sequence has any.
        schedule: the schedule of this step by `plan`, or None.
    """

    seq_lens: Tensor

    @names_parameters
    def __init__(
        self,
        layers: Size,
        pages: Size,
        page: Size,
        kv_lora_rank: Size,
        qk_rope_head_dim: Size,
        block_table: Tensor,
        device: torch.device | str | int | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        self.kv: Tensor = torch.zeros(layers, pages, page, kv_lora_rank, device=device, dtype=dtype)
        self.k_pe: Tensor = torch.zeros(layers, pages, page, qk_rope_head_dim, device=device, dtype=dtype)
        if block_table.is_meta and not self.kv.is_meta:
            raise ValueError("PagedLatents: block_table is on meta; expected numbers of pages")
        self.block_table: Tensor = block_table.to(device=self.kv.device, dtype=torch.int32)
        self.seq_lens = torch.zeros(len(block_table), dtype=torch.int32, device=self.kv.device)
        self.is_empty: bool = True
        self.schedule: Tensor | None = None

    def sequences(self, rows: slice) -> PagedLatents:
        """Return a view of the cache for some of its sequences, say those whose prompts begin now."""
        part = object.__new__(PagedLatents)
        part.kv, part.k_pe = self.kv, self.k_pe
        part.block_table, part.seq_lens = self.block_table[rows], self.seq_lens[rows]
        part.is_empty = not bool(part.seq_lens.any())
        part.schedule = None
        return part

    def update(self, kv: Tensor, k_pe: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write new positions `[B, 1, S, C]` and `[B, 1, S, R]` behind the complete ones; returns the layer's pools."""
        page = self.kv.shape[2]
        positions = self.seq_lens[:, None] + torch.arange(kv.shape[2], device=kv.device, dtype=torch.int32)
        pages = self.block_table.gather(1, (positions // page).long())
        slots = (pages * page + positions % page).flatten().long()
        for pool, new in ((self.kv[layer_idx], kv), (self.k_pe[layer_idx], k_pe)):
            pool.view(-1, pool.shape[-1]).index_copy_(0, slots, new.reshape(-1, new.shape[-1]).to(pool.dtype))
        return self.kv[layer_idx], self.k_pe[layer_idx]

    def plan(self, length: int, num_heads: int) -> None:
        """Plan the schedule of the next decoding step, of `length` new positions, by the lengths of the sequences."""
        self.schedule = torch.ops.tile.mla_schedule.default(self.seq_lens + length, length * num_heads, 0)

    def advance(self, length: int) -> None:
        """Count the `length` positions of a step that every layer has written."""
        self.seq_lens += length
        self.is_empty = False
        self.schedule = None
