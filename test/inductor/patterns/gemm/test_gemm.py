# SPDX-License-Identifier: Apache-2.0
"""Products become gemm kernels with the longest epilogue that follows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tile
from torch_tile.inductor.report.rows import collect


def only(report, family="gemm"):
    (row,) = report.replaced(family)
    return row.what


def linear(generator, k, n, bias=True):
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return layer


@pytest.mark.parametrize("dynamic", [None, True])
def test_einsum_is_a_linear_layer(dynamic, agrees, generator):
    """Around its product it permutes dimensions of size one."""
    x, *weights = (torch.randn(s, generator=generator) / 3 for s in ((3, 7, 16), (16, 40), (40, 16), (16, 40)))

    def f(x, gate, down, up):
        h = F.silu(torch.einsum("bsk,kn->bsn", x, gate)) * torch.einsum("kn,bsk->bsn", up, x)
        return x + torch.einsum("bsn,nk->bsk", h, down)

    _, report = agrees(f, x, *weights, dynamic=dynamic)
    first, second = (r.what for r in report.replaced("gemm"))
    assert first == "tile.gemm(2 products, v0=silu(acc0);v1=mul(acc1,v0);ret v1)"
    assert second == "tile.gemm(v0=add(acc0,x0);ret v0)"


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.relu, "relu"),
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (torch.sigmoid, "sigmoid"),
        (torch.tanh, "tanh"),
        (lambda x: x, ""),
    ],
)
def test_linear_with_activation(activation, name, dynamic, agrees, generator):
    layer = linear(generator, 24, 17)
    x = torch.randn(2, 5, 24, generator=generator)
    _, report = agrees(lambda x: activation(layer(x)), x, dynamic=dynamic)
    what = only(report)
    assert "add(acc0,x0)" in what
    assert f"={name}(" in what or not name, what


def test_swiglu_is_one_kernel(agrees, generator):
    gate, up, down = (
        linear(generator, 16, 40, False),
        linear(generator, 16, 40, False),
        linear(generator, 40, 16, False),
    )
    x = torch.randn(3, 7, 16, generator=generator)
    _, report = agrees(lambda x: x + down(F.silu(gate(x)) * up(x)), x)
    first, second = (r.what for r in report.replaced("gemm"))
    assert first == "tile.gemm(2 products, v0=silu(acc0);v1=mul(acc1,v0);ret v1)"
    assert second == "tile.gemm(v0=add(acc0,x0);ret v0)"


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b, t, r, c: a @ b,
        lambda a, b, t, r, c: (a @ b + r) * t,
        lambda a, b, t, r, c: (a @ b) * c + r,
        lambda a, b, t, r, c: torch.where(a @ b > 0.5, t, -1.0),
        lambda a, b, t, r, c: (a @ b).clamp(-1, 1).pow(2) - t,
        lambda a, b, t, r, c: 3 - 2 * (a @ b),
        lambda a, b, t, r, c: torch.sub(t, a @ b, alpha=2),
        lambda a, b, t, r, c: torch.addmm(r, a, b, beta=0.5, alpha=2),
        lambda a, b, t, r, c: torch.addmm(t, a, b).abs().sqrt(),
        lambda a, b, t, r, c: torch.maximum(a @ b, t).exp() / (1 + c.abs()),
        lambda a, b, t, r, c: (a @ b).view(3, 2, 10) * r + t.view(3, 2, 10),
        lambda a, b, t, r, c: torch.baddbmm(t[None], a[None], b[None]),
        lambda a, b, t, r, c: (a @ b).double().float(),
    ],
)
def test_epilogues(form, agrees, generator):
    shapes = (6, 8), (8, 10), (6, 10), (10,), (6, 1)
    _, report = agrees(form, *(torch.randn(s, generator=generator) for s in shapes))
    assert len(report.replaced("gemm")) == 1
    assert not report.missed()


def test_batched(agrees, generator):
    a, b, t = (torch.randn(s, generator=generator) for s in ((2, 3, 6, 8), (2, 3, 8, 10), (2, 3, 6, 10)))
    _, report = agrees(lambda a, b, t: torch.relu(a @ b + t), a, b, t)
    assert only(report) == "tile.gemm(v0=add(acc0,x0);v1=relu(v0);ret v1)"


def test_a_value_used_twice_ends_the_epilogue(agrees, generator):
    a, b = torch.randn(6, 8, generator=generator), torch.randn(8, 10, generator=generator)

    def f(a, b):
        h = torch.relu(a @ b)
        return h.sum(), torch.tanh(h).sum(0)

    _, report = agrees(f, a, b)
    assert only(report) == "tile.gemm(v0=relu(acc0);ret v0)"


def test_operands_that_do_not_fit_stay_outside(agrees, generator):
    a, b, m = (torch.randn(s, generator=generator) for s in ((2, 3, 6, 8), (2, 3, 8, 10), (2, 1, 6, 10)))
    _, report = agrees(lambda a, b, m: a @ b + m, a, b, m)
    assert only(report) == "tile.gemm(ret acc0)"


def test_operands_of_two_dtypes_raise_torchs_own_error(caplog):
    """And no traceback of ours is logged before."""
    a, b = torch.randn(4, 5), torch.randint(0, 9, (5, 6))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.compile(torch.mm, backend="tile")(a, b)
    assert not [r for r in caplog.records if r.name.startswith("torch_tile") and (r.exc_info or r.levelname == "ERROR")]


def test_other_dtypes_are_reported(agrees, generator):
    a, b = (torch.randint(0, 9, s, generator=generator) for s in ((4, 5), (5, 6)))
    _, report = agrees(lambda a, b: a @ b, a, b)
    assert not report.replaced("gemm")
    assert "int64" in report.missed("gemm")[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_closer_to_the_truth(dtype, light, generator):
    a, b, r, t = (torch.randn(s, generator=generator).to(dtype) for s in ((33, 64), (64, 48), (48,), (33, 48)))

    def f(a, b, r, t):
        return F.gelu(a @ b + r) * 0.5 + t

    with torch.no_grad():
        got, report = light(f, a, b, r, t)
    truth = f(*(x.double() for x in (a, b, r, t)))
    assert only(report)
    assert got.dtype == dtype
    assert (got - truth).norm() <= 1.5 * (f(a, b, r, t) - truth).norm()


def test_training_gradients(light, generator):
    one, two = linear(generator, 12, 20), linear(generator, 20, 12)
    x = torch.randn(5, 12, generator=generator)

    def f(x):
        return two(F.gelu(one(x))).square().mean()

    with collect() as report:  # the backward is compiled when it is first run
        light(f, x)[0].backward()
    grads = [p.grad.clone() for p in (*one.parameters(), *two.parameters())]
    one.zero_grad(), two.zero_grad()
    f(x).backward()
    torch.testing.assert_close(grads, [p.grad for p in (*one.parameters(), *two.parameters())])
    assert {r.graph for r in report.replaced("gemm")} == {"forward", "backward"}


def test_sums_of_many_products(agrees, generator):
    """As experts computed for every token are: what one match leaves behind is no epilogue of the next product."""
    x, ws = torch.randn(10, 16, generator=generator), torch.randn(4, 16, 16, generator=generator)
    gates = torch.rand(4, 10, 1, generator=generator)

    def experts(x, ws, gates):
        out = torch.zeros_like(x)
        for w, gate in zip(ws, gates, strict=True):
            out = out + gate * (F.silu(x @ w) @ w)
        return out

    _, report = agrees(experts, x, ws, gates)
    assert len(report.replaced("gemm")) >= 7, report


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float16, torch.float64])
def test_the_error_for_operands_of_another_dtype_is_torchs(dtype, caplog):
    with pytest.raises(RuntimeError, match=r"dtype|floating"):
        torch_tile.explain(nn.Linear(8, 8), torch.ones(2, 8, dtype=dtype))
    assert "its subgraphs are left to Inductor" not in caplog.text
