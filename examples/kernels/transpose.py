# SPDX-License-Identifier: Apache-2.0
"""Transpose through shared memory, so that reads and writes both go along rows."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def transpose(A, block=32):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), "float32")
    B = T.empty((N, M), "float32")
    with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
        a = T.alloc_shared((block, block), "float32")
        b = T.alloc_shared((block, block), "float32")
        T.copy(A[by * block, bx * block], a)
        T.transpose(a, b)
        T.copy(b, B[bx * block, by * block])
    return B


a = torch.randn(100, 75)
torch.testing.assert_close(transpose(a), a.T.contiguous(), rtol=0, atol=0)
print(f"rows  columns  elements that differ\n{100:4}  {75:7}  {(transpose(a) != a.T).sum()}")
