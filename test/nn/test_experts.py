# SPDX-License-Identifier: Apache-2.0
"""Experts of transformers in float8 and MXFP4 become ours with the same numbers."""

import copy
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torch_tile
import torch_tile.nn as tnn
from torch_tile.nn.experts import Gate
from torch_tile.nn.packing import dequantize_4bit, quantize_4bit

G, K, I, T, EACH = 4, 192, 160, 11, 2  # experts, hidden and inner sizes, tokens, experts of a token


def routing(seed):
    torch.manual_seed(seed)
    return torch.rand(T, G).topk(EACH).indices, torch.rand(T, EACH)


def exact(x, gate_up, gate_up_bias, down, down_bias, join, numbers, weights):
    """Each token's experts one by one, in float64; `join` takes all rows of gate and up."""
    wide = [t.double() for t in (gate_up, gate_up_bias, down, down_bias)]
    out = torch.zeros(x.shape[0], K, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(numbers[token].tolist(), weights[token].double(), strict=True):
            if 0 <= expert < G:
                inner = join(wide[0][expert] @ x[token].double() + wide[1][expert])
                out[token] = out[token] + weight * (wide[2][expert] @ inner + wide[3][expert])
    return out


def gpt_oss(both):
    gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def silu(both):
    gate, up = both.chunk(2)
    return nn.functional.silu(gate) * up


class Mxfp4GptOssExperts(nn.Module):
    """As transformers holds them once loaded: tensors of the Triton kernels, and their scales apart."""

    def __init__(self):
        super().__init__()
        self.alpha, self.limit, self.wide = 1.702, 7.0, []
        for name, rows, columns in (("gate_up_proj", 2 * I, K), ("down_proj", K, I)):
            words, scales = quantize_4bit(torch.randn(G * rows, columns), "e2m1", 32)
            words = ((words >> 4) | (words << 4)).view(G, rows, -1)  # the first column in the lowest bits
            scales = scales.view(torch.uint8).view(G, rows, -1)
            fields = torch.ops.tile, words, scales
            self.wide.append(self.widened(*fields[1:]))
            setattr(self, name, self.swizzled(words))
            setattr(self, f"{name}_precision_config", SimpleNamespace(weight_scale=self.swizzled(scales)))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(G, rows), requires_grad=False))

    @staticmethod
    def widened(words, scales):
        turned = (words >> 4) | (words << 4)
        flat = turned.flatten(0, 1), scales.flatten(0, 1).view(torch.float8_e8m0fnu)
        return dequantize_4bit(*flat, "e2m1").view(*words.shape[:2], -1)

    @staticmethod
    def swizzled(x):
        layout = SimpleNamespace(unswizzle_data=lambda data: data.flip(0))
        return SimpleNamespace(storage=SimpleNamespace(layout=layout, data=x.mT.flip(0)))


def test_mxfp4_of_gpt_oss(seed):
    layer = Mxfp4GptOssExperts()
    gate_up, down = layer.wide
    biases = layer.gate_up_proj_bias, layer.down_proj_bias
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == "torch_tile.nn.QuantizedExperts" and "e2m1" in repr(layer)
    x = (torch.randn(T, K) / 8).requires_grad_()
    numbers, weights = routing(seed)
    numbers[3, 1], numbers[5, 0] = G, -1  # of other ranks
    got = layer(x, numbers, weights)
    want = exact(x, gate_up, biases[0], down, biases[1], gpt_oss, numbers, weights)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    grad, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
    with pytest.raises(ValueError, match="expected \\[T, K\\] and twice \\[T, experts\\]"):
        layer(x[None], numbers, weights)


def test_under_torch_compile(seed):
    layer = Mxfp4GptOssExperts()
    torch_tile.replace_layers(nn.Sequential(layer))
    x, (numbers, weights) = torch.randn(T, K) / 8, routing(seed)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, numbers, weights), layer(x, numbers, weights), rtol=1e-5, atol=1e-4)


