# SPDX-License-Identifier: Apache-2.0
"""Kernels whose authors order warps by hand, as the tests of the language and of the passes use them."""

import torch_tile.language as T


def tma_gemm(M, N, K, bm=128, bn=128, bk=64, stages=3):
    """One warpgroup copies by the tensor memory accelerator, one multiplies; loops hold both roles."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=256) as (bx, by):
            a = T.alloc_shared((stages, bm, bk), "float16")
            b = T.alloc_shared((stages, bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            full = T.alloc_barrier([128] * stages)
            empty = T.alloc_barrier([128] * stages)
            with T.ws(0):
                T.inc_max_nreg(240)
                T.clear(c)
            with T.ws(1):
                T.dec_max_nreg(24)
            for k in T.serial(T.ceildiv(K, bk)):
                stage = k % stages
                with T.ws(1):
                    T.mbarrier_wait_parity(empty[stage], (k // stages % 2) ^ 1)
                    T.tma_copy(A[by * bm, k * bk], a[stage, :, :], barrier=full[stage])
                    T.tma_copy(B[k * bk, bx * bn], b[stage, :, :], barrier=full[stage])
                    T.mbarrier_arrive(full[stage])
                with T.ws(0):
                    T.mbarrier_wait_parity(full[stage], k // stages % 2)
                    T.gemm(a[stage, :, :], b[stage, :, :], c)
                    T.mbarrier_arrive(empty[stage])
            with T.ws(0):
                T.copy(c, C[by * bm, bx * bn])

    return main


def copied_gemm(M, N, K, bm=128, bn=128, bk=64):
    """The same with ordinary copies through one stage, in the older spelling."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=256) as (bx, by):
            a = T.alloc_shared((bm, bk), "float16")
            b = T.alloc_shared((bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            ready = T.alloc_barrier(arrive_count=128)
            done = T.alloc_barrier(arrive_count=128)
            with T.ws(1):
                T.clear(c)
            for k in range(T.ceildiv(K, bk)):
                with T.ws(0):
                    T.barrier_wait(done, (k + 1) % 2)
                    T.copy(A[by * bm, k * bk], a)
                    T.copy(B[k * bk, bx * bn], b)
                    T.barrier_arrive(ready)
                with T.ws(1):
                    T.barrier_wait(ready, k % 2)
                    T.gemm(a, b, c)
                    T.barrier_arrive(done)
            with T.ws(1):
                T.copy(c, C[by * bm, bx * bn])

    return main


def deferred_gemm(M, N, K, bm=128, bn=128, bk=64, stages=4):
    """A product stays in flight beside the next one, and one thread arrives for each warp."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=384) as (bx, by):
            a = T.alloc_shared((stages, bm, bk), "float16")
            b = T.alloc_shared((stages, bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([8] * stages)  # of eight warps
            with T.ws(0):
                T.set_max_nreg(40, 0)
                for k in T.serial(T.ceildiv(K, bk)):
                    T.mbarrier_wait_parity(empty[k % stages], (k // stages + 1) % 2)
                    T.tma_copy(A[by * bm, k * bk], a[k % stages, :, :], barrier=full[k % stages])
                    T.tma_copy(B[k * bk, bx * bn], b[k % stages, :, :], barrier=full[k % stages])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(full[k % stages])
            with T.ws(1, 2):
                T.set_max_nreg(232, 1)
                T.clear(c)
                for k in T.serial(T.ceildiv(K, bk)):
                    T.mbarrier_wait_parity(full[k % stages], k // stages % 2)
                    T.wgmma_gemm(a[k % stages, :, :], b[k % stages, :, :], c)
                    T.wait_wgmma(1)
                    if k > 0 and T.get_lane_idx() == 0:
                        T.mbarrier_arrive(empty[(k - 1) % stages])
                T.wait_wgmma(0)
                T.copy(c, C[by * bm, bx * bn])

    return main


def attention(queries, keys, dim=64, bm=128, bn=64, stages=2):
    """softmax(Q K^T) V, base 2: two warpgroups multiply, one copies; scores are made ahead of the sums they weigh."""

    @T.prim_func
    def main(
        Q: T.Tensor((queries, dim), "float16"), K: T.Tensor((keys, dim), "float16"),
        V: T.Tensor((keys, dim), "float16"), O: T.Tensor((queries, dim), "float16"),
    ):  # fmt: skip
        with T.Kernel(queries // bm, threads=384) as bx:
            q = T.alloc_shared((bm, dim), "float16")
            k = T.alloc_shared((stages, bn, dim), "float16")
            v = T.alloc_shared((stages, bn, dim), "float16")
            s = T.alloc_fragment((bm, bn), "float32")
            p = T.alloc_fragment((bm, bn), "float16")
            o = T.alloc_fragment((bm, dim), "float32")
            peak = T.alloc_fragment((bm,), "float32")
            before = T.alloc_fragment((bm,), "float32")
            scale = T.alloc_fragment((bm,), "float32")
            part = T.alloc_fragment((bm,), "float32")
            total = T.alloc_fragment((bm,), "float32")
            q_full = T.alloc_barrier(1)
            full_k, full_v = T.alloc_barrier([1] * stages), T.alloc_barrier([1] * stages)
            empty_k, empty_v = T.alloc_barrier([256] * stages), T.alloc_barrier([256] * stages)
            turns = T.ceildiv(keys, bn)

            @T.macro
            def weights():
                """Scores become weights; `scale` says what sums so far are worth."""
                T.copy(peak, before)
                T.reduce_max(s, peak, dim=1, clear=False)
                for r in T.Parallel(bm):
                    scale[r] = T.exp2(before[r] - peak[r])
                for r, c in T.Parallel(bm, bn):
                    s[r, c] = T.exp2(s[r, c] - peak[r])
                T.reduce_sum(s, part, dim=1)
                for r in T.Parallel(bm):
                    total[r] = total[r] * scale[r] + part[r]

            with T.ws(2):
                T.dec_max_nreg(24)
                T.tma_copy(Q[bx * bm, 0], q, barrier=q_full)
                if T.shuffle_elect(128):
                    T.mbarrier_arrive(q_full)
                for i in T.serial(turns):
                    T.mbarrier_wait_parity(empty_k[i % stages], (i // stages % 2) ^ 1)
                    T.tma_copy(K[i * bn, 0], k[i % stages, :, :], barrier=full_k[i % stages])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(full_k[i % stages])
                    T.mbarrier_wait_parity(empty_v[i % stages], (i // stages % 2) ^ 1)
                    T.tma_copy(V[i * bn, 0], v[i % stages, :, :], barrier=full_v[i % stages])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(full_v[i % stages])
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                T.clear(o)
                T.clear(total)
                T.fill(peak, -T.infinity("float32"))
                T.mbarrier_wait_parity(q_full, 0)
                T.mbarrier_wait_parity(full_k[0], 0)
                T.gemm(q, k[0, :, :], s, transpose_B=True, clear_accum=True)
                T.mbarrier_arrive(empty_k[0])
                weights()
                T.copy(s, p)
                for i in T.serial(turns - 1):
                    T.mbarrier_wait_parity(full_k[(i + 1) % stages], (i + 1) // stages % 2)
                    T.wgmma_gemm(q, k[(i + 1) % stages, :, :], s, transpose_B=True, clear_accum=True)
                    T.mbarrier_wait_parity(full_v[i % stages], i // stages % 2)
                    T.wgmma_gemm(p, v[i % stages, :, :], o)
                    T.wait_wgmma(1)
                    T.mbarrier_arrive(empty_k[(i + 1) % stages])
                    weights()
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty_v[i % stages])
                    for r, c in T.Parallel(bm, dim):
                        o[r, c] = o[r, c] * scale[r]
                    T.copy(s, p)
                T.mbarrier_wait_parity(full_v[(turns - 1) % stages], (turns - 1) // stages % 2)
                T.gemm(p, v[(turns - 1) % stages, :, :], o)
                for r, c in T.Parallel(bm, dim):
                    o[r, c] = o[r, c] / total[r]
                T.copy(o, O[bx * bm, 0])

    return main


def block_gemm(M, N, K, bm=64, bn=64, bk=64):
    """No roles: a warpgroup copies and multiplies in turn, by wgmma nevertheless."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
            a = T.alloc_shared((bm, bk), "float16")
            b = T.alloc_shared((bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            T.clear(c)
            for k in T.serial(T.ceildiv(K, bk)):
                T.copy(A[by * bm, k * bk], a)
                T.copy(B[k * bk, bx * bn], b)
                T.wgmma_gemm(a, b, c)
                T.wait_wgmma(0)
            T.copy(c, C[by * bm, bx * bn])

    return main


def async_gemm(M, N, K, bm=128, bn=128, bk=64, stages=2):
    """The copying warpgroup starts copies of its own threads, and waits for them before it hands tiles over."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=256) as (bx, by):
            a = T.alloc_shared((stages, bm, bk), "float16")
            b = T.alloc_shared((stages, bk, bn), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            full, empty = T.alloc_barrier([128] * stages), T.alloc_barrier([128] * stages)
            with T.ws(0):
                for k in T.serial(T.ceildiv(K, bk)):
                    T.barrier_wait(empty[k % stages], (k // stages + 1) % 2)
                    T.async_copy(A[by * bm, k * bk], a[k % stages, :, :])
                    T.async_copy(B[k * bk, bx * bn], b[k % stages, :, :])
                    T.ptx_commit_group()
                    T.ptx_wait_group(0)
                    T.barrier_arrive(full[k % stages])
            with T.ws(1):
                T.clear(c)
                for k in T.serial(T.ceildiv(K, bk)):
                    T.barrier_wait(full[k % stages], k // stages % 2)
                    T.gemm(a[k % stages, :, :], b[k % stages, :, :], c)
                    T.barrier_arrive(empty[k % stages])
                T.copy(c, C[by * bm, bx * bn])

    return main


def apart_gemm(M, N, K, bm=64, bn=128, bk=64):
    """Two warpgroups that have nothing to do with each other, each with a pipelined loop of its own."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, 2 * bm), threads=256) as (bx, by):
            c = T.alloc_fragment((bm, bn), "float32")
            for half in [0, 1]:
                with T.ws(half):
                    a = T.alloc_shared((bm, bk), "float16")
                    b = T.alloc_shared((bk, bn), "float16")
                    T.clear(c)
                    for k in T.Pipelined(T.ceildiv(K, bk), num_stages=3 - half):
                        T.copy(A[(2 * by + half) * bm, k * bk], a)
                        T.copy(B[k * bk, bx * bn], b)
                        T.gemm(a, b, c)
                    T.copy(c, C[(2 * by + half) * bm, bx * bn])

    return main


GEMMS = {f.__name__: f for f in (tma_gemm, copied_gemm, deferred_gemm, block_gemm, async_gemm, apart_gemm)}
