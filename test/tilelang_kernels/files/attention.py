# SPDX-License-Identifier: Apache-2.0
"""Attention in its forms, and recurrences that stand for it."""

import tilelang
import tilelang.language as T


@tilelang.jit(
    out_idx=[3],
    pass_configs={
        tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    },
)
def flash_attention(
    batch, heads, seq_len, dim, is_causal, groups=1, window=None, block_M=32, block_N=32, num_stages=1, threads=64
):  # fmt: skip
    scale = (1.0 / dim) ** 0.5 * 1.44269504  # log2(e)
    head_kv = heads // groups
    q_shape = [batch, seq_len, heads, dim]
    kv_shape = [batch, seq_len, head_kv, dim]
    dtype = T.float16
    accum_dtype = T.float32

    @T.macro
    def MMA0(
        K: T.Tensor(kv_shape, dtype), Q_shared: T.SharedBuffer([block_M, dim], dtype),
        K_shared: T.SharedBuffer([block_N, dim], dtype), acc_s: T.FragmentBuffer([block_M, block_N], accum_dtype),
        k: T.int32, bx: T.int32, by: T.int32, bz: T.int32,
    ):  # fmt: skip
        T.copy(K[bz, k * block_N : (k + 1) * block_N, by // groups, :], K_shared)
        if is_causal:
            for i, j in T.Parallel(block_M, block_N):
                q_idx = bx * block_M + i
                k_idx = k * block_N + j
                acc_s[i, j] = T.if_then_else(q_idx >= k_idx, 0, -T.infinity(acc_s.dtype))
        elif window is not None:
            for i, j in T.Parallel(block_M, block_N):
                apart = bx * block_M + i - (k * block_N + j)
                acc_s[i, j] = T.if_then_else(apart >= 0 and apart < window, 0, -T.infinity(acc_s.dtype))
        else:
            for i, j in T.Parallel(block_M, block_N):
                acc_s[i, j] = T.if_then_else(k * block_N + j >= seq_len, -T.infinity(acc_s.dtype), 0)
        T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def Softmax(
        acc_s: T.FragmentBuffer([block_M, block_N], accum_dtype),
        acc_s_cast: T.FragmentBuffer([block_M, block_N], dtype),
        scores_max: T.FragmentBuffer([block_M], accum_dtype),
        scores_max_prev: T.FragmentBuffer([block_M], accum_dtype),
        scores_scale: T.FragmentBuffer([block_M], accum_dtype),
        scores_sum: T.FragmentBuffer([block_M], accum_dtype),
        logsum: T.FragmentBuffer([block_M], accum_dtype),
    ):
        T.copy(scores_max, scores_max_prev)
        T.fill(scores_max, -T.infinity(accum_dtype))
        T.reduce_max(acc_s, scores_max, dim=1, clear=False)
        for i in T.Parallel(block_M):
            scores_max[i] = T.max(scores_max[i], scores_max_prev[i])
        for i in T.Parallel(block_M):
            shift = T.if_then_else(scores_max[i] == -T.infinity(accum_dtype), 0.0, scores_max[i] * scale)
            scores_scale[i] = T.exp2(scores_max_prev[i] * scale - shift)
        for i, j in T.Parallel(block_M, block_N):
            shift = T.if_then_else(scores_max[i] == -T.infinity(accum_dtype), 0.0, scores_max[i] * scale)
            acc_s[i, j] = T.exp2(acc_s[i, j] * scale - shift)
        T.reduce_sum(acc_s, scores_sum, dim=1)
        for i in T.Parallel(block_M):
            logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]
        T.copy(acc_s, acc_s_cast)

    @T.prim_func
    def main(
        Q: T.Tensor(q_shape, dtype),
        K: T.Tensor(kv_shape, dtype),
        V: T.Tensor(kv_shape, dtype),
        Output: T.Tensor(q_shape, dtype),
    ):
        with T.Kernel(T.ceildiv(seq_len, block_M), heads, batch, threads=threads) as (bx, by, bz):
            Q_shared = T.alloc_shared([block_M, dim], dtype)
            K_shared = T.alloc_shared([block_N, dim], dtype)
            V_shared = T.alloc_shared([block_N, dim], dtype)
            O_shared = T.alloc_shared([block_M, dim], dtype)
            acc_s = T.alloc_fragment([block_M, block_N], accum_dtype)
            acc_s_cast = T.alloc_fragment([block_M, block_N], dtype)
            acc_o = T.alloc_fragment([block_M, dim], accum_dtype)
            scores_max = T.alloc_fragment([block_M], accum_dtype)
            scores_max_prev = T.alloc_fragment([block_M], accum_dtype)
            scores_scale = T.alloc_fragment([block_M], accum_dtype)
            scores_sum = T.alloc_fragment([block_M], accum_dtype)
            logsum = T.alloc_fragment([block_M], accum_dtype)

            T.copy(Q[bz, bx * block_M : (bx + 1) * block_M, by, :], Q_shared)
            T.fill(acc_o, 0)
            T.fill(logsum, 0)
            T.fill(scores_max, -T.infinity(accum_dtype))

            loop_range = (
                T.min(T.ceildiv(seq_len, block_N), T.ceildiv((bx + 1) * block_M, block_N))
                if is_causal
                else T.ceildiv(seq_len, block_N)
            )
            for k in T.Pipelined(loop_range, num_stages=num_stages):
                MMA0(K, Q_shared, K_shared, acc_s, k, bx, by, bz)
                Softmax(acc_s, acc_s_cast, scores_max, scores_max_prev, scores_scale, scores_sum, logsum)
                for i, j in T.Parallel(block_M, dim):
                    acc_o[i, j] *= scores_scale[i]
                T.copy(V[bz, k * block_N : (k + 1) * block_N, by // groups, :], V_shared)
                T.gemm(acc_s_cast, V_shared, acc_o, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, dim):
                acc_o[i, j] /= logsum[i]
            T.copy(acc_o, O_shared)
            T.copy(O_shared, Output[bz, bx * block_M : (bx + 1) * block_M, by, :])

    return main


@tilelang.jit(out_idx=[-1])
def flash_decoding(batch, heads, groups, length, dim, splits=3, block_N=32, block_H=16):
    """One query for each head; the keys are split over blocks, and a second launch joins what they found."""
    scale = dim**-0.5 * 1.44269504
    kv_heads = heads // groups
    used = min(block_H, groups)
    share = tilelang.cdiv(tilelang.cdiv(length, block_N), splits)

    @T.macro
    def split(Q, K, V, glse, Part):
        with T.Kernel(batch, kv_heads, splits, threads=64) as (bx, by, bz):
            q = T.alloc_shared([block_H, dim], "float16")
            k = T.alloc_shared([block_N, dim], "float16")
            v = T.alloc_shared([block_N, dim], "float16")
            s = T.alloc_fragment([block_H, block_N], "float32")
            p = T.alloc_fragment([block_H, block_N], "float16")
            o = T.alloc_fragment([block_H, dim], "float32")
            peak = T.alloc_fragment([block_H], "float32")
            before = T.alloc_fragment([block_H], "float32")
            factor = T.alloc_fragment([block_H], "float32")
            total = T.alloc_fragment([block_H], "float32")
            logsum = T.alloc_fragment([block_H], "float32")
            for i, d in T.Parallel(block_H, dim):
                q[i, d] = T.if_then_else(i < used, Q[bx, by * groups + T.min(i, used - 1), d], 0)
            T.clear(o)
            T.clear(logsum)
            T.fill(peak, -1e30)
            for n in T.Pipelined(share, num_stages=2):
                at = (bz * share + n) * block_N
                T.copy(K[bx, at : at + block_N, by, :], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(block_H, block_N):
                    s[i, j] = T.if_then_else(at + j < length, s[i, j] * scale, -1e30)
                T.copy(peak, before)
                T.reduce_max(s, peak, dim=1, clear=False)
                for i in T.Parallel(block_H):
                    factor[i] = T.exp2(before[i] - peak[i])
                for i, j in T.Parallel(block_H, block_N):
                    s[i, j] = T.exp2(s[i, j] - peak[i])
                T.reduce_sum(s, total, dim=1)
                T.copy(s, p)
                for i in T.Parallel(block_H):
                    logsum[i] = logsum[i] * factor[i] + total[i]
                for i, d in T.Parallel(block_H, dim):
                    o[i, d] *= factor[i]
                T.copy(V[bx, at : at + block_N, by, :], v)
                T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullCol)
            for i, d in T.Parallel(block_H, dim):
                o[i, d] /= logsum[i]
            for i in T.Parallel(block_H):
                if i < used:
                    glse[bx, by * groups + i, bz] = T.log2(logsum[i]) + peak[i]
            for i, d in T.Parallel(block_H, dim):
                if i < used:
                    Part[bx, by * groups + i, bz, d] = o[i, d]

    @T.macro
    def combine(glse, Part, Output):
        with T.Kernel(heads, batch, threads=64) as (by, bz):
            o = T.alloc_fragment([dim], "float32")
            peak = T.alloc_var("float32", -T.infinity("float32"))
            total = T.alloc_var("float32", 0.0)
            T.clear(o)
            for k in T.serial(splits):
                peak = T.max(peak, glse[bz, by, k])
            for k in T.serial(splits):
                total += T.exp2(glse[bz, by, k] - peak)
            for k in T.serial(splits):
                weight = T.exp2(glse[bz, by, k] - peak) / total
                for d in T.Parallel(dim):
                    o[d] += Part[bz, by, k, d] * weight
            for d in T.Parallel(dim):
                Output[bz, by, d] = o[d]

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, dim], "float16"),
        K: T.Tensor([batch, length, kv_heads, dim], "float16"),
        V: T.Tensor([batch, length, kv_heads, dim], "float16"),
        glse: T.Tensor([batch, heads, splits], "float32"),
        Part: T.Tensor([batch, heads, splits, dim], "float32"),
        Output: T.Tensor([batch, heads, dim], "float16"),
    ):
        split(Q, K, V, glse, Part)
        combine(glse, Part, Output)

    return main


