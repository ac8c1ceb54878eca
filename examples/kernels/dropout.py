# SPDX-License-Identifier: Apache-2.0
"""Dropout from a counter: random numbers of Philox, so that the backward draws the same mask again and keeps none."""

import torch

import torch_tile
import torch_tile.language as T

BLOCK = 256


@torch_tile.jit(out_idx=[-1])
def dropout_of(p):
    n = T.dynamic("n")

    @T.prim_func
    def dropout(X: T.Tensor((n,), "float32"), seed: T.int32, Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=128) as bx:
            for i in T.Parallel(BLOCK):
                T.rng_init(seed, bx * BLOCK + i)  # a sequence of its own for each element
                keep = T.rng_rand_float() >= p
                Y[bx * BLOCK + i] = T.if_then_else(keep, X[bx * BLOCK + i] / (1 - p), 0)

    return dropout


x = torch.rand(20_000) + 0.5
kernel = dropout_of(0.25)
y, again, other = kernel(x, 7), kernel(x, 7), kernel(x, 8)
torch.testing.assert_close(y, again, rtol=0, atol=0)
kept = y != 0
torch.testing.assert_close(y[kept], x[kept] / 0.75)
share = kept.double().mean().item()
assert abs(share - 0.75) < 0.02 and (y != other).any()
print(f"elements  kept of them  same seed, same mask\n{len(x):8}  {share:12.3f}  {bool((y == again).all())}")
