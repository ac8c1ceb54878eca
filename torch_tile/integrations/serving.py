# SPDX-License-Identifier: Apache-2.0
"""Serve the paged caches of vLLM and SGLang: attention, latent attention and cache writes with their arguments.

These functions need neither package. An attention backend of theirs calls them with the tensors that it has:
`block_table` int32 `[B, max_blocks]`, and `seq_lens` int32 `[B]` with the new tokens included. `query_start_loc` int32
`[B + 1]` says where the queries of each sequence begin. See docs/serving.md.
"""

from __future__ import annotations

import torch

from torch_tile.diagnostics.arguments import Window, explains_misfits, renames
from torch_tile.nn.functional import text_of_cap, with_sinks
from torch_tile.ops import append_to_pages, attention_paged, attention_paged_lse, mla_decode_lse
from torch_tile.ops.checks import require, require_value
from torch_tile.runtime.launch_plan import has_memory

Tensor = torch.Tensor
Cache = Tensor | tuple[Tensor, Tensor]
"""A paged cache: one tensor of keys and values, or a pair of both."""
named_here = renames(
    q="query", q_pe="query's rotary part", k="key", v="value",
    k_pages="kv_cache's keys", v_pages="kv_cache's values", kv="kv_cache", k_pe="kv_cache's rotary part",
    block_tables="block_table", lengths="seq_lens",
    cu_seqlens_q="query_start_loc", cu_seqlens="query_start_loc",
    max_seqlen_q="max_query_len", max_seqlen="max_query_len",
)  # fmt: skip
"""What the arguments of our operators are called here."""


@explains_misfits
def split_cache(kv_cache: Cache, kv_dim: int = 1, heads_first: bool = False) -> tuple[Tensor, Tensor]:
    """View a cache as pages of keys and of values, `[blocks, block_size, Hkv, D]` each.

    Args:
        kv_cache: `[blocks, 2, block_size, Hkv, D]` with kv_dim 1, `[2, blocks, block_size, Hkv, D]` with kv_dim 0, or
            the pair of keys and values, `[blocks, block_size, Hkv, D]` each.
        kv_dim: the dimension in which keys come before values.
        heads_first: blocks are `[Hkv, block_size, D]` ("HND") and not `[block_size, Hkv, D]` ("NHD").

    Raises RuntimeError for other shapes, ValueError for another kv_dim.
    """
    require_value(kv_dim in (0, 1), lambda: f"kv_dim is {kv_dim}; expected 0 or 1")
    if isinstance(kv_cache, Tensor):
        shape = tuple(kv_cache.shape)
        require(
            len(shape) == 5 and shape[kv_dim] == 2,
            lambda: f"kv_cache has shape {shape}; expected five dimensions, of which dimension {kv_dim} has size 2",
        )
        keys, values = kv_cache.unbind(kv_dim)
    else:
        keys, values = kv_cache
        require(
            keys.dim() == values.dim() == 4,
            lambda: (
                f"kv_cache has shapes {tuple(keys.shape)} and {tuple(values.shape)}; expected [blocks, block_size, "
                "heads, head_dim]. View a token pool [slots, heads, head_dim] so: x.unflatten(0, (-1, page_size))"
            ),
        )
    return (keys.transpose(1, 2), values.transpose(1, 2)) if heads_first else (keys, values)


