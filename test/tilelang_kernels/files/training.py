# SPDX-License-Identifier: Apache-2.0
"""Steps of training and of images: optimizers, dropout, norms of groups, pools, convolutions in time."""

import tilelang
import tilelang.language as T


@tilelang.jit
def adam(Step, G, P, First, Second, lr: float = 1e-2, beta: tuple = (0.9, 0.99), block: int = 128):
    """One step of Adam in place, with bias correction by the number of the step."""
    N = T.const("N")
    Step: T.Tensor((1,), T.int32)
    G: T.Tensor((N,), T.bfloat16)
    P: T.Tensor((N,), T.float32)
    First: T.Tensor((N,), T.float32)
    Second: T.Tensor((N,), T.float32)
    with T.Kernel(T.ceildiv(N, block), threads=block) as b:
        for i in T.Parallel(block):
            at = b * block + i
            if at < N:
                g = T.cast(G[at], T.float32)
                m = beta[0] * First[at] + (1 - beta[0]) * g
                v = beta[1] * Second[at] + (1 - beta[1]) * g * g
                First[at] = m
                Second[at] = v
                step = T.cast(Step[0], T.float32)
                m_hat = m / (1 - T.pow(T.float32(beta[0]), step))
                v_hat = v / (1 - T.pow(T.float32(beta[1]), step))
                P[at] -= lr * m_hat / (T.sqrt(v_hat) + 1e-8)


@tilelang.jit(out_idx=[1, 2])
def norm_of_groups(batch, groups, size, eps=1e-5):
    """Means and variances of groups by two running sums, which threads gather and combine once."""

    @T.prim_func
    def main(
        X: T.Tensor((batch, groups, size), "float16"),
        Y: T.Tensor((batch, groups, size), "float16"),
        Stats: T.Tensor((batch, groups, 2), "float32"),
    ):
        with T.Kernel(groups, batch, threads=64) as (g, b):
            x = T.alloc_shared((size,), "float16")
            sums = T.alloc_reducer((2,), "float32", op="sum", replication="all")
            T.copy(X[b, g, :], x)
            T.clear(sums)
            for i in T.Parallel(size):
                value = T.cast(x[i], "float32")
                sums[0] += value
                sums[1] += value * value
            T.finalize_reducer(sums)
            mean = sums[0] / size
            rstd = T.rsqrt(sums[1] / size - mean * mean + eps)
            Stats[b, g, 0] = mean
            Stats[b, g, 1] = rstd
            for i in T.Parallel(size):
                Y[b, g, i] = (x[i] - mean) * rstd

    return main


@tilelang.jit(out_idx=[-2, -1])
def largest_of_windows(images, height, width, channels, window=3, stride=2):
    """Maximum pooling, and where each maximum was."""
    rows, columns = (height - window) // stride + 1, (width - window) // stride + 1

    @T.prim_func
    def main(
        X: T.Tensor((images, channels, height, width), "float32"),
        Y: T.Tensor((images, channels, rows, columns), "float32"),
        Where: T.Tensor((images, channels, rows, columns), "int64"),
    ):
        with T.Kernel(channels, images, threads=64) as (c, n):
            for y, x in T.Parallel(rows, columns):
                most = T.alloc_var("float32", init=-T.infinity("float32"))
                place = T.alloc_var("int64", init=-1)
                for dy, dx in T.grid(window, window):
                    value = X[n, c, y * stride + dy, x * stride + dx]
                    if value > most:
                        most = value
                        place = T.int64((y * stride + dy) * width + x * stride + dx)
                Y[n, c, y, x] = most
                Where[n, c, y, x] = place

    return main


@tilelang.jit(out_idx=[3, 4])
def convolved_in_time(batch, length, channels, width=4, block=16):
    """Depthwise causal convolution with a state of the last inputs, then silu."""

    @T.prim_func
    def main(
        X: T.Tensor((batch, length, channels), "float16"),
        W: T.Tensor((channels, width), "float32"),
        State: T.Tensor((batch, channels, width - 1), "float16"),
        Y: T.Tensor((batch, length, channels), "float16"),
        Last: T.Tensor((batch, channels, width - 1), "float16"),
    ):
        with T.Kernel(T.ceildiv(channels, block), batch, threads=block) as (bc, b):
            c = bc * block + T.get_thread_binding()
            ring = T.alloc_local((width - 1,), "float32")
            if c < channels:
                for i in T.unroll(width - 1):
                    ring[i] = State[b, c, i]
                for t in T.serial(length):
                    now = T.alloc_var("float32", init=X[b, t, c])
                    total = T.alloc_var("float32", init=now * W[c, width - 1])
                    for i in T.unroll(width - 1):
                        total += ring[i] * W[c, i]
                    for i in T.unroll(width - 2):
                        ring[i] = ring[i + 1]
                    ring[width - 2] = now
                    Y[b, t, c] = total * T.sigmoid(total)
                for i in T.unroll(width - 1):
                    Last[b, c, i] = ring[i]

    return main


