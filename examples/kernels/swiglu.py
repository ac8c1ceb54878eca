# SPDX-License-Identifier: Apache-2.0
"""SwiGLU: two products of one input and their gate in one kernel (arXiv:2002.05202)."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def swiglu(X, gate, up, block_M=32, block_N=64, block_K=32):
    M, N, K = T.const("M, N, K")
    X: T.Tensor((M, K), "float32")
    gate: T.Tensor((N, K), "float32")
    up: T.Tensor((N, K), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        x = T.alloc_shared((block_M, block_K), "float32")
        w = T.alloc_shared((block_N, block_K), "float32")
        v = T.alloc_shared((block_N, block_K), "float32")
        g = T.alloc_fragment((block_M, block_N), "float32")
        u = T.alloc_fragment((block_M, block_N), "float32")
        T.clear(g)
        T.clear(u)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
            T.copy(X[by * block_M, k * block_K], x)
            T.copy(gate[bx * block_N, k * block_K], w)
            T.copy(up[bx * block_N, k * block_K], v)
            T.gemm(x, w, g, transpose_B=True)
            T.gemm(x, v, u, transpose_B=True)
        for i, j in T.Parallel(block_M, block_N):
            g[i, j] = g[i, j] * T.sigmoid(g[i, j]) * u[i, j]
        T.copy(g, Y[by * block_M, bx * block_N])
    return Y


x, gate, up = torch.randn(50, 96), torch.randn(130, 96) / 10, torch.randn(130, 96) / 10
y = swiglu(x, gate, up)
exact = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
print(f"M x N x K       error against float64\n50 x 130 x 96   {(y - exact).abs().max():.1e}")
