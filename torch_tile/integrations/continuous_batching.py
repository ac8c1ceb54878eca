# SPDX-License-Identifier: Apache-2.0
"""Attend over the paged cache of transformers' continuous batching (`generate_batch`).

Layers that see all keys append new ones to the cache's own pages and attend over these. Tables of pages are made from
the indices that transformers reads by. Layers with a sliding window keep a ring of positions: transformers gathers
their keys, and attention runs over the gathered sequences. No mask is made, and no heads are repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_tile.integrations.serving import block_table_of_indices
from torch_tile.nn.functional import attend_varlen, text_of_cap, with_sinks

Tensor = torch.Tensor


def allow(name: str) -> None:
    """Let continuous batching run models with an attention implementation that transformers does not list."""
    _allow_models(name)
    _defer_updates(name)


def _defer_updates(name: str) -> None:
    """Let an attention implementation write new keys and values into a cache itself, where layers would do so before.

    From transformers 5.24 on, layers call `update`, which gathers all keys of a sequence. It now leaves new keys as
    they are, and gives the cache to the implementation as an argument. Layers that expand latents need all of them.
    """
    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
    except ImportError:  # an older version
        return
    update = _transformers_update(PagedAttentionCache)
    if update is not PagedAttentionCache.update:
        return  # replaced before

    @functools.wraps(update)
    def unless_ours(
        self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        config = getattr(self, "config", None)
        own = getattr(config, "_attn_implementation", None) == name and not hasattr(config, "kv_lora_rank")
        if not own or not isinstance(named.get("kwargs"), dict):
            found: tuple[Tensor, Tensor] = update(self, key_states, value_states, *args, **named)
            return found
        named["kwargs"]["cache"] = self
        return key_states, value_states

    PagedAttentionCache.update = unless_ours


def _transformers_update(cache_class: Any) -> Callable[..., Any]:
    """Return the `update` that transformers gives a class of caches, also where ours stands in its place."""
    update: Callable[..., Any] = cache_class.update
    ours = getattr(update, "__globals__", None) is globals()  # transformers' may be wrapped as well
    return update.__wrapped__ if ours else update  # type: ignore[attr-defined]


def _allow_models(name: str) -> None:
    """Keep continuous batching from giving models of an attention implementation another one."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager
    except ImportError:  # an older version
        return
    switch = getattr(Manager, "switch_to_cb_friendly_attn", None)
    if switch is None or getattr(switch, "allowed", None) == name:
        return

    @functools.wraps(switch)
    def unless_ours(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *args, **kwargs)

    unless_ours.allowed = name  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = unless_ours


@torch.compiler.disable  # type: ignore[untyped-decorator]  # pages of keys and values are views of one tensor
def attend_cached(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    window: int,
    kwargs: dict[str, Any],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write new keys and values into a cache, and attend over what each sequence has there.

    Args:
        layer: number of the attention layer.
        query: `[1, H, T, D]`, the new tokens of all sequences.
        key: `[1, Hkv, T, D]`.
        value: `[1, Hkv, T, D]`.
        cache: transformers' `PagedAttentionCache`.
        window: of the layer, 0 for none.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k` and `max_length_k` by kinds of layers, `max_length_q`, `read_index`,
            `write_index` and `block_table`, as continuous batching gives them.
        scale: as in `attend`.
        softcap: as in `attend`.
        sinks: as in `attend`.

    Returns:
        `[1, T, H, D]`. Rows of no sequence are 0.
    """
    if not hasattr(cache, "layer_to_allocator"):  # an older version
        return _attend_gathered(layer, query, key, value, cache, window, kwargs, scale, softcap, sinks)
    allocator = cache.layer_to_allocator[layer]
    starts, most = kwargs["cu_seq_lens_q"].int(), kwargs["max_length_q"]
    q = query[0].transpose(0, 1)
    table = _tables(allocator, kwargs)
    if table is None:
        given = dict(kwargs)
        # `update` writes, and replaces the dictionaries by what this kind of layers has.
        all_kept = _transformers_update(type(cache))(cache, key, value, layer_idx=layer, kwargs=given)
        k, v = (x[0].transpose(0, 1) for x in all_kept)
        found = attend_varlen(
            q, k, v, starts, given["cu_seq_lens_k"], most, given["max_length_k"],
            causal=True, scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return found[None]
    lengths = kwargs["cu_seq_lens_k"][allocator.layer_type].int().diff()
    pages = allocator.get_cache_for_block_table(layer)
    new = (x[0].transpose(0, 1).contiguous() for x in (key, value))
    torch.ops.tile.append_to_pages(*new, *pages, table, lengths, starts, most)
    score = text_of_cap(softcap)
    paged = (q, *pages, table, lengths, starts, most, True, scale, window, 0, None, score)
    if sinks is None:
        alone: Tensor = torch.ops.tile.attention_paged(*paged)
        return alone[None]
    out, lse = torch.ops.tile.attention_paged_lse(*paged)
    return with_sinks(out, lse.mT, sinks)[None]


def _attend_gathered(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    window: int,
    kwargs: dict[str, Any],
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend as `attend_cached`, over keys that a cache of transformers before its `page_size` gathers itself."""
    places = kwargs["read_index"], kwargs["write_index"]
    k, v = _transformers_update(type(cache))(cache, key, value, layer, *places)
    starts, most = kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(starts, dict):  # by kinds of layers, where a model has several
        kind = "sliding_attention" if window else "full_attention"
        starts, most = starts[kind], most[kind]
    found = attend_varlen(
        query[0].transpose(0, 1), k, v, kwargs["cu_seq_lens_q"].int(), starts.int(), kwargs["max_seqlen_q"], most,
        causal=True, scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return found[None]


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tables of one step, which its layers share


def _tables(allocator: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the table of pages of each sequence, int32 `[B, n]`; None for keys without pages, or all new ones."""
    if not getattr(allocator, "supports_block_table", False):
        return None
    given = kwargs.get("block_table")
    if given is not None:
        table: Tensor = given[allocator.index]
        return table
    reads = kwargs["read_index"][allocator.index]
    if not reads.numel():
        return None
    found: Tensor | None = _made.get(reads)
    if found is None:
        page = allocator.tokens_per_page
        columns = -(-kwargs["max_length_k"][allocator.layer_type] // page)
        found = block_table_of_indices(kwargs["cu_seq_lens_k"][allocator.layer_type], reads, page, columns)
        _made[reads] = found
    return found
