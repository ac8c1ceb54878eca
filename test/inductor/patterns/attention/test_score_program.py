# SPDX-License-Identifier: Apache-2.0
"""Modifications of scores, as models write them, become texts of the kernel; the numbers are eager's."""

import math

import pytest
import torch
import torch.nn.functional as F

B, H, SQ, SK, D = 2, 4, 7, 9, 8


def positions():
    return torch.arange(SQ)[:, None] + (SK - SQ), torch.arange(SK)[None]


def attend(s, v):
    return torch.softmax(s, -1) @ v


def soft_cap(q, k, v):
    return attend(torch.tanh(q @ k.mT * 0.3 / 5.0) * 5.0, v)


def soft_cap_and_window(q, k, v):
    i, j = positions()
    s = torch.tanh(q @ k.mT / math.sqrt(D) / 5.0) * 5.0
    return attend(s + torch.zeros(SQ, SK).masked_fill((j > i) | (j <= i - 3), -math.inf), v)


def soft_cap_of_merged_heads(q, k, v):
    s = torch.baddbmm(torch.zeros(1, 1, SK), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.4)
    s = (s.view(B, H, SQ, SK) / 3).tanh() * 3
    return torch.bmm(torch.softmax(s.flatten(0, 1), -1), v.flatten(0, 1)).view(B, H, SQ, D)


def gemma_in_low_precision(q, k, v):
    s = q.bfloat16() @ k.bfloat16().mT * 0.3
    s = (s / 5.0).tanh() * 5.0
    return torch.softmax(s, -1, dtype=torch.float32).bfloat16() @ v.bfloat16()


def masked_before_the_cap(q, k, v):
    i, j = positions()
    s = (q @ k.mT * 0.3).masked_fill(j > i, -4.0)
    return attend(torch.tanh(s), v)


def alibi(q, k, v):
    i, j = positions()
    slopes = 2.0 ** -torch.arange(1, H + 1)
    s = q @ k.mT * 0.3 + slopes[:, None, None] * (j - i)
    return attend(s.masked_fill(j > i, -math.inf), v)


