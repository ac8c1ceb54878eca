# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, as DeepSeek-V2 and V3 have it, with weights absorbed in decoding."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from torch_tile.diagnostics.arguments import Count, FloatDtype, Size, explains_misfits, names_parameters
from torch_tile.nn.attention import PagedLatents
from torch_tile.nn.decoder_keywords import DecoderKeywords, check_decoder_keywords
from torch_tile.nn.functional import attend, check_hidden_states, rotate
from torch_tile.nn.linear import Linear, is_product
from torch_tile.nn.norm import RMSNorm

Tensor = torch.Tensor


class MLAAttention(nn.Module):
    """Attention over a cache of one latent vector and one rotated key per position (DeepSeek-V2, arXiv:2405.04434).

    Parameters are named as in transformers' DeepseekV3Attention. A long input is computed as ordinary attention over
    keys and values expanded from the latents. Few new positions over a cache, as in decoding, never expand them:
    `kv_b_proj` is multiplied into the queries and the results instead, and `torch.ops.tile.mla_decode` runs on the
    latents. Both mean the same; they round differently. A `kv_b_proj` with an adapter, hooks or a bias is called, so
    latents are expanded then, those of pages too.

    Args:
        hidden_size: of input and output.
        num_heads: H.
        q_lora_rank: size of the queries' latent, or None for queries straight from the input.
        kv_lora_rank: C, size of the latent of keys and values.
        qk_nope_head_dim: of queries and keys, the part that is not rotated.
        qk_rope_head_dim: R, the rotated part.
        v_head_dim: of the values.
        bias: whether the projections from and to hidden_size have one (not `q_proj`).
        eps: of the norms of the latents.
        rope_interleave: whether the rotated pairs lie beside each other.
        scale: of the scores; default `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`. Models with YaRN have their own.
        layer_idx: this layer's number in a cache.
        device: of all parameters.
        dtype: of all parameters.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    layer_idx: int

    @names_parameters
    def __init__(
        self,
        hidden_size: Size,
        num_heads: Count,
        *,
        q_lora_rank: Size | None = 1536,
        kv_lora_rank: Size = 512,
        qk_nope_head_dim: Size = 128,
        qk_rope_head_dim: Size = 64,
        v_head_dim: Size = 128,
        bias: bool = False,
        eps: float = 1e-6,
        rope_interleave: bool = True,
        scale: float | None = None,
        layer_idx: int = 0,
        device: torch.device | str | int | None = None,
        dtype: FloatDtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.q_lora_rank, self.kv_lora_rank = num_heads, q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.rope_interleave, self.layer_idx = rope_interleave, layer_idx
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.scaling: Any | float = qk_head_dim**-0.5 if scale is None else scale
        if q_lora_rank is None:
            self.q_proj: Linear = Linear(hidden_size, num_heads * qk_head_dim, bias=False, **factory)
        else:
            self.q_a_proj: Linear = Linear(hidden_size, q_lora_rank, bias, **factory)
            self.q_a_layernorm: RMSNorm = RMSNorm(q_lora_rank, eps, cast_first=True, **factory)
            self.q_b_proj: Linear = Linear(q_lora_rank, num_heads * qk_head_dim, bias=False, **factory)
        self.kv_a_proj_with_mqa: Linear = Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias, **factory)
        self.kv_a_layernorm: RMSNorm = RMSNorm(kv_lora_rank, eps, cast_first=True, **factory)
        self.kv_b_proj: Linear = Linear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **factory
        )
        self.o_proj: Linear = Linear(num_heads * v_head_dim, hidden_size, bias, **factory)

    @explains_misfits
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        **keywords: Unpack[DecoderKeywords],
    ) -> tuple[Tensor, None]:
        """Attend from the new positions to themselves and the cached ones, causally.

        Args:
            hidden_states: `[B, S, hidden_size]`.
            position_embeddings: cos and sin, `[B or 1, S, R]` or `[S, R]`.
            attention_mask: None, or broadcastable to `[B, H, S, keys]`, bool or floating; it then says everything,
                causality included, and weights are not absorbed.
            cache: a cache with transformers' `update(k, v, layer_idx) -> (k, v)`; k is the latent
                `[B, 1, S, C]` and v the rotated key `[B, 1, S, R]`. Or a PagedLatents, which takes no mask.
            past_key_values: the same, as transformers before 5.24 calls it.
            **keywords: what decoder layers of transformers pass, too (`DecoderKeywords`). They have no effect.

        Returns:
            `[B, S, hidden_size]`, and None where transformers has the attention weights.

        Raises:
            TypeError: on other keywords.
            ValueError: on a keyword's value that would change the result.
        """
        check_decoder_keywords(type(self).__name__, keywords, True, attention_mask)
        cache = past_key_values if cache is None else cache
        check_hidden_states(self, hidden_states, self.kv_a_proj_with_mqa)
        length = hidden_states.shape[1]
        q = hidden_states
        q = self.q_proj(q) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(q)))
        q = q.unflatten(-1, (self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        kv, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv, k_pe = self.kv_a_layernorm(kv)[:, None], k_pe[:, None]
        q_pe, k_pe = (rotate(x, *position_embeddings, self.rope_interleave) for x in (q_pe, k_pe))
        if isinstance(cache, PagedLatents):
            out = self.paged(q_nope, q_pe, kv, k_pe, attention_mask, cache)
            return self.o_proj(out.flatten(2)), None
        if cache is not None:
            kv, k_pe = cache.update(kv, k_pe, self.layer_idx)
        if attention_mask is None and cache is not None and self.absorbing_pays(length) and self.is_absorbable():
            out = self.absorbed(q_nope, q_pe, kv[:, 0], k_pe[:, 0])
        else:
            out = self.expanded(q_nope, q_pe, kv, k_pe, attention_mask)
        return self.o_proj(out.flatten(2)), None

    def absorbing_pays(self, length: int) -> bool:
        """Return whether attention on latents costs less than expanding the latents, for `length` queries.

        Per head and key, expanding multiplies C (nope + v) times. A query multiplies nope + R + v times with expanded
        keys and values, and C + R + C times on the latents.
        """
        more = 2 * self.kv_lora_rank - self.qk_nope_head_dim - self.v_head_dim
        return length * more < self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)

    def is_absorbable(self) -> bool:
        """Return whether `kv_b_proj` is its weight and nothing else."""
        return is_product(self.kv_b_proj) and self.kv_b_proj.bias is None

    def paged(
        self, q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, mask: Tensor | None, cache: PagedLatents
    ) -> Tensor:
        """Attend over a cache in pages; write the new latents `[B, 1, S, C]` and `[B, 1, S, R]` to it first."""
        if mask is not None:
            raise ValueError("attention_mask must be None with PagedLatents, whose seq_lens say what is there")
        length = kv.shape[2]
        pools = cache.update(kv, k_pe, self.layer_idx)
        if cache.is_empty and not self.absorbing_pays(length):
            return self.expanded(q_nope, q_pe, kv, k_pe, None)
        if not self.is_absorbable():
            kv, k_pe = (pool[cache.block_table.clamp(min=0)].flatten(1, 2)[:, None] for pool in pools)
            last = cache.seq_lens[:, None] + torch.arange(length, device=kv.device)
            seen = (torch.arange(kv.shape[2], device=kv.device) <= last[..., None])[:, None]  # [B, 1, S, keys]
            unwritten = ~seen[:, :, -1, :, None]
            return self.expanded(q_nope, q_pe, kv.masked_fill(unwritten, 0), k_pe.masked_fill(unwritten, 0), seen)
        return self.absorbed(q_nope, q_pe, *pools, cache.block_table, cache.seq_lens + length, cache.schedule)

    def absorbed(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        table: Tensor | None = None,
        lengths: Tensor | None = None,
        schedule: Tensor | None = None,
    ) -> Tensor:
        """Attend on the latents, with weights absorbed into queries and outputs: queries `[B, H, S, nope]` and `[B, H,
        S, R]` to `[B, S, H, v]`.

        With a table `[B, n]` and lengths `[B]`, latents are pools of pages `[pages, page, C]` and `[pages, page, R]`.
        `tile.mla_schedule` may have made a schedule of the lengths.
        """
        weight = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        w_k, w_v = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q = torch.matmul(q_nope, w_k.to(q_nope.dtype)).transpose(1, 2)  # [B, S, H, C]
        options = table, lengths, self.scaling, 0, schedule
        out = torch.ops.tile.mla_decode.default(q, q_pe.transpose(1, 2), kv, k_pe, *options)
        values: Tensor = torch.matmul(out.transpose(1, 2), w_v.to(out.dtype).mT).transpose(1, 2)
        return values

    def expanded(self, q_nope: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        """Attend after expanding the latents to keys and values of every head; latents are `[B, 1, keys, C]` and `[B,
        1, keys, R]`.
        """
        batch, _, keys, _ = kv.shape
        sizes = batch, keys, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        both = self.kv_b_proj(kv).view(sizes).transpose(1, 2)
        k_nope, v = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        q = torch.cat([q_nope, q_pe], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, self.num_heads, -1, -1)], dim=-1)
        if mask is not None:
            mask = mask[..., :keys]
        return attend(q, k, v, mask, causal=mask is None, scale=self.scaling).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the options that the children do not show."""
        dims = f"{self.qk_nope_head_dim}+{self.qk_rope_head_dim}/{self.v_head_dim}"
        return f"num_heads={self.num_heads}, head_dim={dims}, scaling={self.scaling:.4g}"
