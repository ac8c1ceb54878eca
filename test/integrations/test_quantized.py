# SPDX-License-Identifier: Apache-2.0
"""Quantised layers of other libraries, written out here, become ours with the same numbers."""

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

    def __init__(self, format, block, nested):
        super().__init__(K, N)
        words, scales = quantize_4bit(self.weight.reshape(N * K // block, block), format, block)
        scales, inner, offset = scales.flatten(), None, None
        if nested:
            offset = scales.mean()
            inner = SimpleNamespace(
                code=torch.linspace(-1, 1, 256), absmax=(scales - offset).abs().max()[None], blocksize=256
            )
            scales = ((scales - offset) / inner.absmax * 127.5 + 127.5).round().to(torch.uint8)
        self.weight = nn.Parameter(words.reshape(-1, 1), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            quant_type=format, shape=(N, K), absmax=scales, blocksize=block, nested=nested, state2=inner, offset=offset
        )
        self.compute_dtype = None

    def wide(self):
        state = self.weight.quant_state
        table, bytes_ = torch.tensor(FORMATS[state.quant_type].values), self.weight.flatten()
        codes = torch.stack([bytes_ >> 4, bytes_ & 15], -1).flatten()
        scales = state.absmax
        if state.nested:
            scales = state.state2.code[scales.long()] * state.state2.absmax + state.offset
        return (table[codes.long()].view(-1, state.blocksize) * scales[:, None]).view(N, K)


class QuantLinear(nn.Module):
    """As GPTQ's libraries hold a weight: `[K, N]`, eight input features to an int32."""

    def __init__(self, bits=4, group=32, order=False):
        super().__init__()
        self.bits, self.group = bits, group
        per_word = 32 // bits
        numbers = torch.randint(0, 1 << bits, (K, N))
        zeros = torch.randint(0, 1 << bits, (K // group, N))

        def packed(x):  # along the first dimension
            fields = x.view(-1, per_word, *x.shape[1:]) << (bits * torch.arange(per_word)).view(1, -1, 1)
            return fields.sum(1).to(torch.int32)

        self.register_buffer("qweight", packed(numbers))
        self.register_buffer("qzeros", packed((zeros - 1).remainder(1 << bits).t()).t())
        self.register_buffer("scales", (torch.rand(K // group, N) + 0.1) / 2**self.bits)
        self.register_buffer("g_idx", torch.arange(K).flip(0) // group if order else torch.arange(K) // group)
        self.register_buffer("bias", torch.randn(N))
        self.numbers, self.zeros = numbers, zeros

    def wide(self):
        repeat = lambda x: x.repeat_interleave(self.group, 0)  # noqa: E731
        return ((self.numbers - repeat(self.zeros)) * repeat(self.scales)).t()


class WQLinear_GEMM(nn.Module):
    """As AWQ holds a weight: `[K, N]`, eight interleaved output features to an int32."""

    def __init__(self, group=64):
        super().__init__()
        self.w_bit, self.bits, self.group = 4, 4, group
        self.numbers, self.zeros = torch.randint(0, 16, (K, N)), torch.randint(0, 16, (K // group, N))

        def packed(x):
            fields = x.view(-1, N // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]] << 4 * torch.arange(8)
            return fields.sum(-1).to(torch.int32)

        self.register_buffer("qweight", packed(self.numbers))
        self.register_buffer("qzeros", packed(self.zeros))
        self.register_buffer("scales", (torch.rand(K // group, N) + 0.1) / 2**self.bits)
        self.bias = None

    wide = QuantLinear.wide


class FP8Linear(nn.Linear):
    """As transformers holds a weight in float8."""

    def __init__(self, block=(128, 128), static=False):
        super().__init__(300, 150)
        scale = torch.rand(2, 3) + 0.1 if block else torch.tensor(0.3)
        self.block_size, self.weight = block, nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale)
        self.activation_scale = nn.Parameter(torch.tensor(0.02)) if static else None

    def wide(self):
        scale = self.weight_scale_inv
        if self.block_size:
            scale = scale.repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :300]
        return self.weight.float() * scale


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


@pytest.mark.parametrize(
    ("layer", "why"),
    [
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
    with pytest.raises(ValueError, match="group is 32; NVFP4 has runs of 16"):
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
