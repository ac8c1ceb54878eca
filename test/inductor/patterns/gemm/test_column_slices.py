# SPDX-License-Identifier: Apache-2.0
"""Weights that models have merged: where the parts of a product meet again, one kernel makes them."""

import pytest
import torch
import torch.nn.functional as F

ROUTES = {
    "chunk": lambda y: y.chunk(2, -1),
    "split": lambda y: y.split(y.shape[-1] // 2, -1),
    "slices": lambda y: (y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]),
    "from the end": lambda y: (y[..., :-9], y[..., -9:]),
    "turned": lambda y: y.chunk(2, -1)[::-1],
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rank", [2, 3])
def test_a_merged_gate_is_one_kernel(route, rank, dynamic, agrees, generator):
    """Phi-3 and GLM have one weight for both, and `silu(gate) * up` takes its halves."""
    x = torch.randn((3, 5, 7)[-rank:], generator=generator)
    w = torch.nn.Parameter(torch.randn(18, 7, generator=generator))

    def mlp(x):
        gate, up = ROUTES[route](F.linear(x, w))
        return up * F.silu(gate)

    _, report = agrees(mlp, x, dynamic=dynamic)
    (row,) = report.replaced("gemm")
    assert row.what == "tile.gemm(2 products, v0=silu(acc0);v1=mul(acc1,v0);ret v1)" or route == "turned"
    assert "2 products" in row.what


def test_a_residual_behind_it(agrees, generator):
    x, w, r = (torch.randn(s, generator=generator) for s in ((2, 5, 7), (18, 7), (2, 5, 9)))

    def mlp(x, w, r):
        gate, up = F.linear(x, w).chunk(2, -1)
        return r + F.gelu(gate) * up

    _, report = agrees(mlp, x, w, r)
    assert "2 products" in report.replaced("gemm")[0].what


@pytest.mark.parametrize("parts", [(9, 9), (3, 7, 8), (6, 6, 6)], ids=str)
def test_parts_that_do_not_meet_stay_one_product(parts, agrees, generator):
    x, w = torch.randn(2, 5, 7, generator=generator), torch.randn(18, 7, generator=generator)
    _, report = agrees(lambda x, w: [F.silu(p) for p in F.linear(x, w).split(parts, -1)], x, w)
    assert [row.what for row in report.replaced("gemm")] == ["tile.gemm(ret acc0)"]


@pytest.mark.parametrize(
    "read",
    [
        lambda y: (F.silu(y[..., :9]) * y[..., 9:], y),  # whole, too
        lambda y: (F.silu(y[..., :9]) * y[..., 9:], y[..., 9:] * 2),  # one of them twice
        lambda y: F.silu(y[..., ::2]) * y[..., 1::2],  # in turns
        lambda y: F.silu(y[:1]) * y[1:],  # rows
        lambda y: F.silu(y[..., :4]) * y[..., 14:],  # not all; the product of the rest is never made
    ],
)
def test_other_readers(read, agrees, generator):
    x, w = torch.randn(2, 7, generator=generator), torch.randn(18, 7, generator=generator)
    agrees(lambda x, w: read(F.linear(x, w)), x, w)


@pytest.mark.parametrize("flip", [False, True])
def test_a_bias_is_cut_as_well(flip, agrees, generator):
    """GEGLU of diffusion models: the second half is the gate."""
    x, w, b = (torch.randn(s, generator=generator) for s in ((2, 5, 7), (18, 7), 18))

    def mlp(x, w, b):
        up, gate = F.linear(x, w, b).chunk(2, -1)[:: -1 if flip else 1]
        return up * F.gelu(gate)

    _, report = agrees(mlp, x, w, b)
    assert "2 products" in report.replaced("gemm")[0].what


def test_what_is_added_and_no_row_stays_whole(agrees, generator):
    x, w, t = (torch.randn(s, generator=generator) for s in ((5, 7), (7, 18), (5, 18)))

    def mlp(x, w, t):
        up, gate = torch.addmm(t, x, w, beta=0.5, alpha=2).chunk(2, -1)
        return up * F.gelu(gate)

    _, report = agrees(mlp, x, w, t)
    assert "2 products" not in report.replaced("gemm")[0].what


def test_parts_of_several_products(agrees, generator):
    """The gate is a part of one product, what it multiplies a part of another of the same input."""
    x, w, v = (torch.randn(s, generator=generator) for s in ((5, 7), (18, 7), (18, 7)))

    def f(x, w, v):
        a, b = F.linear(x, w).chunk(2, -1)
        c, d = F.linear(x, v).chunk(2, -1)
        return F.silu(a) * c, b + d

    agrees(f, x, w, v)


def test_a_product_of_one_element_without_dimensions(agrees, generator):
    """Has no columns to look for, and does not keep other products from being replaced."""
    x, w, v = (torch.randn(s, generator=generator) for s in ((1, 7), (7, 1), (7, 5)))
    _, report = agrees(lambda x, w, v: ((x @ w).reshape(()) * 2, F.silu(x @ v)), x, w, v)
    assert "tile.gemm(v0=silu(acc0);ret v0)" in [row.what for row in report.replaced("gemm")]
