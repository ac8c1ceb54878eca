# SPDX-License-Identifier: Apache-2.0
"""Matrix products: tiled, split, streamed, persistent, grouped, quantized, and what else multiplies."""

import itertools

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout
from tvm import DataType


@tilelang.jit
def matmul_relu(A, B, block_M: int = 64, block_N: int = 64, block_K: int = 32, dtype: T.dtype = T.float16):
    M, N, K = T.const("M, N, K")
    A: T.Tensor[[M, K], dtype]
    B: T.Tensor[[K, N], dtype]
    C = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        A_shared = T.alloc_shared((block_M, block_K), dtype)
        B_shared = T.alloc_shared((block_K, block_N), dtype)
        C_local = T.alloc_fragment((block_M, block_N), T.float32)
        T.use_swizzle(panel_size=10, enable=True)
        T.clear(C_local)
        for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
            T.copy(A[by * block_M, ko * block_K], A_shared)
            T.copy(B[ko * block_K, bx * block_N], B_shared)
            T.gemm(A_shared, B_shared, C_local)
        for i, j in T.Parallel(block_M, block_N):
            C_local[i, j] = T.max(C_local[i, j], 0)
        T.copy(C_local, C[by * block_M, bx * block_N])
    return C


@tilelang.jit(out_idx=[-1])
def matmul(
    M, N, K, trans_A=False, trans_B=True, in_dtype="float16", out_dtype="float32", accum_dtype="float32",
    block_M=64, block_N=64, block_K=32, num_stages=2, threads=128,
):  # fmt: skip
    A_shape = (K, M) if trans_A else (M, K)
    B_shape = (N, K) if trans_B else (K, N)
    A_tile = (block_K, block_M) if trans_A else (block_M, block_K)
    B_tile = (block_N, block_K) if trans_B else (block_K, block_N)

    @T.prim_func
    def main(A: T.Tensor(A_shape, in_dtype), B: T.Tensor(B_shape, in_dtype), C: T.Tensor((M, N), out_dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared(A_tile, in_dtype, scope="shared.dyn")
            B_shared = T.alloc_shared(B_tile, in_dtype, scope="shared.dyn")
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.annotate_layout({A_shared: make_swizzled_layout(A_shared), B_shared: make_swizzled_layout(B_shared)})
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
                if trans_A:
                    T.copy(A[k * block_K, by * block_M], A_shared)
                else:
                    T.copy(A[by * block_M, k * block_K], A_shared)
                if trans_B:
                    T.copy(B[bx * block_N, k * block_K], B_shared)
                else:
                    T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local, trans_A, trans_B, clear_accum=(k == 0))
            T.copy(C_local, C[by * block_M, bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_bias_gelu(M, N, K, block_M=64, block_N=64, block_K=32):
    @T.macro
    def epilogue(
        C_local: T.FragmentBuffer((block_M, block_N), "float32"), Bias: T.Tensor((N,), "float32"), bx: T.int32
    ):
        for i, j in T.Parallel(block_M, block_N):
            x = C_local[i, j] + Bias[bx * block_N + j]
            C_local[i, j] = x * T.sigmoid(1.702 * x)

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), Bias: T.Tensor((N,), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_local = T.alloc_fragment((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_K, block_N), "float16")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            C_shared = T.alloc_shared((block_M, block_N), "float32")
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=1):
                T.copy(A[by * block_M, k * block_K], A_local)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_local, B_shared, C_local, policy=T.GemmWarpPolicy.FullRow)
            epilogue(C_local, Bias, bx)
            T.copy(C_local, C_shared)
            T.copy(C_shared, C[by * block_M, bx * block_N])

    return main


@tilelang.jit
def matmul_split_k(M, N, K, split_k=4, block_M=64, block_N=64, block_K=32):
    splitK = K // split_k

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), split_k, threads=128) as (bx, by, bz):
            A_shared = T.alloc_shared((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_N, block_K), "float16")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            C_shared = T.alloc_shared((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(splitK, block_K), num_stages=0):
                T.copy(A[by * block_M, bz * splitK + ko * block_K], A_shared)
                T.copy(B[bx * block_N, bz * splitK + ko * block_K], B_shared)
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)
            T.copy(C_local, C_shared)
            T.atomic_add(C[by * block_M, bx * block_N], C_shared)

    return main


