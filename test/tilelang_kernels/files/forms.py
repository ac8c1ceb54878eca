# SPDX-License-Identifier: Apache-2.0
"""Forms of kernels: hosts' loops, grids of loops, roles by the thread's index, swaps, several launches."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def loops_without_a_kernel(M, N):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), S: T.Tensor((1,), "float32")):
        total = T.alloc_var("float32", 0.0)
        for i, j in T.grid(M, N):
            total += A[i, j]
        S[0] = total

    return main


@tilelang.jit(out_idx=[-1])
def one_block(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(threads=64):
            T.annotate_pass_configs({tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: False})
            for i in T.Parallel(N):
                B[i] = A[N - 1 - i]

    return main


@tilelang.jit(out_idx=[-1])
def two_launches(M, N):
    """Column sums by the second kernel, of what the first has doubled."""

    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), S: T.Tensor((N,), "float32")):
        twice = T.alloc_global((M, N), "float32")
        with T.Kernel(M, threads=32) as (row,):
            for j in T.Parallel(N):
                twice[row, j] = A[row, j] * 2.0
        with T.Kernel(T.ceildiv(N, 32), threads=32) as (bx,):
            tile = T.alloc_fragment((M, 32), "float32")
            total = T.alloc_fragment((32,), "float32")
            T.copy(twice[0:M, bx * 32 : bx * 32 + 32], tile)
            T.reduce_sum(tile, total, dim=0)
            T.copy(total, S[bx * 32])

    return main


@tilelang.jit(out_idx=[-1])
def roles_by_hand(M, N, block_N=64):
    """The first warps load, the last ones store."""

    @T.prim_func
    def main(A: T.Tensor((M, N), "float16"), B: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, block_N), threads=256) as bx:
            tile = T.alloc_shared((M, block_N), "float16")
            tx = T.get_thread_binding()
            if tx < 128:
                T.copy(A[:, bx * block_N : (bx + 1) * block_N], tile)
            T.sync_threads()
            if tx >= 128:
                for i, j in T.Parallel(M, block_N):
                    B[i, bx * block_N + j] = tile[i, j] + T.float16(1)

    return main


@tilelang.jit(out_idx=[-1])
def fibonacci(N):
    @T.prim_func
    def main(F: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_var("int32", 0)
            b = T.alloc_var("int32", 1)
            for i in T.serial(N):
                F[i] = a
                a, b = b, a + b

    return main


@tilelang.jit(out_idx=[-1])
def reversed_in_place(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(threads=32):
            tile = T.alloc_shared((N,), "float32")
            T.copy(A, tile)
            for i in T.Parallel(N // 2):
                tile[i], tile[N - 1 - i] = tile[N - 1 - i], tile[i]
            T.copy(tile, B)

    return main


@tilelang.jit(out_idx=[-1])
def squares_in_parallel(batch, N):
    """A product in each iteration of T.Parallel."""

    @T.prim_func
    def main(A: T.Tensor((batch, N, N), "float16"), C: T.Tensor((batch, N, N), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((N, N), "float16")
            c = T.alloc_fragment((N, N), "float32")
            for b in T.Parallel(batch):
                T.copy(A[b, :, :], a)
                T.gemm(a, a, c, clear_accum=True)
                T.copy(c, C[b, :, :])

    return main


@tilelang.jit(out_idx=[-1])
def conditioned_sums(M, N):
    """By a reducer, of what a condition lets pass."""

    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), S: T.Tensor((M,), "float32")):
        with T.Kernel(1, threads=128):
            total = T.alloc_reducer((M,), "float32", op="sum", replication="all")
            T.reducer_init(total)
            for i, j in T.Parallel(M, N):
                if A[i, j] > 0:
                    T.reducer_update(total[i], A[i, j])
            T.finalize_reducer(total)
            T.copy(total, S)

    return main
