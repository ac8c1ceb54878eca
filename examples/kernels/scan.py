# SPDX-License-Identifier: Apache-2.0
"""Scan: running sums of each row, with a carry from one piece of the row to the next."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def running_sum(X, block=256):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(M, threads=128) as row:
        x = T.alloc_shared((1, block), "float32")
        carry = T.alloc_var("float32", 0.0)
        for s in T.serial(T.ceildiv(N, block)):
            T.copy(X[row, s * block], x)
            T.cumsum(x, dim=1)
            for i in T.Parallel(block):
                Y[row, s * block + i] = x[0, i] + carry
            carry += x[0, block - 1]
    return Y


x = torch.randn(9, 1000)
y = running_sum(x)
exact = x.double().cumsum(1)
torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
print(f"rows  columns  error against float64\n{9:4}  {1000:7}  {(y - exact).abs().max():.1e}")
