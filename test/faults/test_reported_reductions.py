# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: reductions and scans: parts of tiles, ties, threads that sizes do
not divide.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()
I32 = torch.int32


@case
def scan_of_a_choice_in_a_loop() -> Case:  # triton 2361
    @T.prim_func
    def kernel(n: T.int32, O: T.Tensor((40,), "int64")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((8,), "int64")
            for t in T.serial(5):
                for i in T.Parallel(8):
                    f[i] = T.if_then_else(t * 8 + i < n, T.int64(1), T.int64(0))
                T.cumsum(f, dim=0)
                for i in T.Parallel(8):
                    O[t * 8 + i] = f[i]

    inside = (torch.arange(40) < 29).long().view(5, 8)
    return kernel, [29, zeros(40, dtype=torch.int64)], {1: inside.cumsum(1).flatten()}


@case
def smaller_and_larger_index() -> Case:  # halide 645
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "int32"), O: T.Tensor((16, 16), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((16, 16), "int32")
            T.copy(A, s)
            for i, j in T.Parallel(16, 16):
                O[i, j] = s[T.min(i, j), T.max(i, j)] - s[T.max(i - j, 0), T.clamp(j + i, 3, 11)]

    a = whole(16, 16, dtype=torch.int32, most=99)
    i, j = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    return (
        kernel,
        [a, zeros(16, 16, dtype=torch.int32)],
        {1: a[torch.minimum(i, j), torch.maximum(i, j)] - a[(i - j).clamp(0), (i + j).clamp(3, 11)]},
    )


@case.of_threads
def tree_of_halves_in_shared_memory() -> Case:  # numba 1891
    @T.prim_func
    def kernel(A: T.Tensor((500,), "float64"), O: T.Tensor((4,), "float64")):
        with T.Kernel(4, threads=128) as b:
            s = T.alloc_shared((128,), "float64")
            t = T.get_thread_binding()
            s[t] = 0.0
            if b * 128 + t < 500:
                s[t] = A[b * 128 + t]
            T.sync_threads()
            n = T.alloc_var("int32", 64)
            while n > 0:
                if t < n:
                    s[t] = s[t] + s[t + n]
                T.sync_threads()
                n = n // 2
            if t == 0:
                O[b] = s[0]

    a = whole(500).double()
    return kernel, [a, zeros(4, dtype=torch.float64)], {1: pad(a, (0, 12)).view(4, 128).sum(1)}


@case
def place_of_the_maximum_with_ties() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((9, 70), "float32"), O: T.Tensor((9,), "int32")):
        with T.Kernel(9, threads=32) as b:
            f, m = T.alloc_fragment((70,), "float32"), T.alloc_fragment((1,), "float32")
            p, o = T.alloc_fragment((70,), "int32"), T.alloc_fragment((1,), "int32")
            T.copy(A[b, 0:70], f)
            T.reduce_max(f, m, dim=0)
            for i in T.Parallel(70):
                p[i] = T.if_then_else(f[i] == m[0], i, 70)
            T.reduce_min(p, o, dim=0)
            T.copy(o, O[b : b + 1])

    a = whole(9, 70, most=2)
    return (
        kernel,
        [a, zeros(9, dtype=torch.int32)],
        {1: torch.tensor([int((r == r.max()).nonzero()[0]) for r in a], dtype=torch.int32)},
    )


@case
def sum_by_48_threads() -> Case:
    """Tile-ai/tilelang #2542: lanes beyond a power of two were dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 48), "float32"), B: T.Tensor((5,), "float32")):
        with T.Kernel(1, threads=48):
            f, o = T.alloc_fragment((5, 48), "float32"), T.alloc_fragment((5,), "float32")
            T.copy(A, f)
            T.reduce_sum(f, o, dim=1)
            T.copy(o, B)

    a = whole(5, 48)
    return kernel, [a, torch.zeros(5)], {1: a.sum(1)}


@case
def scan_of_a_part() -> Case:
    """Tile-ai/tilelang #2523: rows of a part lie further apart than the part is wide."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 40), "int32"), B: T.Tensor((8, 24), "int32")):
        with T.Kernel(1, threads=96):
            s = T.alloc_shared((8, 40), "int32")
            T.copy(A, s)
            T.cumsum(s[0:8, 0:24], dim=1)
            T.copy(s[0:8, 0:24], B)

    a = whole(8, 40).int()
    return kernel, [a, torch.zeros(8, 24).int()], {1: a[:, :24].cumsum(1).int()}


