# SPDX-License-Identifier: Apache-2.0
"""Quantised Llamas, end to end: the logits of their libraries' own weights or layers, by our kernels."""

import copy

import pytest
import torch
from torch import nn

import torch_tile
from test.integrations.test_mxfp4 import Calls
from test.integrations.test_quantized import FP8Linear, Linear4bit, QuantLinear, WQLinear_GEMM

SIZES = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64}
LAYERS = {
    "nf4": lambda n, k: Linear4bit("nf4", 64, False, n, k),
    "nf4, doubly quantised": lambda n, k: Linear4bit("nf4", 64, True, n, k),
    "gptq": lambda n, k: small(QuantLinear(n=n, k=k).requires_grad_(False), "scales"),
    "awq": lambda n, k: small(WQLinear_GEMM(n=n, k=k).requires_grad_(False), "scales"),
    "float8": lambda n, k: small(FP8Linear(n=n, k=k), "weight_scale_inv"),
}
OPERATORS = {"float8": "tile.scaled_gemm.default"}  # of other formats: tile.dequant_gemm.default
ROUNDED = 0.1  # the most that rounding activations to float8 in each layer may change logits, of their norm


def small(layer, scales):
    """Divide the scales, so that a model's activations keep their size."""
    with torch.no_grad():
        getattr(layer, scales).mul_(0.05 if scales == "scales" else 0.5)
    return layer


def linears(model):
    """The linear layers of a decoder, by name."""
    return {name: layer for name, layer in model.named_modules() if "layers." in name and isinstance(layer, nn.Linear)}


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def logits(model, count, ids, steps, operator):
    """The logits of a model with our layers, of which `count` run our operator in each of four steps."""
    with Calls() as calls:
        got = steps(model, ids)
    assert calls.names[operator] == 4 * count
    return got.float()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_written_out(name, build, steps, device, seed):
    model = build("Llama", **SIZES)
    packed = copy.deepcopy(model)
    for path, linear in linears(model).items():
        layer = LAYERS[name](linear.out_features, linear.in_features)
        linear.weight.data = layer.wide().detach().contiguous()
        linear.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        packed.set_submodule(path, layer)
    torch_tile.replace_layers(packed)
    ids = torch.randint(0, model.config.vocab_size, (2, 17)).to(device)
    model, packed = model.to(device), packed.to(device)
    want = steps(model, ids)
    got = logits(packed, len(linears(model)), ids, steps, OPERATORS.get(name, "tile.dequant_gemm.default"))
    if name == "float8":
        assert relative(got, want) < ROUNDED
    else:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


@pytest.fixture
def saved(build, tmp_path):
    """A checkpoint of a Llama in bfloat16."""
    build("Llama", **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def load(saved):
    """`load(config)`: the checkpoint, quantised by transformers while it is loaded to a GPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def run(config):
        return transformers.AutoModelForCausalLM.from_pretrained(
            saved, quantization_config=config, device_map={"": 0}, dtype=torch.bfloat16
        ).eval()

    return run


@pytest.mark.cuda
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_loaded_with_bitsandbytes(format, nested, load, steps, seed):
    """Its own kernels' logits, whose error in bfloat16 is that of ours."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = load(
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=format, bnb_4bit_use_double_quant=nested,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    )  # fmt: skip
    ids = torch.randint(0, model.config.vocab_size, (2, 17), device="cuda")
    want, count = steps(model, ids).float(), len(linears(model))
    torch_tile.replace_layers(model)
    assert relative(logits(model, count, ids, steps, "tile.dequant_gemm.default"), want) < 0.03


@pytest.mark.cuda
def test_loaded_in_float8(load, steps, seed):
    """The logits of its widened weights: the library's kernels come from a hub."""
    from transformers import FineGrainedFP8Config

    model = load(FineGrainedFP8Config())
    wide = copy.deepcopy(model)
    for path, layer in linears(model).items():
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        n, k = layer.weight.shape
        linear = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        linear.weight.data = (layer.weight.float() * scale[:n, :k]).bfloat16()
        wide.set_submodule(path, linear)
    ids = torch.randint(0, model.config.vocab_size, (2, 17), device="cuda")
    want, count = steps(wide, ids).float(), len(linears(wide))
    torch_tile.replace_layers(model)
    assert relative(logits(model, count, ids, steps, "tile.scaled_gemm.default"), want) < ROUNDED
