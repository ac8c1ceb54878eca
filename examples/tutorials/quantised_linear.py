# SPDX-License-Identifier: Apache-2.0
"""A quantised linear: weights of 4 bits, widened between memory and the product.

A weight of 4 bits is an eighth of the traffic of float32. Groups of 32 inputs share a scale.
"""

# %%
# `T.Tensor((N, K), "int4")` takes a tensor of bytes with two weights in each. `T.copy` unpacks them.

import torch

import torch_tile
import torch_tile.language as T

GROUP = 32


@torch_tile.jit(out_idx=[-1])
def linear_int4_of(N, K, block_M=32, block_N=64, block_K=64):
    M = T.dynamic("M")

    @T.prim_func
    def linear_int4(
        X: T.Tensor((M, K), "float32"),
        W: T.Tensor((N, K), "int4"),
        S: T.Tensor((N, K // GROUP), "float32"),
        Y: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            x = T.alloc_shared((block_M, block_K), "float32")
            packed = T.alloc_shared((block_N, block_K), "int4")
            w = T.alloc_shared((block_N, block_K), "float32")
            y = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(X[by * block_M, k * block_K], x)
                T.copy(W[bx * block_N, k * block_K], packed)
                for i, j in T.Parallel(block_N, block_K):
                    scale = S[bx * block_N + i, (k * block_K + j) // GROUP]
                    w[i, j] = T.cast(packed[i, j], "float32") * scale
                T.gemm(x, w, y, transpose_B=True)
            T.copy(y, Y[by * block_M, bx * block_N])

    return linear_int4


# %%
# Quantise a weight: round each group to integers from -7 to 7, and put two neighbours into a byte, the first one low.


def quantise(weight):
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp(min=1e-8) / 7
    levels = (groups / scales[..., None]).round().flatten(1).to(torch.int32)
    packed = ((levels[:, 0::2] & 15) | ((levels[:, 1::2] & 15) << 4)).to(torch.uint8)
    return packed, scales, levels


x, weight = torch.randn(5, 256), torch.randn(100, 256)
packed, scales, levels = quantise(weight)
widened = levels.double() * scales.double().repeat_interleave(GROUP, 1)
y = linear_int4_of(100, 256)(x, packed.view(torch.uint8), scales)
torch.testing.assert_close(y.double(), x.double() @ widened.T, rtol=1e-4, atol=1e-4)
print(f"bytes of the weight: {weight.nbytes} in float32, {packed.nbytes + scales.nbytes} quantised")
lost = (y - x @ weight.T).norm() / (x @ weight.T).norm()
print(
    f"error of the kernel {(y - x.double() @ widened.T).abs().max():.1e}; quantisation changes the result by {lost:.0%}"
)

# %%
# A model needs no kernel of yours: `backend="tile"` finds the casts, shifts and scales in front of a product.


def dequantised(x, weight, scale):
    return torch.nn.functional.linear(x, weight.to(torch.float32) * scale[:, None])


weight8 = torch.randint(-127, 128, (64, 256), dtype=torch.int8)
with torch.no_grad():
    print(torch_tile.explain(dequantised, x, weight8, torch.rand(64)))
