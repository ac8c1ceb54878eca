# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
import torch.nn.functional as F

import torch_tile  # noqa: F401
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


GATE = "v0=mul(x2,x3);v1=add(acc0,v0);ret v1"
MODULATE = "v0=add(x0,1.0);v1=mul(acc0,v0);v2=add(v1,x1);ret v2"
op = torch.ops.tile.fused_norm.default


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_gradients_are_eagers(centred, maker):
    t = maker(5, torch.float64, True)
    x, y, scale, shift, gate = t(2, 3, 8), t(2, 3, 8), t(2, 1, 8), t(2, 1, 8), t(2, 1, 8)
    got = op(x, [scale, shift, gate, y], "gggt", GATE, MODULATE, centred, 1e-3, True, torch.float64)
    total = x + gate * y
    norm = F.layer_norm(total, (8,), eps=1e-3) if centred else F.rms_norm(total, (8,), eps=1e-3)
    want = norm * (1 + scale) + shift, total
    torch.testing.assert_close(got, want)
    inputs = [x, y, scale, shift, gate]
    some = torch.randn(3, *x.shape, dtype=x.dtype)
    grads = [torch.autograd.grad([a, b], inputs, [some[0], some[1]], retain_graph=True) for a, b in (got, want)]
    torch.testing.assert_close(*grads)
    for a, b in zip(got, want, strict=True):
        alone = [
            torch.autograd.grad(o, inputs, some[2], allow_unused=True, materialize_grads=True, retain_graph=True)
            for o in (a, b)
        ]
        torch.testing.assert_close(*alone)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_empty_fused_norm(shape):
    x = torch.zeros(shape)
    y, total = op(x, [x], "t", "v0=add(acc0,x0);ret v0", "", True, 1e-5, True, torch.float16)
    assert y.shape == total.shape == shape and y.dtype == torch.float16


def refusals():
    x, w = torch.zeros(2, 3, 7), torch.zeros(7)
    runs, other = torch.zeros(2, 1, 7), torch.zeros(1, 1, 7)
    return [
        ((x.int(), [], ""), TypeError, "x has dtype torch.int32"),
        ((x, [w], ""), ValueError, "kinds is '' for 1 aux operands"),
        ((x, [w], "q"), ValueError, "kinds is 'q'"),
        ((x, [w], "t"), RuntimeError, r"aux\[0\] has 1 dimensions .* as x"),
        ((x, [w[:6]], "r"), RuntimeError, r"aux\[0\] has size 6 .* expected 7"),
        ((x, [w], "s"), RuntimeError, r"aux\[0\] has shape \[7\]; by kind 's'"),
        ((x, [w], "g"), RuntimeError, r"aux\[0\] has 1 dimensions"),
        (
            (x, [torch.zeros(1, 3, 7)], "g"),
            RuntimeError,
            r"aux\[0\] has size 1 .* expected 2, by kind 'g'",
        ),
        ((x, [runs, other], "gg"), RuntimeError, "an aux of kind 'g' has size 1 in dimension 0 .* as the first"),
    ]


@pytest.mark.parametrize(("arguments", "error", "message"), refusals())
def test_refuses_fused_norm(arguments, error, message):
    with pytest.raises(error, match=f"tile.fused_norm: {message}"):
        op(*arguments, "", "", False, 1e-6, False, torch.float32)


@pytest.mark.parametrize(
    ("texts", "said"), [(("ret acc1", ""), "prologue: .* is 1"), (("", "v0=add(acc0,x0);ret v0"), "epilogue: .* is 0")]
)
def test_refuses_texts_that_read_what_is_not_there(texts, said):
    with pytest.raises(ValueError, match=said):
        op(torch.zeros(2, 4), [], "", *texts, False, 1e-6, False, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 33), (2, 3, 7), (3, 0, 4)])
def test_is_torchs(shape, dtype, maker):
    x = maker(1, dtype)(*shape) * 5
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for dim in range(-len(shape), len(shape)):
        want = torch.softmax(x.double(), dim)
        torch.testing.assert_close(ops.softmax(x, dim).double(), want, rtol=tolerance, atol=tolerance / 10)
        wide = ops.softmax(x, dim, torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.double(), want, rtol=1e-4, atol=1e-6)


def test_refuses_softmax():
    x = torch.zeros(3, 4)
    with pytest.raises(IndexError, match=r"tile.softmax: dim is 2; expected -2 to 1 for shape \[3, 4\]"):
        ops.softmax(x, 2)
    with pytest.raises(IndexError, match="dim is -3"):
        ops.softmax(x, -3)
    with pytest.raises(TypeError, match=r"tile\.softmax: x has dtype torch.int64"):
        ops.softmax(x.long())
    with pytest.raises(TypeError, match=r"tile\.softmax: dtype is torch.int32"):
        ops.softmax(x, 0, torch.int32)
