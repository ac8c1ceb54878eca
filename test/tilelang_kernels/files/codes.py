# SPDX-License-Identifier: Apache-2.0
"""Numbers of few bits and their scales: codes to floats, floats to codes, products of integers."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[1, 2])
def float8_by_groups(M, N, group=32, block_M=8):
    """Rows as float8_e4m3fn with a scale, rounded up to a power of two, for each group of a row."""
    fp8_max = 448.0

    @T.macro
    def scale_of(most):
        bits = T.reinterpret(most / fp8_max, T.uint32)
        exponent = (bits >> 23) + T.Cast("uint32", (bits & 0x7FFFFF) != 0)
        return T.reinterpret(exponent << 23, T.float32)

    @T.prim_func
    def main(
        X: T.Tensor[(M, N), T.bfloat16], Y: T.Tensor[(M, N), T.float8_e4m3fn], S: T.Tensor[(M, N // group), T.float32]
    ):
        with T.Kernel(T.ceildiv(M, block_M), N // group, threads=128) as (bm, bg):
            x = T.alloc_fragment((block_M, group), T.float32)
            y = T.alloc_fragment((block_M, group), T.float8_e4m3fn)
            most = T.alloc_fragment((block_M,), T.float32)
            T.copy(X[bm * block_M, bg * group], x)
            T.reduce_absmax(x, most, dim=1)
            for i in T.Parallel(block_M):
                most[i] = scale_of(T.max(most[i], 1e-4))
                if bm * block_M + i < M:
                    S[bm * block_M + i, bg] = most[i]
            for i, j in T.Parallel(block_M, group):
                y[i, j] = T.clamp(x[i, j] / most[i], -fp8_max, fp8_max)
            T.copy(y, Y[bm * block_M, bg * group])

    return main


@tilelang.jit(out_idx=[2])
def microscaled(N, K, group=32, block=64):
    """float4_e2m1 codes, two a byte, and exponents of groups as bytes become bfloat16, by bits alone."""

    @T.macro
    def decoded(code: T.uint8, exponent: T.uint8):
        sign = T.cast(code >> 3, "uint16")
        power = T.cast((code >> 1) & 3, "int16")
        half = T.cast(code & 1, "uint16")
        e = T.cast(exponent, "int16") + power - 1
        normal = (sign << 15) | (T.cast(e, "uint16") << 7) | (half << 6)
        small = (sign << 15) | (T.cast(T.cast(exponent, "int16") - 1, "uint16") << 7)
        value = T.if_then_else(power > 0, normal, T.if_then_else(half > 0, small, sign << 15))
        return T.reinterpret(T.cast(value, "uint16"), "bfloat16")

    @T.prim_func
    def main(B: T.Tensor((N, K // 2), T.uint8), E: T.Tensor((N, K // group), T.uint8), W: T.Tensor((N, K), T.bfloat16)):
        with T.Kernel(N, T.ceildiv(K, block), threads=32) as (n, bk):
            codes = T.alloc_shared((block // 2,), T.uint8)
            values = T.alloc_local((4,), T.bfloat16)
            T.copy(B[n, bk * block // 2], codes)
            t = T.get_thread_binding(0)
            for p in T.serial(T.ceildiv(block, 4 * 32)):
                if (p * 32 + t) * 4 < block:
                    at = (p * 32 + t) * 4
                    for v in T.unroll(4):
                        code = (codes[(at + v) // 2] >> (((at + v) % 2) * 4)) & 15
                        values[v] = decoded(code, E[n, (bk * block + at) // group])
                    for v in T.vectorized(4):
                        W[n, bk * block + at + v] = values[v]

    return main


@tilelang.jit(out_idx=[-1])
def ternary_product(M, N, K, block=32, block_K=64):
    """int8 rows times weights of two bits, four a byte, of which 1 is subtracted."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "int8"),
        B: T.Tensor((N, K // 4), "int8"),
        S: T.Tensor((1,), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            a = T.alloc_shared((block, block_K), "int8")
            packed = T.alloc_shared((block, block_K // 4), "int8")
            packed_local = T.alloc_fragment((block, block_K // 4), "int8")
            b = T.alloc_shared((block, block_K), "int8")
            c = T.alloc_fragment((block, block), "int32")
            T.use_swizzle(10)
            T.clear(c)
            for k in T.Pipelined(K // block_K, num_stages=2):
                T.copy(A[by * block, k * block_K], a)
                T.copy(B[bx * block, k * block_K // 4], packed)
                T.copy(packed, packed_local)
                for i, j in T.Parallel(block, block_K):
                    b[i, j] = ((packed_local[i, j // 4] >> (j % 4 * 2)) & T.int8(3)) - T.int8(1)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(block, block):
                if by * block + i < M and bx * block + j < N:
                    C[by * block + i, bx * block + j] = T.cast(c[i, j], "float32") * S[0]

    return main


@tilelang.jit(out_idx=[2])
def products_of_four(N, K, threads=32):
    """A row of int8 times a matrix of int8, four products at a time."""

    @T.prim_func
    def main(a: T.Tensor((K,), T.int8), B: T.Tensor((N, K), T.int8), c: T.Tensor((N,), T.int32)):
        with T.Kernel(N, threads=threads) as n:
            t = T.get_thread_binding()
            x = T.alloc_local((4,), T.int8)
            y = T.alloc_local((4,), T.int8)
            acc = T.alloc_local((1,), T.int32)
            T.clear(acc)
            for p in T.serial(T.ceildiv(K, 4 * threads)):
                for v in T.vectorized(4):
                    x[v] = a[(p * threads + t) * 4 + v]
                    y[v] = B[n, (p * threads + t) * 4 + v]
                T.dp4a(x, y, acc)
            whole = T.warp_reduce_sum(acc[0])
            if t == 0:
                c[n] = whole

    return main


@tilelang.jit(out_idx=[-1])
def scaled_integers(M, N, K, block_M=64, block_N=32, block_K=64, num_stages=2, threads=128):
    """A product of int8, whose rows and columns have scales, with a bias."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), T.int8),
        B: T.Tensor((N, K), T.int8),
        scales: T.Tensor((M + N,), T.float32),
        bias: T.Tensor((N,), T.float16),
        C: T.Tensor((M, N), T.float16),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            a = T.alloc_shared((block_M, block_K), T.int8)
            b = T.alloc_shared((block_N, block_K), T.int8)
            rows = T.alloc_fragment((block_M,), T.float32)
            acc = T.alloc_fragment((block_M, block_N), T.int32)
            out = T.alloc_shared((block_M, block_N), T.float16)
            T.annotate_layout({a: tilelang.layout.make_swizzled_layout(a)})
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[bx * block_N, k * block_K], b)
                T.gemm(a, b, acc, transpose_B=True)
            for i in T.Parallel(block_M):
                rows[i] = scales[by * block_M + i] if by * block_M + i < M else 0.0
            for i, j in T.Parallel(block_M, block_N):
                out[i, j] = acc[i, j] * rows[i] * scales[M + bx * block_N + j] + bias[bx * block_N + j]
            T.copy(out, C[by * block_M, bx * block_N])

    return main


@tilelang.jit
def signs_as_bits(X, threads: int = 64):
    """One bit for each number, set where it is negative, in words of 32."""
    N = T.const("N")
    X: T.Tensor((N,), T.float16)
    Words = T.empty((T.ceildiv(N, 32),), T.uint32)
    with T.Kernel(T.ceildiv(N, threads), threads=threads) as b:
        t = T.get_thread_binding()
        at = b * threads + t
        negative = T.alloc_var(T.bool, init=False)
        if at < N:
            negative = X[at] < 0
        word = T.ballot(negative)
        if t % 32 == 0 and at < N:
            Words[at // 32] = T.cast(word, T.uint32)
    return Words


@tilelang.jit(out_idx=[1])
def hadamard(rows, n, threads=32):
    """The Walsh-Hadamard transform of rows: within a thread, then between threads."""
    each = n // threads

    @T.prim_func
    def main(A: T.Tensor((rows, n), "float32"), B: T.Tensor((rows, n), "float32")):
        with T.Kernel(rows, threads=threads) as row:
            local = T.alloc_local((each,), "float32")
            other = T.alloc_local((each,), "float32")
            t = T.get_thread_binding(0)
            for i in T.vectorized(each):
                local[i] = A[row, t * each + i]
            step = T.alloc_var("int32", init=1)
            while step < each:
                for i in T.serial(each // 2):
                    low = i // step * step * 2 + i % step
                    x = T.alloc_var("float32", init=local[low])
                    local[low] = x + local[low + step]
                    local[low + step] = x - local[low + step]
                step *= 2
            for stage in T.unroll(5):
                for i in T.serial(each):
                    other[i] = T.tvm_warp_shuffle(0xFFFFFFFF, local[i], t ^ (1 << stage), 32, 32)
                for i in T.serial(each):
                    local[i] = T.if_then_else((t >> stage) & 1 == 0, local[i] + other[i], other[i] - local[i])
            for i in T.vectorized(each):
                B[row, t * each + i] = local[i]

    return main
