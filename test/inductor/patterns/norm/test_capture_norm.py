# SPDX-License-Identifier: Apache-2.0
"""Training: a norm written in Python is one op with a gradient, unless something else needs its parts."""

import pytest
import torch


def llama(x, w):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def gemma(x, w):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).type_as(x)


def t5(x, w):
    """Only the mean is of the widened input."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + 1e-6)
    if w.dtype in (torch.float16, torch.bfloat16):
        h = h.to(w.dtype)
    return w * h


def bare(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [llama, gemma, t5, bare])
def test_forward_and_gradients(form, dtype, light, generator):
    x, w = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in ((5, 6, 24), (24,)))
    got, report = light(form, x, w)
    assert [(r.status, r.graph) for r in report.select("norm")] == [("replaced", "forward")], report
    truth = form(*(t.detach().double().requires_grad_() for t in (x, w)))
    eager = form(x, w)
    assert got.dtype == eager.dtype
    assert (got - truth).norm() <= 1.5 * (eager - truth).norm() + 1e-5
    upstream = torch.randn(got.shape, generator=generator).to(dtype)
    ours, theirs = (torch.autograd.grad(y, (x, w), upstream, allow_unused=True) for y in (got, eager))
    for a, b in zip(ours, theirs, strict=True):
        if b is not None:
            assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()


def shared(x, w):
    h = x.float()
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (h * r) + r


def beside_a_mutation(x, w):
    count = torch.zeros(())
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    count.add_(1)
    return w * (x * r) + count


@pytest.mark.parametrize("form", [shared, beside_a_mutation])
def test_what_is_not_closed_is_left(form, light, generator):
    x, w = (torch.randn(s, generator=generator).requires_grad_() for s in ((5, 6, 24), (24,)))
    got, report = light(form, x, w)
    assert not report.replaced("norm")
    torch.testing.assert_close(got, form(x, w), rtol=1e-5, atol=1e-5)
