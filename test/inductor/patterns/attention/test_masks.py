# SPDX-License-Identifier: Apache-2.0
"""A mask becomes a rule only where the rule says the same for every index."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.graph.axes import axes_of
from torch_tile.inductor.graph.score_index import Places
from torch_tile.inductor.patterns.attention import masks
from torch_tile.inductor.patterns.attention.scores import Mask


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


def ones_compared(n, m):
    return torch.triu(torch.ones(n, m), diagonal=1) == 0


def as_bytes(n, m):
    return torch.triu(torch.ones(1, n, m), diagonal=1).type(torch.uint8) != 1


def chosen(n, m):
    return torch.where(causal(n, m), True, False)


def repeated(n, m):
    return causal(n, m)[None, None].repeat(2, 1, 1, 1)


def added(n, m):
    return torch.zeros(n, m).masked_fill(~causal(n, m), -math.inf)


def added_in_two_steps(n, m):
    keep = causal(n, m)
    return keep.float().masked_fill(keep == 0, -math.inf).masked_fill(keep == 1, 0.0)[None, None].expand(2, 1, n, m)


def counted_down(n, m):
    return (1.0 - causal(n, m).float()) * torch.finfo(torch.float32).min


RULES = {
    ones_compared: "causal",
    as_bytes: "causal",
    chosen: "causal",
    repeated: "causal",
    added: "causal",
    added_in_two_steps: "causal",
    counted_down: "causal",
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


def added_and_moderate(n, m):
    return torch.zeros(n, m).masked_fill(~causal(n, m), -3.0)


def added_twice(n, m):
    return torch.zeros(n, m).masked_fill(~causal(n, m), -math.inf).masked_fill(~window(n, m), -1e5)


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


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [causal, added, counted_down])
def test_rules_where_scores_are_merged_or_transposed(make, dynamic, agrees, generator):
    """What the mask is added to may be [batch * heads, queries, keys], or [..., keys, queries]."""
    q, k, v = (torch.randn(n, generator=generator) for n in ((6, 5, 8), (6, 9, 8), (6, 9, 4)))

    def put(scores, mask):
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask

    def merged(q, k, v):
        return torch.softmax(put(q @ k.mT, make(q.shape[1], k.shape[1])), -1) @ v

    def transposed(q, k, v):
        return torch.softmax(put(k @ q.mT, make(q.shape[1], k.shape[1]).mT), 1).mT @ v

    def below(q, k, v):
        mask = make(q.shape[1], k.shape[1])
        hidden = mask if mask.dtype != torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        return torch.softmax(torch.baddbmm(hidden.expand(6, -1, -1), q, k.mT).view(2, 3, 5, -1), -1) @ v.view(
            2, 3, -1, 4
        )

    for form in (merged, transposed, below):
        _, report = agrees(form, q, k, v, dynamic=dynamic)
        (row,) = report.replaced("attention")
        assert "causal" in row.what and "mask" not in row.what, (form, row)


def joined_keys(n, m):
    """Two registers, which all see, before the others."""
    return torch.cat([torch.ones(n, 2, dtype=torch.bool), causal(n, m - 2)], 1)


def joined_queries(n, m):
    return torch.cat([torch.ones(2, m, dtype=torch.bool), causal(n - 2, m)], 0)


def from_the_end(n, m):
    """An index below 0 counts from the end."""
    i, j = arange(n, m)
    return torch.arange(max(n, m))[j - i] <= 3


def overflowing(n, m):
    i, j = (x.to(torch.int8) * 50 for x in arange(n, m))
    return (i >= j) | (j == 0)


OTHERS = [causal_or_prefix, other_way, far, added_and_moderate, added_twice, strided]


@pytest.mark.parametrize("make", [*OTHERS, joined_keys, joined_queries, from_the_end, overflowing])
def test_what_is_no_rule_stays_a_tensor_or_is_right(make, agrees, generator):
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    _, report = agrees(sdpa(make), q, k, v)
    assert len(report.replaced("attention")) == 1


def test_padding_is_read_beside_the_causal_rule(agrees, generator):
    q, k, v = (torch.randn(2, 3, 6, 8, generator=generator) for _ in range(3))
    keep = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])

    def f(q, k, v, keep):
        mask = causal(6, 6) & keep[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, :, 2:]

    _, report = agrees(f, q, k, v, keep)
    (row,) = report.replaced("attention")
    assert row.what.endswith("causal, score v0=where(x0,acc0,-inf);ret v0)")


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
        torch.testing.assert_close(got, f(q, k, v), rtol=2e-5, atol=2e-5)
    (row,) = report.replaced("attention")
    assert "causal" not in row.what and "v1=gt(i3,v0);v2=where(v1,-3.4028" in row.what


FILLS = [
    lambda s, keep, more: s.masked_fill(~keep, -1e4),
    lambda s, keep, more: torch.where(keep, s, torch.finfo(torch.float16).min),
    lambda s, keep, more: s + torch.zeros(keep.shape).masked_fill(~keep, -1e4),
    lambda s, keep, more: s.masked_fill(~more, -1e4).masked_fill(~keep, -1e4),
    lambda s, keep, more: (s + more).masked_fill(~keep, -1e4),
    lambda s, keep, more: s + more - 2 * keep.int(),
    lambda s, keep, more: s.masked_fill(~more, -math.inf).masked_fill(~keep, -1e4),
    lambda s, keep, more: (s + more.to(torch.float16) * 3).masked_fill(~keep, -1e9),
]


@pytest.mark.parametrize("put", FILLS)
def test_a_query_that_sees_no_key(put, agrees, generator):
    """Replaced scores are lost, so that all keys are alike; scores to which a number was added are not."""
    q, k, v = (3 * torch.randn(2, 2, 5, 8, generator=generator) for _ in range(3))
    keep, more = (torch.rand(2, 1, 5, 5, generator=generator) < 0.7 for _ in range(2))
    keep[0, 0, 3] = False
    more[..., 0] = True  # eager makes NaN of rows of -inf, kernels 0

    def f(q, k, v, keep, more):
        return torch.softmax(put(q @ k.mT, keep, more), -1) @ v

    _, report = agrees(f, q, k, v, keep, more)
    assert report.replaced("attention")[0].what.endswith("mask)")


def test_data_has_no_rule():
    graph = torch.fx.Graph()
    node = graph.placeholder("m")
    for dtype in (torch.float32, torch.bool):
        node.meta["val"] = torch.empty(3, 3, device="meta", dtype=dtype)
        dims = axes_of((3, 3))
        said = masks.what_it_says(Mask(node, dims, dtype != torch.bool), Places([], *dims))
        assert said is None or masks.classify(said[0], 3, 3) is None


def test_numbers_that_the_kernel_would_round_are_compared_beside_it(agrees, generator):
    """Float64 documents that differ by less than float32 holds: the mask is a tensor."""
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator) for _ in range(3))
    ids = torch.randint(0, 2, (2, 9), generator=generator).double() * 1e-9 + 1

    def f(q, k, v, ids):
        hidden = ids[:, None, :, None] != ids[:, None, None, :]
        return torch.softmax((q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v

    _, report = agrees(f, q, k, v, ids)
    (row,) = report.replaced("attention")
    assert row.what.endswith("mask)")


def test_integers_are_compared_with_numbers_beside_the_kernel(agrees, generator):
    """As `attention_mask` of transformers is, of integers: one bool for each key."""
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator) for _ in range(3))
    given = torch.ones(2, 9, dtype=torch.int64)
    given[1, -3:] = 0

    def f(q, k, v, given):
        i = torch.arange(9)
        seen = (i[:, None] >= i[None, :]) & (given[:, None, None, :] > 0)
        return torch.softmax((q @ k.mT).masked_fill(~seen, -torch.inf), -1) @ v

    _, report = agrees(f, q, k, v, given)
    (row,) = report.replaced("attention")
    assert row.what.endswith("causal, score v0=where(x0,acc0,-inf);ret v0)"), row.what
