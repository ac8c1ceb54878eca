# SPDX-License-Identifier: Apache-2.0
"""MLA decode: one step of latent attention, as DeepSeek-V2 and V3 serve it.

All heads share one latent of 512 numbers and one rotated key of 64 for each position (arXiv:2405.04434). The latent is
key and value at once, so a block reads it once for both products.
"""

# %%
# Keys of all heads are the same, so the heads are the rows of the products.

import torch

import torch_tile
import torch_tile.language as T


@torch_tile.jit(out_idx=[-1])
def mla_decode_of(heads, latent=512, rope=64, block_H=16, block_N=64, dtype="float32"):
    batch, length = T.dynamic("batch, length")
    scale = (128 + rope) ** -0.5 * 1.4426950408889634

    @T.prim_func
    def mla_decode(
        Q: T.Tensor((batch, heads, latent), dtype),
        Q_pe: T.Tensor((batch, heads, rope), dtype),
        KV: T.Tensor((batch, length, latent), dtype),
        K_pe: T.Tensor((batch, length, rope), dtype),
        O: T.Tensor((batch, heads, latent), dtype),
    ):
        with T.Kernel(T.ceildiv(heads, block_H), batch, threads=128) as (bx, by):
            q = T.alloc_shared((block_H, latent), dtype)
            q_pe = T.alloc_shared((block_H, rope), dtype)
            kv = T.alloc_shared((block_N, latent), dtype)
            k_pe = T.alloc_shared((block_N, rope), dtype)
            scores = T.alloc_fragment((block_H, block_N), "float32")
            weights = T.alloc_shared((block_H, block_N), dtype)
            out = T.alloc_fragment((block_H, latent), "float32")
            row_max = T.alloc_fragment((block_H,), "float32")
            before = T.alloc_fragment((block_H,), "float32")
            part = T.alloc_fragment((block_H,), "float32")
            row_sum = T.alloc_fragment((block_H,), "float32")
            T.copy(Q[by, bx * block_H, 0], q)
            T.copy(Q_pe[by, bx * block_H, 0], q_pe)
            T.clear(out)
            T.clear(row_sum)
            T.fill(row_max, -1e30)
            for s in T.Pipelined(T.ceildiv(length, block_N), num_stages=2):
                T.copy(KV[by, s * block_N, 0], kv)
                T.copy(K_pe[by, s * block_N, 0], k_pe)
                T.gemm(q, kv, scores, transpose_B=True, clear_accum=True)
                T.gemm(q_pe, k_pe, scores, transpose_B=True)
                for i, j in T.Parallel(block_H, block_N):
                    scores[i, j] = T.if_then_else(s * block_N + j < length, scores[i, j], -T.infinity("float32"))
                T.copy(row_max, before)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i, j in T.Parallel(block_H, block_N):
                    scores[i, j] = T.exp2((scores[i, j] - row_max[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block_H):
                    before[i] = T.exp2((before[i] - row_max[i]) * scale)  # what earlier results are multiplied by
                    row_sum[i] = row_sum[i] * before[i] + part[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(block_H, latent):
                    out[i, j] = out[i, j] * before[i]
                T.gemm(weights, kv, out)
            for i, j in T.Parallel(block_H, latent):
                out[i, j] = out[i, j] / row_sum[i]
            T.copy(out, O[by, bx * block_H, 0])

    return mla_decode


# %%
# Compare with plain torch in float64, and with the library's operator, which also splits long caches over blocks.

q, q_pe = torch.randn(2, 24, 512), torch.randn(2, 24, 64)
kv, k_pe = torch.randn(2, 150, 512), torch.randn(2, 150, 64)
scores = (q.double() @ kv.double().mT + q_pe.double() @ k_pe.double().mT) * 192**-0.5
exact = scores.softmax(-1) @ kv.double()
ours = mla_decode_of(24)(q, q_pe, kv, k_pe)
operator = torch.ops.tile.mla_decode(q[:, None], q_pe[:, None], kv, k_pe, scale=192**-0.5)[:, 0]
for name, out in (("this kernel", ours), ("tile.mla_decode", operator)):
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    print(f"{name:<16} error against float64 {(out - exact).abs().max():.1e}")