@explains_misfits
@named_here
def paged_attention(
    query: Tensor,
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: Window | None = 0,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dim: int = 1,
    heads_first: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attend over a paged cache that holds the new tokens: decoding, prefilling and both in one batch.

    Args:
        query: `[T, H, D]` with query_start_loc; without it `[B, H, D]`, one token a sequence, or `[B, Sq, H, D]`.
        kv_cache: as for `split_cache`; H is a multiple of its Hkv. float8_e4m3fn needs both scales.
        block_table: int32 `[B, max_blocks]`. Entries past a sequence's end are not read.
        seq_lens: int32 `[B]`: cached positions of each sequence.
        query_start_loc: int32 `[B + 1]`. Rows of `query` from its last entry on are padding and give 0.
        max_query_len: the most queries of a sequence, with query_start_loc only.
        scale: of the scores, default `D ** -0.5`.
        causal: each query sees the keys up to its own position.
        window: how many keys a query sees, its own included (FlashAttention's `window_size[0] + 1`); 0 or None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 and None leave them.
        sinks: `[H]`: logits that only enlarge each softmax's denominator.
        k_scale: float32, one element for all keys, or `[Hkv]`.
        v_scale: the same of values.
        kv_dim: as for `split_cache`.
        heads_first: as for `split_cache`.
        out: receives the result and is returned, of query's shape but for a last dimension of the values' size.

    Raises RuntimeError, TypeError and ValueError as `ops.attention_paged` does.
    """
    keys, values = split_cache(kv_cache, kv_dim, heads_first)
    _require_max_query_len(query_start_loc, max_query_len)
    q = _with_queries(query, query_start_loc)
    score, most = text_of_cap(softcap), int(window or 0)
    given = (
        q, keys, values, block_table, seq_lens, query_start_loc, max_query_len, causal, scale, most, 0, None, score,
        _page_scale("k_scale", k_scale, keys), _page_scale("v_scale", v_scale, values),
    )  # fmt: skip
    if sinks is None:
        found = attention_paged(*given)
    else:
        plain, lse = attention_paged_lse(*given)
        found = with_sinks(plain, lse.mT, sinks)
    if query_start_loc is None and query.dim() == 3:
        found = found.squeeze(1)
    return found if out is None else out.view(found.shape).copy_(found).view(out.shape)


@explains_misfits
@named_here
def write_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Cache,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dim: int = 1,
    heads_first: bool = False,
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    The slots follow from block_table and seq_lens, the new tokens included. They are those of a `slot_mapping`,
    `block_table[b, s // block_size] * block_size + s % block_size`.

    Args:
        key: `[T, Hkv, D]` with query_start_loc; without it `[B, Hkv, D]`, one token a sequence, or `[B, Sq, Hkv, D]`.
        value: as key.
        kv_cache: as for `paged_attention`, and so are the arguments that follow.
        block_table: int32 `[B, max_blocks]`.
        seq_lens: int32 `[B]`.
        query_start_loc: int32 `[B + 1]`; rows of key from its last entry on are padding and not written.
        max_query_len: the most new tokens of a sequence, with query_start_loc only.
        k_scale: for a cache of float8_e4m3fn: `key / k_scale` is written.
        v_scale: the same of values.
        kv_dim: as for `split_cache`.
        heads_first: as for `split_cache`.

    Raises RuntimeError, TypeError and ValueError as `ops.append_to_pages` does.
    """
    keys, values = split_cache(kv_cache, kv_dim, heads_first)
    _require_max_query_len(query_start_loc, max_query_len)
    _check_new("key", key, query_start_loc)
    _check_new("value", value, query_start_loc)
    new_keys, new_values = (_with_queries(x, query_start_loc) for x in (key, value))
    scales = _page_scale("k_scale", k_scale, keys), _page_scale("v_scale", v_scale, values)
    place = block_table, seq_lens, query_start_loc, max_query_len
    append_to_pages(new_keys, new_values, keys, values, *place, *scales)


@explains_misfits
@named_here
def mla_decode(
    query: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_lora_rank: int = 512,
    schedule: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode with latent attention over a paged cache of latents, their rotary part behind them.

    Args:
        query: `[B, H, C + R]` or `[B, Sq, H, C + R]`, multiplied into the latent space, or its two parts as a pair.
        kv_cache: `[blocks, block_size, C + R]`, or `[blocks, block_size, 1, C + R]` as FlashMLA has it.
        block_table: int32 `[B, max_blocks]`.
        seq_lens: int32 `[B]`. The Sq queries are the last positions of their sequence, causal among themselves.
        scale: of the scores: the model's own, `192 ** -0.5` for DeepSeek-V3.
        kv_lora_rank: C, the size of a latent.
        schedule: what `ops.mla_schedule(seq_lens, Sq * H)` made, once for all layers of a step.
        out: receives the result, `[B, H, C]` or `[B, Sq, H, C]`.

    Returns:
        The result in query's dtype, and the natural logarithm of each softmax's denominator in float32, `[B, H]` or
        `[B, H, Sq]`.

    Raises RuntimeError, TypeError and ValueError as `ops.mla_decode` does.
    """
    if isinstance(query, Tensor):
        require(
            query.shape[-1] == kv_cache.shape[-1],
            lambda: f"mla_decode: query has {query.shape[-1]} columns; expected {kv_cache.shape[-1]}, as kv_cache",
        )
    q, q_pe = query if isinstance(query, tuple) else query.tensor_split((kv_lora_rank,), dim=-1)
    latents, rotary = split_latents(kv_cache, kv_lora_rank)
    own, own_pe = (x if x.dim() == 4 else x.unsqueeze(1) for x in (q, q_pe))
    given = own, own_pe, latents, rotary, block_table, seq_lens, scale, 0, schedule
    found, lse = mla_decode_lse(*given)
    lse = lse.mT
    if q.dim() == 3:
        found, lse = found.squeeze(1), lse.squeeze(-1)
    return (found if out is None else out.copy_(found)), lse


@explains_misfits
def write_latents(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
) -> None:
    """Write new latents and their rotary part into a paged cache of latents, in place.

    Args:
        kv_c: `[T, C]` with query_start_loc, else `[B, C]`, one token a sequence.
        k_pe: `[T, R]` or `[B, R]`, or with a dimension of one head before the last.
        kv_cache: as for `mla_decode`.
        block_table: as for `write_cache`, and so are the arguments that follow.
        seq_lens: int32 `[B]`.
        query_start_loc: int32 `[B + 1]`.
        max_query_len: the most new tokens of a sequence.
    """
    latents, rotary = (x.unsqueeze(2) for x in split_latents(kv_cache, kv_c.shape[-1]))
    room = rotary.shape[-1]
    require(
        k_pe.shape[-1] == room,
        lambda: f"write_latents: k_pe has {k_pe.shape[-1]} columns; expected {room}, what kv_cache has beside kv_c's",
    )
    new, new_pe = (x.reshape(x.shape[0], 1, x.shape[-1]) for x in (kv_c, k_pe))
    write_cache(new, new_pe, (latents, rotary), block_table, seq_lens, query_start_loc, max_query_len)


@explains_misfits
def split_latents(kv_cache: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """View a cache of latents as pages of latents `[blocks, block_size, C]` and of rotary parts `[.., R]`."""
    shape = tuple(kv_cache.shape)
    require(
        len(shape) == 3 or (len(shape) == 4 and shape[2] == 1),
        lambda: f"kv_cache has shape {shape}; expected [blocks, block_size, C + R], or a dimension of one head in it",
    )
    require(
        0 < kv_lora_rank < shape[-1],
        lambda: f"kv_cache has {shape[-1]} columns; expected more than kv_lora_rank, which is {kv_lora_rank}",
    )
    flat = kv_cache if len(shape) == 3 else kv_cache.squeeze(2)
    return flat[..., :kv_lora_rank], flat[..., kv_lora_rank:]


@explains_misfits
def block_table_of_indices(kv_indptr: Tensor, kv_indices: Tensor, page_size: int, max_pages: int) -> Tensor:
    """Make a block table of the slots of all sequences. SGLang keeps the slots one after the other for its kernels.

    Args:
        kv_indptr: `[B + 1]`: the slots of sequence b are `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
        kv_indices: integers `[n]`, in order of positions. A page's slots are neighbours and begin at its first row.
        page_size: slots of a page.
        max_pages: columns of the table.

    Returns:
        int32 `[B, max_pages]`, -1 past a sequence's end.
    """
    _check_page_size(page_size)
    if not kv_indices.numel():
        return torch.full((kv_indptr.shape[0] - 1, max_pages), -1, dtype=torch.int32, device=kv_indices.device)
    starts = kv_indptr.long()
    first = starts[:-1, None] + torch.arange(max_pages, device=kv_indices.device) * page_size
    inside = first < starts[1:, None]
    slots = kv_indices[first.clamp(max=kv_indices.numel() - 1)]
    _check_slots("kv_indices", torch.where(inside, slots, 0), page_size)
    return torch.where(inside, slots // page_size, -1).int()


@explains_misfits
def block_table_of_requests(req_to_token: Tensor, req_pool_indices: Tensor, page_size: int, max_len: int) -> Tensor:
    """Make a block table from SGLang's table of slots.

    Args:
        req_to_token: integers `[requests, positions]`: the slot of each position of a request.
        req_pool_indices: `[B]`: the requests of this batch.
        page_size: slots of a page.
        max_len: the most positions of a sequence of this batch.

    Returns:
        int32 `[B, ceil(max_len / page_size)]`. Entries past the end of a shorter sequence mean nothing.
    """
    _check_page_size(page_size)
    slots = req_to_token[req_pool_indices.long(), :max_len:page_size]
    _check_slots("req_to_token", slots[:, :1], page_size)  # slots past a sequence's end may be any
    return (slots // page_size).int()


def _require_max_query_len(query_start_loc: Tensor | None, max_query_len: int) -> None:
    """Refuse packed queries whose longest sequence is not said."""
    if query_start_loc is not None and isinstance(max_query_len, int):
        require_value(
            max_query_len > 0,
            lambda: f"max_query_len is {max_query_len}; expected the most queries of a sequence, with query_start_loc",
        )


def _check_new(name: str, new: Tensor, query_start_loc: Tensor | None) -> None:
    """Refuse new keys and values whose heads are not a dimension."""
    require(
        new.dim() == 3 or (query_start_loc is None and new.dim() == 4),
        lambda: (
            f"write_cache: {name} has shape {list(new.shape)}; expected [tokens, heads, head_dim]: "
            f"{name}.unflatten(-1, (heads, head_dim))"
        ),
    )


def _check_page_size(page_size: int) -> None:
    """Refuse pages without slots."""
    require_value(page_size > 0, lambda: f"page_size is {page_size}; expected at least 1")


def _check_slots(name: str, first: Tensor, page_size: int) -> None:
    """Refuse slots that begin no page, where the host can read them."""
    if first.device.type == "cpu" and not torch.compiler.is_compiling() and has_memory(first):
        wrong = first[first % page_size != 0]
        require(
            not wrong.numel(),
            lambda: f"{name} begins a page at slot {int(wrong[0])}; expected a multiple of page_size, {page_size}",
        )


def _with_queries(x: Tensor, query_start_loc: Tensor | None) -> Tensor:
    """Add the dimension of queries to one token a sequence."""
    return x.unsqueeze(1) if query_start_loc is None and x.dim() == 3 else x


def _page_scale(name: str, scale: Tensor | None, pages: Tensor) -> Tensor | None:
    """View a scale as `[1, 1, 1]` or `[1, 1, Hkv]`."""
    if scale is None:
        return None
    require(
        scale.numel() in (1, pages.shape[2]),
        lambda: (
            f"{name} has shape {tuple(scale.shape)}; expected one element, or one for each of {pages.shape[2]} heads"
        ),
    )
    return scale.reshape(1, 1, -1)
