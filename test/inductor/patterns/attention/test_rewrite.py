# SPDX-License-Identifier: Apache-2.0
"""Every way of writing attention that we know ends as one op, with the right numbers."""

import math

import pytest
import torch
import torch.nn.functional as F


def matmul(q, k, v):
    return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v


def scale_first(q, k, v):
    return torch.softmax((q * 0.25) @ k.mT, -1) @ v


def softmax_in_float(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, k.mT) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype), v)


def by_hand(q, k, v):
    s = q @ k.mT * 0.3
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def einsum(q, k, v):
    q, k, v = (t.movedim(-3, -2).contiguous() for t in (q, k, v))
    p = torch.einsum("...qhd,...khd->...hqk", q, k).mul(0.3).softmax(-1)
    return torch.einsum("...hqk,...khd->...hqd", p, v)


def dropout_of_zero(q, k, v):
    return F.dropout(F.softmax(q @ k.mT, -1), 0.1, training=False) @ v


def keys_first(q, k, v):
    """Everything transposed: the softmax is over the second last dimension, and the values stand on the left."""
    return (v.mT @ torch.softmax(k @ q.mT * 0.3, -2)).mT


def keys_first_einsum(q, k, v):
    p = torch.einsum("...qd,...kd->...kq", q, k).softmax(-2)
    return torch.einsum("...kd,...kq->...qd", v, p)


def baddbmm(q, k, v):
    q, k, v = (t.flatten(0, -3) for t in (q, k, v))
    return (torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=0.3).softmax(-1) @ v)[None]


def own_maximum(q, k, v):
    s = q @ k.mT * 0.3
    return F.softmax(s - s.max(-1, keepdim=True)[0], -1) @ v


def own_maximum_of_amax(q, k, v):
    s = q @ k.mT * 0.3
    return F.softmax(s - s.amax(-1, keepdim=True), -1) @ v


def temperature_of_heads(q, k, v):
    t = torch.arange(1.0, q.shape[-3] + 1)[:, None, None] / 4
    return F.softmax(q @ k.mT * t, -1) @ v


def temperature_below(q, k, v):
    return F.softmax((q @ k.mT) / torch.sqrt(torch.tensor(float(q.shape[-1]))), -1) @ v


def by_hand_with_max(q, k, v):
    s = q @ k.mT * 0.3
    e = (s - s.max(-1).values.unsqueeze(-1)).exp()
    return (e / e.sum(-1).unsqueeze(-1)) @ v


def without_maximum(q, k, v):
    e = torch.exp(q @ k.mT * 0.3)
    return (e / e.sum(-1, keepdim=True)) @ v


FORMS = [
    *(by_hand_with_max, without_maximum),
    *(matmul, scale_first, softmax_in_float, by_hand, einsum, dropout_of_zero, keys_first, keys_first_einsum),
    *(baddbmm, own_maximum, own_maximum_of_amax, temperature_of_heads, temperature_below),
]


def sizes(generator):
    b, h, s, t, d, e = (int(torch.randint(low, 9, (), generator=generator)) for low in (1, 2, 2, 2, 3, 2))
    return b, h, s, t, d, e


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", FORMS)
def test_written_out(form, dynamic, agrees, generator):
    b, h, s, t, d, e = sizes(generator)
    shapes = (b, h, s, d), (b, h, t, d), (b, h, t, e)
    _, report = agrees(form, *(torch.randn(n, generator=generator) for n in shapes), dynamic=dynamic)
    assert len(report.replaced("attention")) == 1, report
    assert not report.replaced("gemm"), report


@pytest.mark.parametrize("empty", range(4))
def test_no_elements(empty, agrees, caplog):
    n = [2, 3, 5, 7]
    n[empty] = 0
    q, k, v = torch.randn(*n[:3], 8), *(torch.randn(*n[:2], n[3], 8) for _ in "kv")
    for form in (matmul, einsum, keys_first):
        agrees(form, q, k, v)
    assert "failed" not in caplog.text


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank, agrees, generator):
    lead = (2, 3, 2)[: rank - 2]
    q, k, v = (torch.randn(*lead, *n, generator=generator) for n in ((5, 4), (7, 4), (7, 6)))
    _, report = agrees(matmul, q, k, v)
    assert len(report.replaced("attention")) == 1, report


@pytest.mark.parametrize("dynamic", [None, True])
def test_shared_heads_are_not_expanded(dynamic, agrees, generator):
    def grouped(q, k, v):
        b, h, t, _ = k.shape
        n = q.shape[1] // h
        k, v = (x[:, :, None].expand(b, h, n, t, x.shape[-1]).reshape(b, h * n, t, x.shape[-1]) for x in (k, v))
        return softmax_in_float(q, k, v)

    q, k, v = (torch.randn(n, generator=generator) for n in ((2, 6, 5, 8), (2, 2, 9, 8), (2, 2, 9, 4)))
    _, report = agrees(grouped, q, k, v, dynamic=dynamic)
    (row,) = report.replaced("attention")
    if dynamic is None:
        assert "k [2, 2, 9, 8], v [2, 2, 9, 4]" in row.what


