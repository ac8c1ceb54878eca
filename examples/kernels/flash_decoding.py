# SPDX-License-Identifier: Apache-2.0
"""Flash decoding: one query over a long cache, which several blocks share; a second kernel joins their parts."""

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def decode_of(heads, kv_heads, dim, splits=4, block_N=64):
    batch, length = T.dynamic("batch, length")
    group = heads // kv_heads  # query heads that share a key: the rows of the products
    scale = dim**-0.5 * 1.4426950408889634

    @T.prim_func
    def decode(
        Q: T.Tensor((batch, kv_heads, group, dim), "float32"),
        K: T.Tensor((batch, length, kv_heads, dim), "float32"),
        V: T.Tensor((batch, length, kv_heads, dim), "float32"),
        O: T.Tensor((batch, kv_heads, group, dim), "float32"),
    ):
        parts = T.alloc_global((batch, kv_heads, splits, group, dim), "float32")
        lse = T.alloc_global((batch, kv_heads, splits, group), "float32")
        with T.Kernel(splits, kv_heads, batch, threads=128) as (bs, bh, bb):
            q = T.alloc_shared((group, dim), "float32")
            k = T.alloc_shared((block_N, dim), "float32")
            v = T.alloc_shared((block_N, dim), "float32")
            scores = T.alloc_fragment((group, block_N), "float32")
            out = T.alloc_fragment((group, dim), "float32")
            row_max = T.alloc_fragment((group,), "float32")
            before = T.alloc_fragment((group,), "float32")
            part = T.alloc_fragment((group,), "float32")
            row_sum = T.alloc_fragment((group,), "float32")
            each = T.ceildiv(T.ceildiv(length, block_N), splits)
            T.copy(Q[bb, bh, 0, 0], q)
            T.clear(out)
            T.clear(row_sum)
            T.fill(row_max, -1e30)
            for s in T.Pipelined(each, num_stages=2):
                start = (bs * each + s) * block_N
                T.copy(K[bb, start : start + block_N, bh, 0:dim], k)
                T.copy(V[bb, start : start + block_N, bh, 0:dim], v)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(group, block_N):
                    scores[i, j] = T.if_then_else(start + j < length, scores[i, j] * scale, -T.infinity("float32"))
                T.copy(row_max, before)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i, j in T.Parallel(group, block_N):
                    scores[i, j] = T.exp2(scores[i, j] - row_max[i])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(group):
                    before[i] = T.exp2(before[i] - row_max[i])
                    row_sum[i] = row_sum[i] * before[i] + part[i]
                for i, j in T.Parallel(group, dim):
                    out[i, j] = out[i, j] * before[i]
                T.gemm(scores, v, out)
            for i, j in T.Parallel(group, dim):
                parts[bb, bh, bs, i, j] = out[i, j] / T.max(row_sum[i], 1e-30)
            for i in T.Parallel(group):
                lse[bb, bh, bs, i] = row_max[i] + T.log2(T.max(row_sum[i], 1e-30))
        with T.Kernel(kv_heads, batch, threads=128) as (bh, bb):
            out = T.alloc_fragment((group, dim), "float32")
            row_max = T.alloc_fragment((group,), "float32")
            row_sum = T.alloc_fragment((group,), "float32")
            T.clear(out)
            T.clear(row_sum)
            T.fill(row_max, -1e30)
            for s in T.serial(splits):
                for i in T.Parallel(group):
                    row_max[i] = T.max(row_max[i], lse[bb, bh, s, i])
            for s in T.serial(splits):
                for i in T.Parallel(group):
                    row_sum[i] += T.exp2(lse[bb, bh, s, i] - row_max[i])
                for i, j in T.Parallel(group, dim):
                    out[i, j] += T.exp2(lse[bb, bh, s, i] - row_max[i]) * parts[bb, bh, s, i, j]
            for i, j in T.Parallel(group, dim):
                O[bb, bh, i, j] = out[i, j] / row_sum[i]

    return decode


kernel = decode_of(8, 2, 64)
print("length  error against float64")
for length in (30, 1000):
    q, k, v = torch.randn(2, 2, 4, 64), torch.randn(2, length, 2, 64), torch.randn(2, length, 2, 64)
    keys, values = k.double().transpose(1, 2), v.double().transpose(1, 2)
    exact = (q.double() @ keys.mT * 64**-0.5).softmax(-1) @ values
    out = kernel(q, k, v)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    print(f"{length:6}  {(out - exact).abs().max():.1e}")
