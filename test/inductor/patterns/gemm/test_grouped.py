# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, as mixtures of experts make them, become one kernel each with what follows."""

import functools

import pytest
import torch
import torch.nn.functional as F

from torch_tile.inductor import compat
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.graph.extract import EXAMPLE, extract
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import decide as competition
from torch_tile.inductor.select.benchmark import example, is_called
from torch_tile.kernels.gemm.grouped import reference

S, K, N, G = 37, 16, 24, 5
BF16 = torch.bfloat16
SWIGLU = "tile.grouped_gemm(2 products, v0=silu(acc0);v1=mul(acc1,v0);ret v1)"


def grouped_mm(a, b, offsets):
    return torch._grouped_mm(a, b, offs=offsets)


def looped(a, b, offsets):
    return torch.ops.transformers.grouped_mm_fallback(a, b, offsets)


CALLS = {"torch": (grouped_mm, BF16), "transformers' loop": (looped, torch.float32)}


@pytest.fixture(params=CALLS)
def call(request):
    if request.param != "torch":
        pytest.importorskip("transformers.integrations.moe")
    return CALLS[request.param]


@pytest.fixture
def given(call, generator):
    """The call, and `(rows, gate, up, down, offsets, weight of each row)`."""
    multiply, dtype = call
    make = lambda *shape: (torch.randn(shape, generator=generator) / 3).to(dtype)  # noqa: E731
    offsets = torch.tensor([4, 4, 20, 31, S], dtype=torch.int32)
    return multiply, (make(S, K), make(G, N, K), make(G, N, K), make(G, K, N), offsets, make(S, 1))


def check(got, want, dtype):
    tolerance = 2e-2 if dtype == BF16 else 2e-5
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def double(args):
    return [x.double() if x.is_floating_point() else x for x in args]


def exact(x, gate, up, down, offsets, weight):
    """The experts in float64."""
    hidden = reference(x, [gate.mT, up.mT], offsets, [], "", "v=silu(acc0);w=mul(v,acc1);ret w", torch.float64)
    return reference(hidden, [down.mT], offsets, [weight], "c", "v=mul(acc0,x0);ret v", torch.float64)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_are_two_kernels(merged, dynamic, given, light):
    multiply, args = given
    for x in (args[0], args[5]) if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)

    def experts(x, gate, up, down, offsets, weight):
        if merged:
            gate, up = multiply(x, torch.cat([gate, up], 1).mT, offsets).chunk(2, -1)
        else:
            gate, up = multiply(x, gate.mT, offsets), multiply(x, up.mT, offsets)
        return multiply(F.silu(gate) * up, down.mT, offsets) * weight

    with torch.no_grad():
        got, report = light(experts, *args)
    assert [r.what for r in report.replaced("grouped")] == [SWIGLU, "tile.grouped_gemm(v0=mul(acc0,x0);ret v0)"]
    check(got, exact(*double(args)), args[0].dtype)


@pytest.mark.parametrize("merged", [False, True])
def test_rows_of_nobody(merged, given, light):
    """Rows that other devices' experts have are masked before and behind each product."""
    multiply, (x, gate, up, down, offsets, weight) = given
    nobody = torch.randint(9, (S,)) >= 7

    def experts(x, gate, up, down, offsets, weight, nobody):
        nobody = nobody[:, None]
        x = x.masked_fill(nobody, 0.0)
        if merged:
            both = multiply(x, torch.cat([gate, up], 1).mT, offsets)
            gate, up = both.masked_fill(nobody, 0.0).chunk(2, -1)
        else:
            gate, up = (multiply(x, w.mT, offsets).masked_fill(nobody, 0.0) for w in (gate, up))
        down = multiply(F.silu(gate) * up, down.mT, offsets)
        return down.masked_fill(nobody, 0.0) * weight

    args = x, gate, up, down, offsets, weight
    with torch.no_grad():
        got, report = light(experts, *args, nobody)
    assert [r.what for r in report.replaced("grouped")] == [
        "tile.grouped_gemm(2 products, v0=where(x0,0.0,acc0);v1=silu(v0);v2=where(x0,0.0,acc1);v3=mul(v1,v2);ret v3)",
        "tile.grouped_gemm(v0=where(x0,0.0,acc0);v1=mul(x1,v0);ret v1)",
    ]
    check(got, exact(*double(args)).masked_fill(nobody[:, None], 0.0), x.dtype)


