# SPDX-License-Identifier: Apache-2.0
"""RMS norm with a residual: add, keep the sum, normalise, in one pass over memory (arXiv:1910.07467)."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def add_rms_norm(X, R, weight, eps=1e-6):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    R: T.Tensor((M, N), "float32")
    weight: T.Tensor((N,), "float32")
    S = T.empty((M, N), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(M, threads=128) as row:
        x = T.alloc_fragment((N,), "float32")
        square = T.alloc_fragment((N,), "float32")
        total = T.alloc_fragment((1,), "float32")
        for i in T.Parallel(N):
            x[i] = X[row, i] + R[row, i]
            square[i] = x[i] * x[i]
        T.reduce_sum(square, total, dim=0)
        for i in T.Parallel(N):
            S[row, i] = x[i]
            Y[row, i] = x[i] * T.rsqrt(total[0] / N + eps) * weight[i]
    return S, Y


x, r, weight = torch.randn(37, 500), torch.randn(37, 500), torch.randn(500)
s, y = add_rms_norm(x, r, weight)
exact = torch.nn.functional.rms_norm((x + r).double(), (500,), weight.double(), 1e-6)
torch.testing.assert_close(s, x + r)
torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
print(f"rows  columns  error against float64\n{37:4}  {500:7}  {(y - exact).abs().max():.1e}")
