# SPDX-License-Identifier: Apache-2.0
"""Kernels whose blocks leave parts in global memory, which the last block to arrive joins; used by tests here, in
test/tileop and test/device.
"""

import torch_tile.language as T


def sums(rows, columns, splits, block=(4, 32), threads=64, dtype="float32", cluster=None):
    """Sums of rows, `splits` blocks for each; every block adds up its columns, `block[1]` at a time."""
    height, width = block
    turns = -(-columns // (splits * width))

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, columns), dtype), parts: T.Tensor((splits, rows), "float32"),
        counters: T.Tensor((-(-rows // height),), "int32"), out: T.Tensor((rows,), "float32"),
    ):  # fmt: skip
        with T.Kernel(splits, -(-rows // height), threads=threads, cluster_dims=cluster) as (bx, by):
            a = T.alloc_fragment((height, width), "float32")
            total = T.alloc_fragment((height,), "float32")
            T.clear(total)
            for n in T.serial(turns):
                T.copy(A[by * height, (bx * turns + n) * width], a)
                T.reduce_sum(a, total, dim=1, clear=False)
            T.copy(total, parts[bx, by * height])
            if cluster is not None:
                T.cluster_sync()
            if T.arrive_last(counters[by], splits):
                all_parts = T.alloc_fragment((splits, height), "float32")
                T.copy(parts[0, by * height], all_parts)
                T.reduce_sum(all_parts, total, dim=0)
                T.copy(total, out[by * height])

    return kernel


def products(m, n, k, splits, block=(64, 64, 64), stages=3, threads=128, dtype="float16", staged=False):
    """A @ B, each tile of it by `splits` blocks that take their share of k."""
    bm, bn, bk = block
    turns = -(-k // (splits * bk))

    @T.prim_func
    def kernel(
        A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), parts: T.Tensor((splits, m, n), "float32"),
        counters: T.Tensor((-(-m // bm), -(-n // bn)), "int32"), C: T.Tensor((m, n), dtype),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), splits, threads=threads) as (bx, by, bz):
            a, b = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bk, bn), dtype)
            c = T.alloc_fragment((bm, bn), "float32")
            left, whole = T.alloc_shared((bm, bn), "float32"), T.alloc_shared((bm, bn), dtype)
            T.clear(c)
            for turn in T.Pipelined(turns, num_stages=stages):
                T.copy(A[by * bm, (bz * turns + turn) * bk], a)
                T.copy(B[(bz * turns + turn) * bk, bx * bn], b)
                T.gemm(a, b, c)
            if staged:
                T.copy(c, left)
                T.copy(left, parts[bz, by * bm, bx * bn])
            else:
                T.copy(c, parts[bz, by * bm, bx * bn])
            if T.arrive_last(counters[by, bx], splits):
                T.clear(c)
                for z in T.serial(splits):
                    for i, j in T.Parallel(bm, bn):
                        c[i, j] += parts[z, by * bm + i, bx * bn + j]
                T.copy(c, whole)
                T.copy(whole, C[by * bm, bx * bn])

    return kernel


def tile_after_tile(m, n, k, splits, blocks, stages=3):
    """The same by `blocks` blocks, which take one share of a tile after another."""
    bm, bn, bk = 64, 64, 64
    turns, wide, high = -(-k // (splits * bk)), -(-n // bn), -(-m // bm)
    shares = wide * high * splits

    @T.prim_func
    def kernel(
        A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), parts: T.Tensor((splits, m, n), "float32"),
        counters: T.Tensor((high, wide), "int32"), C: T.Tensor((m, n), "float16"),
    ):  # fmt: skip
        with T.Kernel(blocks, threads=128) as block:
            a, b = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((bk, bn), "float16")
            c, whole = T.alloc_fragment((bm, bn), "float32"), T.alloc_shared((bm, bn), "float16")
            for share in T.serial(block, shares, blocks):
                bz, by, bx = share % splits, share // splits // wide, share // splits % wide
                T.clear(c)
                for turn in T.Pipelined(turns, num_stages=stages):
                    T.copy(A[by * bm, (bz * turns + turn) * bk], a)
                    T.copy(B[(bz * turns + turn) * bk, bx * bn], b)
                    T.gemm(a, b, c)
                T.copy(c, parts[bz, by * bm, bx * bn])
                if T.arrive_last(counters[by, bx], splits):
                    T.clear(c)
                    for z in T.serial(splits):
                        for i, j in T.Parallel(bm, bn):
                            c[i, j] += parts[z, by * bm + i, bx * bn + j]
                    T.copy(c, whole)
                    T.copy(whole, C[by * bm, bx * bn])

    return kernel


def bulk(rows, columns, splits):
    """Twice the sum of A over its first dimension; parts leave and come by bulk copies, as their author says."""

    @T.prim_func
    def kernel(
        A: T.Tensor((splits, rows, columns), "float32"), parts: T.Tensor((splits, rows, columns), "float32"),
        counters: T.Tensor((1,), "int32"), out: T.Tensor((rows, columns), "float32"),
    ):  # fmt: skip
        with T.Kernel(splits, threads=256) as bz:
            a = T.alloc_shared((rows, columns), "float32")
            p = T.alloc_shared((splits, rows, columns), "float32")
            here = T.alloc_barrier(1)
            with T.ws(1):
                s = T.alloc_fragment((rows, columns), "float32")
                T.copy(A[bz, 0, 0], a)
                for i, j in T.Parallel(rows, columns):
                    a[i, j] = a[i, j] * 2
                T.tma_copy(a, parts[bz, 0:rows, 0:columns])
                if T.arrive_last(counters[0], splits):
                    for z in range(splits):
                        T.tma_copy(parts[z, 0:rows, 0:columns], p[z, 0:rows, 0:columns], barrier=here[0])
                    if T.shuffle_elect(128):
                        T.mbarrier_arrive(here[0])
                    T.mbarrier_wait_parity(here[0], 0)
                    T.clear(s)
                    for z in range(splits):
                        for i, j in T.Parallel(rows, columns):
                            s[i, j] += p[z, i, j]
                    T.copy(s, out)

    return kernel
