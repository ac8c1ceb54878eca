# SPDX-License-Identifier: Apache-2.0
"""A paged cache of latents: sequences of different lengths share one pool of memory."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


class PagedLatents:
    """What `MLAAttention` remembers of several sequences, in pages that a table assigns to them.

    Who serves sequences owns the table: before a step it names pages for the positions that the step will write. After
    the last layer of a step, `advance` counts them.

    Args:
        layers: how many layers share the table.
        pages: how many pages each layer has.
        page: positions in a page.
        kv_lora_rank: C, size of the latent.
        qk_rope_head_dim: R, size of the rotated key.
        block_table: `[B, n]` int32, the page of each block of `page` positions; what no position needs may be -1.
        **kwargs: `device` and `dtype` of the pools.

    Attributes:
        kv: `[layers, pages, page, C]`.
        k_pe: `[layers, pages, page, R]`.
        seq_lens: `[B]` int32, positions of each sequence that are complete.
        is_empty: whether no sequence has any.
        schedule: what `plan` said about this step, or None.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_table: Tensor,
        **kwargs: Any,
    ) -> None:
        self.kv = torch.zeros(layers, pages, page, kv_lora_rank, **kwargs)
        self.k_pe = torch.zeros(layers, pages, page, qk_rope_head_dim, **kwargs)
        self.block_table = block_table.to(device=self.kv.device, dtype=torch.int32)
        self.seq_lens = torch.zeros(len(block_table), dtype=torch.int32, device=self.kv.device)
        self.is_empty = True
        self.schedule: Tensor | None = None

    def sequences(self, rows: slice) -> PagedLatents:
        """The same cache for some of its sequences, say those whose prompts begin now; memory is shared."""
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
        """Share out the work of the next step, of `length` new positions, by how long each sequence is.

        Pays where sequences differ in length, on a GPU: `tile.mla_decode` would wait for the longest. All layers use
        the plan, until `advance`.
        """
        self.schedule = torch.ops.tile.mla_schedule.default(self.seq_lens + length, length * num_heads, 0)

    def advance(self, length: int) -> None:
        """Count the `length` positions of a step that every layer has written."""
        self.seq_lens += length
        self.is_empty = False
        self.schedule = None
