# SPDX-License-Identifier: Apache-2.0
"""Quantised layers and what follows them become one kernel, whatever the layer's own epilogue is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import int4_decode
from torch_tile.nn import QuantizedLinear

N, K, GROUP = 24, 128, 64


def layer(generator, kind="int4", bias=False, rows=N):
    words = torch.randint(0, 256, (rows, K if kind == "int8" else K // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, K // GROUP, generator=generator) / 64
    shift = nn.Parameter(torch.randn(rows, generator=generator), False) if bias else None
    if kind == "nf4":
        return QuantizedLinear(words, scales * 8, bias=shift, high_first=True, format="nf4")
    if kind == "nvfp4":
        scales = torch.rand(rows, K // 16, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedLinear(words, scales, bias=shift, format="e2m1", whole_scale=torch.full((1,), 1 / 64))
    if kind == "zeros":
        zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
        return QuantizedLinear(words, scales, zeros, shift)
    return QuantizedLinear(words, scales, bias=shift, bits=8 if kind == "int8" else 4, offset=8)


KINDS = ("int4", "int8", "nf4", "nvfp4", "zeros")


@pytest.fixture
def exact(light):
    """Compile and compare with the module in float64; return the report."""

    def run(module, *args, **options):
        with torch.no_grad():
            got, report = light(module, *args, **options)
            wide = [x.double() if x.is_floating_point() else x for x in args]
            want = module(*wide)
        assert got.dtype == args[0].dtype
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
        return report

    return run


class Gated(nn.Module):
    def __init__(self, gate, up):
        super().__init__()
        self.gate, self.up = gate, up

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class Added(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x, residual):
        return residual + self.linear(x)


class Halves(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        gate, up = self.linear(x).chunk(2, -1)
        return F.gelu(gate) * up


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
class TestOneKernel:
    def test_swiglu(self, kind, bias, dynamic, exact, generator):
        module = Gated(layer(generator, kind, bias), layer(generator, kind, not bias))
        report = exact(module, torch.randn(3, 5, K, generator=generator), dynamic=dynamic)
        (row,) = report.replaced("dequant")
        assert "2 products" in row.what and "silu" in row.what

    def test_residual(self, kind, bias, dynamic, exact, generator):
        module = Added(layer(generator, kind, bias))
        x, residual = torch.randn(1, 1, K, generator=generator), torch.randn(1, 1, N, generator=generator)
        report = exact(module, x, residual, dynamic=dynamic)
        (row,) = report.replaced("dequant")
        assert "products" not in row.what and "add" in row.what

    def test_halves_of_one_layer(self, kind, bias, dynamic, exact, generator):
        module = Halves(layer(generator, kind, bias, 2 * N))
        report = exact(module, torch.randn(7, K, generator=generator), dynamic=dynamic)
        (row,) = report.replaced("dequant")
        assert "2 products" in row.what and "gelu" in row.what


def test_layers_of_different_storage_are_two_kernels(exact, generator):
    x = torch.randn(4, K, generator=generator)
    for first, second in (("int4", "int8"), ("int4", "nf4"), ("int4", "zeros"), ("nf4", "nvfp4")):
        report = exact(Gated(layer(generator, first), layer(generator, second)), x)
        assert all("products" not in row.what for row in report.replaced("dequant"))


def test_layers_of_different_inputs_are_two_kernels(exact, generator):
    gate, up = layer(generator), layer(generator)

    class Two(nn.Module):
        def forward(self, x, y):
            return F.silu(gate(x)) * up(y)

    report = exact(Two(), *torch.randn(2, 4, K, generator=generator))
    assert all("products" not in row.what for row in report.replaced("dequant"))


def test_a_plain_product_joins_no_layer(exact, generator):
    module = Gated(layer(generator), nn.Linear(K, N, bias=False))
    weight = module.up.weight.data

    class Mixed(nn.Module):
        def forward(self, x):
            return F.silu(F.linear(x, weight.to(x.dtype))) * module.gate(x)

    report = exact(Mixed(), torch.randn(4, K, generator=generator))
    assert all("products" not in row.what for row in (*report.replaced("dequant"), *report.replaced("gemm")))


def test_a_result_that_is_read_twice_stays(exact, generator):
    linear = layer(generator)

    class Twice(nn.Module):
        def forward(self, x):
            y = linear(x)
            return y + F.silu(y).flip(-1)

    exact(Twice(), torch.randn(4, K, generator=generator))


def test_gradients_flow_through_the_fused_call(light, generator):
    linear, x = layer(generator, bias=True), torch.randn(4, K, generator=generator, requires_grad=True)
    residual = torch.randn(4, N, generator=generator)
    module = Added(linear)
    got, _ = light(module, x, residual)
    found = torch.autograd.grad(got.square().sum(), [x])
    wide = x.detach().double().requires_grad_()
    want = torch.autograd.grad(module(wide, residual.double()).square().sum(), [wide])
    torch.testing.assert_close(found[0].double(), want[0], rtol=1e-4, atol=1e-4 * want[0].abs().max().item())


def test_no_option_leaves_calls_alone(light, generator):
    _, report = light(Gated(layer(generator), layer(generator)), torch.randn(2, K), families=("norm",))
    assert not report.replaced("dequant")


def test_a_layer_of_llama_over_a_cache(light, seed):
    """Each layer's products take the residual sums, and SwiGLU's two are one kernel."""
    torch.manual_seed(seed)
    with torch.no_grad():
        narrow, same = int4_decode.with_int4(int4_decode.Decoder(2, 33, 16).eval())
        given = int4_decode.inputs(256, 33, "cpu", torch.float32)
        want = copy.deepcopy(same).double()(*(x.double() if x.is_floating_point() else x for x in given))
        got, report = light(narrow, *given)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    rows = [row.what for row in report.replaced("dequant")]
    assert len(rows) == 6 and sum("2 products" in row and "silu" in row for row in rows) == 2
    assert sum(row.endswith("v0=add(acc0,x0);ret v0)") for row in rows) == 4
