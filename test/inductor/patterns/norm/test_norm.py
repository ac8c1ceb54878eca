# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm as they are written in the wild, and what only looks like one."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.compat import no_graph_caches
from torch_tile.inductor.context import Context
from torch_tile.inductor.dry_run import dry_run
from torch_tile.inductor.finalize import settle
from torch_tile.inductor.patterns.norm.norm import fuse_residual
from torch_tile.inductor.report.rows import collect
from torch_tile.inductor.select import decide
from torch_tile.inductor.select.policy import policy_of
from torch_tile.inductor.settings import Settings


def llama(x, w, eps=1e-6):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def gemma(x, w, eps=1e-5):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def swapped(x, w):
    h = x.float()
    return (torch.rsqrt(1e-6 + (h * h).mean(-1, keepdim=True)) * h).to(x.dtype) * w


def in_float(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def power(x, w):
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)).to(x.dtype) * w


def divided(x, w):
    h = x.float()
    return (h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def divided_by_power(x, w):
    h = x.float()
    return (h / (h.pow(2).mean(-1, keepdim=True) + 1e-6) ** 0.5).to(x.dtype) * w


def inverse_of_root(x, w):
    h = x.float()
    return (h * (1 / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype) * w


def plain(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def float_twice(x, w):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def keeps_no_dimension(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1) + 1e-6).unsqueeze(-1)).to(x.dtype) * w


def summed(x, w):
    h = x.float()
    return (h * torch.rsqrt((h * h).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)).to(x.dtype) * w


RMS = [llama, gemma, swapped, in_float, power, divided, divided_by_power, inverse_of_root, plain, float_twice]
RMS += [keeps_no_dimension, summed]


def by_var(x, w, b):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * w + b


def by_square(x, w, b):
    h = x - x.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


def bert(x, w, b):
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return w * ((x - u) / torch.sqrt(s + 1e-12)) + b


def no_bias(x, w, b):
    h = x - x.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def bare(x, w, b):
    var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1e-5)


def weight_first(x, w, b):
    return w * (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) + b


def two_moments(x, w, b):
    mean = x.mean(-1)[..., None]
    return (x - mean) * torch.rsqrt(((x * x).mean(-1)[..., None] - mean**2) + 1e-5) * w + b


def sums(x, w, b):
    n = x.shape[-1]
    h = x - x.sum(-1, keepdim=True) / n
    return h * torch.rsqrt((h * h).sum(-1) / n + 1e-5).unsqueeze(-1).expand(x.shape) * w + b


LAYER = [weight_first, two_moments, sums, by_var, by_square, bert, no_bias, bare]


def shape_of(generator):
    rank = int(torch.randint(2, 5, (), generator=generator))
    return [int(torch.randint(2, 12, (), generator=generator)) for _ in range(rank)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", RMS)
def test_rms_norm(form, dynamic, agrees, generator):
    size = shape_of(generator)
    x, w = torch.randn(size, generator=generator), torch.randn(size[-1], generator=generator)
    _, report = agrees(form, x, w, dynamic=dynamic)
    (row,) = report.replaced()
    assert row.what.startswith("tile.rms_norm([..., ")
    assert dynamic or row.what.endswith(f", {size[-1]}])")
    assert not report.missed()


def of_length_one(x, w):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-2)


def of_length_one_and_weighed(x, w):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-2) * w


def of_length_one_and_scaled(x, w):
    """Gated delta rule: queries are scaled besides."""
    h = of_length_one(x.float(), w) * x.shape[-1] ** -0.5
    return h.transpose(0, 1).contiguous().to(x.dtype)


UNIT = [of_length_one, of_length_one_and_weighed, of_length_one_and_scaled]


@pytest.mark.parametrize("form", UNIT)
def test_rows_of_length_one(form, agrees, light, generator):
    x, w = torch.randn(3, 7, 24, generator=generator) / 9, torch.randn(24, generator=generator)
    _, report = agrees(form, x, w)
    assert [r.what for r in report.rows] == ["tile.rms_norm([..., 24]) with what follows"], report
    low = x.bfloat16(), w.bfloat16()
    with torch.no_grad():
        got, report = light(form, *low)
    truth, eager = form(*(t.double() for t in low)), form(*low)
    assert len(report.replaced("norm")) == 1 and got.dtype == eager.dtype, report
    assert (got - truth).norm() <= 1.5 * (eager - truth).norm() + 1e-9


