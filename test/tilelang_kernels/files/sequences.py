# SPDX-License-Identifier: Apache-2.0
"""Attention over pages, packed batches and chosen blocks; its gradients, and chunks of states."""

import tilelang
import tilelang.language as T

LOG2E = 1.44269504


@tilelang.jit(out_idx=[-1], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
def packed_attention(heads, dim, longest, block_M=32, block_N=32):
    """Causal attention over sequences of unlike lengths, which lie behind each other."""
    tokens = T.dynamic("tokens")
    ends = T.dynamic("ends")
    scale = dim**-0.5 * LOG2E
    shape = [tokens, heads, dim]

    @T.prim_func
    def main(
        Q: T.Tensor(shape, T.float16),
        K: T.Tensor(shape, T.float16),
        V: T.Tensor(shape, T.float16),
        cu_seqlens: T.Tensor([ends], T.int32),
        Out: T.Tensor(shape, T.float16),
    ):
        with T.Kernel(T.ceildiv(longest, block_M), heads, ends - 1, threads=128) as (bm, h, b):
            Q_shared = T.alloc_shared([block_M, dim], T.float16)
            K_shared = T.alloc_shared([block_N, dim], T.float16)
            V_shared = T.alloc_shared([block_N, dim], T.float16)
            S = T.alloc_fragment([block_M, block_N], T.float32)
            P = T.alloc_fragment([block_M, block_N], T.float16)
            O = T.alloc_fragment([block_M, dim], T.float32)
            row_max = T.alloc_fragment([block_M], T.float32)
            before = T.alloc_fragment([block_M], T.float32)
            factor = T.alloc_fragment([block_M], T.float32)
            row_sum = T.alloc_fragment([block_M], T.float32)
            total = T.alloc_fragment([block_M], T.float32)

            start = cu_seqlens[b]
            length = cu_seqlens[b + 1] - start
            if bm * block_M < length:
                for i, d in T.Parallel(block_M, dim):
                    Q_shared[i, d] = T.if_then_else(bm * block_M + i < length, Q[start + bm * block_M + i, h, d], 0)
                T.fill(O, 0)
                T.fill(total, 0)
                T.fill(row_max, -T.infinity(T.float32))
                turns = T.ceildiv(T.min(length, (bm + 1) * block_M), block_N)
                for k in T.Pipelined(turns, num_stages=1):
                    T.copy(K[start + k * block_N : start + (k + 1) * block_N, h, :], K_shared)
                    for i, j in T.Parallel(block_M, block_N):
                        seen = (bm * block_M + i >= k * block_N + j) and (k * block_N + j < length)
                        S[i, j] = T.if_then_else(seen, 0, -T.infinity(S.dtype))
                    T.gemm(Q_shared, K_shared, S, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(V[start + k * block_N : start + (k + 1) * block_N, h, :], V_shared)
                    T.copy(row_max, before)
                    T.reduce_max(S, row_max, dim=1, clear=False)
                    for i in T.Parallel(block_M):
                        factor[i] = T.exp2(before[i] * scale - row_max[i] * scale)
                    for i, j in T.Parallel(block_M, block_N):
                        S[i, j] = T.exp2(S[i, j] * scale - row_max[i] * scale)
                    T.reduce_sum(S, row_sum, dim=1)
                    for i in T.Parallel(block_M):
                        total[i] = total[i] * factor[i] + row_sum[i]
                    for i, d in T.Parallel(block_M, dim):
                        O[i, d] *= factor[i]
                    T.copy(S, P)
                    T.gemm(P, V_shared, O, policy=T.GemmWarpPolicy.FullRow)
                for i, d in T.Parallel(block_M, dim):
                    if bm * block_M + i < length:
                        Out[start + bm * block_M + i, h, d] = O[i, d] / total[i]

    return main


@tilelang.jit(out_idx=-1)
def paged_decoding(heads, dim, page, most_pages, block_H=16):
    """One query for each sequence; keys and values lie in pages that a table lists."""
    batch, pages = T.dynamic("batch"), T.dynamic("pages")
    scale = dim**-0.5

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), "float16"),
        K: T.Tensor((pages, page, dim), "float16"),
        V: T.Tensor((pages, page, dim), "float16"),
        table: T.Tensor((batch, most_pages), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), "float16"),
    ):
        with T.Kernel(batch, T.ceildiv(heads, block_H), threads=128) as (b, hb):
            q = T.alloc_shared((block_H, dim), "float16")
            k = T.alloc_shared((page, dim), "float16")
            v = T.alloc_shared((page, dim), "float16")
            p = T.alloc_shared((block_H, page), "float16")
            s = T.alloc_fragment((block_H, page), "float32")
            o = T.alloc_fragment((block_H, dim), "float32")
            m = T.alloc_fragment((block_H,), "float32")
            m_new = T.alloc_fragment((block_H,), "float32")
            part = T.alloc_fragment((block_H,), "float32")
            z = T.alloc_fragment((block_H,), "float32")
            length = T.alloc_var("int32", init=lengths[b])
            T.copy(Q[b, hb * block_H : (hb + 1) * block_H, :], q)
            T.clear(o)
            T.clear(z)
            T.fill(m, -1e30)
            n = T.alloc_var("int32")
            while n * page < length:
                T.copy(K[table[b, n], :, :], k)
                T.copy(V[table[b, n], :, :], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_H, page):
                    s[i, j] = T.Select(n * page + j < length, s[i, j] * scale, -1e30)
                T.reduce_max(s, m_new, dim=-1, clear=True)
                for i in T.Parallel(block_H):
                    m_new[i] = T.max(m_new[i], m[i])
                for i, j in T.Parallel(block_H, page):
                    s[i, j] = T.exp(s[i, j] - m_new[i])
                T.reduce_sum(s, part, dim=-1)
                for i in T.Parallel(block_H):
                    z[i] = z[i] * T.exp(m[i] - m_new[i]) + part[i]
                for i, d in T.Parallel(block_H, dim):
                    o[i, d] = o[i, d] * T.exp(m[i] - m_new[i])
                T.copy(m_new, m)
                T.copy(s, p)
                T.gemm(p, v, o)
                n += 1
            for i, d in T.Parallel(block_H, dim):
                o[i, d] /= z[i]
            T.copy(o, Out[b, hb * block_H, 0])

    return main


