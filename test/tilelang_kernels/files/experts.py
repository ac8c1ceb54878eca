# SPDX-License-Identifier: Apache-2.0
"""Experts and sparse matrices: who gets which token, products of chosen blocks, rows of unlike lengths."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-2, -1])
def routed(tokens, experts, groups, kept_groups, top, block=4):
    """The best experts within the best groups, by sigmoids, with weights that add to 1."""
    per = experts // groups

    @T.prim_func
    def main(
        Logits: T.Tensor((tokens, experts), "float32"),
        Weights: T.Tensor((tokens, top), "float32"),
        Ids: T.Tensor((tokens, top), "int64"),
    ):
        with T.Kernel(tokens, threads=32) as t:
            scores = T.alloc_shared((experts,), "float32")
            by_group = T.view(scores, (groups, per))
            best = T.alloc_fragment((groups,), "float32")
            kept = T.alloc_shared((groups,), "bool")
            left = T.alloc_fragment((experts,), "float32")
            most = T.alloc_fragment((1,), "float32")
            where = T.alloc_fragment((experts,), "int32")
            first = T.alloc_fragment((1,), "int32")
            total = T.alloc_fragment((1,), "float32")
            for e in T.Parallel(experts):
                scores[e] = T.sigmoid(Logits[t, e])
            T.reduce_max(by_group, best, dim=1)
            T.fill(kept, False)
            for _ in range(kept_groups):
                T.reduce_max(best, most, dim=0)
                for g in T.Parallel(groups):
                    if best[g] == most[0]:
                        kept[g] = True
                        best[g] = -1
            for e in T.Parallel(experts):
                left[e] = T.if_then_else(kept[e // per], scores[e], -1)
            T.clear(total)
            for k in T.serial(top):
                T.reduce_max(left, most, dim=0)
                for e in T.Parallel(experts):
                    where[e] = T.if_then_else(left[e] == most[0], e, experts)
                T.reduce_min(where, first, dim=0)
                Ids[t, k] = first[0]
                Weights[t, k] = most[0]
                total[0] += most[0]
                for e in T.Parallel(experts):
                    if e == first[0]:
                        left[e] = -1
            for k in T.Parallel(top):
                Weights[t, k] = Weights[t, k] / total[0]

    return main


@tilelang.jit(out_idx=[1, 2])
def sorted_by_expert(N, experts, threads=128):
    """Places of tokens in the order of their experts, and where each expert begins; one block counts and adds."""

    @T.prim_func
    def main(Ids: T.Tensor((N,), "int32"), Begins: T.Tensor((experts + 1,), "int32"), Experts: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=threads):
            counts = T.alloc_shared((experts,), "int32")
            sums = T.alloc_shared((experts,), "int32")
            T.clear(counts)
            for i in T.Parallel(N):
                T.atomic_add(counts[Ids[i]], 1)
            T.copy(counts, sums)
            T.cumsum(sums, dim=0)
            for e in T.Parallel(experts):
                Begins[e + 1] = sums[e]
            Begins[0] = 0
            for e in T.Parallel(experts):
                counts[e] = sums[e] - counts[e]
            for i in T.Parallel(N):
                place = T.atomic_add(counts[Ids[i]], 1, return_prev=True)
                Experts[place] = Ids[i]

    return main


@tilelang.jit
def gated_expert(X, Up, Gate, Down, block_M: int = 32, block_N: int = 32, block_K: int = 32):
    """silu(x gate) * (x up), then times `down`: two launches with a tensor between them."""
    M, K, N = T.const("M K N")
    dtype = T.float16
    X: T.Tensor[(M, K), dtype]
    Up: T.Tensor[(K, N), dtype]
    Gate: T.Tensor[(K, N), dtype]
    Down: T.Tensor[(N, K), dtype]
    Between = T.alloc_global((M, N), dtype)
    Y = T.empty((M, K), T.float32)

    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        x = T.alloc_shared((block_M, block_K), dtype)
        up = T.alloc_shared((block_K, block_N), dtype)
        gate = T.alloc_shared((block_K, block_N), dtype)
        u = T.alloc_fragment((block_M, block_N), T.float32)
        g = T.alloc_fragment((block_M, block_N), T.float32)
        T.clear(u)
        T.clear(g)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
            T.copy(X[by * block_M, k * block_K], x)
            T.copy(Up[k * block_K, bx * block_N], up)
            T.copy(Gate[k * block_K, bx * block_N], gate)
            T.gemm(x, up, u)
            T.gemm(x, gate, g)
        for i, j in T.Parallel(block_M, block_N):
            u[i, j] = u[i, j] * (g[i, j] / (1.0 + T.exp(-g[i, j])))
        T.copy(u, Between[by * block_M, bx * block_N])
    with T.Kernel(T.ceildiv(K, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        z = T.alloc_shared((block_M, block_K), dtype)
        w = T.alloc_shared((block_K, block_N), dtype)
        y = T.alloc_fragment((block_M, block_N), T.float32)
        T.clear(y)
        for k in T.Pipelined(T.ceildiv(N, block_K), num_stages=2):
            T.copy(Between[by * block_M, k * block_K], z)
            T.copy(Down[k * block_K, bx * block_N], w)
            T.gemm(z, w, y)
        T.copy(y, Y[by * block_M, bx * block_N])
    return Y


@tilelang.jit(out_idx=[-1])
def block_sparse_product(M, N, K, block=32):
    """A product that skips blocks of the second matrix, by a table of truth values."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        Kept: T.Tensor((N // block, K // block), "bool"),
        C: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=64) as (bx, by):
            a = T.alloc_shared((block, block), "float16")
            b = T.alloc_shared((block, block), "float16")
            c = T.alloc_fragment((block, block), "float32")
            T.clear(c)
            for k in T.Pipelined(K // block, num_stages=1):
                if Kept[bx, k]:
                    T.copy(A[by * block, k * block], a)
                    T.copy(B[k * block, bx * block], b)
                    T.gemm(a, b, c)
            T.copy(c, C[by * block, bx * block])

    return main


@tilelang.jit(out_idx=[-1])
def sparse_rows(rows, threads=64):
    """A matrix of compressed rows times a vector; a warp takes a row."""
    kept, columns = T.dynamic("kept, columns")

    @T.prim_func
    def main(
        Values: T.Tensor((kept,), "float32"),
        Columns: T.Tensor((kept,), "int32"),
        Begins: T.Tensor((rows + 1,), "int32"),
        X: T.Tensor((columns,), "float32"),
        Y: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows * 32, threads), threads=threads) as b:
            t = T.get_thread_binding()
            row = (b * threads + t) // 32
            lane = t % 32
            total = T.alloc_var("float32", init=0)
            if row < rows:
                at = T.alloc_var("int32", init=Begins[row] + lane)
                while at < Begins[row + 1]:
                    total += Values[at] * X[Columns[at]]
                    at += 32
            for step in T.unroll(5):
                total += T.shfl_xor(total, 16 >> step)
            if lane == 0 and row < rows:
                Y[row] = total

    return main


