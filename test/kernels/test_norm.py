# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from torch_tile.kernels.norm import layer_norm_reference, rms_norm_reference


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 33)])
def test_rms_norm_is_torchs(shape):
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    y, rstd, total = rms_norm_reference(x, w, None, 1e-5)
    torch.testing.assert_close(y, F.rms_norm(x, shape[-1:], w, 1e-5))
    torch.testing.assert_close(rstd, torch.rsqrt(x.square().mean(-1) + 1e-5).reshape(-1))
    assert total is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rounding_is_transformers_or_torchs(dtype):
    x, w = torch.randn(9, 65).to(dtype), torch.randn(65).to(dtype)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm_reference(x, w)[0], w * normalised.to(dtype), rtol=0, atol=0)
    once = rms_norm_reference(x, w, None, 1e-6, "none", 1.0, False)[0]
    torch.testing.assert_close(once, (normalised * (1.0 + w.float())).to(dtype), rtol=0, atol=0)


def test_promotes_with_the_weight_only_after_the_cast():
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8)
    assert rms_norm_reference(x, w)[0].dtype == torch.float32
    assert rms_norm_reference(x, w, cast_first=False)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_residual_and_activation(activation):
    x, r, w = (torch.randn(n, dtype=torch.float64) for n in ((4, 9), (4, 9), (9,)))
    act = {"gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}.get(activation) or getattr(F, activation)
    y, _, total = rms_norm_reference(x, w, r, 1e-6, activation)
    torch.testing.assert_close(y, act(F.rms_norm(x + r, (9,), w, 1e-6)))
    torch.testing.assert_close(total, x + r, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 33)])
@pytest.mark.parametrize("affine", [(False, False), (True, False), (False, True), (True, True)])
def test_layer_norm_is_torchs(shape, affine):
    x = torch.randn(shape, dtype=torch.float64) + 3
    w, b = (torch.randn(shape[-1], dtype=torch.float64) if given else None for given in affine)
    y, mean, rstd = layer_norm_reference(x, w, b, 1e-3)
    torch.testing.assert_close(y, F.layer_norm(x, shape[-1:], w, b, 1e-3))
    torch.testing.assert_close(mean, x.mean(-1).reshape(-1))
    torch.testing.assert_close(rstd, torch.rsqrt(x.var(-1, correction=0) + 1e-3).reshape(-1))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_empty(shape):
    x, w = torch.randn(shape), torch.randn(shape[-1])
    assert rms_norm_reference(x, w, x)[0].shape == shape
    assert layer_norm_reference(x, w, w)[0].shape == shape
