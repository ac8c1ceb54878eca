# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from torch_tile.kernels.epilogue.autodiff import slopes, vjp
from torch_tile.kernels.epilogue.canonicalize import canonical
from torch_tile.kernels.epilogue.program import ARITY, evaluate, of_layer, soft_cap


@pytest.mark.parametrize("name", sorted(ARITY))
def test_every_derivative_is_autograds(name, one_function):
    text, values = one_function(name, 2)
    values = [v.requires_grad_() for v in values]
    used = values[: ARITY[name]]
    out = evaluate(text, values[:1], values[1:])
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, used, grad, allow_unused=True) if out.requires_grad else (None,) * len(used)
    names = ["acc0", "x0", "x1"][: len(used)]
    got = vjp(text, dict(zip(["acc0", "x0", "x1"], values, strict=True)), grad)
    for key, expected in zip(names, want, strict=True):
        torch.testing.assert_close(
            got.get(key, torch.zeros_like(grad)), torch.zeros_like(grad) if expected is None else expected
        )


def test_derivative_of_the_exponent_with_a_zero_or_negative_base_is_finite():
    base = torch.tensor([[0.0, -1.0, 2.0]], dtype=torch.float64)
    got = vjp(
        "v=pow(acc0,x0);ret v", {"acc0": base, "x0": torch.full((1, 3), 2.0, dtype=torch.float64)}, torch.ones(1, 3)
    )
    assert got["x0"].isfinite().all() and got["acc0"].tolist() == [[0.0, -2.0, 4.0]]


def test_vjp_recomputes_only_what_a_derivative_reads():
    asked = []

    def product(name):
        def make():
            asked.append(name)
            return torch.ones(2, 3)

        return make

    inputs = {"acc0": product("acc0"), "x0": product("x0")}
    grads = vjp(of_layer("none", bias=True, residual=False), inputs, torch.ones(2, 3))
    assert set(grads) == {"acc0", "x0"} and asked == []
    vjp(of_layer("silu", bias=True, residual=False), inputs, torch.ones(2, 3))
    assert sorted(asked) == ["acc0", "x0"]


@pytest.mark.parametrize(
    "text",
    [
        "a=silu(acc0);b=mul(a,x0);c=square(b);d=add(c,a);e=div(d,3.0);ret e",  # values and gradients meet again
        "a=mul(acc0,acc0);b=mul(a,acc0);c=sub(b,acc0);d=neg(c);e=mul(d,x0);f=sub(x1,e);ret f",
        "a=gt(acc0,x0);b=exp(acc0);c=where(a,b,x1);d=sigmoid(c);e=max(d,x0);ret e",
        "a=gelu(acc0);b=gelu_tanh(a);c=erf(b);d=pow(x0,2.0);e=mul(c,d);f=div(e,acc0);ret f",
        "a=sub(2.0,acc0);b=div(1.0,a);c=mul(b,-1.0);d=min(c,0.25);ret d",
    ],
)
def test_programs(text, one_function):
    values = [v.requires_grad_() for v in one_function("add", 3)[1]]
    out = evaluate(text, values[:1], values[1:])
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, values, grad, allow_unused=True)
    got = vjp(text, dict(zip(["acc0", "x0", "x1"], values, strict=True)), grad)
    for key, expected in zip(["acc0", "x0", "x1"], want, strict=True):
        torch.testing.assert_close(
            got.get(key, torch.zeros_like(grad)), torch.zeros_like(grad) if expected is None else expected
        )


def test_slopes_are_texts():
    cap = slopes(canonical(soft_cap(50.0)))
    assert str(cap.program).endswith("v1=tanh(v0);v2=mul(v1,50.0);d3=square(v1);d4=sub(1.0,d3);ret v2")
    assert cap.slopes == {"acc0": "d4"}
    assert slopes("").slopes == {"acc0": 1.0}
    assert slopes("v=mul(acc0,-2.0);ret v").slopes == {"acc0": -2.0}
    alibi = slopes("v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2")
    assert alibi.slopes["acc0"] == 1.0 and alibi.slopes["x0"] == "v0"
    assert "x0" not in slopes("v=floor(x0);w=add(acc0,v);ret w").slopes


def test_only_what_is_asked_for_is_computed():
    both = slopes("v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2")
    assert str(both.only("v2", "acc0").program) == "v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2"
    assert both.only("v2", "acc0").slopes == {"acc0": 1.0}
    capped = slopes(canonical(soft_cap(2.0)))
    assert len(capped.only("v1").program.statements) == 2 and not capped.only("v1").slopes


def test_what_is_hidden_needs_no_slope():
    text = "c=eq(x0,x1);v=tanh(acc0);w=where(c,v,-inf);ret w"
    assert "where" not in str(slopes(text, hides=True).only("v", "acc0").program)
    assert "where" not in str(slopes("v=tanh(acc0);ret v").program)
    assert slopes("w=where(x0,acc0,-inf);ret w", hides=True).slopes == {"acc0": 1.0}
    assert slopes("w=where(x0,acc0,-inf);ret w").slopes != {"acc0": 1.0}
    # Behind a cap -inf is a number like others.
    assert slopes("w=where(x0,acc0,-inf);v=tanh(w);ret v", hides=True).slopes["acc0"] != 1.0
    assert slopes("w=where(x0,acc0,-1e9);ret w", hides=True).slopes["acc0"] != 1.0


@pytest.mark.parametrize(
    "text, infinite",
    [
        (soft_cap(5.0), False),
        ("v=add(acc0,x0);ret v", False),
        ("v=mul(acc0,x0);ret v", True),  # x0 may be
        ("v=gt(x0,0.0);w=where(v,acc0,1.0);ret w", False),
        ("v=log(acc0);ret v", True),
        ("v=div(acc0,x0);ret v", True),
        ("v=mul(acc0,i3);ret v", False),
    ],
)
def test_slopes_that_may_be_infinite(text, infinite):
    sloped = slopes(canonical(text))
    assert sloped.may_be_infinite(sloped.slopes["acc0"]) == infinite
    assert math.inf not in sloped.slopes.values()


@pytest.mark.parametrize(
    "text",
    [
        "a=exp(acc0);b=log1p(a);c=gt(acc0,20.0);d=where(c,acc0,b);ret d",  # softplus, mish, elu and selu in parts
        "a=exp(acc0);b=log1p(a);c=gt(acc0,20.0);d=where(c,acc0,b);e=tanh(d);f=mul(acc0,e);ret f",
        "a=gt(acc0,0.0);b=expm1(acc0);c=mul(b,0.5);d=where(a,acc0,c);ret d",
        "a=gt(acc0,0.0);b=mul(acc0,1.05);c=expm1(acc0);d=mul(c,1.75);e=where(a,b,d);ret e",
        "a=gt(acc0,0.0);b=log(acc0);c=lt(acc0,9.0);d=where(c,b,2.0);e=where(a,d,0.0);f=square(e);ret f",
        "a=gt(acc0,0.0);b=sqrt(acc0);c=square(b);d=add(b,c);e=where(a,d,acc0);ret e",
    ],
)
def test_the_branch_that_is_not_taken_adds_no_nan(text):
    points = [-1e30, -1000.0, -3.0, -0.5, 0.5, 3.0, 1000.0, 1e30]
    values = torch.tensor([points], dtype=torch.float64)
    got = vjp(text, {"acc0": values}, torch.ones_like(values))["acc0"]
    step = values.abs() * 1e-6
    want = (evaluate(text, [values + step], []) - evaluate(text, [values - step], [])) / (2 * step)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
