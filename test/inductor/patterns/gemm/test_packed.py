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
    assert sum("2 products" in row and "silu" in row for row in rows) == 2
    assert sum(row.endswith("v0=add(acc0,x0);ret v0)") for row in rows) == 4
    assert len(rows) == 10 and sum("tile.rms_norm([..., 256]) in front" in row for row in rows) == 4
    assert not report.replaced("norm")


class Normed(nn.Module):
    """Layers behind one norm. `how`: called, or written out as transformers does; `keep` returns the norm, too."""

    def __init__(self, layers, generator, how="called", weighted=True, keep=False):
        super().__init__()
        self.layers, self.how, self.keep = nn.ModuleList(layers), how, keep
        self.weight = nn.Parameter(torch.randn(K, generator=generator), False) if weighted else None

    def forward(self, x):
        if self.how == "called":
            y = F.rms_norm(x, (K,), self.weight, 1e-5)
        else:
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            y = y if self.weight is None else self.weight * y
        found = torch.cat([layer(y) for layer in self.layers], -1)
        return torch.cat([found, y], -1) if self.keep else found


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("how", ["called", "written out"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_one_row_goes_into_all_its_layers(kind, how, weighted, exact, generator):
    layers = [layer(generator, kind, bias, rows) for bias, rows in ((True, N), (False, N), (False, 3 * N))]
    report = exact(Normed(layers, generator, how, weighted), torch.randn(1, 1, K, generator=generator) * 9)
    (row,) = report.replaced("dequant")
    assert "3 calls" in row.what and "tile.rms_norm" in row.what


def test_norms_that_stay(exact, generator):
    """Those of several rows, of which no kernel takes more than one, and those that something else reads."""
    one, many = (torch.randn(1, rows, K, generator=generator) for rows in (1, 3))
    for x, keep in ((many, False), (one, True)):
        report = exact(Normed([layer(generator)], generator, keep=keep), x)
        assert not report.replaced("dequant")
    report = exact(Normed([layer(generator)], generator), torch.randn(1, 1, K, generator=generator), dynamic=True)
    assert all("rms_norm" not in row.what or "[1, 1" in row.what for row in report.replaced("norm"))


def test_an_operator_with_a_norm_has_the_gradients_of_its_parts(generator):
    words, scales = layer(generator).words, layer(generator).scales
    x, weight = torch.randn(3, K, generator=generator), torch.randn(K, generator=generator)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    op = torch.ops.tile.dequant_gemm.default
    rest = [words], [scales.double()], [], 4, False, 8, [], "", "", torch.float64, ""
    got = op(leaves[0], *rest, leaves[1], 1e-5)
    want = op(F.rms_norm(leaves[0], (K,), leaves[1], 1e-5), *rest)
    torch.testing.assert_close(got, want)
    found, known = (torch.autograd.grad(y.square().sum(), leaves) for y in (got, want))
    torch.testing.assert_close(found, known)


def test_llama_of_transformers_over_a_static_cache(light, seed):
    """Queries, keys and values take one norm; gate and up are one kernel; o and down add the residual."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    for module in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(module, name, QuantizedLinear.from_linear(linear, "nf4"))
    prompt, token, place = torch.randint(32, (1, 3)), torch.randint(32, (1, 1)), torch.tensor([3])

    def cache(model):
        made = transformers.StaticCache(config=config, max_cache_len=8)
        model(prompt, past_key_values=made)
        return made

    with torch.no_grad():
        wide = copy.deepcopy(model).double()
        want = wide(token, past_key_values=cache(wide), cache_position=place).logits
        got, report = light(model, token, past_key_values=cache(model), cache_position=place)
    torch.testing.assert_close(got.logits.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    rows = [row.what for row in report.replaced("dequant")]
    assert sum("3 calls" in row and "tile.rms_norm" in row for row in rows) == 1
    assert sum("2 products" in row and "silu" in row for row in rows) == 1
    assert sum("add" in row for row in rows) == 2 and len(rows) == 5
