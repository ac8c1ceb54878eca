# SPDX-License-Identifier: Apache-2.0
"""Histogram: each block counts into shared memory, then adds its counts to those of all blocks."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit
def histogram(X, counts, block=1024):
    N, bins = T.const("N, bins")
    X: T.Tensor((N,), "int32")
    counts: T.Tensor((bins,), "int32")
    with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
        own = T.alloc_shared((bins,), "int32")
        T.clear(own)
        for i in T.Parallel(block):
            if bx * block + i < N:
                T.atomic_add(own[X[bx * block + i]], 1)
        for i in T.Parallel(bins):
            T.atomic_add(counts[i], own[i])


x, counts = torch.randint(0, 40, (5000,), dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
histogram(x, counts)
torch.testing.assert_close(counts.long(), torch.bincount(x, minlength=40))
print(f"numbers  bins  bins that differ\n{5000:7}  {40:4}  {(counts != torch.bincount(x, minlength=40)).sum()}")
