# SPDX-License-Identifier: Apache-2.0
"""GEMM with an epilogue: a product whose bias and GELU never go to memory.

The product stays in registers, so what follows it elementwise costs no traffic.
"""

# %%
# `T.Pipelined` lets the copies of later iterations run beside the product of this one. On a GPU the compiler makes
# asynchronous copies and several versions of both tiles; on a CPU it is a plain loop with the same result.

import torch
import torch.nn.functional as F

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def linear_gelu(X, W, bias, block_M=64, block_N=64, block_K=32, dtype="float32"):
    M, N, K = T.const("M, N, K")
    X: T.Tensor((M, K), dtype)
    W: T.Tensor((N, K), dtype)  # as nn.Linear keeps its weight
    bias: T.Tensor((N,), dtype)
    Y = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        x = T.alloc_shared((block_M, block_K), dtype)
        w = T.alloc_shared((block_N, block_K), dtype)
        y = T.alloc_fragment((block_M, block_N), "float32")
        T.clear(y)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
            T.copy(X[by * block_M, k * block_K], x)
            T.copy(W[bx * block_N, k * block_K], w)
            T.gemm(x, w, y, transpose_B=True)
        for i, j in T.Parallel(block_M, block_N):
            v = y[i, j] + bias[bx * block_N + j]
            y[i, j] = 0.5 * v * (1 + T.erf(v * 0.7071067811865476))
        T.copy(y, Y[by * block_M, bx * block_N])
    return Y


# %%
# Ragged sizes in all three dimensions, compared with float64.

x, w, bias = torch.randn(100, 210), torch.randn(150, 210), torch.randn(150)
exact = F.gelu(F.linear(x.double(), w.double(), bias.double()))
y = linear_gelu(x, w, bias)
torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
torchs = F.gelu(F.linear(x, w, bias))
print(f"error against float64: ours {(y - exact).abs().max():.1e}, torch {(torchs - exact).abs().max():.1e}")

# %%
# What the compiler decides for a GPU is printed without one. In float16, Hopper multiplies by `wgmma` from bulk copies.

kernel = linear_gelu.on("cuda:sm_90a").compile(M=1024, N=1024, K=1024, block_K=64, dtype="float16")
print(kernel.schedule)