@pytest.mark.parametrize("dynamic", [None, True])
def test_captured_shared_heads(dynamic, agrees, generator):
    def repeat_kv(q, k, v):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def expanded(q, k, v):
        b, h, t, d = k.shape
        k, v = (x[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(n, generator=generator) for n in ((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)))
    agrees(repeat_kv, q, k, v, dynamic=dynamic)
    _, report = agrees(expanded, q, k, v, dynamic=dynamic)
    (row,) = report.replaced("attention")
    assert "causal" in row.what
    assert dynamic or "k [2, 2, 5, 8]" in row.what


@pytest.mark.parametrize("dynamic", [None, True])
def test_heads_shared_in_turn(dynamic, agrees, generator):
    """`k.repeat(1, n, 1, 1)`: head h reads keys h % heads, not h // n; queries are permuted instead."""

    def in_turn(q, k, v):
        return matmul(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))

    def in_groups(q, k, v):
        k, v = (t[:, :, None].repeat(1, 1, 3, 1, 1).flatten(1, 2) for t in (k, v))
        return matmul(q, k, v)

    q, k, v = (torch.randn(n, generator=generator) for n in ((3, 6, 5, 8), (3, 2, 9, 8), (3, 2, 9, 4)))
    for form in (in_turn, in_groups):
        _, report = agrees(form, q, k, v, dynamic=dynamic)
        (row,) = report.replaced("attention")
        assert dynamic or "k [3, 2, 9, 8], v [3, 2, 9, 4]" in row.what


def test_masks(agrees, generator):
    q, k, v = (torch.randn(2, 3, 6, 8, generator=generator) for _ in range(3))
    keep = torch.rand(2, 1, 6, 6, generator=generator) < 0.7
    keep[..., 0] = True
    bias = torch.randn(3, 6, 6, generator=generator)

    def additive(q, k, v):
        return torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v

    def filled(q, k, v):
        return torch.softmax((q @ k.mT * 0.3).masked_fill(~keep, -math.inf), -1) @ v

    def filled_low(q, k, v):
        return torch.softmax((q @ k.mT * 0.3).masked_fill(~keep, torch.finfo(q.dtype).min), -1) @ v

    def filled_then_scaled(q, k, v):
        return torch.softmax((q @ k.mT).masked_fill(~keep, -math.inf) * 0.3, -1) @ v

    def both(q, k, v):
        return torch.softmax((q @ k.mT * 0.3 + bias).masked_fill(~keep, -math.inf), -1) @ v

    def added_then_scaled(q, k, v):
        return torch.softmax((q @ k.mT - bias) * 0.3, -1) @ v

    def baddbmm(q, k, v):
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        s = torch.baddbmm(bias.repeat(2, 1, 1), q, k.mT, beta=0.5, alpha=0.3)
        return (torch.softmax(s.view(2, 3, 6, 6).masked_fill(~keep, -math.inf), -1) @ v.view(2, 3, 6, 8)).mean(-1)

    def before_the_view(q, k, v):
        s = (q.flatten(0, 1) @ k.flatten(0, 1).mT).unflatten(0, (2, 3)) + bias
        s = s.flatten(0, 1).masked_fill(~keep.expand(2, 3, 6, 6).flatten(0, 1), -math.inf)
        return torch.softmax(s, -1) @ v.flatten(0, 1)

    def transposed(q, k, v):
        return torch.softmax((k @ q.mT + bias.mT).masked_fill(~keep.mT, -math.inf), -2).mT @ v

    forms = (additive, filled, filled_low, filled_then_scaled, both)
    for form in (*forms, added_then_scaled, baddbmm, before_the_view, transposed):
        _, report = agrees(form, q, k, v)
        (row,) = report.replaced("attention")
        assert row.what.endswith("mask)"), row


def gpt_oss(q, k, v, sinks, mask):
    """As transformers has it; half of the heads share keys."""
    b, h, s, _ = q.shape
    k, v = (t[:, :, None].expand(b, t.shape[1], 2, *t.shape[2:]).reshape(b, h, *t.shape[2:]) for t in (k, v))
    scores = (q @ k.mT) * 0.3 + mask
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1] @ v


def probabilities_in_float(q, k, v, sinks, mask):
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.cat([q @ k.mT, sinks[:, None, None].expand(*q.shape[:3], 1)], -1)
    return F.softmax(scores.float(), -1).to(q.dtype)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", [gpt_oss, probabilities_in_float])
def test_sinks(form, dynamic, agrees, generator):
    q, k, v = (torch.randn(2, h, s, 8, generator=generator) for h, s in ((4, 5), (2, 7), (2, 7)))
    sinks, mask = torch.randn(4, generator=generator), torch.zeros(5, 7)
    mask = mask.masked_fill(torch.ones(5, 7, dtype=torch.bool).tril(2).logical_not(), torch.finfo(torch.float32).min)
    mask[3] = torch.finfo(torch.float32).min  # all is given to the sink
    _, report = agrees(form, q, k, v, sinks, mask, dynamic=dynamic)
    (row,) = report.select("attention")
    assert row.status == "replaced" and row.what.endswith("with sinks") and not report.replaced("gemm"), report
    assert dynamic or "k [2, 2, 7, 8]" in row.what


