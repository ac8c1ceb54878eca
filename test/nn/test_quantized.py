# SPDX-License-Identifier: Apache-2.0
"""Layers with frozen weights: what is done to all layers of a model leaves their numbers as they are."""

import copy

import pytest
import torch
from torch import nn

import torch_tile.nn as tnn
from torch_tile.nn.packing import quantize_4bit
from torch_tile.nn.quantized import Frozen, QuantizedLinear

N, K, G = 96, 128, 3
E4M3 = torch.float8_e4m3fn


def linear():
    return nn.Linear(K, N, bias=False)


def float8(rows, columns):
    words, scales = torch.ops.tile.quantize_fp8(torch.randn(G * rows, columns) / 1e6, 0, E4M3)
    return words.view(G, rows, columns), scales.view(G, rows, 1)


def nf4(rows, columns):
    words, scales = quantize_4bit(torch.randn(G * rows, columns) / 1e6, "nf4", 32)
    return words.view(G, rows, -1), scales.view(G, rows, -1)


LAYERS = {
    **{name: lambda name=name: QuantizedLinear.from_linear(linear(), name) for name in ("nf4", "fp4", "e2m1", "nvfp4")},
    "words in float8": lambda: QuantizedLinear(torch.randn(N, K).to(E4M3), torch.rand(N, 1) / 1e6, bits=8),
    "float8": lambda: tnn.Float8Linear.from_linear(linear()),
    "int8": lambda: tnn.Int8Linear.from_linear(linear()),
    "experts of few bits": lambda: tnn.QuantizedExperts(*nf4(2 * K, K), *nf4(K, K), format="nf4", high_first=True),
    "experts in float8": lambda: tnn.Float8Experts(*float8(2 * K, K), *float8(K, K)),
}
CASTS = {
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.to(torch.bfloat16),
    "double": lambda layer: layer.double(),
    "there and back": lambda layer: layer.half().float(),
    "type": lambda layer: layer.type(torch.float16),
    "in a model": lambda layer: nn.Sequential(nn.Linear(2, 2), layer).bfloat16()[1],
}


def test_every_layer_with_a_frozen_weight_is_here(seed):
    assert {type(make()) for make in LAYERS.values()} == set(Frozen.__subclasses__())


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", LAYERS)
def test_casts_of_a_model_leave_words_and_scales(name, cast, seed):
    layer = LAYERS[name]()
    x = torch.randn(5, K)
    given = (x, torch.randint(G, (5, 2)), torch.rand(5, 2)) if "experts" in name else (x,)
    made = CASTS[cast](copy.deepcopy(layer))
    assert {n: b.dtype for n, b in made.named_buffers()} == {n: b.dtype for n, b in layer.named_buffers()}
    torch.testing.assert_close(made(*given), layer(*given), rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_casts_reach_the_bias_and_moves_the_buffers(name, seed):
    layer = LAYERS[name]()
    if not isinstance(layer, tnn.QuantizedExperts | tnn.Float8Experts):
        layer.register_parameter("bias", nn.Parameter(torch.randn(N)))
    layer.to("meta", torch.float16)
    assert all(b.is_meta for b in layer.buffers())
    assert all(p.is_meta and p.dtype == torch.float16 for p in layer.parameters())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        lambda layer: quantize_4bit(layer.weight, "e2m1", 32),
        lambda layer: QuantizedLinear.from_linear(layer, "nf4"),
        lambda layer: QuantizedLinear.from_linear(layer, "nvfp4"),
        tnn.Float8Linear.from_linear,
        tnn.Int8Linear.from_linear,
    ],
    ids=["e2m1", "nf4", "nvfp4", "float8", "int8"],
)
def test_no_weight_is_rounded_that_is_not_finite(make, number: float, seed: int) -> None:
    """Its scales would be NaN, and so would what whole rows give."""
    layer = linear()
    make(layer)
    with torch.no_grad():
        layer.weight[N // 3, K // 2] = number
    with pytest.raises(ValueError, match=r"weight holds (NaN|an infinity); expected finite"):
        make(layer)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_one_graph_for_all_sizes(name: str, seed: int) -> None:
    """Checks of symbolic sizes end no graph of Dynamo's."""
    torch._dynamo.reset()
    layer, x = LAYERS[name](), torch.randn(5, K)
    given = (x, torch.randint(G, (5, 2)), torch.rand(5, 2)) if "experts" in name else (x,)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), layer(*given))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_batches_of_transforms(name, seed):
    """torch.func.grad and torch.vmap give what autograd and calls in turn give; so do second gradients."""
    layer = LAYERS[name]()
    routes = (torch.randint(G, (5, 2)), torch.rand(5, 2)) if "experts" in name else ()
    batch = torch.randn(2, 5, K)

    def loss(x):
        return layer(x, *routes).sin().sum()

    called = torch.stack([layer(x, *routes) for x in batch])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x, *routes))(batch), called)
    leaf = batch[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    assert wanted.any()
    torch.testing.assert_close(torch.func.grad(loss)(batch[0]), wanted)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(batch)[0], wanted)
    (second,) = torch.autograd.grad(wanted.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(batch[0]), second)
