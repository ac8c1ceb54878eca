# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from torch_tile.nn import LayerNorm, RMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exactness(dtype: torch.dtype) -> dict[str, float]:
    return (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_rms_norm_agrees_with_nn_rms_norm(dtype: torch.dtype, eps: float | None, scale: float, seed: int) -> None:
    stock, ours = torch.nn.RMSNorm(37, eps, dtype=dtype), RMSNorm(37, eps, dtype=dtype)
    torch.nn.init.normal_(stock.weight)
    ours.load_state_dict(stock.state_dict())
    x = (torch.randn(3, 5, 37) * scale).to(dtype)
    torch.testing.assert_close(ours(x), stock(x), **exactness(dtype))


def test_rms_norm_forms(seed: int) -> None:
    x = torch.randn(5, 33).bfloat16()
    gemma = RMSNorm(33, 1e-6, weight_offset=1.0, dtype=torch.bfloat16)
    assert gemma.weight.eq(0).all()  # so that it starts as the identity does
    torch.nn.init.normal_(gemma.weight)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(gemma(x), (wide * (1 + gemma.weight.float())).bfloat16(), rtol=1e-2, atol=1e-6)
    llama = RMSNorm(33, 1e-6, cast_first=True, dtype=torch.bfloat16)
    torch.nn.init.normal_(llama.weight)
    torch.testing.assert_close(llama(x), wide.bfloat16() * llama.weight, rtol=1e-2, atol=1e-6)
    assert RMSNorm(33, elementwise_affine=False)(x).shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_agrees_with_nn_layer_norm(dtype: torch.dtype, affine: bool, seed: int) -> None:
    stock = torch.nn.LayerNorm(41, 1e-4, affine, dtype=dtype)
    ours = LayerNorm(41, 1e-4, affine, dtype=dtype)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(3, 41).to(dtype)
    exact = stock.double()(x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours(x).double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm])
def test_several_dimensions_are_refused(layer: type) -> None:
    with pytest.raises(ValueError, match=r"normalized_shape is \(3, 4\); expected the last"):
        layer((3, 4))(torch.randn(2, 3, 4))


@pytest.mark.parametrize("gating", ["before", "after"])
@pytest.mark.parametrize("rounded", [False, True])
def test_hooks_of_a_gated_norm_run_once(gating: str, rounded: bool, seed: int) -> None:
    norm, calls = RMSNorm(8), []
    norm.names, norm.gating, norm.gate_rounded = ("x", "gate"), gating, rounded
    norm.register_forward_hook(lambda *given: calls.append(given))
    norm(torch.randn(3, 8), torch.randn(3, 8))
    assert len(calls) == 1


@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("shape", [np.int64(8), (np.int32(8),), torch.Size([8]), [8], 8])
def test_a_size_may_be_any_integer(layer: type, shape: object) -> None:
    """As in torch's layers."""
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(shape)(x), getattr(torch.nn, layer.__name__)(8)(x))