@tilelang.jit(out_idx=[-1])
def doubly_normalized(batch, n, turns=20):
    """Exponentials of small matrices, whose rows and columns are divided by their sums in turn."""

    @T.prim_func
    def main(X: T.Tensor((batch, n, n), T.float32), Y: T.Tensor((batch, n, n), T.float32)):
        with T.Kernel(batch, threads=32) as b:
            m = T.alloc_fragment((n, n), T.float32)
            rows = T.alloc_fragment(n, T.float32)
            columns = T.alloc_fragment(n, T.float32)
            T.copy(X[b, :, :], m)
            T.reduce_max(m, rows, dim=1)
            for i, j in T.Parallel(n, n):
                m[i, j] = T.exp(m[i, j] - rows[i])
            for _ in T.serial(turns):
                T.reduce_sum(m, rows, dim=1)
                for i, j in T.Parallel(n, n):
                    m[i, j] = m[i, j] / rows[i]
                T.reduce_sum(m, columns, dim=0)
                for i, j in T.Parallel(n, n):
                    m[i, j] = m[i, j] / columns[j]
            T.copy(m, Y[b, :, :])

    return main


@tilelang.jit(out_idx=[-1])
def product_of_doubles(M, N, K, block=16):
    """C = beta C + alpha A B in float64, with numbers of the host as parameters."""

    @T.prim_func
    def main(
        A: T.Tensor((M, K), T.float64),
        B: T.Tensor((K, N), T.float64),
        C: T.Tensor((M, N), T.float64),
        alpha: T.float64,
        beta: T.float64,
        D: T.Tensor((M, N), T.float64),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=32) as (bx, by):
            a = T.alloc_shared((block, block), T.float64)
            b = T.alloc_shared((block, block), T.float64)
            c = T.alloc_fragment((block, block), T.float64)
            old = T.alloc_fragment((block, block), T.float64)
            T.clear(c)
            T.copy(C[by * block, bx * block], old)
            for k in range(T.ceildiv(K, block)):
                T.copy(A[by * block, k * block], a)
                T.copy(B[k * block, bx * block], b)
                T.gemm(a, b, c)
            for i, j in T.Parallel(block, block):
                c[i, j] = alpha * c[i, j] + beta * old[i, j]
            T.copy(c, D[by * block, bx * block])

    return main


@tilelang.jit(out_idx=[-1])
def complex_product(N, block=64):
    """Products of complex numbers, whose two parts lie side by side, eight numbers to a thread."""

    @T.prim_func
    def main(A: T.Tensor((N, 2), "float32"), B: T.Tensor((N, 2), "float32"), C: T.Tensor((N, 2), "float32")):
        with T.Kernel(T.ceildiv(N, block), threads=block // 2) as b:
            a, x = T.alloc_fragment((block, 2), "float32"), T.alloc_fragment((block, 2), "float32")
            c = T.alloc_fragment((block, 2), "float32")
            T.copy(A[b * block : (b + 1) * block, 0:2], a)
            T.copy(B[b * block : (b + 1) * block, 0:2], x)
            for i in T.Parallel(block):
                c[i, 0] = a[i, 0] * x[i, 0] - a[i, 1] * x[i, 1]
                c[i, 1] = a[i, 0] * x[i, 1] + a[i, 1] * x[i, 0]
            T.copy(c, C[b * block : (b + 1) * block, 0:2])

    return main


@tilelang.jit(out_idx=[2, 3])
def dropped_again(M, N, rate=0.25):
    """Zeros in place of a quarter of the numbers, twice by the same draws: forwards, and for a gradient."""

    @T.macro
    def dropped(source, row, result):
        T.rng_init(99, row, 0)
        for j in T.serial(N):
            result[row, j] = T.if_then_else(T.rng_rand_float() < rate, 0.0, source[row, j] / (1 - rate))

    @T.prim_func
    def main(
        X: T.Tensor((M, N), "float32"),
        G: T.Tensor((M, N), "float32"),
        Y: T.Tensor((M, N), "float32"),
        dX: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(M, threads=32) as row:
            dropped(X, row, Y)
            dropped(G, row, dX)

    return main


@tilelang.jit(out_idx=[1, 2])
def tiles_of_tokens(height, width, size=4):
    """An image as tokens of `size` x `size` points and back, by views of one shared tile."""

    @T.prim_func
    def main(
        X: T.Tensor((height, width), "int32"),
        Tokens: T.Tensor((height // size * (width // size), size * size), "int32"),
        Back: T.Tensor((height, width), "int32"),
    ):
        with T.Kernel(height // size, threads=64) as row:
            strip = T.alloc_shared((size, width), "int32")
            apart = T.view(strip, (size, width // size, size))
            tokens = T.alloc_shared((width // size, size * size), "int32")
            T.copy(X[row * size, 0], strip)
            for n, y, x in T.Parallel(width // size, size, size):
                tokens[n, y * size + x] = apart[y, n, x]
            T.copy(tokens, Tokens[row * (width // size), 0])
            for y, n, x in T.Parallel(size, width // size, size):
                Back[row * size + y, n * size + x] = tokens[n, y * size + x]

    return main