def test_sinks_in_training_are_near(light, generator):
    q, k, v = (torch.randn(2, h, 5, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    sinks, mask = torch.randn(4, generator=generator).requires_grad_(), torch.zeros(5, 5)
    got, report = light(gpt_oss, q, k, v, sinks, mask)
    (row,) = report.select("attention")
    assert row.status == "missed" and "more than once" in row.reason
    torch.testing.assert_close(got, gpt_oss(q, k, v, sinks, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_bias_made_of_products(dynamic, agrees, generator):
    """Relative positions in two dimensions (SAM, ViTDet): products of the queries, each with a part of the keys."""

    def whole(q, k, v, rows, columns):
        b, n, _ = q.shape
        height, width = rows.shape[0], columns.shape[0]
        image = q.reshape(b, height, width, -1)
        bias = torch.einsum("bhwc,hkc->bhwk", image, rows)[..., None]
        bias = bias + torch.einsum("bhwc,wkc->bhwk", image, columns)[..., None, :]
        return torch.softmax((q * 0.3) @ k.mT + bias.reshape(b, n, n), -1, dtype=torch.float32).to(q.dtype) @ v

    def in_parts(q, k, v, rows, columns):
        b, height, width = len(q), rows.shape[0], columns.shape[0]
        image = q.reshape(b, height, width, -1)
        scores = ((q * 0.3) @ k.mT).view(b, height, width, height, width)
        scores = scores + torch.einsum("bhwc,hkc->bhwk", image, rows)[..., None]
        scores = scores + torch.einsum("bhwc,wkc->bhwk", image, columns)[..., None, :]
        return scores.view(b, height * width, -1).softmax(-1) @ v

    q, k, v = (torch.randn(6, 4 * 5, 8, generator=generator) for _ in range(3))
    rows, columns = (torch.randn(n, n, 8, generator=generator) for n in (4, 5))
    for form in (whole, in_parts)[: 1 if dynamic else 2]:  # of symbolic sizes, only whole dimensions are told apart
        _, report = agrees(form, q, k, v, rows, columns, dynamic=dynamic)
        assert len(report.replaced("attention")) == 1 and not report.missed(), report


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda q, k, v: torch.softmax(torch.tan(q @ k.mT / 5) * 5, -1) @ v, "aten.tan()"),
        (lambda q, k, v: torch.softmax(q @ k.mT + 1e-3 * k.sum() + v.sum(), -1).tril() @ v, "between softmax"),
        (lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(k > 2, 0.0), -1) @ v, "does not hide"),
        (lambda q, k, v: (p := torch.softmax(q @ k.mT, -1)).mean() + p @ v, "more than once"),
        (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, "does not sum over the keys"),
        (lambda q, k, v: torch.softmax(torch.tanh(q @ k.mT) * 0.0, -1) @ v, "all scores are 0"),
    ],
)
def test_near_misses_say_why(form, reason, agrees, generator):
    q, k, v = (torch.randn(2, 3, 6, 6, generator=generator) for _ in range(3))
    _, report = agrees(form, q, k, v)
    assert not report.replaced("attention")
    assert any(reason in r.reason for r in report.missed("attention")), report


def test_low_precision_is_closer_to_the_truth(light, generator):
    q, k, v = (torch.randn(2, 3, 33, 32, generator=generator).bfloat16() for _ in range(3))
    with torch.no_grad():
        got, report = light(softmax_in_float, q, k, v)
    truth = softmax_in_float(*(t.double() for t in (q, k, v)))
    eager = softmax_in_float(q, k, v)
    assert len(report.replaced("attention")) == 1
    assert (got - truth).norm() <= 1.5 * (eager - truth).norm()
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("rounded", ["q and k", "all", "twice"])
def test_operands_that_were_rounded_are_read_so(rounded, light, generator):
    """Positions are often turned in float32: attention is of what was rounded, in the precision of its values."""
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator).bfloat16() for _ in range(3))

    def turned(x):
        return (x.float() * 0.5 + x.float().roll(1, -1).sin()).to(x.dtype)

    def f(q, k, v):
        q, k = turned(q), turned(k)
        if rounded == "all":
            v = turned(v)
        if rounded == "twice":
            q, v = q.float().to(v.dtype), v.float()
        weights = torch.softmax(torch.matmul(q, k.mT) * 0.3, -1, dtype=torch.float32).to(v.dtype)
        return torch.matmul(weights, v)

    with torch.no_grad():
        got, report = light(f, q, k, v, families=("attention", "softmax"))
    (row,) = report.replaced("attention")
    assert row.cost.dtype == torch.bfloat16 and not report.missed(), report
    assert (got - f(q, k, v)).norm() <= 0.01 * got.norm()