def test_what_is_added_to_each_row(given, light):
    """A bias of each group, gathered for its rows, is a full operand."""
    multiply, (x, gate, *_, offsets, _) = given
    bias = torch.randn(G, N).to(x.dtype)
    group = torch.bucketize(torch.arange(S), offsets, right=True)

    def biased(x, gate, offsets, bias, group):
        return F.gelu(multiply(x, gate.mT, offsets) + bias[group])

    with torch.no_grad():
        got, report = light(biased, x, gate, offsets, bias, group)
    (row,) = report.replaced("grouped")
    assert row.what == "tile.grouped_gemm(v0=add(acc0,x0);v1=gelu(v0);ret v1)"
    want = reference(x.double(), [gate.mT.double()], offsets, [], "", "", torch.float64) + bias.double()[group]
    check(got, F.gelu(want), x.dtype)


def test_other_groups_make_another_kernel(given, light):
    """Products of the same rows, cut at other places, are not joined."""
    multiply, (x, gate, up, _, offsets, _) = given
    others = torch.tensor([1, 2, 3, 4, S], dtype=torch.int32)
    with torch.no_grad():
        got, report = light(
            lambda *a: F.silu(multiply(a[0], a[1].mT, a[3])) * multiply(a[0], a[2].mT, a[4]),
            *(x, gate, up, offsets, others),
        )
    assert len(report.replaced("grouped")) == 2
    products = [
        reference(x.double(), [b.mT.double()], o, [], "", "", torch.float64) for b, o in ((gate, offsets), (up, others))
    ]
    check(got, F.silu(products[0]) * products[1], x.dtype)


def test_gradients_of_rows_and_of_matrices(given, backend):
    multiply, (x, gate, *_, offsets, _) = given
    if multiply is looped and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("this transformers reads sizes of groups in its backward, which no graph can hold")
    x, gate = x.requires_grad_(), gate.requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(lambda x, gate, offsets: multiply(x, gate.mT, offsets).float().square().sum(), backend=backend)
    with collect() as report:  # the backward is compiled when it is run
        grads = torch.autograd.grad(run(x, gate, offsets), (x, gate))
    if multiply is grouped_mm:
        whats = sorted(r.what for r in report.replaced("grouped") if r.graph == "backward")
        assert whats == ["tile.grouped_gemm(ret acc0)", "tile.k_grouped_gemm"]
    else:
        assert [r.what for r in report.replaced("grouped")][1:] == ["tile.grouped_gemm and tile.k_grouped_gemm"]
    wide = [t.detach().double().requires_grad_() for t in (x, gate)]
    want = reference(wide[0], [wide[1].mT], offsets, [], "", "", torch.float64).square().sum()
    for g, w in zip(grads, torch.autograd.grad(want, wide), strict=True):
        check(g, w, x.dtype)


def test_what_has_no_kernel_is_said(light, generator):
    """Groups of columns of the right operand."""
    a, b = (torch.randn(s, generator=generator).to(BF16) for s in ((3, 8, 16), (16, 32)))
    offsets = torch.tensor([8, 8, 32], dtype=torch.int32)
    with torch.no_grad():
        _, report = light(grouped_mm, a, b, offsets)
    (row,) = report.missed("grouped")
    assert row.reason == "groups are not of rows" and "[S, K]" in row.fix


def test_contests_have_groups_of_equal_size(given, light, monkeypatch):
    """Torch's side is run as it is, and rows are spread over all matrices."""
    multiply, args = given
    seen = []

    def decide(new, old, settings):
        inputs = [n for module in (new, old) for n in module.graph.find_nodes(op="placeholder") if EXAMPLE in n.meta]
        with compat.nested_compile():
            seen.extend(map(example, inputs))
        seen.append(is_called(new) and is_called(old))
        return competition.Outcome(1.0, 2.0)

    monkeypatch.setattr(competition, "decide", decide)
    torch._dynamo.reset()
    run = torch.compile(
        lambda x, gate, offsets: multiply(x, gate.mT, offsets),
        backend=functools.partial(dry_run, options={"select": "fastest"}),
    )
    with collect() as report, torch.no_grad():
        run(args[0], args[1], args[4])
    (row,) = report.replaced("grouped")
    assert row.times == competition.Outcome(1.0, 2.0)
    *offsets, both_called = seen
    assert both_called and len(offsets) == 2
    for each in offsets:
        assert each.tolist() == [7, 14, 22, 29, 37] and each.dtype == torch.int32


def test_parts_carry_examples(given):
    """What a part of a graph reads keeps what stands for it in contests."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.ones(2), EXAMPLE: lambda: torch.zeros(2)}
    out = graph.call_function(torch.relu, (x,))
    part = extract([out], [x])
    (given,) = part.graph.find_nodes(op="placeholder")
    assert torch.equal(example(given), torch.zeros(2))
