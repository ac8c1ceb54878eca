# SPDX-License-Identifier: Apache-2.0
"""Calls that hide several operations are written out, with the numbers that they had."""

import pytest
import torch
import torch.nn.functional as F

WIDTH, HEADS = 32, 4


def layer(kind, seed_training=False, **options):
    module = kind(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, **options)
    with torch.no_grad():
        for p in module.parameters():  # biases start at zero, norm weights at one
            p.add_(torch.randn_like(p) * 0.1)
    return module.train(seed_training)


def counts(report):
    return tuple(len(report.replaced(family)) for family in ("attention", "gemm", "norm"))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}])
def test_encoder_layer(options, dynamic, agrees):
    """In inference it is one fused call of torch's; none of its parts may be lost to that."""
    if dynamic and torch.__version__.startswith("2.11."):
        pytest.skip("Dynamo passes no graph of it")
    module = layer(torch.nn.TransformerEncoderLayer, **options)
    _, report = agrees(module, torch.randn(3, 7, WIDTH), dynamic=dynamic)
    assert counts(report) == (1, 4, 2), report
    assert not report.missed(), report


@pytest.mark.parametrize("kind", ["padding", "square", "both"])
def test_masks_of_the_encoder_layer(kind, agrees):
    module = layer(torch.nn.TransformerEncoderLayer)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    square = torch.ones(7, 7, dtype=torch.bool).triu(2)

    def f(x):
        masks = {"src_key_padding_mask": padding} if kind != "square" else {}
        return module(x, src_mask=square if kind != "padding" else None, **masks)

    _, report = agrees(f, torch.randn(3, 7, WIDTH))
    assert counts(report) == (1, 4, 2), report


@pytest.mark.parametrize("training", [False, True])
def test_decoder_layer(training, agrees):
    module = layer(torch.nn.TransformerDecoderLayer, training)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    _, report = agrees(
        lambda x, y: module(x, y, tgt_mask=mask, tgt_is_causal=True), torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    )
    assert counts(report) == (2, 7, 3), report
    assert "causal" in report.replaced("attention")[0].what


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention(batch_first, dynamic, agrees):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).eval()

    def f(x):
        length = x.shape[1 if batch_first else 0]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        return module(x, x, x, need_weights=False, attn_mask=hidden)[0]

    _, report = agrees(f, torch.randn(3, 7, WIDTH), dynamic=dynamic)
    assert counts(report) == (1, 2, 0), report
    assert report.replaced("attention")[0].what.endswith("causal)")


def test_multi_head_attention_in_training(light):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(2, 5, WIDTH)
    got, report = light(lambda x: module(x, x, x, need_weights=False)[0], x)
    got.square().sum().backward()
    grads = [p.grad for p in module.parameters()]
    assert len(report.replaced("attention")) == 1
    module.zero_grad()
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    for grad, p in zip(grads, module.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-4)


def test_weights_that_are_returned_stay(agrees):
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    _, report = agrees(lambda x: module(x, x, x), torch.randn(2, 5, WIDTH))
    assert "more than once" in report.missed("attention")[0].reason


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 4)])
def test_attention_of_any_rank(lead, dynamic, agrees, generator):
    q, k, v = (torch.randn(*lead, *n, generator=generator) for n in ((5, 8), (7, 8), (7, 6)))
    bias = torch.randn(*lead, 5, 7, generator=generator)
    for f in (
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b),
    ):
        _, report = agrees(f, q, k, v, bias, dynamic=dynamic)
        assert len(report.replaced("attention")) == 1
        assert not report.missed(), report


@pytest.mark.parametrize("sizes", [((3, 4), (1, 4), (1, 4)), ((3, 4), (3, 1), (3, 4)), ((3, 4), (3, 4), (1, 1))])
def test_attention_whose_batch_or_heads_broadcast(sizes, agrees, generator):
    q, k, v = (torch.randn(*lead, 5, 8, generator=generator) for lead in sizes)
    _, report = agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
    assert len(report.replaced("attention")) == 1
    assert not report.missed(), report
