# SPDX-License-Identifier: Apache-2.0
"""gpt-oss with experts in MXFP4, end to end: transformers' logits of its own widened weights, by our kernels."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_tile
from torch_tile.nn.packing import quantize_4bit


class Calls(TorchDispatchMode):
    """Count the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def loaded(experts, config):
    """transformers' experts as its loader leaves them, and the weights that its own code widens, of float experts."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    layer = mxfp4.Mxfp4GptOssExperts(config)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).data.mT  # [experts, rows, columns]
        groups, rows, columns = weight.shape
        words, scales = quantize_4bit(weight.reshape(-1, columns), "e2m1", 32)
        words = ((words >> 4) | (words << 4)).view(groups, rows, -1)  # the first column in the lowest bits
        scales = scales.view(torch.uint8).view(groups, rows, -1)
        blocks = words.view(groups, rows, columns // 32, 16)
        widened = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
        getattr(experts, name).data = widened.reshape(getattr(experts, name).shape)
        delattr(layer, name)
        setattr(layer, name, turned(words))
        setattr(layer, f"{name}_precision_config", SimpleNamespace(weight_scale=turned(scales)))
        setattr(layer, f"{name}_bias", nn.Parameter(getattr(experts, f"{name}_bias").data.clone(), requires_grad=False))
    return layer


def turned(stored):
    """A tensor of the Triton kernels, whose layout gives back rows and columns turned."""
    layout = SimpleNamespace(unswizzle_data=lambda data: data.flip(0))
    return SimpleNamespace(storage=SimpleNamespace(layout=layout, data=stored.mT.flip(0)))


def test_a_model_gives_its_librarys_logits_by_our_kernels(build, steps, device, seed):
    torch.manual_seed(seed)
    model = build("GptOss", hidden_size=64, intermediate_size=96)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, 0.0, 0.2)
    packed = copy.deepcopy(model)
    count = 0
    for layer, other in zip(model.model.layers, packed.model.layers, strict=True):
        other.mlp.experts = loaded(layer.mlp.experts, model.config)  # widened weights are left in `model`
        count += 1
    done = torch_tile.replace_layers(packed)
    assert [one.new for one in done].count("torch_tile.nn.QuantizedExperts") == count
    ids = torch.randint(0, model.config.vocab_size, (2, 17)).to(device)
    model, packed = model.to(device), packed.to(device)
    want = steps(model, ids)
    with Calls() as calls:
        got = steps(packed, ids)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())
    assert calls.names["tile.grouped_dequant_gemm.default"] == 2 * count * 4  # both products of a layer, four steps
