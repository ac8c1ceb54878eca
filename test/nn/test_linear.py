# SPDX-License-Identifier: Apache-2.0

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_tile import nn
from torch_tile.nn import GatedMLP, Linear, linear

REFERENCE = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize("bias", [True, False])
def test_agrees_with_nn_linear(activation: str, bias: bool, seed: int) -> None:
    stock = torch.nn.Linear(37, 53, bias)
    ours = Linear(37, 53, bias, activation)
    ours.load_state_dict(stock.state_dict())
    x, residual = torch.randn(3, 5, 37), torch.randn(3, 5, 53)
    exact = REFERENCE[activation](stock.double()(x.double()))
    torch.testing.assert_close(ours(x).double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, residual).double(), exact + residual, rtol=1e-4, atol=1e-5)


def test_each_activation_has_its_own_function() -> None:
    """Layers with adapters compute by these; only "none" is the identity."""
    x = torch.randn(9, 5)
    for name, function in REFERENCE.items():
        torch.testing.assert_close(linear.FUNCTIONS[name](x), function(x))
    assert set(linear.FUNCTIONS) == set(REFERENCE)


def test_gradients_reach_parameters(seed: int) -> None:
    stock, ours = torch.nn.Linear(7, 5), Linear(7, 5, activation="silu")
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(4, 7)
    F.silu(stock(x)).square().sum().backward()
    ours(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, stock.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.bias.grad, stock.bias.grad, rtol=1e-4, atol=1e-5)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'swish'; it may be none, relu"):
        Linear(3, 4, activation="swish")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")]
)
def test_agrees_with_transformers(bias: bool, activation: str, theirs: str, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    stock = LlamaMLP(
        transformers.LlamaConfig(
            hidden_size=36, num_attention_heads=6, intermediate_size=50, hidden_act=theirs, mlp_bias=bias
        )
    )
    ours = GatedMLP(36, 50, activation, bias)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 7, 36)
    torch.testing.assert_close(ours(x).double(), stock.double()(x.double()), rtol=1e-4, atol=1e-5)


NO_TENSORS = (np.ones((4, 64), dtype=np.float32), [[1.0] * 64], None, 3)


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
def test_layers_name_the_argument_that_is_no_tensor(value) -> None:
    """Each layer says which argument it is, and never that some type has no attribute."""
    classes, labels = torch.randn(4, 10), torch.zeros(4, dtype=torch.long)
    calls = [
        (nn.Linear(64, 8), (value,), "input"),
        (nn.LayerNorm(64), (value,), "input"),
        (nn.RMSNorm(64), (value,), "x"),
        (nn.GatedMLP(64, 32), (value,), "x"),
        (nn.Attention(64, 4), (value,), "hidden_states"),
        (nn.QuantizedLinear.from_linear(torch.nn.Linear(64, 64), "nf4"), (value,), "input"),
        (nn.Int8Linear.from_linear(torch.nn.Linear(64, 64)), (value,), "input"),
        (nn.Float8Linear.from_linear(torch.nn.Linear(64, 64)), (value,), "input"),
        (nn.CrossEntropyLoss(), (value, labels), "input"),
        (nn.CrossEntropyLoss(), (classes, value), "target"),
        (nn.LinearCrossEntropyLoss(10, 5), (value, labels), "input"),
        (nn.LinearCrossEntropyLoss(10, 5), (classes, value), "target"),
    ]
    for layer, given, name in calls:
        with pytest.raises((TypeError, RuntimeError)) as caught:
            layer(*given)
        assert re.search(rf"\b{name}\b", str(caught.value)), (layer, caught.value)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_projections_that_change_later_are_called(projection: str, seed: int) -> None:
    """Hooks, adapters and patched calls of a projection count, also where a model got them behind `replace_layers`."""
    torch.manual_seed(seed)

    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + x.mean(-1, keepdim=True)

    def adapt(mlp: torch.nn.Module) -> None:
        setattr(mlp, projection, Adapter(getattr(mlp, projection)))

    def patch(mlp: torch.nn.Module) -> None:
        layer = getattr(mlp, projection)
        layer.forward = lambda x: x @ layer.weight.T * 3

    changes = [
        adapt,
        patch,
        lambda mlp: getattr(mlp, projection).register_forward_hook(lambda layer, args, out: out * 2),
        lambda mlp: getattr(mlp, projection).register_forward_pre_hook(lambda layer, args: (args[0] + 1,)),
        lambda mlp: torch.nn.utils.parametrizations.weight_norm(getattr(mlp, projection)).weight.mul(1),
    ]
    for change in changes:
        mlp, x = GatedMLP(7, 9, activation="gelu"), torch.randn(3, 7)
        change(mlp)
        wanted = mlp.down_proj(F.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))
        torch.testing.assert_close(mlp(x), wanted)