@tilelang.jit(out_idx=[-1])
def block_sparse_attention(batch, heads, length, dim, block=32):
    scale = dim**-0.5
    count = tilelang.cdiv(length, block)

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, length, dim), "float16"),
        K: T.Tensor((batch, heads, length, dim), "float16"),
        V: T.Tensor((batch, heads, length, dim), "float16"),
        Mask: T.Tensor((batch, heads, count, count), "int8"),
        O: T.Tensor((batch, heads, length, dim), "float16"),
    ):
        with T.Kernel(count, heads, batch, threads=64) as (bx, by, bz):
            q = T.alloc_shared((block, dim), "float16")
            k = T.alloc_shared((block, dim), "float16")
            v = T.alloc_shared((block, dim), "float16")
            keep = T.alloc_local([count], "bool")
            s = T.alloc_fragment((block, block), "float32")
            p = T.alloc_fragment((block, block), "float16")
            o = T.alloc_fragment((block, dim), "float32")
            peak = T.alloc_fragment((block,), "float32")
            before = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            part = T.alloc_fragment((block,), "float32")
            T.copy(Q[bz, by, bx * block : (bx + 1) * block, :], q)
            T.clear(o)
            T.clear(total)
            T.fill(peak, -1e30)
            for n in T.serial(count):
                keep[n] = Mask[bz, by, bx, n] != 0
            for n in T.Pipelined(count, num_stages=0):
                if keep[n]:
                    T.copy(K[bz, by, n * block : (n + 1) * block, :], k)
                    T.clear(s)
                    T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(peak, before)
                    T.reduce_max(s, peak, dim=1, clear=False)
                    for i in T.Parallel(block):
                        peak[i] = T.max(peak[i], before[i])
                    for i, j in T.Parallel(block, block):
                        s[i, j] = T.exp((s[i, j] - peak[i]) * scale)
                    T.reduce_sum(s, part, dim=1)
                    for i in T.Parallel(block):
                        before[i] = T.exp((before[i] - peak[i]) * scale)
                        total[i] = total[i] * before[i] + part[i]
                    for i, d in T.Parallel(block, dim):
                        o[i, d] = o[i, d] * before[i]
                    T.copy(s, p)
                    T.copy(V[bz, by, n * block : (n + 1) * block, :], v)
                    T.gemm(p, v, o, policy=T.GemmWarpPolicy.FullRow)
            for i, d in T.Parallel(block, dim):
                o[i, d] /= total[i]
            T.copy(o, O[bz, by, bx * block : (bx + 1) * block, :])

    return main


