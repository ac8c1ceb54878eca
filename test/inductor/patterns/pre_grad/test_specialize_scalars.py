# SPDX-License-Identifier: Apache-2.0
"""Under dynamic=True floats of a model are symbols: those that kernels want are numbers again, with a guard."""

import logging

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor.compat import compiled_graphs
from torch_tile.inductor.report.rows import collect


def test_numbers_that_dynamic_shapes_made_symbols(backend, generator):
    """Those of a norm, and of a captured attention."""

    class Model(torch.nn.Module):
        eps, scale = 1e-6, 0.3

        def forward(self, x):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return F.scaled_dot_product_attention(x, x, x, scale=self.scale)

    model, x = Model(), torch.randn(2, 4, 7, 8, generator=generator)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for model.eps, model.scale in ((1e-6, 0.3), (0.5, 0.3), (0.5, 0.9), (1e-6, 0.3)):
            with collect() as report:
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
            assert {r.status for r in report.rows} <= {"replaced"}, report


class Scores(torch.nn.Module):
    """Attention written out, scaled and capped."""

    scale, cap, low = 0.3, 2.0, -1e9

    def forward(self, q, k, v):
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        scores = self.cap * torch.tanh(scores / self.cap)
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(hidden, self.low), dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(F.dropout(weights, 0.1, self.training), v)


@pytest.mark.parametrize("training", [False, True])
def test_numbers_in_scores(training, backend, generator):
    model = Scores().eval()
    q, k, v = (torch.randn(2, 4, 9, 16, generator=generator, requires_grad=training) for _ in range(3))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for model.scale, model.cap in ((0.3, 2.0), (0.3, 3.0), (0.1, 3.0)):
        with collect() as report, torch.set_grad_enabled(training):
            got, want = compiled(q, k, v), model(q, k, v)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        (row, *_) = report.replaced("attention")
        assert "causal" in row.what and "tanh" in row.what and not report.missed(), report
        if training:
            for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, want)), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_temperature_of_samples_stays_a_symbol(backend, generator):
    """It differs from call to call, and no product reads what its softmax makes."""

    class Sampler(torch.nn.Module):
        temperature = 0.7

        def forward(self, x, w):
            return torch.softmax(torch.matmul(x, w) / self.temperature, -1).cumsum(-1)

    model, x, w = Sampler(), *(torch.randn(s, generator=generator) for s in ((3, 16), (16, 40)))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    before = compiled_graphs()
    for model.temperature in (0.7, 0.8, 0.95):
        torch.testing.assert_close(compiled(x, w), model(x, w), rtol=1e-5, atol=1e-5)
    assert compiled_graphs() == before + 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_scale_that_is_read_from_a_tensor_is_no_number(captured, backend, generator, caplog):
    """It is known only when the graph runs."""

    def f(q, scale):
        if captured:
            return F.scaled_dot_product_attention(q, q, q, scale=scale.item())
        return torch.matmul(torch.softmax(torch.matmul(q, q.mT) * scale.item(), -1), q)

    q, scale = torch.randn(2, 4, 9, 16, generator=generator), torch.tensor(0.3)
    caplog.set_level(logging.ERROR, "torch_tile.inductor")
    with torch._dynamo.config.patch(capture_scalar_outputs=True), collect() as report, torch.no_grad():
        got = torch.compile(f, backend=backend)(q, scale)
    torch.testing.assert_close(got, f(q, scale), rtol=1e-5, atol=1e-5)
    assert not caplog.records and len(report.replaced("attention")) == (not captured), report
