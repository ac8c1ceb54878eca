# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft over our layers: the numbers stay, and only the adapters get gradients."""

import copy

import pytest
import torch
from torch import nn

import torch_tile
import torch_tile.nn as tnn

peft = pytest.importorskip("peft")


def adapted(model, custom=None):
    """The model with random adapters on both of its linear layers."""
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    if custom is not None:
        config._register_custom_module(custom)
    return peft.get_peft_model(model, config)


def plain():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 33))


def gradients(model, x):
    """The result in float64, and the gradients of the parameters that have one."""
    out = model(x)
    out.square().sum().backward()
    return out.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def check(model, reference, x):
    """Compare with the reference in float64; gradients are the adapters' alone."""
    out, found = gradients(model, x)
    exact, wanted = gradients(reference, x.double())
    assert found and found.keys() == wanted.keys() and all("lora_" in name for name in found)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-3, msg=name)


def test_adapters_stay_over_replaced_layers(seed) -> None:
    model = adapted(plain())
    reference = copy.deepcopy(model).double()
    done = torch_tile.replace_layers(model)
    assert {each.new for each in done} == {"torch_tile.nn.Linear"} and len(done) == 6
    check(model, reference, torch.randn(7, 64))


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("format", ["nf4", "fp4", "e2m1"])
def test_adapters_over_layers_of_four_bits(format, seed) -> None:
    """QLoRA on our own layers, which peft is told of; the reference is the widened weight."""
    from peft.tuners.lora import Linear as Adapter

    base = plain()
    wide = copy.deepcopy(base)
    for n in (0, 2):
        base[n] = tnn.QuantizedLinear.from_linear(base[n], format, 32)
        wide[n].weight.data = base[n].dequantize()
    model, reference = adapted(base, {tnn.QuantizedLinear: Adapter}), adapted(wide)
    missing = reference.load_state_dict(
        {name: value for name, value in model.state_dict().items() if "lora_" in name}, strict=False
    )
    assert not missing.unexpected_keys
    check(model, reference.double(), torch.randn(7, 64))


def test_adapters_over_layers_of_bitsandbytes(seed) -> None:
    """QLoRA as authors write it: bitsandbytes, peft, then `replace_layers`."""
    bnb = pytest.importorskip("bitsandbytes")
    model, wide = plain(), plain()
    for n in (0, 2):
        layer = bnb.nn.Linear4bit(
            model[n].in_features, model[n].out_features, quant_type="nf4", compute_dtype=torch.float32
        )
        layer.load_state_dict(model[n].state_dict())
        model[n] = layer.to("cpu")
        wide[n].load_state_dict(
            {
                "weight": bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float(),
                "bias": layer.bias.detach(),
            }
        )
    model, reference = adapted(model), adapted(wide)
    reference.load_state_dict({n: v for n, v in model.state_dict().items() if "lora_" in n}, strict=False)
    done = torch_tile.replace_layers(model)
    assert "torch_tile.nn.QuantizedLinear" in {each.new for each in done}, done
    check(model, reference.double(), torch.randn(7, 64))
