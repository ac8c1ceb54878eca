# SPDX-License-Identifier: Apache-2.0
"""Top-k of each row, as routers of experts need it: take the largest, blank it, repeat."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def top_k(X, k=4):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    values = T.empty((M, k), "float32")
    indices = T.empty((M, k), "int32")
    with T.Kernel(M, threads=128) as row:
        x = T.alloc_fragment((N,), "float32")
        place = T.alloc_fragment((N,), "int32")
        largest = T.alloc_fragment((1,), "float32")
        first = T.alloc_fragment((1,), "int32")
        T.copy(X[row, 0:N], x)
        for step in T.serial(k):
            T.reduce_max(x, largest, dim=0)
            for i in T.Parallel(N):
                place[i] = T.if_then_else(x[i] == largest[0], i, N)
            T.reduce_min(place, first, dim=0)  # of equal ones the first
            for i in T.Parallel(1):
                values[row, step + i] = largest[i]
                indices[row, step + i] = first[i]
            for i in T.Parallel(N):
                x[i] = T.if_then_else(i == first[0], -T.infinity("float32"), x[i])
    return values, indices


x = torch.randn(50, 96)
values, indices = top_k(x, k=6)
wanted = x.topk(6)
torch.testing.assert_close(values, wanted.values, rtol=0, atol=0)
torch.testing.assert_close(indices.long(), wanted.indices)
print(f"rows  columns  k  places that differ from torch.topk\n{50:4}  {96:7}  6  {(indices != wanted.indices).sum()}")
