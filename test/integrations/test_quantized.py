# SPDX-License-Identifier: Apache-2.0
"""Quantised layers of other libraries, written out here, become ours with the same numbers."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_tile
import torch_tile.nn as tnn
from torch_tile.kernels.gemm.formats import FORMATS
from torch_tile.nn.packing import dequantize_4bit, pack_fields, quantize_4bit, unpack_fields

N, K = 48, 128


class Linear4bit(nn.Linear):
    """As bitsandbytes holds a weight: flat bytes, and a state with the scales of blocks in memory order."""

    def __init__(self, format, block, nested, n=N, k=K):
        super().__init__(k, n)
        words, scales = quantize_4bit(self.weight.reshape(n * k // block, block), format, block)
        scales, inner, offset = scales.flatten(), None, None
        if nested:
            offset = scales.mean()
            blocks = (scales - offset).split(256)
            most = torch.stack([block.abs().max() for block in blocks])
            inner = SimpleNamespace(code=torch.linspace(-1, 1, 256), absmax=most, blocksize=256)
            rounded = [(block / top * 127.5 + 127.5).round() for block, top in zip(blocks, most, strict=True)]
            scales = torch.cat(rounded).to(torch.uint8)
        self.weight = nn.Parameter(words.reshape(-1, 1), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            quant_type=format, shape=(n, k), absmax=scales, blocksize=block, nested=nested, state2=inner, offset=offset
        )
        self.compute_dtype = None

    def wide(self):
        state = self.weight.quant_state
        table, bytes_ = torch.tensor(FORMATS[state.quant_type].values), self.weight.flatten()
        codes = torch.stack([bytes_ >> 4, bytes_ & 15], -1).flatten()
        scales = state.absmax
        if state.nested:
            absmax = state.state2.absmax.repeat_interleave(256)[: len(scales)]
            scales = state.state2.code[scales.long()] * absmax + state.offset
        return (table[codes.long()].view(-1, state.blocksize) * scales[:, None]).view(state.shape)


class QuantLinear(nn.Module):
    """As GPTQ's libraries hold a weight: `[K, N]`, eight input features to an int32."""

    def __init__(self, bits=4, group=32, order=False, n=N, k=K):
        super().__init__()
        self.bits, self.group = bits, group
        per_word = 32 // bits
        numbers = torch.randint(0, 1 << bits, (k, n))
        zeros = torch.randint(0, 1 << bits, (k // group, n))

        def packed(x):  # along the first dimension
            fields = x.view(-1, per_word, *x.shape[1:]) << (bits * torch.arange(per_word)).view(1, -1, 1)
            return fields.sum(1).to(torch.int32)

        self.register_buffer("qweight", packed(numbers))
        self.register_buffer("qzeros", packed((zeros - 1).remainder(1 << bits).t()).t())
        self.register_buffer("scales", (torch.rand(k // group, n) + 0.1) / 2**self.bits)
        self.register_buffer("g_idx", torch.arange(k).flip(0) // group if order else torch.arange(k) // group)
        self.register_buffer("bias", torch.randn(n))
        self.numbers, self.zeros = numbers, zeros

    def wide(self):
        repeat = lambda x: x.repeat_interleave(self.group, 0)  # noqa: E731
        return ((self.numbers - repeat(self.zeros)) * repeat(self.scales)).t()


class WQLinear_GEMM(nn.Module):
    """As AWQ holds a weight: `[K, N]`, eight interleaved output features to an int32."""

    def __init__(self, group=64, n=N, k=K):
        super().__init__()
        self.w_bit, self.bits, self.group = 4, 4, group
        self.numbers, self.zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // group, n))

        def packed(x):
            fields = x.view(-1, n // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]] << 4 * torch.arange(8)
            return fields.sum(-1).to(torch.int32)

        self.register_buffer("qweight", packed(self.numbers))
        self.register_buffer("qzeros", packed(self.zeros))
        self.register_buffer("scales", (torch.rand(k // group, n) + 0.1) / 2**self.bits)
        self.bias = None

    wide = QuantLinear.wide


class FP8Linear(nn.Linear):
    """As transformers holds a weight in float8."""

    def __init__(self, block=(128, 128), static=False, n=150, k=300):
        super().__init__(k, n)
        scale = torch.rand(-(-n // 128), -(-k // 128)) + 0.1 if block else torch.tensor(0.3)
        self.block_size, self.weight = block, nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale)
        self.activation_scale = nn.Parameter(torch.tensor(0.02)) if static else None

    def wide(self):
        scale = self.weight_scale_inv
        if self.block_size:
            n, k = self.weight.shape
            scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return self.weight.float() * scale


class Linear8bitLt(nn.Linear):
    """As bitsandbytes holds a weight in int8: with the largest magnitude of each row, here or in its state."""

    def __init__(self, threshold=0.0, used=False, training=False):
        super().__init__(K, N)
        most = self.weight.detach().abs().amax(1)
        whole = (self.weight.detach() * (127 / most)[:, None]).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.state = SimpleNamespace(threshold=threshold, has_fp16_weights=training, SCB=most if used else None)
        if not used:
            self.weight.SCB = most

    def wide(self):
        most = self.state.SCB if self.state.SCB is not None else self.weight.SCB
        return self.weight.float() * most[:, None] / 127


LAYERS = {
    "nf4": lambda: Linear4bit("nf4", 64, False),
    "fp4 in large blocks": lambda: Linear4bit("fp4", 256, False),
    "nf4, doubly quantised": lambda: Linear4bit("nf4", 64, True),
    "gptq": QuantLinear,
    "gptq of 2 bits": lambda: QuantLinear(2, 64),
    "gptq of 8 bits": lambda: QuantLinear(8, 128),
    "awq": WQLinear_GEMM,
}


@pytest.mark.parametrize("name", LAYERS)
def test_becomes_ours_with_the_same_numbers(name, seed):
    layer = LAYERS[name]()
    model, wide, bias = nn.Sequential(layer), layer.wide().detach(), layer.bias
    (done,) = torch_tile.replace_layers(model)
    assert done.new == "torch_tile.nn.QuantizedLinear" and model[0] is layer
    torch.testing.assert_close(layer.dequantize(), wide)
    x = torch.randn(3, 5, K, requires_grad=True)
    got, want = model(x), F.linear(x, wide, bias)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    (grad,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (got, want))
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-3)
    assert {"words", "scales"} <= set(model[0].state_dict())
    assert "groups" in repr(layer)


@pytest.mark.parametrize(("block", "static"), [((128, 128), False), (None, False), (None, True)])
def test_float8_layers(block, static, seed):
    layer = FP8Linear(block, static)
    wide, bias = layer.wide().detach(), layer.bias.detach()
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == "torch_tile.nn.Float8Linear"
    x = torch.randn(2, 7, 300, requires_grad=True)
    got, want = layer(x), F.linear(x, wide, bias)
    assert (got - want).norm() < 0.04 * want.norm()
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], wide.sum(0).expand_as(x), rtol=1e-4, atol=1e-3)


def test_float8_of_a_linear_layer(seed):
    linear = nn.Linear(300, 72)
    layer = torch_tile.nn.Float8Linear.from_linear(linear)
    x = torch.randn(5, 300, requires_grad=True)
    got, want = layer(x), linear.double()(x.double())
    assert layer.scale.shape == (72, 1) and (got - want).norm() < 0.05 * want.norm()
    wide = layer.weight.float() * layer.scale
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], wide.sum(0).expand_as(x), rtol=1e-4, atol=1e-3)


class Int8Tensor(torch.Tensor):
    """As torchao holds a weight in int8: a tensor of its own class, with the parts as attributes."""


class Float8Tensor(torch.Tensor):
    """The same in float8."""


def of_torchao(kind, columns=K, rows=1, rounded=False, **changes):
    """A linear layer with such a weight, and this widened."""
    layer = nn.Linear(K, N)
    scale = torch.rand(1 if rows > 1 else N, K // columns) / 100 + 0.01
    data = torch.randn(N, K) * 40
    data = data.to(torch.float8_e4m3fn) if kind is Float8Tensor else data.round().clamp(-127, 127).to(torch.int8)
    weight = torch.zeros(N, K).as_subclass(kind)
    parts = {
        "qdata": data, "scale": scale, "block_size": [rows, columns], "act_pre_scale": None, "act_quant_scale": None,
        "zero_point": torch.zeros_like(scale, dtype=torch.int8),
        "act_quant_kwargs": SimpleNamespace(mapping_type="SYMMETRIC") if rounded else None,
    }  # fmt: skip
    for name, value in {**parts, **changes}.items():
        setattr(weight, name, value)
    del layer.weight
    layer.weight = weight
    return layer, data.float() * scale.repeat_interleave(columns, 1)


@pytest.mark.parametrize("kind", [Int8Tensor, Float8Tensor])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [1, N])
def test_torchao(kind, rounded, rows, seed):
    layer, wide = of_torchao(kind, rows=rows, rounded=rounded)
    bias = layer.bias.detach()
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    names = {Int8Tensor: "Int8Linear", Float8Tensor: "Float8Linear"}
    assert done.new == f"torch_tile.nn.{names[kind] if rounded else 'QuantizedLinear'}"
    x = torch.randn(5, K)
    got, want = layer(x), F.linear(x, wide, bias)
    assert (got - want).norm() < (0.04 if rounded else 1e-5) * want.norm()


@pytest.mark.parametrize("most", [0.0, 1e-45, 1e-20, 1e4, math.inf, math.nan])
def test_nested_scales_of_all_sizes(most, seed):
    """One block's factor of bitsandbytes' scales is 0, tiny, huge or no number; other rows keep theirs."""
    made = Linear4bit("nf4", 64, True, n=192)
    made.weight.quant_state.state2.absmax[1] = most  # rows from 128 on
    made.weight.quant_state.absmax[0] = 255
    wide, model = made.wide(), nn.Sequential(made)
    torch_tile.replace_layers(model)
    ours, x = model[0], torch.randn(5, K)
    want = x @ wide.t() + made.bias
    got = ours(x)
    assert type(ours) is tnn.QuantizedLinear and got[:, :128].isfinite().all()
    assert math.isfinite(most) or not got[:, 128:].isfinite().any()
    known = want.isfinite()
    torch.testing.assert_close(got[known], want[known], rtol=1e-4, atol=1e-4 * float(wide[wide.isfinite()].abs().max()))


def test_torchao_with_zeros(seed):
    zeros = torch.randint(-9, 9, (N, 2), dtype=torch.int8)
    layer, wide = of_torchao(Int8Tensor, 64, zero_point=zeros)
    want = wide - (zeros * layer.weight.scale).repeat_interleave(64, 1)
    torch_tile.replace_layers(nn.Sequential(layer))
    torch.testing.assert_close(layer.dequantize(), want, rtol=1e-4, atol=1e-5)


class Linear(nn.Linear):
    """As compressed-tensors leaves a layer: parts of the weight, a scheme, and a forward of its own."""

    def __init__(self, form):
        super().__init__(K, N)
        weights = SimpleNamespace(num_bits=4, symmetric=True, block_structure=None)
        self.quantization_scheme = SimpleNamespace(weights=weights, input_activations=None)
        self.forward = lambda x: None
        if form == "nvfp4":
            words, scales, whole = tnn.packing.quantize_nvfp4(torch.randn(N, K))
            self.wide = dequantize_4bit(words, scales, "e2m1") * whole
            self.weight_packed, self.weight_scale = (words >> 4) | (words << 4), scales
            self.weight_global_scale = 1 / whole
        elif form.startswith("packed"):
            bits = weights.num_bits = int(form[-1])
            numbers = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8)
            zeros = torch.randint(0, 1 << bits, (N, K // 32), dtype=torch.uint8)
            self.weight_packed = pack_fields(numbers, bits).view(torch.int32)
            self.weight_scale, self.weight_shape = torch.rand(N, K // 32) / 50, torch.tensor([N, K])
            self.weight_zero_point = pack_fields(zeros.t().contiguous(), bits).view(torch.int32).t()
            difference = numbers.float() - zeros.repeat_interleave(32, 1)
            self.wide = difference * self.weight_scale.repeat_interleave(32, 1)
        else:
            self.quantization_scheme.input_activations = SimpleNamespace(dynamic=True, symmetric=True)
            dtype = {"int8": torch.int8, "float8": torch.float8_e4m3fn}[form]
            self.weight_scale = torch.rand(N, 1) / 100 + 0.01
            stored = (torch.randn(N, K) * 30).clamp(-127, 127).to(dtype)
            self.weight = nn.Parameter(stored, requires_grad=False)
            self.wide = stored.float() * self.weight_scale


@pytest.mark.parametrize("form", ["nvfp4", "packed 4", "packed 8", "int8", "float8"])
def test_compressed_tensors(form, seed):
    layer = Linear(form)
    wide, bias = layer.wide, layer.bias.detach()
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == f"torch_tile.nn.{ {'int8': 'Int8', 'float8': 'Float8'}.get(form, 'Quantized') }Linear"
    x = torch.randn(5, K)
    got, want = layer(x), F.linear(x, wide, bias)
    assert (got - want).norm() < (0.04 if "8" in form[-1:] and form[0] != "p" else 1e-5) * want.norm()


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao_itself(name, seed):
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(K, N))
    torchao.quantize_(model, getattr(torchao, name)())
    x, wide = torch.randn(5, K), model[0].weight.dequantize()
    want = F.linear(x, wide.to(x.dtype), model[0].bias)
    (done,) = torch_tile.replace_layers(model)
    assert "Linear" in done.new and (model(x) - want).norm() < 0.04 * want.norm()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_int8_layers(threshold, used, seed):
    """Large input features are multiplied as they are if there is a threshold, and spoil their rows if not."""
    layer = Linear8bitLt(threshold, used)
    wide, bias = layer.wide().detach(), layer.bias.detach()
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == "torch_tile.nn.Int8Linear" and "threshold" in repr(layer)
    x = torch.randn(2, 7, K)
    x[..., 3] *= 100
    x.requires_grad_()
    got, want = layer(x), F.linear(x, wide, bias)
    small = F.linear(x.detach().index_fill(-1, torch.tensor([3]), 0), wide)  # what is left without the large feature
    error = (got - want).norm() / small.norm()
    assert error < 0.02 if threshold else error > 0.1
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], wide.sum(0).expand_as(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: Linear8bitLt(training=True), "kept in float16 for training"),
        (lambda: QuantLinear(order=True), "ordered by activation"),
        (lambda: QuantLinear(group=8), "16 groups of 128 input features"),
        (lambda: Linear4bit("nf4", 48, False), "blocks of 48 do not divide rows of 128"),
        (lambda: FP8Linear((64, 64)), r"its blocks are \(64, 64\)"),
    ],
)
def test_what_no_kernel_takes_is_left_alone_with_a_reason(layer, why, caplog):
    caplog.set_level("INFO", logger="torch_tile")
    module = layer()
    kind = type(module)
    assert torch_tile.replace_layers(nn.Sequential(module)) == [] and type(module) is kind
    assert re.search(why, caplog.text)


def test_they_are_left_alone_if_the_caller_wants():
    model = nn.Sequential(Linear4bit("nf4", 64, False))
    assert not torch_tile.replace_layers(model, quantized=False) and type(model[0]) is Linear4bit


class LoRA(nn.Module):
    """What peft wraps around a frozen layer (arXiv:2106.09685)."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer, self.down = base, nn.Parameter(torch.randn(rank, K) / 8)
        self.up = nn.Parameter(torch.randn(N, rank) / 8)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


QLORA = {
    **{format: lambda format=format: tnn.QuantizedLinear.from_linear(nn.Linear(K, N), format) for format in FORMATS},
    "nvfp4": lambda: tnn.QuantizedLinear.from_linear(nn.Linear(K, N), "nvfp4"),
    "gptq": QuantLinear,
    "int8": lambda: tnn.Int8Linear.from_linear(nn.Linear(K, N)),
}


@pytest.mark.parametrize("name", QLORA)
def test_adapters_train_on_frozen_weights(name, seed):
    """Eagerly and under torch.compile, with the gradients of the widened weight; the base gets none."""
    base = QLORA[name]()
    if name == "gptq":
        torch_tile.replace_layers(nn.Sequential(base))
    model = LoRA(base)
    wide = base.weight.float() * base.scale if name == "int8" else base.dequantize()
    x = torch.randn(2, 5, K, requires_grad=True)
    plain = F.linear(x, wide) + x @ model.down.T @ model.up.T
    wanted = torch.autograd.grad(plain.mul(x.detach().sum()).sum(), [model.down, model.up])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (model, compiled):
        out = run(x)
        grads = torch.autograd.grad(out.mul(x.detach().sum()).sum(), [x, model.down, model.up])
        torch.testing.assert_close(grads[1:], tuple(wanted), rtol=1e-3, atol=1e-3)
        of_x = (wide + model.up @ model.down).sum(0) * x.detach().sum()
        torch.testing.assert_close(grads[0], of_x.expand_as(x), rtol=1e-3, atol=1e-3)
    assert not any(p.requires_grad for p in (base.words if name != "int8" else base.weight,))


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_to_the_nearest_number(format, seed):
    linear = nn.Linear(K, N)
    layer = tnn.QuantizedLinear.from_linear(linear, format)
    group = K // layer.scales.shape[1]
    scales = layer.scales.float().repeat_interleave(group, 1)
    table = torch.tensor(FORMATS[format].values)
    best = (linear.weight / scales)[..., None].sub(table).abs().amin(-1)
    got = dequantize_4bit(layer.words, layer.scales, format)
    torch.testing.assert_close((linear.weight - got).abs() / scales, best, rtol=1e-3, atol=1e-5)
    x = torch.randn(5, K)
    torch.testing.assert_close(layer(x), F.linear(x, got, linear.bias), rtol=1e-4, atol=1e-4)
    for large in (0.0, 1e30):
        words, scale = quantize_4bit(torch.full((1, 32), large), format, 32)
        assert (dequantize_4bit(words, scale, format) - large).abs().max() <= large / 3


def test_nvfp4_has_scales_of_two_levels(seed):
    linear = nn.Linear(K, N)
    layer = tnn.QuantizedLinear.from_linear(linear, "nvfp4")
    assert layer.scales.shape == (N, K // 16) and layer.scales.dtype == torch.float8_e4m3fn
    got = layer.dequantize()
    steps = layer.scales.float().repeat_interleave(16, 1) * layer.whole_scale
    table = torch.tensor(FORMATS["e2m1"].values)
    best = (linear.weight / steps)[..., None].sub(table).abs().amin(-1)
    torch.testing.assert_close((linear.weight - got).abs() / steps, best, rtol=1e-3, atol=1e-4)
    x = torch.randn(5, K, requires_grad=True)
    want = F.linear(x, got, linear.bias)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
    (grad,), (wanted,) = (torch.autograd.grad(y.square().sum(), x) for y in (layer(x), want))
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="group is 32; expected 16 or None, as NVFP4"):
        tnn.QuantizedLinear.from_linear(linear, "nvfp4", 32)
    assert tnn.QuantizedLinear.from_linear(nn.Linear(16, 4).requires_grad_(False), "nvfp4").words.shape == (4, 8)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("high_first", [False, True])
def test_packing_has_an_inverse(bits, high_first, seed):
    numbers = torch.randint(0, 1 << bits, (3, 16), dtype=torch.uint8)
    assert torch.equal(unpack_fields(pack_fields(numbers, bits, high_first), bits, high_first), numbers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_fields(torch.zeros(2, 8), 3), "bits is 3; expected 1, 2, 4 or 8"),
        (lambda: pack_fields(torch.zeros(2, 7), 4), "numbers has 7 columns; expected a multiple of 2"),
        (lambda: quantize_4bit(torch.zeros(2, 64), "nf3", 64), "format is 'nf3'; expected one of 'nf4'"),
        (lambda: quantize_4bit(torch.zeros(2, 64), "nf4", 48), "group is 48; expected a divisor of 64"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
