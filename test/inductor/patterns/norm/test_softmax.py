# SPDX-License-Identifier: Apache-2.0
"""Softmax by hand is softmax."""

import pytest
import torch


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_by_hand(dim, agrees, generator):
    def f(x):
        e = torch.exp(x - x.amax(dim, keepdim=True))
        return e / e.sum(dim, keepdim=True)

    x = torch.randn(5, 7, 6, generator=generator)
    _, report = agrees(f, x)
    assert [r.status for r in report.select("softmax")] == ["replaced"]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: torch.exp(x - x.amax(-1, keepdim=True)) / torch.exp(x).sum(-1, keepdim=True),
        lambda x: (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True) + e,
        lambda x: (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.flip(-1).sum(-1, keepdim=True).cos(),
        # sums along another dimension
        lambda x: (e := torch.exp(x)) / e.sum(-1),  # a square x: divides columns
        lambda x: (e := torch.exp(x)) / e.sum(0),  # right only for a tensor of rank 2
        lambda x: (e := torch.exp(x)) / e.sum(-1, keepdim=True).expand(6, 6).mT,
    ],
)
def test_look_alikes_are_left(form, agrees, generator):
    _, report = agrees(form, torch.randn(6, 6, generator=generator))
    assert not report.rows


@pytest.mark.parametrize(
    "form",
    [
        lambda x: (e := torch.exp(x)) / e.sum(-1, keepdim=True),
        lambda x: (e := torch.exp(x - x.max(-1).values[..., None])) / e.sum(-1).unsqueeze(-1),
        lambda x: (e := torch.exp(x - x.max(0, keepdim=True).values)) / e.sum(0, keepdim=True),
        lambda x: (e := torch.exp(x - x.amax(0, keepdim=True))) / e.sum(-1, keepdim=True),  # of what is shifted
    ],
)
def test_with_any_maximum_or_none(form, agrees, generator):
    _, report = agrees(form, torch.randn(6, 6, generator=generator))
    assert [r.status for r in report.select("softmax")] == ["replaced"]


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.softmax(-1),
        lambda x: (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True),
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_tensors_of_no_dimensions(form, agrees, generator, caplog):
    _, report = agrees(form, torch.randn((), generator=generator))
    assert not report.replaced() and "failed" not in caplog.text


def test_narrow_input_wide_arithmetic(light, generator):
    x = torch.randn(5, 33, generator=generator).bfloat16()
    f = lambda x: torch.softmax(x, -1, dtype=torch.float32)  # noqa: E731
    with torch.no_grad():
        got, report = light(f, x)
    torch.testing.assert_close(got, f(x), rtol=1e-5, atol=1e-6)
    assert len(report.replaced("softmax")) == 1