@pytest.mark.parametrize("form", RMS)
def test_rms_norm_in_low_precision(form, light, generator):
    x, w = (torch.randn(n, generator=generator).bfloat16() for n in ((5, 48), (48,)))
    with torch.no_grad():
        got, report = light(form, x, w)
    truth, eager = form(x.double(), w.double()), form(x, w)
    assert len(report.replaced("norm")) == 1, report
    assert got.dtype == eager.dtype
    assert (got - truth).norm() <= 1.5 * (eager - truth).norm() + 1e-9


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", LAYER)
def test_layer_norm(form, dynamic, agrees, generator):
    size = shape_of(generator)
    dtype = torch.float64 if form is two_moments else torch.float32  # in which their difference has digits left
    x, w, b = (torch.randn(n, generator=generator, dtype=dtype) for n in (size, size[-1], size[-1]))
    x += 3.0 * torch.arange(size[-1])  # rows of elements that are nearly equal have no digits left either
    _, report = agrees(form, x, w, b, dynamic=dynamic)
    (row,) = report.replaced()
    assert row.what.startswith("tile.layer_norm([..., ")
    assert dynamic or row.what.endswith(f", {size[-1]}])")


def test_the_sum_is_returned_too(agrees, generator):
    """Without a gemm to take the residual, the norm does."""
    x, r, w = (torch.randn(n, generator=generator) for n in ((3, 7, 24), (3, 7, 24), 24))

    def block(x, r, w):
        h = x + r
        return llama(h, w), h + 1

    _, report = agrees(block, x, r, w)
    assert "tile.add_rms_norm([..., 24])" in [row.what for row in report.replaced("norm")]


@pytest.mark.parametrize("won_alone", [False, True])
@pytest.mark.parametrize("wins", [False, True])
def test_a_norm_that_loses_with_its_sum_is_left_to_inductor(wins, won_alone, monkeypatch):
    """A captured call of it was kept, between a sum and readers that Inductor could not fuse with it."""
    monkeypatch.setattr(decide, "_measure", lambda *args: decide.Outcome(1, 2) if wins else decide.Outcome(2, 1))
    monkeypatch.setattr(decide, "_outcomes", {})
    tile = torch.ops.tile

    def block(x, r, w):
        h = x + r
        return tile.rms_norm(h, w, 1e-5), h.cumsum(0)

    with FakeTensorMode() as mode, V.set_fake_mode(mode), collect() as report:
        graph = make_fx(block)(*(torch.empty(*n) for n in ((256, 512), (256, 512), (512,)))).graph
        context = Context(graph, Settings(), "inference", policy_of(Settings()))
        if won_alone:
            context.handled.update(graph.find_nodes(op="call_function", target=tile.rms_norm.default))
        fuse_residual(context)
        settle(context)
        graph.eliminate_dead_code()
    found = {n.target for n in graph.nodes if getattr(n.target, "namespace", "") == "tile"}
    assert found == ({tile.add_rms_norm.default} if wins else {tile.rms_norm.default} if won_alone else set())
    assert [row.status for row in report.select("norm")] == ["replaced" if wins else "kept"]


def test_a_gemm_takes_the_residual_first(agrees, generator):
    x, r, w, m = (torch.randn(n, generator=generator) for n in ((6, 24), (6, 24), 24, (24, 24)))
    _, report = agrees(lambda x, r, w, m: llama(r + x @ m, w), x, r, w, m)
    assert [row.what for row in report.replaced("norm")] == ["tile.rms_norm([..., 24])"]
    assert "add" in report.replaced("gemm")[0].what


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6), "over dimension 0 of 2"),
        (lambda x, w: (x - x.mean(-1, keepdim=True)) / (x.std(-1, correction=0, keepdim=True) + 1e-6), "eps is not"),
        (lambda x, w: (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * x * w + r, "used elsewhere"),
        (
            lambda x, w: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6) * w,
            "unbiased",
        ),
        (lambda x, w: F.normalize(x, dim=-1) * 4 * w, "bounds the length"),
        (lambda x, w: F.normalize(x, dim=0) * 4 * w, "over dimension 0 of 2"),
        (lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 16**-0.5).clamp(min=1e-8) * w, "bounds the length"),
        (lambda x, w: x / (x.norm(dim=-1, keepdim=True) * 16**-0.5 + 1e-8) * w, "eps is added to the length"),
        (lambda x, w: x / x.norm(dim=-1, keepdim=True), "no eps"),
        (lambda x, w: (r := torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)) * x * w + r, "not of their mean"),
        (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1e-6)), "bounds the length"),
    ],
)
def test_near_misses_say_why(form, reason, agrees, generator):
    x, w = torch.randn(6, 16, generator=generator), torch.randn(16, generator=generator)
    _, report = agrees(form, x, w)
    assert not report.replaced("norm")
    assert [reason in r.reason for r in report.missed("norm")] == [True], report