def alibi_of_a_parameter(q, k, v, slopes):
    i, j = positions()
    bias = -(i - j).abs().float() * slopes[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def bias_and_temperature(q, k, v, bias, slopes):
    return attend(torch.tanh((q @ k.mT + bias) * slopes[:, None, None]) * 2.0, v)


def squared_relu(q, k, v):
    s = q @ k.mT * 0.2
    return attend(s * torch.relu(s) + s, v)


def chunks(q, k, v):
    i, j = positions()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i // 3 == j // 3) | (j == 0))


def whole_parts(q, k, v):
    i, j = positions()
    s = torch.floor_divide(q @ k.mT * 3, 0.7) - torch.remainder((i - j) * 0.5, 1.5)
    return attend(s - ((i - j).abs() // 2), v)


def extended(q, k, v, keep, rows):
    """BERT's mask: what is hidden is lost beside the number, what is not has lost nothing."""
    here = keep[:, None, None, :] * rows[:, None, :, None]
    s = q @ k.mT * 0.3 + (1.0 - here) * -1e9
    return attend(s, v)


def extended_otherwise(q, k, v, keep, rows):
    here = keep[:, None, None, :] * rows[:, None, :, None]
    s = (q @ k.mT + (here * 1e9 - 1e9)) / 3
    return attend(s, v)


def padding_and_prefix(q, k, v, keep):
    i, j = positions()
    mask = ((j <= i) | (j < 2)) & keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def product_of_masks(q, k, v, keep):
    i, j = positions()
    mask = (j <= i).float() * keep.float()[:, None, None]
    return attend((q @ k.mT).masked_fill(mask == 0, -math.inf), v)


SLOPES, KEEP = torch.rand(H) + 0.1, torch.arange(SK) < torch.tensor([[SK], [SK - 2]])
FORMS = {  # operands beside q, k, v; what stands in the text, what does not stand in the call
    soft_cap: ((), "v0=tanh(acc0);v1=mul(v0,5.0);ret v1", "mask"),
    soft_cap_and_window: ((), "causal, window 3, score v0=tanh(acc0);v1=mul(v0,5.0);ret v1", "mask"),
    soft_cap_of_merged_heads: ((), "score v0=tanh(acc0);v1=mul(v0,3.0)", "mask"),
    masked_before_the_cap: ((), "tanh", "mask"),
    alibi: ((), "causal, score", "mask"),
    alibi_of_a_parameter: ((SLOPES,), "abs", "mask"),
    bias_and_temperature: ((torch.randn(H, SQ, SK), SLOPES), "tanh", "mask"),
    squared_relu: ((), "relu(acc0)", "mask"),
    chunks: ((), "floor", "mask"),
    whole_parts: ((), "floor", "mask"),
    extended: ((KEEP.float(), KEEP[:, -SQ:].float()), "sub(1.0,", "mask"),
    extended_otherwise: ((KEEP.float(), KEEP[:, -SQ:].float()), "x0", "mask"),
    padding_and_prefix: ((KEEP,), "x0", "mask"),
    product_of_masks: ((KEEP,), "causal, score v0=where(x0,acc0,-inf);ret v0", "mask"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, agrees, generator):
    operands, there, absent = FORMS[form]
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (SQ, SK, SK))
    _, report = agrees(form, q, k, v, *operands)
    (row,) = report.replaced("attention")
    assert there in row.what and absent not in row.what, row


def test_in_low_precision(light, generator):
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (SQ, SK, SK))
    with torch.no_grad():
        got, report = light(gemma_in_low_precision, q, k, v)
    (row,) = report.replaced("attention")
    assert "tanh(acc0)" in row.what
    truth = soft_cap(*(x.bfloat16().double() for x in (q, k, v)))
    eager = gemma_in_low_precision(q, k, v)
    assert (got - truth).norm() <= 1.2 * (eager - truth).norm()


@pytest.mark.parametrize("form", [soft_cap, squared_relu])
def test_dynamic_sizes(form, agrees, generator):
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (SQ, SK, SK))
    _, report = agrees(form, q, k, v, dynamic=True)
    assert "score" in report.replaced("attention")[0].what


def test_positions_of_dynamic_sizes(agrees, generator):
    """The last query stands at the last key: the op's offset says so."""

    def f(q, k, v, slopes):
        i = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
        j = torch.arange(k.shape[2])[None]
        s = q @ k.mT + slopes[:, None, None] * (j - i)
        return attend(s.masked_fill(j > i, -math.inf), v)

    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (SQ, SK, SK))
    _, report = agrees(f, q, k, v, SLOPES, dynamic=True)
    (row,) = report.replaced("attention")
    assert "causal" in row.what and "i2" in row.what and "mask" not in row.what, row


def test_tensors_at_computed_places_stay_tensors(agrees, generator):
    """T5's relative positions: a table read at a bucket of the distance."""

    def f(q, k, v, table):
        i, j = positions()
        bias = table[(i - j).clamp(-3, 3) + 3].permute(2, 0, 1)
        return attend(q @ k.mT + bias, v)

    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (SQ, SK, SK))
    _, report = agrees(f, q, k, v, torch.randn(7, H, generator=generator))
    assert "mask" in report.replaced("attention")[0].what


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (F.softplus, "v0=softplus(acc0)"),
        (F.logsigmoid, "v0=logsigmoid(acc0)"),
        (F.elu, "v0=elu(acc0,1.0)"),
        (F.leaky_relu, "v0=leaky_relu(acc0,0.01)"),
        (torch.sign, "v0=sign(acc0)"),
        (torch.expm1, "v0=expm1(acc0)"),
        (lambda s: s.abs().log1p(), "v1=log1p(v0)"),
        (torch.floor, "v0=floor(acc0)"),
        (torch.square, "v0=square(acc0)"),
        (lambda s: s.clamp(-1, 0.5), "v1=min(v0,0.5)"),
    ],
)
def test_functions_of_the_table_are_words(f, word, agrees, generator):
    q, k, v = (torch.randn(1, 2, n, D, generator=generator) for n in (SQ, SK, SK))
    _, report = agrees(lambda q, k, v: attend(f(q @ k.mT), v), q, k, v)
    (row,) = report.replaced("attention")
    assert f"score {word}" in row.what or f";{word}" in row.what, row.what
