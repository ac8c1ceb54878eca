# SPDX-License-Identifier: Apache-2.0
"""A mask becomes a rule only where the rule says the same for every index."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.passes import masks


def sdpa(make):
    def f(q, k, v, *rest):
        mask = make(q.shape[2], k.shape[2], *rest)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return f


def arange(n, m, shift=0):
    return torch.arange(n)[:, None] + shift, torch.arange(m)[None]


def causal(n, m):
    return torch.ones(n, m, dtype=torch.bool).tril()


def bottom_right(n, m):
    i, j = arange(n, m, m - n)
    return j <= i


def window(n, m):
    i, j = arange(n, m, m - n)
    return (j <= i) & (j > i - 3)


def window_reversed(n, m):
    i, j = arange(n, m, m - n)
    return (i >= j) & (i - j < 3) & (j >= 0)


def negated(n, m):
    i, j = arange(n, m)
    return ~(j > i)


def gathered(n, m):
    position = torch.arange(max(n, m))
    i, j = arange(n, m)
    return position[j] <= position[i]


def everything(n, m):
    i, j = arange(n, m)
    return (j < m) & (i >= 0)


RULES = {
    causal: "causal",
    bottom_right: "causal",
    window: "causal, window 3",
    window_reversed: "causal, window 3",
    negated: "causal",
    gathered: "causal",
    everything: "",
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", RULES)
def test_rules(make, dynamic, agrees, generator):
    n = int(torch.randint(3, 9, (), generator=generator))
    q = torch.randn(2, 3, n, 8, generator=generator)
    k, v = (torch.randn(2, 3, n + 4, 8, generator=generator) for _ in range(2))
    _, report = agrees(sdpa(make), q, k, v, dynamic=dynamic)
    (row,) = report.replaced("attention")
    assert "mask" not in row.what, row
    assert row.what.endswith(", " + RULES[make] + ")" if RULES[make] else "])") or dynamic, row


def additive(n, m):
    return torch.zeros(n, m).masked_fill(~causal(n, m), -math.inf)


def causal_or_prefix(n, m):
    i, j = arange(n, m)
    return (j <= i) | (j < 2)


def strided(n, m):
    i, j = arange(n, m)
    return (j <= i) & ((i - j) * 2 <= 4)


def other_way(n, m):
    i, j = arange(n, m)
    return j >= i


def far(n, m):
    i, j = arange(n, m)
    return j <= 2 * i


@pytest.mark.parametrize("make", [causal_or_prefix, other_way, far, additive, strided])
def test_what_is_no_rule_stays_a_tensor_or_is_right(make, agrees, generator):
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    _, report = agrees(sdpa(make), q, k, v)
    assert len(report.replaced("attention")) == 1


def test_padding_keeps_the_tensor_and_the_causal_rule(agrees, generator):
    q, k, v = (torch.randn(2, 3, 6, 8, generator=generator) for _ in range(3))
    keep = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])

    def f(q, k, v, keep):
        mask = causal(6, 6) & keep[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, 2:]

    _, report = agrees(f, q, k, v, keep)
    (row,) = report.replaced("attention")
    assert row.what.endswith("causal, mask)")


def test_one_query_over_a_cache(agrees, generator):
    """A decode step: the rule has no query index left."""
    q, k, v = (
        torch.randn(2, 3, 1, 8, generator=generator),
        *(torch.randn(2, 3, 9, 8, generator=generator) for _ in "kv"),
    )

    def f(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(torch.arange(9)[None] <= 6))

    _, report = agrees(f, q, k, v)
    assert report.replaced("attention")[0].what.endswith("causal)")


def test_a_low_number_is_no_minus_infinity_for_an_empty_row(light, generator):
    """Rows that see nothing give the mean with finfo.min and zero with -inf: no rule may confuse them."""
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(3))

    def f(q, k, v):
        i, j = arange(5, 5)
        low = torch.zeros(5, 5).masked_fill(~(j <= i - 2), torch.finfo(torch.float32).min)
        return torch.softmax(q @ k.mT + low, -1) @ v

    with torch.no_grad():
        got, report = light(f, q, k, v)
        torch.testing.assert_close(got[:, :, 2:], f(q, k, v)[:, :, 2:], rtol=2e-5, atol=2e-5)
    assert report.replaced("attention")[0].what.endswith("mask)")


def test_rule_needs_a_boolean():
    graph = torch.fx.Graph()
    node = graph.placeholder("m")
    node.meta["val"] = torch.empty(3, 3, device="meta")
    assert masks.classify(node, 3, 3) is None
