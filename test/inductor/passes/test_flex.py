# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's flex_attention become tile.attention where the language has words for them."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

S = 130


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 20)


def prefix(b, h, i, j):
    return (i >= j) | (j < 30)


def soft_cap(s, b, h, i, j):
    return torch.tanh(s / 3) * 3


def distance(s, b, h, i, j):
    return s - (i - j).abs() * 0.1


SLOPES = torch.rand(4) + 0.1


def alibi(s, b, h, i, j):
    return s + SLOPES[h] * (j - i)


FORMS = [  # score_mod, mask_mod, what the call says
    (None, causal, "causal)"),
    (soft_cap, window, "causal, window 20, score v0=tanh(acc0);v1=mul(v0,3.0);ret v1)"),
    (soft_cap, None, "score v0=tanh(acc0);v1=mul(v0,3.0);ret v1)"),
    (alibi, causal, "causal, score "),
    (distance, prefix, "abs"),
    (None, prefix, "where("),
]


def problem(generator):
    return (torch.randn(2, h, S, 16, generator=generator) for h in (4, 2, 2))


@pytest.mark.parametrize(("score_mod", "mask_mod", "what"), FORMS)
def test_forms(score_mod, mask_mod, what, light, generator):
    q, k, v = problem(generator)
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, S, S, device="cpu")

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)

    with torch.no_grad():
        got, report = light(f, q, k, v)
        torch.testing.assert_close(got, f(q, k, v), rtol=2e-5, atol=2e-5)
    (row,) = report.replaced("attention")
    assert what in row.what, row


def test_what_stays(light, generator):
    q, k, v = problem(generator)
    document = (torch.arange(S) // 50).int()
    documents = create_block_mask(lambda b, h, i, j: document[i] == document[j], None, None, S, S, device="cpu")
    ones = torch.ones(1, 1, 2, dtype=torch.int32)
    lists = BlockMask.from_kv_blocks(ones, torch.zeros(1, 1, 2, 2, dtype=torch.int32), seq_lengths=(S, S))
    for options, reason in (
        ({"block_mask": documents}, "torch.int32, which float32 may not hold"),
        ({"block_mask": lists}, "only its lists say what is visible"),
        ({"return_lse": True}, "log-sum-exp"),
    ):
        with torch.no_grad():
            _, report = light(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, **options), q, k, v)  # noqa: B023
        assert not report.replaced("attention")
        assert reason in report.missed("attention")[0].reason, report