@tilelang.jit
def matmul_stream_k(M, N, K, sms=5, block_M=32, block_N=32, block_K=32):
    iters = tilelang.cdiv(K, block_K)
    tiles_n = tilelang.cdiv(N, block_N)
    total = tilelang.cdiv(M, block_M) * tiles_n * iters
    share = tilelang.cdiv(total, sms)

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(sms, threads=64) as pid:
            A_shared = T.alloc_shared((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_N, block_K), "float16")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            at = T.alloc_var("int32", pid * share)
            last = T.min((pid + 1) * share, total)
            while at < last:
                end = T.min(at + iters - at % iters, last)
                tile = at // iters
                T.clear(C_local)
                for k in T.serial(at % iters, at % iters + end - at):
                    T.copy(A[tile // tiles_n * block_M, k * block_K], A_shared)
                    T.copy(B[tile % tiles_n * block_N, k * block_K], B_shared)
                    T.gemm(A_shared, B_shared, C_local, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    if tile // tiles_n * block_M + i < M and tile % tiles_n * block_N + j < N:
                        T.atomic_add(C[tile // tiles_n * block_M + i, tile % tiles_n * block_N + j], C_local[i, j])
                at = end

    return main


@tilelang.jit(out_idx=[-1])
def matmul_persistent(M, N, K, blocks=3, block_M=32, block_N=32, block_K=32, group_size=2):
    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(blocks, threads=64) as block_id:
            A_shared = T.alloc_shared((block_M, block_K), "float16")
            B_shared = T.alloc_shared((block_K, block_N), "float16")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            for bx, by in T.Persistent([T.ceildiv(M, block_M), T.ceildiv(N, block_N)], blocks, block_id, group_size):
                T.clear(C_local)
                for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                    T.copy(A[bx * block_M, k * block_K], A_shared)
                    T.copy(B[k * block_K, by * block_N], B_shared)
                    T.gemm(A_shared, B_shared, C_local)
                T.copy(C_local, C[bx * block_M, by * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_batched(batch, M, N, K, block=32):
    @T.prim_func
    def main(
        A: T.Tensor((batch, M, K), "bfloat16"), B: T.Tensor((batch, K, N), "bfloat16"),
        C: T.Tensor((batch, M, N), "float32"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), batch, threads=64) as (bx, by, bz):
            a = T.alloc_shared((block, block), "bfloat16")
            b = T.alloc_shared((block, block), "bfloat16")
            c = T.alloc_fragment((block, block), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block), num_stages=2):
                T.copy(A[bz, by * block : (by + 1) * block, k * block : (k + 1) * block], a)
                T.copy(B[bz, k * block : (k + 1) * block, bx * block : (bx + 1) * block], b)
                T.gemm(a, b, c)
            T.copy(c, C[bz, by * block : (by + 1) * block, bx * block : (bx + 1) * block])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_grouped(sizes, N, K, block_M=32, block_N=32, block_K=32):
    """Rows of A belong to groups of these sizes, each with a matrix of its own."""
    total, groups = sum(sizes), len(sizes)
    starts = [0, *itertools.accumulate(sizes)]
    blocks = sum(tilelang.cdiv(size, block_M) for size in sizes)

    @T.prim_func
    def main(
        A: T.Tensor([total, K], "float16"),
        B: T.Tensor([groups, K, N], "float16"),
        C: T.Tensor([total, N], "float16"),
    ):
        with T.Kernel(blocks, T.ceildiv(N, block_N), threads=64) as (bx, by):
            a = T.alloc_shared([block_M, block_K], "float16")
            b = T.alloc_shared([block_K, block_N], "float16")
            c = T.alloc_fragment([block_M, block_N], "float32")
            group = T.alloc_var("int32", 0)
            first = T.alloc_var("int32", 0)
            stop = T.alloc_var("int32", 0)
            seen = T.alloc_var("int32", 0)
            for g, size in enumerate(sizes):
                here = tilelang.cdiv(size, block_M)
                if bx >= seen and bx < seen + here:
                    group = g
                    first = starts[g] + (bx - seen) * block_M
                    stop = starts[g + 1]
                seen = seen + here
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=1):
                T.copy(A[first : first + block_M, k * block_K : (k + 1) * block_K], a)
                T.copy(B[group, k * block_K : (k + 1) * block_K, by * block_N : (by + 1) * block_N], b)
                T.gemm(a, b, c)
            for i, j in T.Parallel(block_M, block_N):
                if first + i < stop:
                    C[first + i, by * block_N + j] = c[i, j]

    return main


@tilelang.jit(out_idx=[-1])
def matmul_gathered(tokens, experts, picked, N, K, block_M=16, block_N=32, block_K=32):
    """Rows of tokens that an expert was chosen for: MoE."""

    @T.prim_func
    def main(
        X: T.Tensor((tokens, K), "float16"),
        W: T.Tensor((experts, N, K), "float16"),
        Rows: T.Tensor((experts, picked), "int32"),
        Y: T.Tensor((experts, picked, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(picked, block_M), T.ceildiv(N, block_N), experts, threads=64) as (bx, by, e):
            x = T.alloc_shared((block_M, block_K), "float16")
            w = T.alloc_shared((block_N, block_K), "float16")
            y = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=1):
                for i, j in T.Parallel(block_M, block_K):
                    if bx * block_M + i < picked:
                        x[i, j] = X[Rows[e, bx * block_M + i], k * block_K + j]
                    else:
                        x[i, j] = 0
                T.copy(W[e, by * block_N : (by + 1) * block_N, k * block_K : (k + 1) * block_K], w)
                T.gemm(x, w, y, transpose_B=True)
            T.copy(y, Y[e, bx * block_M : (bx + 1) * block_M, by * block_N : (by + 1) * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_int4(M, N, K, block_M=32, block_N=32, block_K=64):
    """B as pairs of unsigned 4-bit integers, minus 8."""
    per = 8 // 4

    @T.macro
    def unpack(packed: T.uint8, at: T.int32):
        return T.cast((packed >> (at * 4)) & 15, "float16") - T.float16(8)

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K // per), "uint8"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=64) as (bx, by):
            a = T.alloc_shared((block_M, block_K), "float16")
            packed = T.alloc_shared((block_N, block_K // per), "uint8")
            own = T.alloc_fragment((block_N, block_K // per), "uint8")
            wide = T.alloc_fragment((block_N, block_K), "float16")
            b = T.alloc_shared((block_N, block_K), "float16")
            c = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[bx * block_N, k * block_K // per], packed)
                T.copy(packed, own)
                for i, j in T.Parallel(block_N, block_K):
                    wide[i, j] = unpack(own[i, j // per], j % per)
                T.copy(wide, b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * block_M, bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_scaled(M, N, K, block_M=32, block_N=32, block_K=32):
    """8-bit floats with a scale for each row and 32 columns of either operand."""
    groups = tilelang.cdiv(K, block_K)

    @T.prim_func
    def main(
        A: T.Tensor((M, K), T.float8_e4m3fn), B: T.Tensor((N, K), T.float8_e4m3fn),
        SA: T.Tensor((M, groups), "float32"), SB: T.Tensor((N, groups), "float32"), C: T.Tensor((M, N), "bfloat16"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=64) as (bx, by):
            a = T.alloc_shared((block_M, block_K), T.float8_e4m3fn)
            b = T.alloc_shared((block_N, block_K), T.float8_e4m3fn)
            part = T.alloc_fragment((block_M, block_N), "float32")
            c = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(part)
            T.clear(c)
            for k in T.Pipelined(groups, num_stages=2):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[bx * block_N, k * block_K], b)
                T.gemm(a, b, part, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    c[i, j] += part[i, j] * SA[by * block_M + i, k] * SB[bx * block_N + j, k]
                T.clear(part)
            T.copy(c, C[by * block_M, bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def gemv(N, K, block_N=8, reduce_threads=32, dtype="float16"):
    vector = 128 // DataType(dtype).bits
    block_K = reduce_threads * vector

    @T.prim_func
    def main(A: T.Tensor((K,), dtype), B: T.Tensor((N, K), dtype), C: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), threads=(reduce_threads, block_N)) as bn:
            tk = T.get_thread_binding(0)
            tn = T.get_thread_binding(1)
            a = T.alloc_local((vector,), dtype)
            b = T.alloc_local((vector,), dtype)
            total = T.alloc_local((1,), "float32")
            reduced = T.alloc_local((1,), "float32")
            T.clear(total)
            for bk in T.serial(T.ceildiv(K, block_K)):
                for v in T.vectorized(vector):
                    a[v] = A[bk * block_K + tk * vector + v]
                    b[v] = B[bn * block_N + tn, bk * block_K + tk * vector + v]
                for k in T.serial(vector):
                    total[0] += a[k].astype("float32") * b[k].astype("float32")
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast("float32", 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), total[0], True, reduced[0], tk, dtype="handle"))
            if tk == 0:
                C[bn * block_N + tn] = reduced[0]

    return main


@tilelang.jit(out_idx=[-1])
def gemv_shared(N, K, block_N=32, block_K=64):
    @T.prim_func
    def main(A: T.Tensor((K,), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((N,), "float16")):
        with T.Kernel(T.ceildiv(N, block_N), threads=block_N) as bn:
            tn = T.get_thread_binding(0)
            a = T.alloc_shared((block_K,), "float16")
            b = T.alloc_shared((block_N, block_K), "float16")
            total = T.alloc_local((1,), "float32")
            T.clear(total)
            for bk in T.serial(T.ceildiv(K, block_K)):
                for tk in T.serial(block_K):
                    a[tk] = A[bk * block_K + tk]
                    b[tn, tk] = B[bn * block_N + tn, bk * block_K + tk]
                for tk in T.serial(block_K):
                    total[0] += T.cast(a[tk], "float32") * T.cast(b[tn, tk], "float32")
            C[bn * block_N + tn] = total[0]

    return main


@tilelang.jit(out_idx=[2])
def convolution(N, C, H, W, F, K, S, D, P, block_M=32, block_N=32, block_K=32, num_stages=2, dtype="float16"):
    KH, KW = K, K
    OH = (H + 2 * P - D * (K - 1) - 1) // S + 1
    OW = (W + 2 * P - D * (K - 1) - 1) // S + 1

    @T.prim_func
    def main(
        data: T.Tensor((N, H, W, C), dtype),
        kernel: T.Tensor((KH, KW, C, F), dtype),
        out: T.Tensor((N, OH, OW, F), dtype),
    ):
        with T.Kernel(T.ceildiv(F, block_N), T.ceildiv(N * OH * OW, block_M), threads=64) as (bx, by):
            data_shared = T.alloc_shared((block_M, block_K), dtype)
            kernel_shared = T.alloc_shared((block_K, block_N), dtype)
            out_local = T.alloc_fragment((block_M, block_N), "float32")
            out_shared = T.alloc_shared((block_M, block_N), dtype)
            kernel_flat = T.Tensor((KH * KW * C, F), dtype, kernel.data)
            out_flat = T.Tensor((N * OH * OW, F), dtype, out.data)
            T.clear(out_local)
            for k_iter in T.Pipelined(T.ceildiv(KH * KW * C, block_K), num_stages=num_stages):
                for i, j in T.Parallel(block_M, block_K):
                    k = k_iter * block_K + j
                    m = by * block_M + i
                    access_h = m % (OH * OW) // OW * S + k // (KW * C) * D - P
                    access_w = m % OW * S + k // C % KW * D - P
                    in_bound = (access_h >= 0) and (access_w >= 0) and (access_h < H) and (access_w < W)
                    data_shared[i, j] = T.if_then_else(in_bound, data[m // (OH * OW), access_h, access_w, k % C], 0)
                T.copy(kernel_flat[k_iter * block_K, bx * block_N], kernel_shared)
                T.gemm(data_shared, kernel_shared, out_local)
            T.copy(out_local, out_shared)
            T.copy(out_shared, out_flat[by * block_M, bx * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def matmul_roles(M, N, K, block_M=64, block_N=64, block_K=32, stages=2):
    """One warpgroup loads, the other multiplies."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=256) as (bx, by):
            a = T.alloc_shared((stages, block_M, block_K), "float16")
            b = T.alloc_shared((stages, block_K, block_N), "float16")
            c = T.alloc_fragment((block_M, block_N), "float32")
            full = T.alloc_barrier(arrive_count=[128] * stages)
            free = T.alloc_barrier(arrive_count=[128] * stages)
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(24, 0)
                for k in range(T.ceildiv(K, block_K)):
                    T.barrier_wait(free[k % stages], parity=(k // stages + 1) % 2)
                    T.tma_copy(A[by * block_M, k * block_K], a[k % stages, :, :], barrier=full[k % stages])
                    T.tma_copy(B[k * block_K, bx * block_N], b[k % stages, :, :], barrier=full[k % stages])
                    T.barrier_arrive(full[k % stages])
            else:
                T.set_max_nreg(240, 1)
                T.clear(c)
                for k in range(T.ceildiv(K, block_K)):
                    T.barrier_wait(full[k % stages], parity=k // stages % 2)
                    T.gemm(a[k % stages, :, :], b[k % stages, :, :], c)
                    T.barrier_arrive(free[k % stages])
                T.copy(c, C[by * block_M, bx * block_N])

    return main