@case
def reducer_whose_size_divides_no_threads() -> Case:
    """Tile-ai/tilelang #2408: groups of threads that hold copies were summed."""

    @T.prim_func
    def kernel(A: T.Tensor((24, 20), "float32"), X: T.Tensor((20,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=128):
            r = T.alloc_reducer((24,), "float32", "sum", replication="all")
            T.clear(r)
            for i, j in T.Parallel(24, 20):
                r[i] += A[i, j] * X[j]
            T.finalize_reducer(r)
            T.copy(r, B)

    a, x = whole(24, 20), whole(20)
    return kernel, [a, x, torch.zeros(24)], {2: a @ x}


@case
def scan_down_the_columns_from_the_end() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((33, 20), "int32"), Y: T.Tensor((33, 20), "int32")):
        with T.Kernel(1, threads=96):
            s = T.alloc_shared((33, 20), "int32")
            T.copy(X, s)
            T.cumsum(s, dim=0, reverse=True)
            T.copy(s, Y)

    x = whole(33, 20, dtype=I32)
    return kernel, [x, zeros(33, 20, dtype=I32)], {1: x.flip(0).cumsum(0, dtype=I32).flip(0)}


@case
def place_of_the_minimum_packed_with_its_value() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((5, 70), "int32"), P: T.Tensor((5,), "int32")):
        with T.Kernel(5, threads=64) as b:
            f, r = T.alloc_fragment((70,), "int64"), T.alloc_fragment((1,), "int64")
            for j in T.Parallel(70):
                f[j] = (T.cast(X[b, j], "int64") << 32) | T.cast(j, "int64")
            T.reduce_min(f, r, dim=0)
            P[b] = T.cast(r[0] & 4294967295, "int32")

    x = whole(5, 70, dtype=I32)
    return kernel, [x, zeros(5, dtype=I32)], {1: x.argmin(1).int()}


@case
def reductions_of_dimensions_of_one() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((1, 37), "float32"), Y: T.Tensor((37, 1), "float32"), O: T.Tensor((4, 37), "float32")):
        with T.Kernel(1, threads=32):
            x, y = T.alloc_fragment((1, 37), "float32"), T.alloc_fragment((37, 1), "float32")
            columns, rows = T.alloc_fragment((37,), "float32"), T.alloc_fragment((37,), "float32")
            T.copy(X, x)
            T.copy(Y, y)
            T.reduce_sum(x, columns, dim=0)
            T.copy(columns, O[0, 0:37])
            T.reduce_max(x, columns, dim=0, clear=False)
            T.copy(columns, O[1, 0:37])
            T.reduce_min(y, rows, dim=1)
            T.copy(rows, O[2, 0:37])
            T.reduce_absmax(y, rows, dim=1)
            T.copy(rows, O[3, 0:37])

    x, y = whole(1, 37), whole(37, 1)
    return kernel, [x, y, zeros(4, 37)], {2: torch.stack([x[0], x[0], y[:, 0], y[:, 0].abs()])}


