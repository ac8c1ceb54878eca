# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

import torch_tile.ops as ops


@pytest.mark.parametrize("n", [1, 7, 64, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_are_torchs(n, seed, maker):
    t = maker(seed, torch.float64)
    x, r, w, b = t(3, 4, n), t(3, 4, n), t(n), t(n)
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5), F.rms_norm(x, (n,), w, 1e-5))
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5, weight_offset=1.0), F.rms_norm(x, (n,), 1 + w, 1e-5))
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5, "silu"), F.silu(F.rms_norm(x, (n,), w, 1e-5)))
    y, total = ops.add_rms_norm(x, r, w, 1e-5)
    torch.testing.assert_close(total, x + r, rtol=0, atol=0)
    torch.testing.assert_close(y, F.rms_norm(x + r, (n,), w, 1e-5))
    torch.testing.assert_close(ops.layer_norm(x, w, b, 1e-3), F.layer_norm(x, (n,), w, b, 1e-3))


def test_layer_norm_keeps_its_digits_far_from_zero(maker):
    """A single-pass variance would lose them all here."""
    x = maker(1, torch.float32)(5, 300) + 1e3
    torch.testing.assert_close(ops.layer_norm(x).double(), F.layer_norm(x.double(), (300,)), rtol=1e-3, atol=1e-3)


def test_gradients_of_the_sum_flow_both_ways(maker):
    t = maker(2, torch.float64, True)
    x, r = t(3, 8), t(3, 8)
    y, total = ops.add_rms_norm(x, r)
    (grad,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    assert torch.equal(grad, torch.ones_like(x))
    both = torch.autograd.grad((y * total).sum(), [x, r])
    want = torch.autograd.grad((F.rms_norm(x + r, (8,), None, 1e-6) * (x + r)).sum(), [x, r])
    torch.testing.assert_close(both, want)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (0,)])
def test_empty(shape, maker):
    t = maker(3, torch.float32, True)
    x, w = t(*shape), t(shape[-1])
    for out in (ops.rms_norm(x, w), ops.layer_norm(x, w, w), *ops.add_rms_norm(x, x, w)):
        assert out.shape == shape
    (ops.rms_norm(x, w).sum() + ops.layer_norm(x, w).sum()).backward()
    assert x.grad.shape == shape and not w.grad.isnan().any()


def errors():
    x, w = torch.zeros(3, 7), torch.zeros(7)
    return [
        (ops.rms_norm, (x.int(),), TypeError, "rms_norm: x has dtype torch.int32"),
        (ops.rms_norm, (x.sum(),), RuntimeError, "rms_norm: x has 0 dimensions"),
        (ops.rms_norm, (x, w[:6]), RuntimeError, "rms_norm: weight has size 6 in dimension 0 .* expected 7, x's last"),
        (ops.rms_norm, (x, x), RuntimeError, "rms_norm: weight has 2 dimensions"),
        (ops.rms_norm, (x, w.long()), TypeError, "rms_norm: weight has dtype torch.int64"),
        (ops.rms_norm, (x, w, 1e-6, "exp"), ValueError, "rms_norm: activation is 'exp'"),
        (ops.add_rms_norm, (x, x[:2]), RuntimeError, "add_rms_norm: residual has size 2 in dimension 0 .* as x"),
        (ops.add_rms_norm, (x, w), RuntimeError, "add_rms_norm: residual has 1 dimensions"),
        (ops.add_rms_norm, (x, x.half()), TypeError, "add_rms_norm: residual has dtype torch.float16; expected"),
        (ops.layer_norm, (x, w[:6]), RuntimeError, "layer_norm: weight has size 6"),
        (ops.layer_norm, (x, w, w[:6]), RuntimeError, "layer_norm: bias has size 6"),
        (ops.layer_norm, (x > 0,), TypeError, "layer_norm: x has dtype torch.bool"),
    ]


@pytest.mark.parametrize(("op", "args", "error", "message"), errors())
def test_refuses(op, args, error, message):
    with pytest.raises(error, match=f"tile.{message}"):
        op(*args)
