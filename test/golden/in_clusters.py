# SPDX-License-Identifier: Apache-2.0
"""Kernels in clusters whose blocks load for each other or read each other's tiles, used by tests here, in test/lowering
and test/device.

Grids are rounded up to whole clusters; blocks beyond the tensors compute nothing that is stored.
"""

import math

import torch_tile.language as T


def rounded(size, block, group):
    """Blocks along an axis, in whole clusters."""
    return math.ceil(math.ceil(size / block) / group) * group


def gemm(m, n, k, cluster, block=(64, 64, 64), stages=3, dtype="float16", turned=(False, True), threads=128,
         total="float32", out=None, staged=False, swapped=False):  # fmt: skip
    """C = op(A) op(B). The blocks of a cluster along x have rows of C in common, those along y columns."""
    (bm, bn, bk), out = block, out or dtype
    grid = rounded(n, bn, cluster[0]), rounded(m, bm, cluster[1])

    @T.prim_func
    def kernel(
        A: T.Tensor((k, m) if turned[0] else (m, k), dtype),
        B: T.Tensor((n, k) if turned[1] else (k, n), dtype),
        C: T.Tensor((m, n), out),
    ):
        with T.Kernel(*grid, threads=threads, cluster_dims=cluster) as (bx, by):
            a = T.alloc_shared((bk, bm) if turned[0] else (bm, bk), dtype)
            b = T.alloc_shared((bn, bk) if turned[1] else (bk, bn), dtype)
            c = T.alloc_fragment((bm, bn), total)
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                if turned[0]:
                    T.copy(A[ko * bk, by * bm], a)
                else:
                    T.copy(A[by * bm, ko * bk], a)
                if turned[1]:
                    T.copy(B[bx * bn, ko * bk], b)
                else:
                    T.copy(B[ko * bk, bx * bn], b)
                T.gemm(a, b, c, transpose_A=turned[0], transpose_B=turned[1])
            if staged:
                s = T.alloc_shared((bm, bn), out)
                T.copy(c, s)
                T.copy(s, C[by * bm, bx * bn])
            else:
                T.copy(c, C[by * bm, bx * bn])

    return kernel


def changed(m, n, k, cluster, stages=2):
    """C = relu(A) B^T: threads read a stage, too, before the product has it from registers."""
    grid = rounded(n, 64, cluster[0]), rounded(m, 64, cluster[1])

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(*grid, threads=128, cluster_dims=cluster) as (bx, by):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            r, c = T.alloc_fragment((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(k, 64), num_stages=stages):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(B[bx * 64, ko * 64], b)
                for i, j in T.Parallel(64, 64):
                    r[i, j] = T.max(a[i, j], T.float16(0))
                T.gemm(r, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    return kernel


def persistent(m, n, k, cluster, clusters, stages=3):
    """C = A B^T, each cluster along x taking tile after tile, of two or more columns of blocks, in turn."""
    wide, columns, rows = cluster[0], rounded(n, 64, cluster[0]) // cluster[0], rounded(m, 64, 1)

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(clusters * wide, threads=128, cluster_dims=cluster) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for tile in T.serial(bx // wide, rows * columns, clusters):
                T.clear(c)
                for ko in T.Pipelined(T.ceildiv(k, 64), num_stages=stages):
                    T.copy(A[tile // columns * 64, ko * 64], a)
                    T.copy(B[(tile % columns * wide + bx % wide) * 64, ko * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[tile // columns * 64, (tile % columns * wide + bx % wide) * 64])

    return kernel


def joined(m, n, k, count, block=(16, 64, 64), stages=3, dtype="float16", threads=128, rows=True):
    """C = A B^T: each block of a cluster has a share of the sum, and adds up a part of the rows, or columns, of all."""
    bm, bn, bk = block
    part = (math.ceil(bm / count), bn) if rows else (bm, math.ceil(bn / count))

    @T.prim_func
    def kernel(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), C: T.Tensor((m, n), "float32")):
        grid = count * math.ceil(n / bn), math.ceil(m / bm)
        with T.Kernel(*grid, threads=threads, cluster_dims=count) as (bx, by):
            a, b = T.alloc_shared((bm, bk), dtype), T.alloc_shared((bn, bk), dtype)
            c, s = T.alloc_fragment((bm, bn), "float32"), T.alloc_shared((bm, bn), "float32")
            T.clear(c)
            share = math.ceil(math.ceil(k / bk) / count)
            for step in T.Pipelined(share, num_stages=stages):
                T.copy(A[by * bm, (bx % count * share + step) * bk], a)
                T.copy(B[bx // count * bn, (bx % count * share + step) * bk], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, s)
            T.cluster_sync()
            for i, j in T.Parallel(*part):
                row = i + (bx % count * part[0] if rows else 0)
                column = j + (0 if rows else bx % count * part[1])
                total = T.alloc_var("float32", 0.0)
                for rank in range(count):
                    total += T.at_rank(s[T.min(row, bm - 1), T.min(column, bn - 1)], rank)
                if row < bm and column < bn:
                    C[by * bm + row, bx // count * bn + column] = total
            T.cluster_sync()

    return kernel


def attention(queries, keys, cluster, width=64, stages=2, threads=128):
    """Softmax in powers of two over all keys; the blocks of a cluster have the keys in common, not the queries."""
    bm = threads // 2
    shape, whole = (bm, width), T.GemmWarpPolicy.FullRow

    @T.prim_func
    def kernel(
        Q: T.Tensor((queries, width), "float16"), K: T.Tensor((keys, width), "float16"),
        V: T.Tensor((keys, width), "float16"), O: T.Tensor((queries, width), "float16"),
    ):  # fmt: skip
        with T.Kernel(rounded(queries, bm, cluster[0]), threads=threads, cluster_dims=cluster) as bx:
            q, k, v = (T.alloc_shared(size, "float16") for size in (shape, (64, width), (64, width)))
            s, p = T.alloc_fragment((bm, 64), "float32"), T.alloc_fragment((bm, 64), "float16")
            o = T.alloc_fragment(shape, "float32")
            top, old, total, part = (T.alloc_fragment((bm,), "float32") for _ in range(4))
            T.copy(Q[bx * bm, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for j in T.Pipelined(keys // 64, num_stages=stages):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=whole)
                T.copy(top, old)
                T.reduce_max(s, top, dim=1, clear=False)
                for x, y in T.Parallel(bm, 64):
                    s[x, y] = T.exp2(s[x, y] - top[x])
                T.reduce_sum(s, part, dim=1)
                for x in T.Parallel(bm):
                    total[x] = total[x] * T.exp2(old[x] - top[x]) + part[x]
                T.copy(s, p)
                for x, y in T.Parallel(bm, width):
                    o[x, y] *= T.exp2(old[x] - top[x])
                T.copy(V[j * 64, 0], v)
                T.gemm(p, v, o, policy=whole)
            for x, y in T.Parallel(bm, width):
                o[x, y] /= total[x]
            T.copy(o, O[bx * bm, 0])

    return kernel
