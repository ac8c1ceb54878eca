# SPDX-License-Identifier: Apache-2.0
"""The calls that vLLM and SGLang make of an attention backend, made again without the packages."""

from types import SimpleNamespace

import pytest
import torch

from torch_tile import ops
from torch_tile.integrations import serving

BLOCKS, BLOCK, HEADS, KV_HEADS, DIM = 24, 16, 4, 2, 32


def step(new: list[int], cached: list[int], pad: int = 0) -> SimpleNamespace:
    """The metadata of one step: `new` tokens of each sequence after `cached` ones, and rows of padding."""
    lengths = [a + b for a, b in zip(new, cached, strict=True)]
    table = torch.randperm(BLOCKS)[: len(new) * 6].reshape(len(new), 6).int()
    starts = torch.tensor([0, *new]).cumsum(0).int()
    slots = [
        table[b, s // BLOCK] * BLOCK + s % BLOCK for b, n in enumerate(lengths) for s in range(n - new[b], n)
    ]  # fmt: skip
    return SimpleNamespace(
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(new),
        slot_mapping=torch.tensor([*slots, *[-1] * pad]),
        tokens=sum(new) + pad,
    )


def layer_forward(query, key, value, kv_cache, meta, **options) -> torch.Tensor:
    """What an attention layer of vLLM does: new keys go into the cache, then queries attend over it."""
    place = meta.block_table, meta.seq_lens, meta.query_start_loc, meta.max_query_len
    cached = {k: v for k, v in options.items() if k in ("kv_dim", "heads_first", "k_scale", "v_scale")}
    serving.write_cache(key, value, kv_cache, *place, **cached)
    out = torch.full_like(query, torch.nan)
    assert serving.paged_attention(query, kv_cache, *place, out=out, **options).data_ptr() == out.data_ptr()
    return out


def expected(query, keys, values, meta, window=0, softcap=0.0, sinks=None) -> torch.Tensor:
    """Attention in float64, one sequence after the other, from pages `[blocks, block, heads, dim]`."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b, n in enumerate(meta.seq_lens.tolist()):
        first, last = meta.query_start_loc[b : b + 2].tolist()
        at = meta.block_table[b, torch.arange(n) // BLOCK].long(), torch.arange(n) % BLOCK
        k, v = (x[at].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), k) * DIM**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        own, key = torch.arange(n - (last - first), n)[:, None], torch.arange(n)
        seen = (key <= own) & ((key > own - window) if window else torch.ones((), dtype=torch.bool))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)
    return out


@pytest.mark.parametrize("layout", ["blocks, 2", "2, blocks", "pair", "HND"])
def test_a_layer_of_vllm_prefills_and_decodes_in_one_batch(layout: str) -> None:
    meta = step([1, 7, 1, 20], [40, 0, 3, 10], pad=3)
    query = torch.randn(meta.tokens, HEADS, DIM)
    key, value = torch.randn(2, meta.tokens, KV_HEADS, DIM)
    pages = torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, DIM)
    before = pages.clone()
    cache, options = {
        "blocks, 2": (pages, {}),
        "2, blocks": (pages.transpose(0, 1).contiguous(), {"kv_dim": 0}),
        "pair": (pages.unbind(1), {}),
        "HND": (pages.transpose(2, 3).contiguous(), {"heads_first": True}),
    }[layout]
    out = layer_forward(query, key, value, cache, meta, **options)

    used = meta.slot_mapping >= 0
    slots = meta.slot_mapping[used]
    for i, new in enumerate((key, value)):  # as reshape_and_cache writes them
        flat = before[:, i].reshape(-1, KV_HEADS, DIM)
        flat[slots] = new[used]
        before[:, i] = flat.view(BLOCKS, BLOCK, KV_HEADS, DIM)
    keys, values = serving.split_cache(cache, **options)
    assert torch.equal(keys, before[:, 0]) and torch.equal(values, before[:, 1])
    torch.testing.assert_close(out.double(), expected(query, keys, values, meta), rtol=1e-5, atol=1e-5)


def test_window_softcap_and_sinks_reach_the_scores() -> None:
    meta = step([5, 1], [30, 60])
    query, cache = torch.randn(meta.tokens, HEADS, DIM) * 3, torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, DIM)
    options = {"window": 9, "softcap": 2.0, "sinks": torch.randn(HEADS)}
    place = meta.block_table, meta.seq_lens, meta.query_start_loc, meta.max_query_len
    out = serving.paged_attention(query, cache, *place, **options)
    exact = expected(query, cache[:, 0], cache[:, 1], meta, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_one_token_a_sequence_needs_no_starts() -> None:
    meta = step([1, 1], [30, 0])
    query, cache = torch.randn(2, HEADS, DIM), torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, DIM)
    new = torch.randn(2, 2, KV_HEADS, DIM)
    serving.write_cache(*new, cache, meta.block_table, meta.seq_lens)
    flat = cache.transpose(1, 2).reshape(-1, 2, KV_HEADS, DIM)
    assert torch.equal(flat[meta.slot_mapping], new.transpose(0, 1))
    out = serving.paged_attention(query, cache, meta.block_table, meta.seq_lens)
    torch.testing.assert_close(out.double(), expected(query, cache[:, 0], cache[:, 1], meta), rtol=1e-5, atol=1e-5)
    four = serving.paged_attention(query[:, None], cache, meta.block_table, meta.seq_lens)
    assert torch.equal(four[:, 0], out)


def test_a_cache_of_float8_has_scales() -> None:
    meta = step([4, 1], [9, 33])
    query = torch.randn(meta.tokens, HEADS, DIM)
    key, value = torch.randn(2, meta.tokens, KV_HEADS, DIM)
    cache = torch.zeros(BLOCKS, 2, BLOCK, KV_HEADS, DIM, dtype=torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor([0.01, 0.03])}
    out = layer_forward(query, key, value, cache, meta, **scales)
    k, v = (cache[:, i].float() * s.view(1, 1, -1, 1) for i, s in enumerate(scales.values()))
    at = meta.slot_mapping[:4]
    assert (k.reshape(-1, KV_HEADS, DIM)[at] - key[:4]).abs().max() <= 2**-4 * key.abs().max()
    torch.testing.assert_close(out.double(), expected(query, k, v, meta), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2])
def test_latent_decoding_as_flash_mla_is_called(queries: int) -> None:
    rank, rotary, scale = 64, 16, 0.11
    meta = step([queries] * 3, [30, 0, 70])
    cache = torch.randn(BLOCKS, BLOCK, 1, rank + rotary)
    new = torch.randn(meta.tokens, rank), torch.randn(meta.tokens, 1, rotary)
    serving.write_latents(*new, cache, meta.block_table, meta.seq_lens, meta.query_start_loc, queries)
    flat = cache.view(-1, rank + rotary)
    assert torch.equal(flat[meta.slot_mapping], torch.cat([new[0], new[1][:, 0]], -1))

    query = torch.randn(3, queries, HEADS, rank + rotary)
    given = query if queries > 1 else query[:, 0].split([rank, rotary], -1)
    schedule = ops.mla_schedule(meta.seq_lens, queries * HEADS)
    for cached, plan in ((cache, None), (cache.squeeze(2), schedule)):
        out, lse = serving.mla_decode(
            given, cached, meta.block_table, meta.seq_lens, scale=scale, kv_lora_rank=rank, schedule=plan
        )
        for b, n in enumerate(meta.seq_lens.tolist()):
            s = torch.arange(n)
            k = flat[meta.block_table[b, s // BLOCK].long() * BLOCK + s % BLOCK].double()
            scores = torch.einsum("qhd,kd->hqk", query[b].double(), k) * scale
            scores = scores.masked_fill(s > torch.arange(n - queries, n)[:, None], -torch.inf)
            exact = torch.einsum("hqk,kd->qhd", scores.softmax(-1), k[:, :rank])
            found, sums = (out[b], lse[b]) if queries > 1 else (out[b][None], lse[b][:, None])
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_tables_of_sglang() -> None:
    """SGLang's request table and its list of slots name the same pages as a block table."""
    meta = step([1, 1, 1], [15, 16, 50])
    positions = torch.arange(6 * BLOCK)
    slots = meta.block_table[:, positions // BLOCK] * BLOCK + positions % BLOCK
    req_to_token = torch.full((9, 6 * BLOCK), -5, dtype=torch.int32)
    requests = torch.tensor([7, 0, 4])
    req_to_token[requests] = slots.int()
    lengths = meta.seq_lens.tolist()
    kv_indptr = torch.tensor([0, *lengths]).cumsum(0).int()
    kv_indices = torch.cat([row[:n] for row, n in zip(slots, lengths, strict=True)])
    of_requests = serving.block_table_of_requests(req_to_token, requests, BLOCK, max(lengths))
    of_indices = serving.block_table_of_indices(kv_indptr, kv_indices, BLOCK, 4)
    assert of_requests.dtype == of_indices.dtype == torch.int32
    assert torch.equal(of_requests, meta.block_table[:, :4])
    for b, n in enumerate(lengths):
        pages = -(-n // BLOCK)
        assert torch.equal(of_indices[b, :pages], meta.block_table[b, :pages]) and (of_indices[b, pages:] == -1).all()
    empty = serving.block_table_of_indices(torch.zeros(3), kv_indices[:0], BLOCK, 2)
    assert torch.equal(empty, torch.full((2, 2), -1, dtype=torch.int32))

    pool = torch.randn(2, BLOCKS * BLOCK, KV_HEADS, DIM)  # keys and values by slots
    query = torch.randn(3, HEADS, DIM)
    cache = tuple(pool.unflatten(1, (-1, BLOCK)))
    out = serving.paged_attention(query, cache, of_indices, meta.seq_lens)
    torch.testing.assert_close(out.double(), expected(query, *cache, meta), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: serving.split_cache(x, kv_dim=0), RuntimeError, "dimension 0 has size 2"),
        (lambda x: serving.split_cache(x, kv_dim=2), ValueError, "kv_dim is 2"),
        (lambda x: serving.split_cache((x[0, 0], x[0, 1])), RuntimeError, "unflatten"),
        (lambda x: serving.split_latents(x, 8), RuntimeError, "a dimension of one head"),
        (lambda x: serving.split_latents(x[0, 0], DIM), RuntimeError, "kv_lora_rank, which is 32"),
        (
            lambda x: serving.write_cache(x[0, 0], x[0, 0], x, *[torch.ones(1).int()] * 2, k_scale=x[0, 0]),
            RuntimeError,
            "expected one element, or one for each of 2 heads",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, text: str) -> None:
    with pytest.raises(error, match=text):
        call(torch.zeros(3, 2, BLOCK, KV_HEADS, DIM))
