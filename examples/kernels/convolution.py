# SPDX-License-Identifier: Apache-2.0
"""Convolution as a product: im2col tiles of the image times the filters, nothing unfolded in memory."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def conv2d(X, W, stride=1, padding=1, block_M=64, block_N=32, block_K=32):
    N, H, Wd, C, F, R = T.const("N, H, Wd, C, F, R")
    X: T.Tensor((N, H, Wd, C), "float32")
    W: T.Tensor((R, R, C, F), "float32")
    out_h = (H + 2 * padding - R) // stride + 1
    out_w = (Wd + 2 * padding - R) // stride + 1
    Y = T.empty((N, out_h, out_w, F), "float32")
    weight = T.reshape(W, (R * R * C, F))
    flat = T.reshape(Y, (N * out_h * out_w, F))
    with T.Kernel(T.ceildiv(F, block_N), T.ceildiv(N * out_h * out_w, block_M), threads=128) as (bx, by):
        x = T.alloc_shared((block_M, block_K), "float32")
        w = T.alloc_shared((block_K, block_N), "float32")
        y = T.alloc_fragment((block_M, block_N), "float32")
        T.clear(y)
        for k in T.Pipelined(T.ceildiv(R * R * C, block_K), num_stages=2):
            T.im2col(X, x, by, k, R, stride, 1, padding)
            T.copy(weight[k * block_K, bx * block_N], w)
            T.gemm(x, w, y)
        T.copy(y, flat[by * block_M, bx * block_N])
    return Y


x, w = torch.randn(2, 13, 11, 32), torch.randn(3, 3, 32, 40)
print("stride  error against float64")
for stride in (1, 2):
    y = conv2d(x, w, stride)
    exact = torch.nn.functional.conv2d(
        x.double().permute(0, 3, 1, 2), w.double().permute(3, 2, 0, 1), stride=stride, padding=1
    ).permute(0, 2, 3, 1)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-3)
    print(f"{stride:6}  {(y - exact).abs().max():.1e}")