@pytest.mark.parametrize(
    "form",
    [
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6) * w,  # a square x: scales columns, not rows
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[None].expand(8, 8) * w,
        lambda x, w: (x - x.mean(-1)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-6),
        lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 7 + 1e-6),
        lambda x, w: x * torch.rsqrt(w + 1e-6),
        lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-6),
        lambda x, w: x.flip(-1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_other_things_are_left_alone(form, agrees, generator):
    x, w = torch.randn(8, 8, generator=generator), torch.rand(8, generator=generator)
    _, report = agrees(form, x, w)
    assert not report.replaced()


ACTIVATIONS = {
    "silu": F.silu,
    "silu by hand": lambda h: h * torch.sigmoid(h),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", [llama, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)], ids=["by hand", "captured"])
def test_an_activation_behind_it_is_taken_along(form, name, dynamic, agrees, generator):
    x, w = torch.randn(3, 5, 24, generator=generator), torch.randn(24, generator=generator)
    _, report = agrees(lambda x, w: ACTIVATIONS[name](form(x, w)), x, w, dynamic=dynamic)
    what = [row.what for row in report.replaced("norm")]
    assert what[-1].endswith(f"and {name.split()[0]}"), report


@pytest.mark.parametrize("form", [lambda h, w: F.silu(h) + h, lambda h, w: 2 * h])
def test_what_is_more_than_an_activation_stays(form, agrees, generator):
    x, w = torch.randn(3, 5, 24, generator=generator), torch.randn(24, generator=generator)
    _, report = agrees(lambda x, w: form(F.rms_norm(x, w.shape, w, 1e-6), w), x, w)
    assert not any(" and " in row.what for row in report.replaced("norm")), report


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reader", ["tangent", "modulated", "product", "both"])
def test_norms_that_inductor_keeps_in_registers_are_its_own(captured, reader, monkeypatch, generator):
    """A norm that is read by pointwise operations only, and one that our kernels have no word for, stays Inductor's."""
    monkeypatch.setattr(decide, "_measure", lambda *args: decide.Outcome(1, 2))
    monkeypatch.setattr(decide, "_outcomes", {})

    def f(x, w, scale, shift):
        h = F.rms_norm(x, w.shape, w, 1e-6) if captured else llama(x, w)
        product = h @ torch.ones(24, 24)
        modulated = h * (1 + scale) + shift
        return {"tangent": modulated.tan(), "modulated": modulated, "product": product, "both": product + h}[reader]

    args = [torch.randn(s, generator=generator) for s in ((3, 5, 24), 24, (3, 1, 24), (3, 1, 24))]
    with torch.no_grad(), no_graph_caches(), collect() as report:
        got = torch.compile(f, backend=dry_run)(*args)
    torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-4)
    (row,) = (r for r in report.select("norm") if r.status != "missed")
    assert row.status == ("kept" if reader == "tangent" else "replaced")
    assert [r.what for r in report.missed("norm")] == (["aten.tan"] if reader == "tangent" else [])


def llama_in_training(x, w):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def gemma_in_training(x, w):
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


def bare_in_training(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [llama_in_training, gemma_in_training, t5, bare_in_training])
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


@pytest.mark.parametrize("form", LAYER)
def test_layer_norms_in_training(form, light, generator):
    x, w, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 6, 24), 24, 24))
    args = [t.requires_grad_() for t in (x, w, b)]
    got, report = light(form, *args)
    assert [(r.status, r.graph) for r in report.select("norm")] == [("replaced", "forward")], report
    want, upstream = form(*args), torch.randn(x.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(got, want)
    ours, theirs = (torch.autograd.grad(y, args, upstream, allow_unused=True) for y in (got, want))
    torch.testing.assert_close(ours, theirs)


def shared(x, w):
    h = x.float()
    r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (h * r) + r


def beside_a_mutation(x, w):
    count = torch.zeros(())
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    count.add_(1)
    return w * (x * r) + count


@pytest.mark.parametrize(("form", "replaced"), [(shared, 0), (beside_a_mutation, 1)])
def test_a_root_that_the_forward_reads_elsewhere_is_left(form, replaced, light, generator):
    x, w = (torch.randn(s, generator=generator).requires_grad_() for s in ((5, 6, 24), (24,)))
    got, report = light(form, x, w)
    assert len(report.replaced("norm")) == replaced
    want = form(x, w)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(y.sum(), (x, w)) for y in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
