# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

import torch_tile  # noqa: F401

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
def test_empty(shape):
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
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=f"tile.fused_norm: {message}"):
        op(*arguments, "", "", False, 1e-6, False, torch.float32)


@pytest.mark.parametrize("texts", [("ret acc1", ""), ("", "v0=add(acc0,x0);ret v0")])
def test_refuses_texts_that_read_what_is_not_there(texts):
    with pytest.raises(ValueError, match=r"epilogue: .* is (1|0)"):
        op(torch.zeros(2, 4), [], "", *texts, False, 1e-6, False, torch.float32)