@case
def windows_at_the_edge_of_a_pool() -> Case:  # max_pool with ceil_mode
    @T.prim_func
    def kernel(X: T.Tensor((9, 10), "float32"), Y: T.Tensor((5, 5), "float32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(5, 5):
                most = T.alloc_var("float32", -T.infinity("float32"))
                for di, dj in T.grid(3, 3):
                    r, c = i * 2 + di - 1, j * 2 + dj - 1
                    if r >= 0 and r < 9 and c >= 0 and c < 10:
                        most = T.max(most, X[r, c])
                Y[i, j] = most

    x = whole(9, 10) - 9
    return kernel, [x, zeros(5, 5)], {1: torch.nn.functional.max_pool2d(x[None], 3, 2, 1)[0]}


@case
def sums_of_a_region_of_a_tile() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((16, 64), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((16, 64), "float32")
            f = T.alloc_fragment((16,), "float32")
            T.copy(X, s)
            T.reduce_sum(s[0:16, 8:40], f, dim=1)
            T.copy(f, Y)

    x = whole(16, 64)
    return kernel, [x, zeros(16)], {1: x[:, 8:40].sum(1)}


@case
def sliding_dot_products() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((3, 50), "float32"), W: T.Tensor((3, 4), "float32"), Y: T.Tensor((3, 50), "float32")):
        with T.Kernel(3, threads=32) as c:
            w = T.alloc_local((4,), "float32")
            for k in T.unroll(4):
                w[k] = W[c, k]
            for t in T.Parallel(50):
                acc = T.alloc_var("float32", 0.0)
                for k in T.unroll(4):
                    at = t + k - 3
                    acc += T.if_then_else(at >= 0, X[c, T.max(at, 0)], 0.0) * w[k]
                Y[c, t] = acc

    x, w = whole(3, 50), whole(3, 4)
    y = torch.nn.functional.conv1d(torch.nn.functional.pad(x[None], (3, 0)), w[:, None], groups=3)[0]
    return kernel, [x, w, zeros(3, 50)], {2: y}


@case
def sums_stored_before_they_grow() -> Case:  # triton 11836
    @T.prim_func
    def kernel(X: T.Tensor((4, 16, 96), "float32"), O: T.Tensor((4, 16), "float32"), F: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=128):
            x, r = T.alloc_fragment((16, 96), "float32"), T.alloc_fragment((16,), "float32")
            s = T.alloc_fragment((16,), "float32")
            T.clear(s)
            for t in T.serial(4):
                T.copy(X[t, 0:16, 0:96], x)
                T.reduce_sum(x, r, dim=1)
                T.copy(s, O[t, 0:16])
                for i in T.Parallel(16):
                    s[i] = s[i] + r[i]
            T.copy(s, F)

    x = whole(4, 16, 96)
    sums = x.sum(2).cumsum(0)
    return kernel, [x, zeros(4, 16), zeros(16)], {1: torch.cat([zeros(1, 16), sums[:-1]]), 2: sums[-1]}


@case
def layer_with_unrolled_columns() -> Case:  # taichi 8529
    @T.prim_func
    def kernel(
        X: T.Tensor((9, 2), "float32"), W: T.Tensor((2, 2), "float32"), B: T.Tensor((2,), "float32"),
        O: T.Tensor((9, 2), "float32"),
    ):  # fmt: skip
        with T.Kernel(9, threads=1) as n:
            r = T.alloc_local((2,), "float32")
            for i in range(2):
                r[i] = 0.0
            for i in T.serial(2):
                for j in T.unroll(2):
                    r[i] += W[i, j] * X[n, j]
                r[i] += B[i]
            for i in T.unroll(2):
                O[n, i] = r[1 - i]

    x, w, b = whole(9, 2), whole(2, 2), whole(2)
    return kernel, [x, w, b, zeros(9, 2)], {3: (x @ w.T + b).flip(1)}


@case
def differences_of_a_row_and_a_column() -> Case:  # triton 1074
    @T.prim_func
    def kernel(D: T.Tensor((4,), "float32"), C: T.Tensor((4,), "float32"), O: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=64):
            d, c = T.alloc_fragment((4,), "float32"), T.alloc_fragment((4,), "float32")
            n, o = T.alloc_fragment((4, 4), "float32"), T.alloc_fragment((4,), "float32")
            T.copy(D, d)
            T.copy(C, c)
            for i, j in T.Parallel(4, 4):
                n[i, j] = c[j]
            for i, j in T.Parallel(4, 4):
                n[i, j] -= d[i]
            T.reduce_sum(n, o, dim=1)
            T.copy(o, O)

    d, c = whole(4), whole(4)
    return kernel, [d, c, zeros(4)], {2: c.sum() - 4 * d}


@case
def scan_longer_than_a_warp() -> Case:  # rocm/triton 947
    @T.prim_func
    def kernel(X: T.Tensor((3, 300), "int32"), O: T.Tensor((2, 3, 300), "int32")):
        with T.Kernel(1, threads=128):
            s, t = T.alloc_shared((3, 300), "int32"), T.alloc_shared((3, 300), "int32")
            T.copy(X, s)
            T.cumsum(s, t, dim=1)
            T.copy(t, O[0, 0:3, 0:300])
            T.cumsum(s, t, dim=1, reverse=True)
            T.copy(t, O[1, 0:3, 0:300])

    x = whole(3, 300, dtype=I32, most=1000)
    back = x.flip(1).cumsum(1).flip(1)
    return kernel, [x, zeros(2, 3, 300, dtype=I32)], {1: torch.stack([x.cumsum(1), back]).int()}


test_reported_reductions = case.test()
