# SPDX-License-Identifier: Apache-2.0
"""Attention: the softmax of a row whose scores never exist at once.

FlashAttention (arXiv:2205.14135): blocks of keys come by one after the other; the row max and the row sum are kept
up to date, and earlier results are rescaled when the max grows.
"""

# %%
# A block owns `block_M` queries of one head. Scores, weights and the result are fragments.

import torch
import torch.nn.functional as F

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def attention_of(heads, dim, causal, block_M=64, block_N=64, dtype="float32"):
    batch, length = T.dynamic("batch, length")
    shape = (batch, heads, length, dim)
    scale = dim**-0.5 * 1.4426950408889634  # log2(e): exp2 is the hardware's

    @T.prim_func
    def attention(
        Q: T.Tensor(shape, dtype), K: T.Tensor(shape, dtype), V: T.Tensor(shape, dtype), O: T.Tensor(shape, dtype)
    ):
        with T.Kernel(T.ceildiv(length, block_M), heads, batch, threads=128) as (bx, by, bz):
            q = T.alloc_shared((block_M, dim), dtype)
            k = T.alloc_shared((block_N, dim), dtype)
            v = T.alloc_shared((block_N, dim), dtype)
            scores = T.alloc_fragment((block_M, block_N), "float32")
            weights = T.alloc_fragment((block_M, block_N), dtype)
            out = T.alloc_fragment((block_M, dim), "float32")
            row_max = T.alloc_fragment((block_M,), "float32")
            before = T.alloc_fragment((block_M,), "float32")
            rescale = T.alloc_fragment((block_M,), "float32")
            part = T.alloc_fragment((block_M,), "float32")
            row_sum = T.alloc_fragment((block_M,), "float32")
            T.copy(Q[bz, by, bx * block_M, 0], q)
            T.clear(out)
            T.clear(row_sum)
            T.fill(row_max, -1e30)  # finite, so that no difference of infinities is taken
            stop = T.min(length, (bx + 1) * block_M) if causal else length
            for s in T.Pipelined(T.ceildiv(stop, block_N), num_stages=2):
                T.copy(K[bz, by, s * block_N, 0], k)
                T.copy(V[bz, by, s * block_N, 0], v)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_M, block_N):
                    key = s * block_N + j
                    last = T.min(bx * block_M + i, length - 1) if causal else length - 1
                    scores[i, j] = T.if_then_else(key <= last, scores[i, j], -T.infinity("float32"))
                T.copy(row_max, before)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    rescale[i] = T.exp2((before[i] - row_max[i]) * scale)
                for i, j in T.Parallel(block_M, block_N):
                    scores[i, j] = T.exp2((scores[i, j] - row_max[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block_M):
                    row_sum[i] = row_sum[i] * rescale[i] + part[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(block_M, dim):
                    out[i, j] = out[i, j] * rescale[i]
                T.gemm(weights, v, out)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] = out[i, j] / row_sum[i]
            T.copy(out, O[bz, by, bx * block_M, 0])

    return attention


# %%
# The last block of queries and of keys is ragged; batch and length are free at each call.

print("causal  length  error against float64")
for causal in (False, True):
    kernel = attention_of(3, 64, causal)
    for length in (100, 257):
        q, k, v = (torch.randn(2, 3, length, 64) for _ in range(3))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
        out = kernel(q, k, v)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
        print(f"{causal!s:6}  {length:6}  {(out - exact).abs().max():.1e}")

# %%
# `torch.ops.tile.attention` is the library's kernel: grouped heads, windows, biases, soft caps, gradients.

torch.testing.assert_close(
    torch.ops.tile.attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
)
