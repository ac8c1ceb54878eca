# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA decoding: Fig. 18 of the TileLang paper, and the skeleton of the Atlas Cloud article completed."""

import math

import pytest
import torch

import torch_tile.language as T

accum_dtype = "float"


# The TileLang paper, Fig. 18. What the figure takes from outside (sizes, scale) is given by the arguments. Mended:
# where the print has `for j in T.Parallel(a, b)` inside a loop over i, one variable for two extents, there are nests
# over (i, j).
def flash_mla(batch, heads, kv_head_num, seqlen_kv, dim, pe_dim, block_N, block_H, dtype="float16"):
    scale = (1.0 / (dim + pe_dim)) ** 0.5 * math.log2(math.e)
    kv_group_num = heads // kv_head_num
    VALID_BLOCK_H = min(block_H, kv_group_num)

    def flash_attn(
        Q: T.Tensor([batch, heads, dim], dtype),
        Q_pe: T.Tensor([batch, heads, pe_dim], dtype),
        KV: T.Tensor([batch, seqlen_kv, kv_head_num, dim], dtype),
        K_pe: T.Tensor([batch, seqlen_kv, kv_head_num, pe_dim], dtype),
        Output: T.Tensor([batch, heads, dim], dtype),
    ):
        with T.Kernel(batch, heads // min(block_H, kv_group_num), threads=256) as (bx, by):
            Q_shared = T.alloc_shared([block_H, dim], dtype)
            S_shared = T.alloc_shared([block_H, block_N], dtype)
            Q_pe_shared = T.alloc_shared([block_H, pe_dim], dtype)
            KV_shared = T.alloc_shared([block_N, dim], dtype)
            K_pe_shared = T.alloc_shared([block_N, pe_dim], dtype)
            O_shared = T.alloc_shared([block_H, dim], dtype)
            acc_s = T.alloc_fragment([block_H, block_N], accum_dtype)
            acc_o = T.alloc_fragment([block_H, dim], accum_dtype)
            scores_max = T.alloc_fragment([block_H], accum_dtype)
            scores_max_prev = T.alloc_fragment([block_H], accum_dtype)
            scores_scale = T.alloc_fragment([block_H], accum_dtype)
            scores_sum = T.alloc_fragment([block_H], accum_dtype)
            logsum = T.alloc_fragment([block_H], accum_dtype)

            cur_kv_head = by // (kv_group_num // block_H)
            T.use_swizzle(10)

            T.copy(Q[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, :], Q_shared)
            T.copy(Q_pe[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, :], Q_pe_shared)
            T.fill(acc_o, 0)
            T.fill(logsum, 0)
            T.fill(scores_max, -T.infinity(accum_dtype))

            loop_range = T.ceildiv(seqlen_kv, block_N)
            for k in T.Pipelined(loop_range, num_stages=2):
                T.copy(KV[bx, k * block_N : (k + 1) * block_N, cur_kv_head, :], KV_shared)
                T.copy(K_pe[bx, k * block_N : (k + 1) * block_N, cur_kv_head, :], K_pe_shared)
                T.clear(acc_s)
                T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(scores_max, scores_max_prev)
                T.fill(scores_max, -T.infinity(accum_dtype))
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(block_H):
                    scores_scale[i] = T.exp2(scores_max_prev[i] * scale - scores_max[i] * scale)
                for i, j in T.Parallel(block_H, block_N):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * scale - scores_max[i] * scale)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                T.copy(acc_s, S_shared)
                for i in T.Parallel(block_H):
                    logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(block_H, dim):
                    acc_o[i, j] *= scores_scale[i]
                T.gemm(S_shared, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(block_H, dim):
                acc_o[i, j] /= logsum[i]
            T.copy(acc_o, O_shared)
            T.copy(O_shared, Output[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, :])

    return flash_attn


# "Writing High-Performance Kernels in TileLang" (Atlas Cloud): the middle is the printed skeleton; what it leaves out
# (allocation, copies, "exp, rescale acc_o by scores_scale, reduce_sum into logsum") is written around it.
def mla_skeleton(batch, heads, seqlen_kv, dim, pe_dim, block_N, dtype="float16"):
    scale = (dim + pe_dim) ** -0.5

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), dtype),
        Q_pe: T.Tensor((batch, heads, pe_dim), dtype),
        KV: T.Tensor((batch, seqlen_kv, dim), dtype),
        K_pe: T.Tensor((batch, seqlen_kv, pe_dim), dtype),
        O: T.Tensor((batch, heads, dim), dtype),
    ):
        with T.Kernel(batch, threads=256) as bx:
            Q_shared = T.alloc_shared((heads, dim), dtype)
            Q_pe_shared = T.alloc_shared((heads, pe_dim), dtype)
            KV_shared = T.alloc_shared((block_N, dim), dtype)
            K_pe_shared = T.alloc_shared((block_N, pe_dim), dtype)
            acc_s = T.alloc_fragment((heads, block_N), accum_dtype)
            acc_s_cast = T.alloc_fragment((heads, block_N), dtype)
            acc_o = T.alloc_fragment((heads, dim), accum_dtype)
            scores_max = T.alloc_fragment((heads,), accum_dtype)
            scores_max_prev = T.alloc_fragment((heads,), accum_dtype)
            scores_sum = T.alloc_fragment((heads,), accum_dtype)
            scores_scale = T.alloc_fragment((heads,), accum_dtype)
            logsum = T.alloc_fragment((heads,), accum_dtype)

            T.copy(Q[bx, :, :], Q_shared)
            T.copy(Q_pe[bx, :, :], Q_pe_shared)
            T.clear(acc_o)
            T.clear(logsum)
            T.fill(scores_max, -T.infinity(accum_dtype))
            for k in T.Pipelined(T.ceildiv(seqlen_kv, block_N), num_stages=2):
                T.copy(KV[bx, k * block_N, 0], KV_shared)
                T.copy(K_pe[bx, k * block_N, 0], K_pe_shared)

                # acc_s = Q_nope @ KV^T + Q_rope @ K_pe^T
                T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
                T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)

                # online softmax
                T.copy(scores_max, scores_max_prev)
                T.fill(scores_max, -T.infinity(accum_dtype))
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(heads):
                    scores_scale[i] = T.exp((scores_max_prev[i] - scores_max[i]) * scale)
                for i, j in T.Parallel(heads, block_N):
                    acc_s[i, j] = T.exp((acc_s[i, j] - scores_max[i]) * scale)
                for i, j in T.Parallel(heads, dim):
                    acc_o[i, j] *= scores_scale[i]
                T.reduce_sum(acc_s, scores_sum, dim=1)
                for i in T.Parallel(heads):
                    logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]

                # acc_o += P @ V  (V is the same latent KV)
                T.copy(acc_s, acc_s_cast)
                T.gemm(acc_s_cast, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(heads, dim):
                acc_o[i, j] /= logsum[i]
            T.copy(acc_o, O[bx, :, :])

    return main


def reference(q, q_pe, kv, k_pe):
    """q [B, H, C], q_pe [B, H, R], kv [B, S, H, C], k_pe [B, S, H, R] in float64."""
    scores = torch.einsum("bhc,bshc->bhs", q, kv) + torch.einsum("bhr,bshr->bhs", q_pe, k_pe)
    weights = (scores / math.sqrt(q.shape[-1] + q_pe.shape[-1])).softmax(-1)
    return torch.einsum("bhs,bshc->bhc", weights, kv)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_flash_mla(kv_heads, launch):
    batch, heads, length, dim, pe_dim = 2, 16, 48, 32, 16
    q, q_pe = torch.randn(batch, heads, dim).half(), torch.randn(batch, heads, pe_dim).half()
    kv, k_pe = torch.randn(batch, length, kv_heads, dim).half(), torch.randn(batch, length, kv_heads, pe_dim).half()
    out = torch.full_like(q, math.nan)
    launch(flash_mla(batch, heads, kv_heads, length, dim, pe_dim, block_N=16, block_H=8), q, q_pe, kv, k_pe, out)
    each = [x.double().repeat_interleave(heads // kv_heads, 2) for x in (kv, k_pe)]
    torch.testing.assert_close(out.double(), reference(q.double(), q_pe.double(), *each), rtol=3e-3, atol=3e-3)


def test_mla_skeleton(launch):
    batch, heads, length, dim, pe_dim = 2, 8, 48, 32, 16
    q, q_pe = torch.randn(batch, heads, dim).half(), torch.randn(batch, heads, pe_dim).half()
    kv, k_pe = torch.randn(batch, length, dim).half(), torch.randn(batch, length, pe_dim).half()
    out = torch.full_like(q, math.nan)
    launch(mla_skeleton(batch, heads, length, dim, pe_dim, block_N=16), q, q_pe, kv, k_pe, out)
    each = [x.double()[:, :, None].expand(-1, -1, heads, -1) for x in (kv, k_pe)]
    torch.testing.assert_close(out.double(), reference(q.double(), q_pe.double(), *each), rtol=3e-3, atol=3e-3)
