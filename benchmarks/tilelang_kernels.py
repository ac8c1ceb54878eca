# SPDX-License-Identifier: Apache-2.0
"""Plain kernels in TileLang's language, so that TileLang can be a rival where it is installed.

Each function takes the module that is to compile the kernel, `tilelang` or our own, and compiles for fixed sizes. The
configurations are the usual ones for Hopper: two warpgroups, tiles of 128 rows, loads two or three steps ahead.
"""

# No annotations of the future here: the kernels' parameters are annotated with values.
from collections.abc import Callable
from typing import Any

import torch

LOG2_E = 1.4426950408889634


def gemm(
    tilelang: Any, m: int, k: int, n: int, dtype: str, turned: bool, block: tuple[int, int, int] = (128, 256, 64)
) -> Callable[..., torch.Tensor]:
    """`f(a [m, k], b [k, n], or [n, k] if turned) -> [m, n]`."""
    T = tilelang.language
    rows, cols, depth = block
    stages, threads = 3, 256

    @tilelang.jit(out_idx=[2])
    def build():
        @T.prim_func
        def product(
            A: T.Tensor((m, k), dtype), B: T.Tensor((n, k) if turned else (k, n), dtype), C: T.Tensor((m, n), dtype)
        ):
            with T.Kernel(T.ceildiv(n, cols), T.ceildiv(m, rows), threads=threads) as (bx, by):
                a = T.alloc_shared((rows, depth), dtype)
                b = T.alloc_shared((cols, depth) if turned else (depth, cols), dtype)
                c = T.alloc_fragment((rows, cols), "float32")
                result = T.alloc_shared((rows, cols), dtype)
                T.use_swizzle(10)
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(k, depth), num_stages=stages):
                    T.copy(A[by * rows, step * depth], a)
                    if turned:
                        T.copy(B[bx * cols, step * depth], b)
                    else:
                        T.copy(B[step * depth, bx * cols], b)
                    T.gemm(a, b, c, transpose_B=turned)
                T.copy(c, result)
                T.copy(result, C[by * rows, bx * cols])

        return product

    return build()


