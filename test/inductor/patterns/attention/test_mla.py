# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA decode, as people write it, becomes one op."""

import pytest
import torch


def einsum(q, q_pe, kv, k_pe):  # DeepSeek's own reference
    scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
    p = (scores * 0.1).softmax(dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,btc->bshc", p, kv)


def einsum_scaled_apart(q, q_pe, kv, k_pe):
    scores = torch.einsum("bshr,btr->bsht", q_pe, k_pe) * 0.2 + torch.einsum("bshc,btc->bsht", q, kv) * 0.2
    return torch.einsum("bsht,btc->bshc", scores.softmax(dim=-1), kv)


def matmul(q, q_pe, kv, k_pe):
    q, q_pe, kv, k_pe = q.transpose(1, 2), q_pe.transpose(1, 2), kv.unsqueeze(1), k_pe.unsqueeze(1)
    p = torch.softmax((q @ kv.mT + q_pe @ k_pe.mT) / 8.0, dim=-1)
    return (p @ kv).transpose(1, 2)


def one_row(q, q_pe, kv, k_pe):
    q, q_pe = q.flatten(1, 2), q_pe.flatten(1, 2)
    p = torch.softmax((torch.bmm(q, kv.mT) + torch.bmm(q_pe, k_pe.mT)) * 0.3, dim=-1)
    return torch.bmm(p, kv)


def operands(generator, batch=3, queries=1, heads=4, length=11, latent=24, rope=8):
    shapes = (
        (batch, queries, heads, latent),
        (batch, queries, heads, rope),
        (batch, length, latent),
        (batch, length, rope),
    )
    return [torch.randn(s, generator=generator) for s in shapes]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("form", [einsum, einsum_scaled_apart, matmul, one_row])
def test_forms(form, queries, dynamic, agrees, generator):
    _, report = agrees(form, *operands(generator, queries=queries), dynamic=dynamic)
    assert len(report.replaced("mla")) == 1, report
    assert not report.replaced("gemm"), report


def test_cache_slices(agrees, generator):
    """The latent and the rotary part live in one cache, sliced where they are used."""
    q, q_pe, kv, k_pe = operands(generator, length=20)
    cache = torch.cat([kv, k_pe], -1)

    def f(q, q_pe, cache):
        return einsum(q, q_pe, cache[:, :13, :24], cache[:, :13, 24:])

    def sliced_twice(q, q_pe, cache):
        scores = torch.einsum("bshc,btc->bsht", q, cache[:, :13, :24])
        scores = scores + torch.einsum("bshr,btr->bsht", q_pe, cache[:, :13, 24:])
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), cache[:, :13, :24])

    for form in (f, sliced_twice):
        _, report = agrees(form, q, q_pe, cache)
        assert len(report.replaced("mla")) == 1, report


def test_other_values_are_a_near_miss(agrees, generator):
    q, q_pe, kv, k_pe = operands(generator)

    def f(q, q_pe, kv, k_pe):
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), kv.roll(1, 1))

    _, report = agrees(f, q, q_pe, kv, k_pe)
    assert "not the keys of either product" in report.missed("mla")[0].reason


def test_transposed_values_of_equal_sizes_are_not_keys(agrees, generator):
    """A square latent cache read the other way round has the right shape and the wrong meaning."""
    q, q_pe, kv, k_pe = operands(generator, length=24)

    def f(q, q_pe, kv, k_pe):
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        return torch.einsum("bsht,bct->bshc", scores.softmax(-1), kv)

    _, report = agrees(f, q, q_pe, kv, k_pe)
    assert not report.replaced("mla")


def test_causal_among_the_last_queries(agrees, generator):
    args = operands(generator, queries=3)

    def condition(n, m):
        return torch.arange(m)[None] <= torch.arange(n)[:, None] + (m - n)

    def by_query(q, q_pe, kv, k_pe):  # [batch, query, head, key]
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        scores = (scores * 0.1).masked_fill(~condition(3, 11)[:, None], float("-inf"))
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), kv)

    def by_head(q, q_pe, kv, k_pe):  # [batch, head, query, key]
        scores = torch.einsum("bshc,btc->bhst", q, kv) + torch.einsum("bshr,btr->bhst", q_pe, k_pe)
        low = torch.zeros(3, 11).masked_fill(~condition(3, 11), torch.finfo(q.dtype).min)
        return torch.einsum("bhst,btc->bshc", (scores * 0.1 + low).softmax(-1), kv)

    for form in (by_query, by_head):
        _, report = agrees(form, *args)
        (row,) = report.replaced("mla")
        assert "q [3, 3, 4, 24]" in row.what, row

    bias = torch.randn(3, 1, 11, generator=generator)

    def other_tensor(q, q_pe, kv, k_pe):
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        return torch.einsum("bsht,btc->bshc", (scores + bias).softmax(-1), kv)

    _, report = agrees(other_tensor, *args)
    assert "neither causal" in report.missed("mla")[0].reason


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_length_for_each_sequence(dynamic, agrees, generator):
    *args, lens = *operands(generator), torch.tensor([3, 11, 7])

    def less(q, q_pe, kv, k_pe, lens):
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        keep = torch.arange(kv.shape[1])[None] < lens[:, None]
        scores = (scores * 0.1).masked_fill(~keep[:, None, None], float("-inf"))
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), kv)

    def position(q, q_pe, kv, k_pe, lens):
        last = lens.view(-1, 1, 1, 1) - 1
        scores = torch.einsum("bshc,btc->bsht", q, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        hidden = torch.where(last >= torch.arange(kv.shape[1]), 0.0, float("-inf"))
        return torch.einsum("bsht,btc->bshc", (scores * 0.1 + hidden).softmax(-1), kv)

    for form in (less, position):
        _, report = agrees(form, *args, lens, dynamic=dynamic)
        assert len(report.replaced("mla")) == 1, report
