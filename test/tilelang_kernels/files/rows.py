# SPDX-License-Identifier: Apache-2.0
"""Along rows: norms, softmax, sums, scans, the largest, losses."""

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def rms_norm(M, N, block_M=4, eps=1e-6, dtype="float16"):
    @T.prim_func
    def main(X: T.Tensor((M, N), dtype), W: T.Tensor((N,), dtype), Y: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x_shared = T.alloc_shared((block_M, N), dtype)
            x = T.alloc_fragment((block_M, N), "float32")
            square = T.alloc_fragment((block_M, N), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.copy(X[bx * block_M : (bx + 1) * block_M, :], x_shared)
            T.copy(x_shared, x)
            for i, j in T.Parallel(block_M, N):
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, total, dim=1)
            for i in T.Parallel(block_M):
                total[i] = T.rsqrt(total[i] / N + eps)
            for i, j in T.Parallel(block_M, N):
                x[i, j] = x[i, j] * total[i] * W[j]
            T.copy(x, Y[bx * block_M : (bx + 1) * block_M, :])

    return main


@tilelang.jit(out_idx=[-1])
def rms_norm_split(M, N, block_M=4, block_N=64, eps=1e-6):
    @T.prim_func
    def main(X: T.Tensor((M, N), "float32"), Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            x = T.alloc_shared((block_M, block_N), "float32")
            square = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            steps = T.ceildiv(N, block_N)
            T.clear(square)
            for k in range(steps):
                T.copy(X[bx * block_M, k * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    square[i, j] += x[i, j] * x[i, j]
            T.reduce_sum(square, total, dim=1)
            for i in T.Parallel(block_M):
                total[i] = T.rsqrt(total[i] / N + eps)
            for k in range(steps):
                T.copy(X[bx * block_M, (steps - 1 - k) * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] *= total[i]
                T.copy(x, Y[bx * block_M, (steps - 1 - k) * block_N])

    return main


@tilelang.jit(out_idx=[3, 4, 5])
def layer_norm(M, N, eps=1e-5):
    @T.prim_func
    def main(
        X: T.Tensor((M, N), "float32"),
        W: T.Tensor((N,), "float32"),
        B: T.Tensor((N,), "float32"),
        Y: T.Tensor((M, N), "float32"),
        Mean: T.Tensor((M,), "float32"),
        Rstd: T.Tensor((M,), "float32"),
    ):
        with T.Kernel(M, threads=128) as row:
            x = T.alloc_fragment((1, N), "float32")
            d = T.alloc_fragment((1, N), "float32")
            mean = T.alloc_fragment((1,), "float32")
            var = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            T.reduce_sum(x, mean, dim=1)
            mean[0] = mean[0] / N
            for j in T.Parallel(N):
                d[0, j] = (x[0, j] - mean[0]) * (x[0, j] - mean[0])
            T.reduce_sum(d, var, dim=1)
            var[0] = T.rsqrt(var[0] / N + eps)
            for j in T.Parallel(N):
                Y[row, j] = (x[0, j] - mean[0]) * var[0] * W[j] + B[j]
            Mean[row] = mean[0]
            Rstd[row] = var[0]

    return main


@tilelang.jit(out_idx=[1])
def online_softmax(M, N, block_N=64, dtype="float16"):
    scale = 1.44269504

    @T.prim_func
    def main(X: T.Tensor([M, N], dtype), Y: T.Tensor([M, N], dtype)):
        with T.Kernel(M, threads=128) as i_m:
            x = T.alloc_fragment([block_N], dtype)
            y = T.alloc_fragment([block_N], dtype)
            lse = T.alloc_fragment([1], "float32")
            max_x = T.alloc_fragment([1], dtype)
            exp_x = T.alloc_fragment([block_N], "float32")
            sum_exp_x = T.alloc_fragment([1], "float32")
            T.fill(lse, -T.infinity("float32"))
            for i_n in T.Pipelined(0, T.ceildiv(N, block_N)):
                T.copy(X[i_m, i_n * block_N : (i_n + 1) * block_N], x)
                T.reduce_max(x, max_x, dim=0, clear=True)
                for j in T.Parallel(block_N):
                    exp_x[j] = T.exp2(x[j] * scale - max_x[0] * scale)
                T.reduce_sum(exp_x, sum_exp_x, dim=0, clear=True)
                lse[0] = max_x[0] * scale + T.log2(T.exp2(lse[0] - max_x[0] * scale) + sum_exp_x[0])
            for i_n in T.Pipelined(0, T.ceildiv(N, block_N)):
                T.copy(X[i_m, i_n * block_N : (i_n + 1) * block_N], x)
                for j in T.Parallel(block_N):
                    y[j] = T.exp2(x[j] * scale - lse[0])
                T.copy(y, Y[i_m, i_n * block_N : (i_n + 1) * block_N])

    return main


@tilelang.jit(out_idx=[-1])
def row_sums(M, N, block_M=16, block_N=64, dtype="float32"):
    @T.prim_func
    def main(A: T.Tensor((M, N), dtype), S: T.Tensor((M,), dtype)):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            tile = T.alloc_fragment((block_M, block_N), dtype)
            total = T.alloc_fragment((block_M,), dtype)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(N, block_N), num_stages=2):
                T.copy(A[bx * block_M, k * block_N], tile)
                T.reduce_sum(tile, total, dim=1, clear=False)
            T.copy(total, S[bx * block_M])

    return main


@tilelang.jit(out_idx=[-2, -1])
def column_extrema(M, N):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), Low: T.Tensor((N,), "float32"), High: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((M, N), "float32")
            low = T.alloc_fragment((N,), "float32")
            high = T.alloc_fragment((N,), "float32")
            T.copy(A, tile)
            T.reduce_min(tile, low, dim=0)
            T.reduce_max(tile, high, dim=0)
            T.copy(low, Low)
            T.copy(high, High)

    return main


@tilelang.jit(out_idx=[-1])
def cumulative_sums(M, N, block_M=8, reverse=False):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            tile = T.alloc_shared((block_M, N), "float32")
            T.copy(A[bx * block_M, 0], tile)
            T.cumsum(src=tile, dim=1, reverse=reverse)
            T.copy(tile, B[bx * block_M, 0])

    return main


@tilelang.jit(out_idx=[-2, -1])
def top_k(M, N, topk, block_M=8, dtype="float32"):
    @T.prim_func
    def main(logits: T.Tensor((M, N), dtype), gates: T.Tensor((M, topk), dtype), indices: T.Tensor((M, topk), "int32")):
        with T.Kernel(T.ceildiv(M, block_M), threads=128) as bx:
            own = T.alloc_fragment((block_M, N), dtype)
            peak = T.alloc_fragment((block_M,), dtype)
            expand = T.alloc_fragment((block_M, N), "int32")
            at = T.alloc_fragment((block_M,), "int32")
            T.copy(logits[bx * block_M, 0], own)
            for k in T.serial(topk):
                T.fill(expand, -1)
                T.reduce_max(own, peak, dim=1, clear=True)
                for i, j in T.Parallel(block_M, N):
                    expand[i, j] = T.if_then_else(peak[i] == own[i, j], j, expand[i, j])
                T.reduce_max(expand, at, dim=1, clear=True)
                for i, j in T.Parallel(block_M, N):
                    own[i, j] = T.if_then_else(at[i] == j, -10000.0, own[i, j])
                for i in T.Parallel(block_M):
                    gates[bx * block_M + i, k] = peak[i]
                    indices[bx * block_M + i, k] = at[i]

    return main


@tilelang.jit(out_idx=[-1])
def cross_entropy(M, V, block_V=64):
    @T.prim_func
    def main(X: T.Tensor((M, V), "float32"), Labels: T.Tensor((M,), "int32"), Loss: T.Tensor((M,), "float32")):
        with T.Kernel(M, threads=128) as row:
            x = T.alloc_fragment((1, block_V), "float32")
            peak = T.alloc_fragment((1,), "float32")
            previous = T.alloc_fragment((1,), "float32")
            part = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.fill(peak, -T.infinity("float32"))
            T.fill(total, 0)
            for k in T.serial(T.ceildiv(V, block_V)):
                for i, j in T.Parallel(1, block_V):
                    x[i, j] = T.if_then_else(k * block_V + j < V, X[row, k * block_V + j], -T.infinity("float32"))
                T.copy(peak, previous)
                T.reduce_max(x, peak, dim=1, clear=False)
                for i, j in T.Parallel(1, block_V):
                    x[i, j] = T.exp(x[i, j] - peak[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] * T.exp(previous[i] - peak[i]) + part[i]
            Loss[row] = T.log(total[0]) + peak[0] - X[row, Labels[row]]

    return main


@tilelang.jit(out_idx=[-1])
def histogram(N, bins, block=128):
    @T.prim_func
    def main(X: T.Tensor((N,), "int32"), H: T.Tensor((bins,), "int32")):
        with T.Kernel(1, threads=128):
            counts = T.alloc_shared((bins,), "int32")
            T.clear(counts)
            for k in T.serial(T.ceildiv(N, block)):
                for i in T.Parallel(block):
                    if k * block + i < N:
                        T.atomic_add(counts[X[k * block + i]], 1)
            T.copy(counts, H)

    return main


@tilelang.jit(out_idx=[-1])
def argmax(M, N):
    @T.prim_func
    def main(A: T.Tensor((M, N), "float32"), At: T.Tensor((M,), "int32")):
        with T.Kernel(M, threads=32) as row:
            best = T.alloc_var("float32", -T.infinity("float32"))
            at = T.alloc_var("int32", 0)
            for j in T.serial(N):
                if A[row, j] > best:
                    best = A[row, j]
                    at = j
            At[row] = at

    return main


@tilelang.jit(out_idx=[-1])
def bitonic_sort(N, threads=64):
    steps = N.bit_length() - 1

    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=threads):
            x = T.alloc_shared((N,), "float32")
            T.copy(A, x)
            for p in range(1, steps + 1):
                for q in T.serial(p):
                    step = 1 << (p - 1 - q)
                    for t in T.Parallel(N // 2):
                        low = (t // step) * 2 * step + t % step
                        high = low + step
                        ascending = (low >> p) % 2 == 0
                        a, b = x[low], x[high]
                        if (a > b) == ascending:
                            a, b = b, a
                        x[low] = a
                        x[high] = b
            T.copy(x, B)

    return main
