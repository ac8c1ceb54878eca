# SPDX-License-Identifier: Apache-2.0
"""Positions of the largest index scores against float64; keys past a length are NaN."""

import math

import pytest
import torch

from torch_tile.kernels.mla import indexer
from torch_tile.kernels.mla.indexer import (
    all_scores_reference,
    index_scores,
    lightning_index,
    reference,
    scores_reference,
)


def problem(problems, dtype):
    batch, q_len, heads, width = (
        problems.pick(1, 3),
        problems.pick(1, 4),
        problems.pick(1, 5, 32),
        problems.pick(16, 32),
    )
    length = problems.random.randint(1, 150)
    lengths = torch.tensor([problems.pick(0, length, problems.random.randint(0, length)) for _ in range(batch)]).int()
    q, k = problems.tensor(batch, q_len, heads, width, dtype=dtype), problems.tensor(batch, length, width, dtype=dtype)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = math.nan
    weights = problems.tensor(batch, q_len, heads, dtype=problems.pick(dtype, torch.float32))
    return q, k, weights, lengths


def test_reference_is_the_definition(problems):
    q, k, weights, lengths = problem(problems, torch.float64)
    scores, lists = scores_reference(q, k, weights, lengths), reference(q, k, weights, 7, lengths)
    for b, t in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        last = int(lengths[b]) - q.shape[1] + t
        found = {
            s: sum(float(weights[b, t, h]) * max(0.0, float(q[b, t, h] @ k[b, s])) for h in range(q.shape[2]))
            for s in range(last + 1)
        }
        for s in range(k.shape[1]):
            assert scores[b, t, s].item() == pytest.approx(found.get(s, -math.inf))
        named = [s for s in lists[b, t].tolist() if s >= 0]
        assert len(set(named)) == len(named) == min(7, len(found))
        best = sorted(found.values(), reverse=True)[: len(named)]
        assert [found[s] for s in named] == pytest.approx(best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_scores(dtype, engine, problems, check):
    q, k, weights, _ = problem(problems, dtype)
    k = k.nan_to_num()
    want = all_scores_reference(q.double(), k.double(), weights.double())
    check(index_scores(q, k, weights), want, f"{tuple(q.shape)} {tuple(k.shape)}", torch.float32, least=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_problems(dtype, engine, problems, check, monkeypatch):
    """Scores as float64 has them; lists name what those scores have at the top."""
    seen = []

    def listed(scores, top, original=indexer.listed):
        seen.append(scores)
        return original(scores, top)

    monkeypatch.setattr(indexer, "listed", listed)
    q, k, weights, lengths = problem(problems, dtype)
    top = problems.pick(1, 9, 200)
    got = lightning_index(q, k, weights, top, lengths)
    want = scores_reference(q.double(), k.double(), weights.double(), lengths)
    assert got.shape == (*q.shape[:2], top) and got.dtype == torch.int32
    check(seen[0], want, f"{tuple(q.shape)} {tuple(k.shape)} {lengths}", torch.float32, least=10.0)
    for lists, scores in zip(got.flatten(0, 1), want.flatten(0, 1), strict=True):
        count = min(top, int(scores.isfinite().sum()))
        named = lists[:count].long()
        assert (named >= 0).all() and named.unique().numel() == count and (lists[count:] == -1).all()
        best = scores.topk(count).values
        torch.testing.assert_close(scores[named].sort(descending=True).values, best, rtol=1e-4, atol=1e-4)