@tilelang.jit(out_idx=[3])
def attention_with_sinks(length, heads, dim, window, block=32):
    """Attention over the last `window` keys and a number of each head that only the sums of rows see."""

    @T.macro
    def first_and_last(row: T.int32):
        return T.max(row * block - window + 1, 0) // block, row + 1

    @T.prim_func
    def main(
        QKV: T.Tensor[[3, heads, length, dim], T.bfloat16],
        Sinks: T.Tensor[[heads], T.float32],
        Unused: T.Tensor[[1], T.int32],
        Out: T.Tensor[[heads, length, dim], T.bfloat16],
    ):
        with T.Kernel(T.ceildiv(length, block), heads, threads=64) as (row, h):
            tiles = [T.alloc_shared([block, dim], T.bfloat16) for _ in range(3)]
            s = T.alloc_fragment([block, block], T.float32)
            p = T.alloc_fragment([block, block], T.bfloat16)
            o = T.alloc_fragment([block, dim], T.float32)
            top, old, z, part = (T.alloc_fragment([block], T.float32) for _ in range(4))
            T.copy(QKV[0, h, row * block, 0], tiles[0])
            for i in T.Parallel(block):
                top[i] = Sinks[h]
                z[i] = 1.0
            T.clear(o)
            first, last = first_and_last(row)
            for k in T.serial(first, last):
                T.copy(QKV[1, h, k * block, 0], tiles[1])
                T.copy(QKV[2, h, k * block, 0], tiles[2])
                T.gemm(tiles[0], tiles[1], s, False, True, clear_accum=True)
                for i, j in T.Parallel(block, block):
                    apart = row * block + i - (k * block + j)
                    s[i, j] = T.if_then_else(0 <= apart < window, s[i, j] * dim**-0.5, -T.infinity("float32"))
                T.copy(top, old)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(block, block):
                    s[i, j] = T.exp(s[i, j] - top[i])
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(block):
                    z[i] = z[i] * T.exp(old[i] - top[i]) + part[i]
                for i, d in T.Parallel(block, dim):
                    o[i, d] *= T.exp(old[i] - top[i])
                T.copy(s, p)
                T.gemm(p, tiles[2], o)
            for i, d in T.Parallel(block, dim):
                o[i, d] = o[i, d] / z[i]
            T.copy(o, Out[h, row * block : (row + 1) * block, :])

    return main


