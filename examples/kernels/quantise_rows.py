# SPDX-License-Identifier: Apache-2.0
"""Quantise rows to int8, each by its own scale, as dynamic quantisation of activations does."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def quantise(X):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    Q = T.empty((M, N), "int8")
    S = T.empty((M,), "float32")
    with T.Kernel(M, threads=128) as row:
        x = T.alloc_fragment((N,), "float32")
        absmax = T.alloc_fragment((1,), "float32")
        T.copy(X[row, 0:N], x)
        T.reduce_absmax(x, absmax, dim=0)
        for i in T.Parallel(1):
            absmax[i] = T.max(absmax[i] / 127, 1e-12)
            S[row + i] = absmax[i]
        for i in T.Parallel(N):
            Q[row, i] = T.cast(T.round(x[i] / absmax[0]), "int8")
    return Q, S


x = torch.randn(30, 333) * torch.rand(30, 1) * 100
q, s = quantise(x)
scale = x.abs().amax(1) / 127
torch.testing.assert_close(s, scale)
torch.testing.assert_close(q, (x / scale[:, None]).round().to(torch.int8), rtol=0, atol=1)
worst = ((q * s[:, None] - x).abs() / s[:, None]).max()
assert worst < 0.501
print(f"rows  columns  largest error in steps\n{30:4}  {333:7}  {worst:.3f}")
