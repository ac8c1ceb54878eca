# SPDX-License-Identifier: Apache-2.0
"""Norms and activations as printed in articles on TileLang, completed to kernels where the print is a fragment."""

import math

import pytest
import torch
from torch.nn import functional as F

import torch_tile as tilelang
import torch_tile.language as T


# "TileLang Code Examples", common patterns: the loops are printed; the kernels around them are not.
def relu(M, N):
    @T.prim_func
    def kernel(input: T.Tensor((M, N), "float32"), output: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            # ReLU activation
            for i, j in T.Parallel(M, N):
                output[i, j] = T.max(input[i, j], 0)

    return kernel


def gelu(M, N):
    @T.prim_func
    def kernel(input: T.Tensor((M, N), "float32"), output: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            # GELU approximation
            for i, j in T.Parallel(M, N):
                x = input[i, j]
                output[i, j] = 0.5 * x * (1.0 + T.tanh(0.797885 * (x + 0.044715 * x * x * x)))

    return kernel


def layer_norm(M, N):
    @T.prim_func
    def kernel(input: T.Tensor((M, N), "float32"), output: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=128) as _:
            mean = T.alloc_fragment((M,), "float32")
            variance = T.alloc_fragment((M,), "float32")
            # Compute mean
            for i in T.Parallel(M):
                sum_val = T.float32(0.0)
                for j in T.Parallel(N):
                    sum_val += input[i, j]
                mean[i] = sum_val / N

            # Compute variance
            for i in T.Parallel(M):
                var_val = T.float32(0.0)
                for j in T.Parallel(N):
                    diff = input[i, j] - mean[i]
                    var_val += diff * diff
                variance[i] = var_val / N

            # Normalize
            for i, j in T.Parallel(M, N):
                output[i, j] = (input[i, j] - mean[i]) / T.sqrt(variance[i] + 1e-5)

    return kernel


REFERENCES = {
    relu: torch.relu,
    gelu: lambda x: F.gelu(x, approximate="tanh"),
    layer_norm: lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
}


@pytest.mark.parametrize("make", REFERENCES, ids=lambda f: f.__name__)
def test_patterns(make, launch):
    x, y = torch.randn(13, 37) * 3, torch.full((13, 37), math.nan)
    launch(make(13, 37), x, y)
    # 0.797885 stands for sqrt(2 / pi) with six digits.
    tolerance = 1e-5
    torch.testing.assert_close(y.double(), REFERENCES[make](x.double()), rtol=tolerance, atol=tolerance)


# "Writing High-Performance Kernels in TileLang" (Atlas Cloud): head and comments of RMSNorm with SiLU are
# printed, the two passes are written as the comments say.
@tilelang.jit
def rms_silu(M, C, BLOCK_M, BLOCK_C, dtype="float16", accum_dtype="float"):
    @T.prim_func
    def main(
        X: T.Tensor((M, C), dtype),  # M = B*T*H*W rows
        gamma: T.Tensor((C,), dtype),
        Y: T.Tensor((M, C), dtype),
    ):
        with T.Kernel(T.ceildiv(M, BLOCK_M), threads=128) as bm:
            X_chunk = T.alloc_shared((BLOCK_M, BLOCK_C), dtype)
            ss = T.alloc_fragment((BLOCK_M,), accum_dtype)  # FP32 sum-of-squares
            # pass 1: loop over C in BLOCK_C chunks, accumulate sum of squares in FP32
            squares = T.alloc_fragment((BLOCK_M, BLOCK_C), accum_dtype)
            gamma_chunk = T.alloc_shared((BLOCK_C,), dtype)
            T.clear(ss)
            for c in T.Pipelined(T.ceildiv(C, BLOCK_C), num_stages=2):
                T.copy(X[bm * BLOCK_M, c * BLOCK_C], X_chunk)
                for i, j in T.Parallel(BLOCK_M, BLOCK_C):
                    squares[i, j] = T.cast(X_chunk[i, j], accum_dtype) * T.cast(X_chunk[i, j], accum_dtype)
                T.reduce_sum(squares, ss, dim=1, clear=False)
            # rinv = rsqrt(ss / C + 1e-5)
            rinv = T.alloc_fragment((BLOCK_M,), accum_dtype)
            for i in T.Parallel(BLOCK_M):
                rinv[i] = T.rsqrt(ss[i] / C + 1e-5)
            # pass 2: re-load X, y = silu(x * gamma * rinv), write back
            for c in T.Pipelined(T.ceildiv(C, BLOCK_C), num_stages=2):
                T.copy(X[bm * BLOCK_M, c * BLOCK_C], X_chunk)
                T.copy(gamma[c * BLOCK_C], gamma_chunk)
                for i, j in T.Parallel(BLOCK_M, BLOCK_C):
                    normed = T.cast(X_chunk[i, j], accum_dtype) * gamma_chunk[j] * rinv[i]
                    X_chunk[i, j] = normed * T.sigmoid(normed)
                T.copy(X_chunk, Y[bm * BLOCK_M, c * BLOCK_C])

    return main


@pytest.mark.parametrize(("rows", "channels", "chunk"), [(16, 96, 32), (13, 160, 64)])
def test_rms_silu(rows, channels, chunk, launch):
    x, gamma = torch.randn(rows, channels).half(), torch.randn(channels).half()
    y = torch.full_like(x, math.nan)
    launch(rms_silu(rows, channels, 8, chunk), x, gamma, y)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gamma.double()
    torch.testing.assert_close(y.double(), F.silu(normed), rtol=2e-3, atol=2e-3)
