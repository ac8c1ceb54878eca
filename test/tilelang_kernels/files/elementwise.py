# SPDX-License-Identifier: Apache-2.0
"""One result for each element: eager and lazy kernels, ragged edges, broadcasts, casts."""

import tilelang
import tilelang.language as T


@tilelang.jit
def add(A, B, block_M=32, block_N=32, threads=128):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), T.float32)
    B: T.Tensor((M, N), T.float32)
    C = T.empty((M, N), T.float32)
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
        A_shared = T.alloc_shared((block_M, block_N), T.float32)
        B_shared = T.alloc_shared((block_M, block_N), T.float32)
        C_local = T.alloc_fragment((block_M, block_N), T.float32)
        T.copy(A[by * block_M, bx * block_N], A_shared)
        T.copy(B[by * block_M, bx * block_N], B_shared)
        for i, j in T.Parallel(block_M, block_N):
            C_local[i, j] = A_shared[i, j] + B_shared[i, j]
        T.copy(C_local, C[by * block_M, bx * block_N])
    return C


@tilelang.jit(out_idx=[-1])
def vector_add_dynamic(block_N=256, dtype="float32"):
    N = T.dynamic("N")

    @T.prim_func
    def main(A: T.Tensor((N,), dtype), B: T.Tensor((N,), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), threads=128) as (bx,):
            for i in T.Parallel(block_N):
                C[bx * block_N + i] = A[bx * block_N + i] + B[bx * block_N + i]

    return main


@tilelang.jit(out_idx=[-1])
def gelu(N, block_N=128, in_dtype="float16"):
    @T.prim_func
    def main(X: T.Tensor((N,), in_dtype), Y: T.Tensor((N,), in_dtype)):
        with T.Kernel(T.ceildiv(N, block_N), threads=128) as bx:
            x = T.alloc_fragment((block_N,), "float32")
            T.copy(X[bx * block_N], x)
            for i in T.Parallel(block_N):
                x[i] = 0.5 * x[i] * (1.0 + T.erf(x[i] * 0.7071067811865476))
            T.copy(x, Y[bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def swiglu(M, N, block_M=16, block_N=64, dtype="bfloat16"):
    @T.prim_func
    def main(X: T.Tensor((M, 2 * N), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            gate = T.alloc_fragment((block_M, block_N), "float32")
            up = T.alloc_fragment((block_M, block_N), "float32")
            T.copy(X[by * block_M, bx * block_N], gate)
            T.copy(X[by * block_M, N + bx * block_N], up)
            for i, j in T.Parallel(block_M, block_N):
                gate[i, j] = gate[i, j] * T.sigmoid(gate[i, j]) * up[i, j]
            T.copy(gate, Y[by * block_M, bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def transpose(M, N, block=32, dtype="float32"):
    @T.prim_func
    def main(A: T.Tensor((M, N), dtype), B: T.Tensor((N, M), dtype)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            tile = T.alloc_shared((block, block), dtype)
            turned = T.alloc_shared((block, block), dtype)
            T.copy(A[by * block, bx * block], tile)
            T.transpose(tile, turned)
            T.copy(turned, B[bx * block, by * block])

    return main


@tilelang.jit(out_idx=[-1])
def rope(seq, heads, dim, dtype="float16"):
    half = dim // 2

    @T.prim_func
    def main(
        X: T.Tensor((seq, heads, dim), dtype),
        Cos: T.Tensor((seq, half), "float32"),
        Sin: T.Tensor((seq, half), "float32"),
        Y: T.Tensor((seq, heads, dim), dtype),
    ):
        with T.Kernel(seq, threads=64) as s:
            for h, d in T.Parallel(heads, half):
                a = X[s, h, d].astype("float32")
                b = T.cast(X[s, h, d + half], "float32")
                Y[s, h, d] = T.cast(a * Cos[s, d] - b * Sin[s, d], dtype)
                Y[s, h, d + half] = T.cast(b * Cos[s, d] + a * Sin[s, d], dtype)

    return main


@tilelang.jit(out_idx=[-1])
def embedding(rows, vocabulary, dim, dtype="float32"):
    @T.prim_func
    def main(
        Ids: T.Tensor((rows,), "int32"), Table: T.Tensor((vocabulary, dim), dtype), Out: T.Tensor((rows, dim), dtype)
    ):
        with T.Kernel(rows, threads=64) as r:
            token = Ids[r]
            for d in T.Parallel(dim):
                Out[r, d] = T.if_then_else(token >= 0, Table[token, d], T.cast(0, dtype))

    return main


@tilelang.jit(out_idx=[-1])
def stencil(M, N, block_M=16, block_N=32):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            for i, j in T.Parallel(block_M, block_N):
                y, x = by * block_M + i, bx * block_N + j
                if 0 < y < M - 1 and 0 < x < N - 1:
                    B[y, x] = 0.25 * (A[y - 1, x] + A[y + 1, x] + A[y, x - 1] + A[y, x + 1])
                elif y < M and x < N:
                    B[y, x] = A[y, x]

    return main


@tilelang.jit(out_idx=[-2, -1])
def quantize_rows(M, N, block_M=8):
    """Rows as int8 with a scale each."""

    @T.prim_func
    def main(X: T.Tensor((M, N), "float32"), S: T.Tensor((M,), "float32"), Q: T.Tensor((M, N), "int8")):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_fragment((block_M, N), "float32")
            amax = T.alloc_fragment((block_M,), "float32")
            T.copy(X[bx * block_M, 0], x)
            T.reduce_absmax(x, amax, dim=1)
            for i in T.Parallel(block_M):
                amax[i] = T.max(amax[i], 1e-4) / 127.0
                S[bx * block_M + i] = amax[i]
            for i, j in T.Parallel(block_M, N):
                Q[bx * block_M + i, j] = T.cast(T.clamp(T.round(x[i, j] / amax[i]), -127.0, 127.0), "int8")

    return main
