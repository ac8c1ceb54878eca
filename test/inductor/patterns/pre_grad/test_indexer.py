# SPDX-License-Identifier: Apache-2.0
"""Scores by which indexers of latent attention choose become tile.index_scores; what means something else stays."""

import pytest
import torch

import torch_tile

TILE = {"select": "tile", "families": ("mla",)}


def rows_of(model, *inputs):
    torch._dynamo.reset()
    return torch_tile.explain(model, *inputs, options=TILE).rows


def by_einsum(q, k, weights, mask):
    scores = (torch.einsum("bshd,btd->bsht", q, k) * 0.25).relu()
    total = (scores * weights.unsqueeze(-1)).sum(2)
    return total.masked_fill(~mask, float("-inf")).topk(3, dim=-1)[1]


def by_products(q, k, weights, mask):
    scores = torch.relu(q.float() @ k.float().mT.unsqueeze(1) / 4)
    total = (weights.float().unsqueeze(-2) @ scores).squeeze(-2)
    return (total + torch.where(mask, 0.0, float("-inf"))).topk(3, dim=-1).indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("written", [by_einsum, by_products])
def test_indexers_written_out(written, dtype, seed):
    # Small integers, whose scores are exact in any dtype.
    q, k, weights = (torch.randint(-3, 4, n).to(dtype) for n in ((2, 5, 4, 8), (2, 9, 8), (2, 5, 4)))
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    (row,) = rows_of(written, q, k, weights, mask)
    assert row.status == "replaced" and "tile.index_scores" in row.what, row
    torch._dynamo.reset()
    got = torch.compile(written, backend="tile", options=TILE)(q, k, weights, mask)
    scores = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu().mul(weights[..., None]).sum(2)
    best = scores.masked_fill(~mask, float("-inf")).topk(3).values
    assert torch.equal(scores.gather(-1, got).sort(-1, descending=True).values, best)


def by_head(q, k, weights):
    scores = (q @ k.mT.unsqueeze(1)).relu()
    return (scores * weights[:, :1].unsqueeze(-1)).sum(2).topk(3, dim=-1)[1]  # weights of the first query alone


def squared(q, k, weights):
    return ((q @ k.mT.unsqueeze(1)).relu() * weights.unsqueeze(-1) * weights.unsqueeze(-1)).sum(2).topk(3, dim=-1)[1]


def negative(q, k, weights):
    return ((q @ k.mT.unsqueeze(1) * -1.0).relu() * weights.unsqueeze(-1)).sum(2).topk(3, dim=-1)[1]


def sliced(q, k, weights):
    q, k = q[..., :6], k[..., :6]
    return ((q @ k.mT.unsqueeze(1)).relu() * weights[..., None]).sum(2).topk(3, dim=-1)[1]


@pytest.mark.parametrize("written", [by_head, squared, negative])
def test_scores_of_another_meaning_stay(written):
    q, k, weights = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 5, 4)
    (row,) = rows_of(written, q, k, weights)
    assert row.status == "missed" and "tile.lightning_index" in row.fix, row


def test_slices_are_operands():
    """The trial has other sizes, and shows none of them."""
    q, k, weights = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 8), torch.randn(2, 5, 4)
    (row,) = rows_of(sliced, q, k, weights)
    assert row.status == "replaced" and "[2, 5, 4, 6]" in row.what, row


def test_chosen_scores_with_a_gradient_stay():
    def chosen(q, k, weights):
        return ((q @ k.mT.unsqueeze(1)).relu() * weights.unsqueeze(-1)).sum(2).topk(3, dim=-1)[0]

    q, k, weights = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 9, 8), torch.randn(2, 5, 4)
    assert "gradient" in rows_of(chosen, q, k, weights)[0].reason


def test_other_choices_have_no_row():
    x = torch.randn(2, 5, 9)
    assert not rows_of(lambda x: x.relu().topk(3, dim=-1)[1], x)
    assert not rows_of(lambda x: (x @ x.mT).relu().topk(3, dim=-1)[1], x)
    assert not rows_of(
        lambda q, k: (q @ k.mT).sum(1).topk(3, dim=-1)[1], torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    )
