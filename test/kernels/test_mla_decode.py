# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from torch_tile.kernels.mla_decode import reference


def by_hand(q, q_pe, kv, k_pe, block_table, seq_lens, scale):
    """One query at a time; the cache is read through the table row by row."""
    batch, q_len, heads, latent = q.shape
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    scale = (latent + q_pe.shape[3]) ** -0.5 if scale is None else scale
    page = kv.shape[1]
    for b in range(batch):
        capacity = page if block_table is None else block_table.shape[1] * page
        length = capacity if seq_lens is None else int(seq_lens[b])

        def row(cache, s, b=b):
            return cache[b, s] if block_table is None else cache[int(block_table[b, s // page]), s % page]

        for t in range(q_len):
            seen = range(max(length - q_len + t + 1, 0))
            for h in range(heads):
                scores = [scale * float(q[b, t, h] @ row(kv, s) + q_pe[b, t, h] @ row(k_pe, s)) for s in seen]
                total = sum(map(math.exp, scores))
                if total:
                    lse[b, t, h] = math.log(total)
                    out[b, t, h] = sum(math.exp(x) / total * row(kv, s) for x, s in zip(scores, seen, strict=True))
    return out, lse


@pytest.mark.parametrize("seed", range(16))
def test_reference_is_the_definition(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    def rand(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    batch, q_len, heads, latent, rotary = pick(1, 3), pick(1, 2, 4), pick(1, 3), pick(3, 8), pick(2, 5)
    q, q_pe = rand(batch, q_len, heads, latent), rand(batch, q_len, heads, rotary)
    scale = pick(None, 0.4)
    if pick(False, True):
        page, blocks = pick(1, 4), pick(1, 3)
        pages = batch * blocks + 2
        kv, k_pe = rand(pages, page, latent), rand(pages, page, rotary)
        table = torch.randperm(pages, generator=g)[: batch * blocks].reshape(batch, blocks).int()
        capacity = page * blocks
    else:
        capacity, table = pick(1, 7), None
        kv, k_pe = rand(batch, capacity, latent), rand(batch, capacity, rotary)
    lens = pick(None, torch.randint(0, capacity + 1, (batch,), generator=g, dtype=torch.int32))
    got = reference(q, q_pe, kv, k_pe, table, lens, scale, pick(0, 1, 3))
    for a, b in zip(got, by_hand(q, q_pe, kv, k_pe, table, lens, scale), strict=True):
        torch.testing.assert_close(a, b)


def test_what_lies_past_the_end_is_not_read():
    q, q_pe = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 4)
    kv, k_pe = torch.randn(1, 6, 8), torch.randn(1, 6, 4)
    lens = torch.tensor([4], dtype=torch.int32)
    want = reference(q, q_pe, kv[:, :4], k_pe[:, :4])
    kv[:, 4:], k_pe[:, 4:] = math.nan, math.inf
    for a, b in zip(reference(q, q_pe, kv, k_pe, None, lens), want, strict=True):
        torch.testing.assert_close(a, b)


def test_is_attention_with_one_key_head():
    from torch_tile.kernels.attention import reference as attention

    q, q_pe = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 2)
    kv, k_pe = torch.randn(2, 7, 8), torch.randn(2, 7, 2)
    joined = torch.cat([q, q_pe], -1).transpose(1, 2), torch.cat([kv, k_pe], -1)[:, None], kv[:, None]
    want, _ = attention(*joined, causal=True, q_offset=4)
    torch.testing.assert_close(reference(q, q_pe, kv, k_pe)[0], want.transpose(1, 2))


@pytest.mark.parametrize("batch, q_len, heads, length", [(0, 1, 2, 3), (2, 0, 2, 3), (2, 1, 0, 3), (2, 1, 2, 0)])
def test_empty(batch, q_len, heads, length):
    q, q_pe = torch.randn(batch, q_len, heads, 8), torch.randn(batch, q_len, heads, 4)
    out, lse = reference(q, q_pe, torch.randn(batch, length, 8), torch.randn(batch, length, 4))
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if length == 0:
        assert not out.any() and lse.isneginf().all()
