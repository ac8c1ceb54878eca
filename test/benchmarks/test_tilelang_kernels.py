# SPDX-License-Identifier: Apache-2.0
"""The rivals' sources, compiled by our own compiler: what they compute is right."""

import pytest
import torch

import torch_tile
from benchmarks import tilelang_kernels
from benchmarks.problem import error_of, tolerance_of
from torch_tile.kernels.attention import forward as attention
from torch_tile.kernels.mla import decode as mla_decode


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


@pytest.mark.parametrize("turned", [False, True])
def test_gemm(turned):
    a, b = half(64, 48), half(40, 48) if turned else half(48, 40)
    kernel = tilelang_kernels.gemm(torch_tile, 64, 48, 40, "float16", turned, (32, 32, 16))
    want = a.double() @ (b.T if turned else b).double()
    assert error_of(kernel(a, b), want) < tolerance_of(a.dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    q, k, v = half(2, 4, 64, 32), half(2, 2, 64, 32), half(2, 2, 64, 32)
    kernel = tilelang_kernels.attention(torch_tile, 2, 4, 2, 64, 32, causal, "float16", (32, 16))
    want = attention.reference(*(x.double() for x in (q, k, v)), None, causal)[0]
    assert error_of(kernel(q, k, v), want) < tolerance_of(q.dtype)


@pytest.mark.parametrize("splits", [1, 4])
def test_mla(splits):
    q, q_pe, kv, k_pe = half(2, 8, 32), half(2, 8, 16), half(2, 128, 32), half(2, 128, 16)
    kernel = tilelang_kernels.mla(torch_tile, 2, 8, 128, 32, 16, splits, "float16", (8, 16))
    want = mla_decode.reference(*(x.double() for x in (q[:, None], q_pe[:, None], kv, k_pe)))[0][:, 0]
    assert error_of(kernel(q, q_pe, kv, k_pe), want) < tolerance_of(q.dtype)