def attention(
    tilelang: Any, batch: int, heads: int, kv_heads: int, length: int, dim: int, causal: bool, dtype: str,
    block: tuple[int, int] = (128, 128),
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """`f(q [batch, heads, length, dim], k and v [batch, kv_heads, length, dim]) -> [batch, heads, length, dim]`."""
    T = tilelang.language
    rows, keys = block
    stages, threads = 2, 256
    groups = heads // kv_heads
    scale = dim**-0.5 * LOG2_E
    q_shape, kv_shape = (batch, heads, length, dim), (batch, kv_heads, length, dim)

    @tilelang.jit(out_idx=[3])
    def build():
        @T.prim_func
        def flash(
            Q: T.Tensor(q_shape, dtype),
            K: T.Tensor(kv_shape, dtype),
            V: T.Tensor(kv_shape, dtype),
            Output: T.Tensor(q_shape, dtype),
        ):
            with T.Kernel(T.ceildiv(length, rows), heads, batch, threads=threads) as (bx, by, bz):
                q = T.alloc_shared((rows, dim), dtype)
                k = T.alloc_shared((keys, dim), dtype)
                v = T.alloc_shared((keys, dim), dtype)
                result = T.alloc_shared((rows, dim), dtype)
                scores = T.alloc_fragment((rows, keys), "float32")
                weights = T.alloc_fragment((rows, keys), dtype)
                sums = T.alloc_fragment((rows, dim), "float32")
                peak = T.alloc_fragment((rows,), "float32")
                before = T.alloc_fragment((rows,), "float32")
                fade = T.alloc_fragment((rows,), "float32")
                part = T.alloc_fragment((rows,), "float32")
                total = T.alloc_fragment((rows,), "float32")

                T.copy(Q[bz, by, bx * rows : (bx + 1) * rows, :], q)
                T.clear(sums)
                T.clear(total)
                T.fill(peak, -T.infinity("float32"))
                reach = (bx + 1) * rows if causal else length
                for step in T.Pipelined(T.min(T.ceildiv(reach, keys), T.ceildiv(length, keys)), num_stages=stages):
                    T.copy(K[bz, by // groups, step * keys : (step + 1) * keys, :], k)
                    if causal:
                        for i, j in T.Parallel(rows, keys):
                            seen = step * keys + j <= bx * rows + i
                            scores[i, j] = T.if_then_else(seen, 0, -T.infinity("float32"))
                    else:
                        T.clear(scores)
                    T.gemm(q, k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(peak, before)
                    T.reduce_max(scores, peak, dim=1, clear=False)
                    for i in T.Parallel(rows):
                        fade[i] = T.exp2(before[i] * scale - peak[i] * scale)
                    for i, j in T.Parallel(rows, keys):
                        scores[i, j] = T.exp2(scores[i, j] * scale - peak[i] * scale)
                    T.reduce_sum(scores, part, dim=1)
                    for i in T.Parallel(rows):
                        total[i] = total[i] * fade[i] + part[i]
                    T.copy(scores, weights)
                    for i, c in T.Parallel(rows, dim):
                        sums[i, c] *= fade[i]
                    T.copy(V[bz, by // groups, step * keys : (step + 1) * keys, :], v)
                    T.gemm(weights, v, sums, policy=T.GemmWarpPolicy.FullRow)
                for i, c in T.Parallel(rows, dim):
                    sums[i, c] /= total[i]
                T.copy(sums, result)
                T.copy(result, Output[bz, by, bx * rows : (bx + 1) * rows, :])

        return flash

    return build()


def mla(
    tilelang: Any, batch: int, heads: int, length: int, latent: int, rotary: int, splits: int, dtype: str,
    block: tuple[int, int] = (64, 64),
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """`f(q [batch, heads, latent], q_pe, kv [batch, length, latent], k_pe) -> [batch, heads, latent]`."""
    kernel = split_mla(tilelang, batch, heads, length, latent, rotary, splits, dtype, block)
    parts: list[torch.Tensor] = []

    def call(q: torch.Tensor, q_pe: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        if not parts:
            shape = (splits, batch, heads)
            parts.extend(torch.empty(s, dtype=torch.float32, device=q.device) for s in ((*shape, latent), shape))
        return kernel(q, q_pe, kv, k_pe, *parts)

    return call


def split_mla(
    tilelang: Any, batch: int, heads: int, length: int, latent: int, rotary: int, splits: int, dtype: str,
    block: tuple[int, int],
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """`mla` with workspaces: each of `splits` blocks takes an equal share of the positions, a second kernel joins."""
    T = tilelang.language
    rows, keys = min(block[0], heads), block[1]
    stages, threads = 2, 256
    share = length // splits
    scale = (latent + rotary) ** -0.5 * LOG2_E

    @tilelang.jit(out_idx=[6])
    def build():
        @T.prim_func
        def decode(
            Q: T.Tensor((batch, heads, latent), dtype),
            Q_pe: T.Tensor((batch, heads, rotary), dtype),
            KV: T.Tensor((batch, length, latent), dtype),
            K_pe: T.Tensor((batch, length, rotary), dtype),
            Parts: T.Tensor((splits, batch, heads, latent), "float32"),
            Lse: T.Tensor((splits, batch, heads), "float32"),
            Output: T.Tensor((batch, heads, latent), dtype),
        ):
            with T.Kernel(heads // rows, batch, splits, threads=threads) as (bx, by, bz):
                q = T.alloc_shared((rows, latent), dtype)
                q_pe = T.alloc_shared((rows, rotary), dtype)
                kv = T.alloc_shared((keys, latent), dtype)
                k_pe = T.alloc_shared((keys, rotary), dtype)
                weights = T.alloc_shared((rows, keys), dtype)
                scores = T.alloc_fragment((rows, keys), "float32")
                sums = T.alloc_fragment((rows, latent), "float32")
                peak = T.alloc_fragment((rows,), "float32")
                before = T.alloc_fragment((rows,), "float32")
                fade = T.alloc_fragment((rows,), "float32")
                part = T.alloc_fragment((rows,), "float32")
                total = T.alloc_fragment((rows,), "float32")

                T.copy(Q[by, bx * rows : (bx + 1) * rows, :], q)
                T.copy(Q_pe[by, bx * rows : (bx + 1) * rows, :], q_pe)
                T.clear(sums)
                T.clear(total)
                T.fill(peak, -T.infinity("float32"))
                for step in T.Pipelined(T.ceildiv(share, keys), num_stages=stages):
                    T.copy(KV[by, bz * share + step * keys : bz * share + (step + 1) * keys, :], kv)
                    T.copy(K_pe[by, bz * share + step * keys : bz * share + (step + 1) * keys, :], k_pe)
                    T.clear(scores)
                    T.gemm(q, kv, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(q_pe, k_pe, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    T.copy(peak, before)
                    T.reduce_max(scores, peak, dim=1, clear=False)
                    for i in T.Parallel(rows):
                        fade[i] = T.exp2(before[i] * scale - peak[i] * scale)
                    for i, j in T.Parallel(rows, keys):
                        scores[i, j] = T.exp2(scores[i, j] * scale - peak[i] * scale)
                    T.reduce_sum(scores, part, dim=1)
                    T.copy(scores, weights)
                    for i in T.Parallel(rows):
                        total[i] = total[i] * fade[i] + part[i]
                    for i, c in T.Parallel(rows, latent):
                        sums[i, c] *= fade[i]
                    T.gemm(weights, kv, sums, policy=T.GemmWarpPolicy.FullCol)
                for i, c in T.Parallel(rows, latent):
                    sums[i, c] /= total[i]
                for i in T.Parallel(rows):
                    total[i] = T.log2(total[i]) + peak[i] * scale
                if splits == 1:
                    T.copy(sums, Output[by, bx * rows : (bx + 1) * rows, :])
                else:
                    T.copy(sums, Parts[bz, by, bx * rows : (bx + 1) * rows, :])
                    T.copy(total, Lse[bz, by, bx * rows : (bx + 1) * rows])

            if splits > 1:
                with T.Kernel(heads, batch, threads=128) as (bx, by):
                    top = T.alloc_local((1,), "float32")
                    factor = T.alloc_local((1,), "float32")
                    both = T.alloc_local((1,), "float32")
                    joined = T.alloc_fragment((latent,), "float32")
                    T.clear(joined)
                    top[0] = -T.infinity("float32")
                    both[0] = 0
                    for s in T.serial(splits):
                        top[0] = T.max(top[0], Lse[s, by, bx])
                    for s in T.serial(splits):
                        both[0] += T.exp2(Lse[s, by, bx] - top[0])
                    for s in T.serial(splits):
                        factor[0] = T.exp2(Lse[s, by, bx] - top[0]) / both[0]
                        for c in T.Parallel(latent):
                            joined[c] += Parts[s, by, bx, c] * factor[0]
                    for c in T.Parallel(latent):
                        Output[by, bx, c] = joined[c]

        return decode

    return build()