def of_transformers(block, dtype="fp8", **options):
    """transformers' own experts with random weights, and these in float32."""
    found = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(found, "FP8Experts"):
        pytest.skip("a version without FP8Experts")
    config = SimpleNamespace(
        hidden_size=K, num_local_experts=G, moe_intermediate_size=I, hidden_act="silu", expert_dtype=dtype, **options
    )  # fmt: skip
    # Older versions read the dtype from the configuration.
    named = {"expert_dtype": dtype} if "expert_dtype" in inspect.signature(found.FP8Experts).parameters else {}
    layer = found.FP8Experts(config, block_size=block, **named)
    wide = []
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(layer, name).data, getattr(layer, f"{name}_scale_inv").data
        scale.uniform_(0.005, 0.01)
        if dtype == "fp4":
            weight.copy_(torch.randint(-128, 128, weight.shape, dtype=torch.int8))
            turned = (weight.view(torch.uint8) >> 4) | (weight.view(torch.uint8) << 4)
            flat = dequantize_4bit(turned.flatten(0, 1), scale.flatten(0, 1), "e2m1")
            wide.append(flat.view(*weight.shape[:2], -1))
            continue
        weight.copy_(torch.randn(weight.shape) * 8)
        rows, columns = weight.shape[1:]
        steps = block or (rows // scale.shape[1], columns)
        full = scale.repeat_interleave(steps[0], 1)[:, :rows].repeat_interleave(steps[1], 2)[..., :columns]
        wide.append(weight.float() * full)
    return layer, wide


@pytest.mark.parametrize("block", [(128, 128), None])
def test_float8_of_transformers(block, seed):
    layer, (gate_up, down) = of_transformers(block)
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == "torch_tile.nn.Float8Experts" and "scales=" in repr(layer)
    assert layer.gate_up_proj.dtype == torch.float8_e4m3fn
    x, (numbers, weights) = torch.randn(T, K, requires_grad=True), routing(seed)
    got = layer(x, numbers, weights)
    none = torch.zeros(G, 2 * I), torch.zeros(G, K)
    want = exact(x, gate_up, none[0], down, none[1], silu, numbers, weights)
    assert (got - want).norm() < 0.06 * want.norm()
    grad, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (got, want))
    assert (grad - wanted).norm() < 0.06 * wanted.norm()


def test_float4_of_transformers(seed):
    layer, (gate_up, down) = of_transformers((128, 128), "fp4", swiglu_limit=0.5)
    (done,) = torch_tile.replace_layers(nn.Sequential(layer))
    assert done.new == "torch_tile.nn.QuantizedExperts"
    x, (numbers, weights) = torch.randn(T, K), routing(seed)
    clamped = lambda both: silu(torch.cat([both[:I].clamp(max=0.5), both[I:].clamp(-0.5, 0.5)]))  # noqa: E731
    none = torch.zeros(G, 2 * I), torch.zeros(G, K)
    want = exact(x, gate_up, none[0], down, none[1], clamped, numbers, weights)
    torch.testing.assert_close(layer(x, numbers, weights).double(), want, rtol=1e-4, atol=1e-5)


def test_integers_of_four_bits(seed):
    """Without a bias, and with experts that no token goes to."""
    words = [
        torch.randint(0, 256, (G, rows, columns // 2), dtype=torch.uint8) for rows, columns in ((2 * I, K), (K, I))
    ]
    scales = [torch.rand(G, 2 * I, 3) / 32, torch.rand(G, K, 5) / 32]
    layer = tnn.QuantizedExperts(words[0], scales[0], words[1], scales[1], gate=Gate("gelu"), offset=8)
    wide = []
    for word, scale in zip(words, scales, strict=True):
        numbers = torch.stack([word & 15, word >> 4], -1).flatten(-2).float() - 8
        wide.append(numbers * scale.repeat_interleave(numbers.shape[-1] // scale.shape[-1], -1))
    x, weights = torch.randn(T, K), torch.rand(T, EACH)
    numbers = torch.tensor([[2, 0]]).expand(T, EACH)
    join = lambda both: nn.functional.gelu(both[:I]) * both[I:]  # noqa: E731
    want = exact(x, wide[0], torch.zeros(G, 2 * I), wide[1], torch.zeros(G, K), join, numbers, weights)
    torch.testing.assert_close(layer(x, numbers, weights).double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_size": (64, 64)}, r"its blocks are \(64, 64\)"),
        ({"activation_scheme": "static"}, "it has no gate, or its activations have one scale"),
        ({"act_fn": nn.Softplus()}, "its activation is Softplus"),
        ({"gate_softcap": 3.0}, "its gate has a soft cap"),
    ],
)
def test_what_no_kernel_takes_is_left_alone_with_a_reason(change, why, caplog):
    caplog.set_level("INFO", logger="torch_tile")
    layer, _ = of_transformers((128, 128))
    layer = copy.deepcopy(layer)
    for name, value in change.items():
        setattr(layer, name, value)
    kind = type(layer)
    assert not torch_tile.replace_layers(nn.Sequential(layer)) and type(layer) is kind
    assert re.search(why, caplog.text)