@tilelang.jit(out_idx=[-1])
def triangular_solve(batch, size, columns):
    """x of (1 + L) x = b, row by row; L lies below the diagonal of the first matrix."""

    @T.prim_func
    def main(
        L: T.Tensor((batch, size, size), "float32"),
        B: T.Tensor((batch, size, columns), "float32"),
        X: T.Tensor((batch, size, columns), "float32"),
    ):
        with T.Kernel(batch, threads=64) as b:
            low = T.alloc_shared((size, size), "float32")
            x = T.alloc_shared((size, columns), "float32")
            T.copy(L[b, 0, 0], low)
            T.copy(B[b, 0, 0], x)
            for i in T.serial(1, size):
                for c in T.Parallel(columns):
                    part = T.alloc_var("float32")
                    part = x[i, c]
                    for j in T.serial(i):
                        part -= low[i, j] * x[j, c]
                    x[i, c] = part
            T.copy(x, X[b, 0, 0])

    return main


@tilelang.jit(out_idx=[1, 2])
def largest_by_digits(rows, N, top, threads=128):
    """Mark the `top` largest of a row by a histogram of upper bytes; of those that tie, any are taken."""

    @T.prim_func
    def main(
        X: T.Tensor((rows, N), "int16"),
        Marks: T.Tensor((rows, N), "bool"),
        Counts: T.Tensor((rows, 2), "int32"),
    ):
        with T.Kernel(rows, threads=threads) as row:
            histogram = T.alloc_shared((256,), "int32")
            border = T.alloc_shared((2,), "int32")
            filled = T.alloc_shared((2,), "int32")
            t = T.get_thread_binding()
            for i in T.Parallel(256):
                histogram[i] = 0
            if t < 2:
                filled[t] = 0
            T.sync_threads()
            for i in T.Parallel(N):
                T.atomic_add(histogram[(T.cast(X[row, i], "int32") >> 8) + 128], 1)
            T.sync_threads()
            T.cumsum(histogram, reverse=True)
            for i in T.Parallel(256):
                above = T.if_then_else(i < 255, histogram[T.min(i + 1, 255)], 0)
                if above < top and histogram[i] >= top:
                    border[0] = i
                    border[1] = top - above
            T.sync_threads()
            for i in T.Parallel(N):
                digit = (T.cast(X[row, i], "int32") >> 8) + 128
                Marks[row, i] = digit > border[0]
                if digit > border[0]:
                    T.atomic_add(filled[0], 1)
                elif digit == border[0]:
                    place = T.atomic_add(filled[1], 1, return_prev=True)
                    if place < border[1]:
                        Marks[row, i] = True
            T.sync_threads()
            if t == 0:
                Counts[row, 0] = filled[0] + border[1]
                Counts[row, 1] = filled[1]

    return main