@tilelang.jit(out_idx=[-1])
def latent_decoding(batch, heads, length, dim, rope_dim, block_N=32, block_H=16):
    """MLA: keys and values are one latent, beside it the part with positions."""
    scale = (dim + rope_dim) ** -0.5 * 1.44269504

    @T.prim_func
    def main(
        Q: T.Tensor([batch, heads, dim], "float16"),
        Q_pe: T.Tensor([batch, heads, rope_dim], "float16"),
        KV: T.Tensor([batch, length, 1, dim], "float16"),
        K_pe: T.Tensor([batch, length, 1, rope_dim], "float16"),
        Output: T.Tensor([batch, heads, dim], "float16"),
    ):
        with T.Kernel(heads // block_H, batch, threads=64) as (hid, bid):
            Q_shared = T.alloc_shared([block_H, dim], "float16")
            S_shared = T.alloc_shared([block_H, block_N], "float16")
            Q_pe_shared = T.alloc_shared([block_H, rope_dim], "float16")
            KV_shared = T.alloc_shared([block_N, dim], "float16")
            K_pe_shared = T.alloc_shared([block_N, rope_dim], "float16")
            acc_s = T.alloc_fragment([block_H, block_N], "float32")
            acc_o = T.alloc_fragment([block_H, dim], "float32")
            scores_max = T.alloc_fragment([block_H], "float32")
            scores_max_prev = T.alloc_fragment([block_H], "float32")
            scores_scale = T.alloc_fragment([block_H], "float32")
            scores_sum = T.alloc_fragment([block_H], "float32")
            logsum = T.alloc_fragment([block_H], "float32")
            T.use_swizzle(10)
            T.copy(Q[bid, hid * block_H : (hid + 1) * block_H, :], Q_shared)
            T.copy(Q_pe[bid, hid * block_H : (hid + 1) * block_H, :], Q_pe_shared)
            T.fill(acc_o, 0)
            T.fill(logsum, 0)
            T.fill(scores_max, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(length, block_N), num_stages=2):
                T.copy(KV[bid, k * block_N : (k + 1) * block_N, 0, :], KV_shared)
                T.copy(K_pe[bid, k * block_N : (k + 1) * block_N, 0, :], K_pe_shared)
                T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
                T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(scores_max, scores_max_prev)
                T.fill(scores_max, -T.infinity("float32"))
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(block_H):
                    scores_max[i] = T.max(scores_max[i], scores_max_prev[i])
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
            T.copy(acc_o, Output[bid, hid * block_H : (hid + 1) * block_H, :])

    return main


@tilelang.jit(out_idx=[3])
def linear_attention(batch, length, heads, dim, chunk=32):
    """Causal, without a softmax: chunk by chunk, with the state of those before."""
    chunks = tilelang.cdiv(length, chunk)

    @T.prim_func
    def main(
        Q: T.Tensor([batch, length, heads, dim], "float16"),
        K: T.Tensor([batch, length, heads, dim], "float16"),
        V: T.Tensor([batch, length, heads, dim], "float16"),
        O: T.Tensor([batch, length, heads, dim], "float16"),
    ):
        with T.Kernel(batch * heads, threads=64) as bh:
            b, h = bh // heads, bh % heads
            q = T.alloc_shared([chunk, dim], "float16")
            k = T.alloc_shared([chunk, dim], "float16")
            v = T.alloc_shared([chunk, dim], "float16")
            state = T.alloc_fragment([dim, dim], "float32")
            state_shared = T.alloc_shared([dim, dim], "float16")
            s = T.alloc_fragment([chunk, chunk], "float32")
            s_shared = T.alloc_shared([chunk, chunk], "float16")
            o = T.alloc_fragment([chunk, dim], "float32")
            T.clear(state)
            for n in T.Pipelined(0, chunks, num_stages=1):
                T.copy(Q[b, n * chunk : (n + 1) * chunk, h, :], q)
                T.copy(K[b, n * chunk : (n + 1) * chunk, h, :], k)
                T.copy(V[b, n * chunk : (n + 1) * chunk, h, :], v)
                T.gemm(q, k, s, clear_accum=True, transpose_B=True)
                for i, j in T.Parallel(chunk, chunk):
                    s_shared[i, j] = T.if_then_else(i >= j, s[i, j], 0)
                T.gemm(s_shared, v, o, clear_accum=True)
                T.copy(state, state_shared)
                T.gemm(k, v, state, transpose_A=True)
                T.gemm(q, state_shared, o)
                T.copy(o, O[b, n * chunk : (n + 1) * chunk, h, :])

    return main


@tilelang.jit(out_idx=[-1])
def gated_scan(batch, length, dim, block=64):
    """h[t] = a[t] * h[t - 1] + x[t], as state-space models have it."""

    @T.prim_func
    def main(
        A: T.Tensor((batch, length, dim), "float32"),
        X: T.Tensor((batch, length, dim), "float32"),
        H: T.Tensor((batch, length, dim), "float32"),
    ):
        with T.Kernel(T.ceildiv(dim, block), batch, threads=block) as (bx, by):
            state = T.alloc_fragment((block,), "float32")
            T.clear(state)
            for t in T.serial(length):
                for i in T.Parallel(block):
                    state[i] = A[by, t, bx * block + i] * state[i] + X[by, t, bx * block + i]
                T.copy(state, H[by, t, bx * block])

    return main


@tilelang.jit(out_idx=[-1])
def delta_rule(batch, length, dim, block=16):
    """S[t] = S[t - 1] + b[t] k[t] (v[t] - k[t] S[t - 1]); o[t] = q[t] S[t]."""

    @T.prim_func
    def main(
        Q: T.Tensor((batch, length, dim), "float32"),
        K: T.Tensor((batch, length, dim), "float32"),
        V: T.Tensor((batch, length, dim), "float32"),
        Beta: T.Tensor((batch, length), "float32"),
        O: T.Tensor((batch, length, dim), "float32"),
    ):
        with T.Kernel(T.ceildiv(dim, block), batch, threads=64) as (bx, by):
            state = T.alloc_fragment((dim, block), "float32")
            product = T.alloc_fragment((dim, block), "float32")
            seen = T.alloc_fragment((block,), "float32")
            out = T.alloc_fragment((block,), "float32")
            T.clear(state)
            for t in T.serial(length):
                for i, j in T.Parallel(dim, block):
                    product[i, j] = K[by, t, i] * state[i, j]
                T.reduce_sum(product, seen, dim=0)
                for j in T.Parallel(block):
                    seen[j] = Beta[by, t] * (V[by, t, bx * block + j] - seen[j])
                for i, j in T.Parallel(dim, block):
                    state[i, j] += K[by, t, i] * seen[j]
                    product[i, j] = Q[by, t, i] * state[i, j]
                T.reduce_sum(product, out, dim=0)
                T.copy(out, O[by, t, bx * block])

    return main