@tilelang.jit
def chosen_blocks(Q, K, V, Chosen, block: int = 16, threads: int = 32):
    """Each query reads the blocks of keys that a table chose for it; -1 stands for none."""
    tokens, groups, dim, kept = T.const("tokens, groups, dim, kept")
    keys = T.const("keys")
    Q: T.Tensor[[tokens, groups, dim], T.float16]
    K: T.Tensor[[keys, dim], T.float16]
    V: T.Tensor[[keys, dim], T.float16]
    Chosen: T.Tensor[[tokens, kept], T.int32]
    Out = T.empty((tokens, groups, dim), T.float16)
    with T.Kernel(tokens, threads=threads) as t:
        q = T.alloc_shared((groups, dim), T.float16)
        k = T.alloc_shared((block, dim), T.float16)
        v = T.alloc_shared((block, dim), T.float16)
        s = T.alloc_fragment((groups, block), T.float32)
        p = T.alloc_fragment((groups, block), T.float16)
        o = T.alloc_fragment((groups, dim), T.float32)
        z = T.alloc_fragment((groups,), T.float32)
        T.copy(Q[t, :, :], q)
        T.clear(o)
        T.clear(z)
        for n in T.Pipelined(kept, num_stages=0):
            at = Chosen[t, n] * block
            if at >= 0:
                T.copy(K[at, 0], k)
                T.copy(V[at, 0], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(groups, block):
                    s[i, j] = T.exp2(s[i, j] * (dim**-0.5 * LOG2E))
                T.reduce_sum(s, z, dim=1, clear=False)
                T.copy(s, p)
                T.gemm(p, v, o)
        for i, d in T.Parallel(groups, dim):
            Out[t, i, d] = o[i, d] / T.max(z[i], 1e-20)
    return Out


@tilelang.jit(out_idx=[-1])
def joined_splits(heads, dim, splits):
    """Partial results of attention, joined by the logarithms of their sums."""
    batch = T.symbolic("batch")

    @T.prim_func
    def main(
        Parts: T.Tensor((splits, batch, heads, dim), "float32"),
        Logs: T.Tensor((splits, batch, heads), "float32"),
        Out: T.Tensor((batch, heads, dim), "float32"),
    ):
        with T.Kernel(batch, heads, threads=64) as (b, h):
            logs = T.alloc_local((splits,), "float32")
            most = T.alloc_var("float32", -T.infinity("float32"))
            whole = T.alloc_var("float32")
            out = T.alloc_fragment((dim,), "float32")
            for n in T.unroll(splits):
                logs[n] = Logs[n, b, h]
                most = T.max(most, logs[n])
            for n in T.unroll(splits):
                whole += T.exp(logs[n] - most)
            T.clear(out)
            for n in range(splits):
                share = T.exp(logs[n] - most) / whole
                for d in T.Parallel(dim):
                    out[d] += Parts[n, b, h, d] * share
            T.copy(out, Out[b, h, :])

    return main


@tilelang.jit(out_idx=[4], compile_flags=["-O3"])
def attention_gradients(length, dim, block=32):
    """Gradients of queries, keys and values; blocks of keys add to the queries' gradients."""

    def main_of(kind):
        @T.prim_func
        def main(
            Q: T.Tensor((length, dim), kind),
            K: T.Tensor((length, dim), kind),
            V: T.Tensor((length, dim), kind),
            dO: T.Tensor((length, dim), kind),
            dQKV: T.Tensor((3, length, dim), "float32"),
        ):
            logs = T.alloc_global((length,), "float32")
            delta = T.alloc_global((length,), "float32")
            with T.Kernel(T.ceildiv(length, block), threads=64) as row:
                q = T.alloc_shared((block, dim), kind)
                k = T.alloc_shared((block, dim), kind)
                v = T.alloc_shared((block, dim), kind)
                g = T.alloc_shared((block, dim), kind)
                s = T.alloc_fragment((block, block), "float32")
                w = T.alloc_fragment((block, block), "float32")
                z = T.alloc_fragment((block,), "float32")
                d = T.alloc_fragment((block,), "float32")
                T.copy(Q[row * block, 0], q)
                T.copy(dO[row * block, 0], g)
                T.clear(z)
                T.clear(d)
                for n in T.serial(length // block):
                    T.copy(K[n * block, 0], k)
                    T.copy(V[n * block, 0], v)
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    T.gemm(g, v, w, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(block, block):
                        s[i, j] = T.exp(s[i, j] * dim**-0.5)
                        w[i, j] *= s[i, j]
                    T.reduce_sum(s, z, dim=1, clear=False)
                    T.reduce_sum(w, d, dim=1, clear=False)
                for i in T.Parallel(block):
                    logs[row * block + i] = T.log(z[i])
                    delta[row * block + i] = d[i] / z[i]
                for i, j in T.Parallel(block, dim):
                    dQKV[0, row * block + i, j] = 0
            with T.Kernel(T.ceildiv(length, block), threads=64) as column:
                q = T.alloc_shared((block, dim), kind)
                k = T.alloc_shared((block, dim), kind)
                v = T.alloc_shared((block, dim), kind)
                g = T.alloc_shared((block, dim), kind)
                p = T.alloc_fragment((block, block), "float32")
                dp = T.alloc_fragment((block, block), "float32")
                p_shared = T.alloc_shared((block, block), kind)
                ds_shared = T.alloc_shared((block, block), kind)
                dk = T.alloc_fragment((block, dim), "float32")
                dv = T.alloc_fragment((block, dim), "float32")
                dq = T.alloc_fragment((block, dim), "float32")
                T.copy(K[column * block, 0], k)
                T.copy(V[column * block, 0], v)
                T.clear(dk)
                T.clear(dv)
                for n in T.Pipelined(length // block, num_stages=2):
                    T.copy(Q[n * block, 0], q)
                    T.copy(dO[n * block, 0], g)
                    T.clear(p)
                    T.gemm(k, q, p, transpose_B=True)
                    for j, i in T.Parallel(block, block):
                        p[j, i] = T.exp(p[j, i] * dim**-0.5 - logs[n * block + i])
                    T.clear(dp)
                    T.gemm(v, g, dp, transpose_B=True)
                    T.copy(p, p_shared)
                    T.gemm(p_shared, g, dv)
                    for j, i in T.Parallel(block, block):
                        ds_shared[j, i] = p[j, i] * (dp[j, i] - delta[n * block + i]) * dim**-0.5
                    T.gemm(ds_shared, q, dk)
                    T.gemm(ds_shared, k, dq, transpose_A=True, clear_accum=True)
                    for i, d in T.Parallel(block, dim):
                        T.atomic_add(dQKV[0, n * block + i, d], dq[i, d])
                T.copy(dk, dQKV[1, column * block, 0])
                T.copy(dv, dQKV[2, column * block, 0])

        return main

    return main_of("float16")


@tilelang.jit(out_idx=[-1])
def scores_of_an_indexer(queries, keys, heads, dim, block_N=32):
    """For each query and key the positive parts of the heads' products, weighted and added."""
    q_rows = 16 // heads

    @T.prim_func
    def main(
        Q: T.Tensor((queries * heads, dim), "float16"),
        K: T.Tensor((keys, dim), "float16"),
        W: T.Tensor((queries, heads), "float32"),
        S: T.Tensor((queries, keys), "float32"),
    ):
        with T.Kernel(T.ceildiv(keys, block_N), T.ceildiv(queries, q_rows), threads=32) as (bn, bq):
            q = T.alloc_shared((16, dim), "float16")
            k = T.alloc_shared((block_N, dim), "float16")
            products = T.alloc_fragment((block_N, 16), "float32")
            by_head = T.reshape(products, (block_N, q_rows, heads))
            weights = T.alloc_fragment((q_rows, heads), "float32")
            found = T.alloc_fragment((block_N, q_rows), "float32")
            T.copy(Q[bq * 16, 0], q)
            T.copy(K[bn * block_N, 0], k)
            T.copy(W[bq * q_rows, 0], weights)
            T.gemm(k, q, products, transpose_B=True, clear_accum=True)
            for j, i, h in T.Parallel(block_N, q_rows, heads):
                by_head[j, i, h] = T.max(by_head[j, i, h], 0) * weights[i, h]
            T.reduce_sum(by_head, found, dim=-1, clear=True)
            for j, i in T.Parallel(block_N, q_rows):
                S[bq * q_rows + i, bn * block_N + j] = found[j, i]

    return main


@tilelang.jit(out_idx=[-1])
def retention(batch, length, heads, dim, chunk=32):
    """Linear attention whose states fade by a factor of each head."""

    @T.prim_func
    def main(
        Q: T.Tensor((batch, length, heads, dim), "float16"),
        K: T.Tensor((batch, length, heads, dim), "float16"),
        V: T.Tensor((batch, length, heads, dim), "float16"),
        O: T.Tensor((batch, length, heads, dim), "float32"),
    ):
        with T.Kernel(heads, batch) as (h, b):
            q, k, v = (T.alloc_shared((chunk, dim), "float16") for _ in "qkv")
            faded = T.alloc_shared((chunk, dim), "float16")
            state = T.alloc_fragment((dim, dim), "float32")
            state_shared = T.alloc_shared((dim, dim), "float16")
            scores = T.alloc_fragment((chunk, chunk), "float32")
            scores_shared = T.alloc_shared((chunk, chunk), "float16")
            out = T.alloc_fragment((chunk, dim), "float32")
            log_decay = T.alloc_var("float32")
            log_decay = T.log2(1 - T.exp2(-5.0 - h))
            T.clear(state)
            for n in T.Pipelined(0, length // chunk):
                for tile, source in zip((q, k, v), (Q, K, V), strict=True):
                    T.copy(source[b, n * chunk : (n + 1) * chunk, h, :], tile)
                T.copy(state, state_shared)
                T.gemm(q, state_shared, out, clear_accum=True)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    scores[i, j] = T.if_then_else(i >= j, scores[i, j] * T.exp2((i - j) * log_decay), 0.0)
                for i, d in T.Parallel(chunk, dim):
                    out[i, d] *= T.exp2((i + 1) * log_decay)
                    faded[i, d] = k[i, d] * T.exp2((chunk - 1 - i) * log_decay)
                T.copy(scores, scores_shared)
                T.gemm(scores_shared, v, out)
                for i, j in T.Parallel(dim, dim):
                    state[i, j] *= T.exp2(chunk * log_decay)
                T.gemm(faded, v, state, transpose_A=True)
                T.copy(out, O[b, n * chunk : (n + 1) * chunk, h, :])

    return main


@tilelang.jit(out_idx=[2])
def chunk_states(chunks, size, rows, columns):
    """The state that each chunk adds: its values times its inputs, faded by what is left of the chunk."""

    @T.prim_func
    def main(
        X: T.Tensor((chunks, size, rows + columns), "bfloat16"),
        Decay: T.Tensor((chunks, size), "float32"),
        States: T.Tensor((chunks, rows, columns), "float32"),
    ):
        with T.Kernel(chunks, threads=64) as (c,):
            x = T.alloc_shared((size, rows), "bfloat16")
            b = T.alloc_shared((size, columns), "bfloat16")
            summed = T.alloc_shared((size,), "float32")
            faded = T.alloc_fragment((rows, size), "bfloat16")
            state = T.alloc_fragment((rows, columns), "float32")
            T.copy(X[c, :, :rows], x)
            T.copy(X[c, :, rows:], b)
            T.copy(Decay[c, :], summed)
            T.cumsum(summed)
            for r, t in T.Parallel(rows, size):
                faded[r, t] = x[t, r] * T.exp(summed[size - 1] - summed[t])
            T.gemm(faded, b, state, clear_accum=True)
            T.copy(state, States[c, :, :])

    return main


@tilelang.jit
def appended_keys(heads, dim):
    """New keys go to the slots of a cache that a table names; a slot below 0 drops the token."""
    tokens, slots = T.dynamic("tokens"), T.dynamic("slots")
    s0 = T.dynamic("s0")

    @T.prim_func
    def main(
        New: T.StridedTensor((tokens, heads, dim), (s0, dim, 1), "float16"),
        Slots: T.Tensor((tokens,), "int64"),
        Cache: T.Tensor((slots, heads, dim), "float16"),
    ):
        with T.Kernel(tokens, threads=32) as t:
            slot = Slots[t]
            if slot >= 0:
                for h, d in T.Parallel(heads, dim):
                    Cache[slot, h, d] = New[t, h, d]

    return main
