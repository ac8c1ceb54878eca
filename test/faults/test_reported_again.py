# SPDX-License-Identifier: Apache-2.0
"""Small programs after further reports on TileLang, Triton, TVM, Halide and Numba, and on what they did not look at:
dependent loops, scalars of every type, guards before loads, memory told across loops.

Numbers behind a name are those of the report.
"""

import math
import sys
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d, pad

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()


@case
def width_that_is_no_multiple_of_threads() -> Case:  # tilelang 2398
    @T.prim_func
    def kernel(X: T.Tensor((3, 229), "float32"), Y: T.Tensor((3, 229), "float32")):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((3, 229), "float32")
            g = T.alloc_fragment((229,), "float32")
            T.copy(X, f)
            T.reduce_max(f, g, dim=0)
            for i, j in T.Parallel(3, 229):
                f[i, j] = f[i, j] * 2.0 - g[j]
            T.copy(f, Y)

    x = whole(3, 229)
    return kernel, [x, zeros(3, 229)], {1: x * 2 - x.amax(0)}


@case
def fragment_that_two_arms_fill() -> Case:  # tilelang 2307
    @T.prim_func
    def kernel(S: T.Tensor((16,), "float32"), O: T.Tensor((32,), "float32"), M: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            f, m = T.alloc_fragment((32,), "float32"), T.alloc_fragment((1,), "float32")
            for i in T.Parallel(32):
                if i < 16:
                    f[i] = S[i]
                else:
                    f[i] = T.infinity("float32")
            for i in T.Parallel(32):
                if i < 16:
                    T.device_assert(T.isfinite(f[i]))
            T.reduce_min(f, m, dim=0)
            T.copy(f, O)
            T.copy(m, M)

    s = whole(16)
    return kernel, [s, zeros(32), zeros(1)], {1: torch.cat([s, torch.full((16,), math.inf)]), 2: s.amin(0, True)}


@case
def quotient_of_two_reductions() -> Case:  # tilelang 1719
    @T.prim_func
    def kernel(A: T.Tensor((8, 4, 6), "float32"), O: T.Tensor((8, 6), "float32")):
        with T.Kernel(1, threads=64):
            a, s, t = (
                T.alloc_fragment((8, 4, 6), "float32"),
                T.alloc_fragment((8, 6), "float32"),
                T.alloc_fragment((8, 6), "float32"),
            )
            T.copy(A, a)
            T.reduce_sum(a, s, dim=1)
            T.reduce_absmax(a, t, dim=1)
            for i, k in T.Parallel(8, 6):
                s[i, k] /= t[i, k] + 1.0
            T.copy(s, O)

    a = whole(8, 4, 6)
    return kernel, [a, zeros(8, 6)], {1: (a.sum(1) / (a.abs().amax(1) + 1))}


@case
def two_products_of_one_operand_without_a_pipeline() -> Case:  # tilelang 2613, 666
    @T.prim_func
    def kernel(A: T.Tensor((64, 96), "float16"), B: T.Tensor((96, 128), "float16"), C: T.Tensor((64, 128), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            d = T.alloc_shared((32, 64), "float16")
            x, y = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(a)
            T.clear(b)
            T.clear(x)
            T.clear(y)
            for k in T.serial(3):
                T.copy(A[0:64, k * 32 : k * 32 + 32], a)
                T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                T.copy(B[k * 32 : k * 32 + 32, 64:128], d)
                T.gemm(a, b, x)
                T.gemm(a, d, y)
            T.copy(x, C[0:64, 0:64])
            T.copy(y, C[0:64, 64:128])

    a, b = whole(64, 96), whole(96, 128)
    return kernel, [a.half(), b.half(), zeros(64, 128)], {2: a @ b}


@case
def product_behind_a_cleared_pipeline() -> Case:  # tilelang 666
    @T.prim_func
    def kernel(A: T.Tensor((64, 160), "float16"), B: T.Tensor((160, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b, x = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(a)
            T.clear(b)
            T.clear(x)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[0:64, k * 32 : k * 32 + 32], a)
                T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                T.gemm(a, b, x)
            T.copy(x, C)

    a, b = whole(64, 160), whole(160, 64)
    return kernel, [a.half(), b.half(), zeros(64, 64)], {2: a @ b}


@case
def pipeline_of_copies_and_stores_by_hand() -> Case:  # tilelang 2166
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 96), "float16"),
        S: T.Tensor((96,), "float32"),
        B: T.Tensor((96, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, x = (
                T.alloc_shared((64, 32), "float16"),
                T.alloc_shared((32, 64), "float16"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(x)
            for k in T.Pipelined(3, num_stages=2):
                for i, j in T.Parallel(64, 32):
                    a[i, j] = A[i, k * 32 + j] * S[k * 32 + j]
                T.copy(B[k * 32 : k * 32 + 32, 0:64], b)
                T.gemm(a, b, x)
            T.copy(x, C)

    a, b, s = whole(64, 96), whole(96, 64), whole(96)
    return kernel, [a.half(), s, b.half(), zeros(64, 64)], {3: (a * s) @ b}


@case
def break_of_an_unrolled_loop() -> Case:  # tilelang 3026
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), O: T.Tensor((9,), "int32")):
        with T.Kernel(9, threads=1) as n:
            s = T.alloc_var("int32", 0)
            for i in T.unroll(8):
                if i == n:
                    break
                if A[i] < 0:
                    continue
                s += A[i]
            O[n] = s

    a = whole(8, dtype=torch.int32, most=9)
    return (
        kernel,
        [a, zeros(9, dtype=torch.int32)],
        {1: torch.tensor([int(a[:n].clamp(min=0).sum()) for n in range(9)], dtype=torch.int32)},
    )


@case
def tile_cleared_behind_its_readers() -> Case:  # tilelang 2699
    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32"), O: T.Tensor((4, 64), "float32")):
        with T.Kernel(1, threads=64):
            s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            for t in T.serial(4):
                for i in T.Parallel(64):
                    s[i] = A[t, i]
                for i in T.Parallel(64):
                    f[i] = s[63 - i]
                T.clear(s)
                for i in T.Parallel(64):
                    if A[t, i] > 0:
                        s[(i * 7) % 64] = f[i]
                T.copy(s, O[t, 0:64])

    a = whole(4, 64)
    w = torch.zeros(4, 64)
    for t in range(4):
        for i in range(64):
            if a[t, i] > 0:
                w[t, i * 7 % 64] = a[t, 63 - i]
    return kernel, [a, zeros(4, 64)], {1: w}


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
def remainder_of_scaled_sums() -> Case:  # tvm 8616, 4127, 13936
    @T.prim_func
    def kernel(O: T.Tensor((30, 8, 4), "int32")):
        with T.Kernel(1, threads=30):
            for x, y, z in T.Parallel(30, 8, 4):
                O[x, y, z] = (
                    (x * 50 + y * 8 + z) % 20
                    + 100 * ((x - 15) % 2)
                    + 1000 * ((y + 1) % 2 * 8192 % 7)
                    + T.if_then_else((z - x) % 3 != 0, 7, 0)
                )

    x, y, z = torch.meshgrid(torch.arange(30), torch.arange(8), torch.arange(4), indexing="ij")
    w = (x * 50 + y * 8 + z) % 20 + 100 * ((x - 15) % 2) + 1000 * ((y + 1) % 2 * 8192 % 7) + ((z - x) % 3 != 0) * 7
    return kernel, [zeros(30, 8, 4, dtype=torch.int32)], {0: w.int()}


@case
def box_sums_divided() -> Case:  # halide 7892
    @T.prim_func
    def kernel(A: T.Tensor((26, 26), "int32"), O: T.Tensor((20, 20), "int32")):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            s = T.alloc_shared((22, 22), "int32")
            acc = T.alloc_fragment((16, 16), "int32")
            T.copy(A[by * 16, bx * 16], s)
            T.clear(acc)
            for r, c in T.grid(7, 7):
                for i, j in T.Parallel(16, 16):
                    acc[i, j] += s[i + r, j + c]
            for i, j in T.Parallel(16, 16):
                acc[i, j] = acc[i, j] // 49
            T.copy(acc, O[by * 16, bx * 16])

    a = whole(26, 26, dtype=torch.int32, most=99)
    w = avg_pool2d(a.double()[None], 7, 1, divisor_override=1)[0]
    return kernel, [a, zeros(20, 20, dtype=torch.int32)], {1: (w / 49).floor().int()}


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


@case
def differences_of_bytes() -> Case:  # halide 9030
    @T.prim_func
    def kernel(
        A: T.Tensor((5, 48), "uint8"),
        B: T.Tensor((5, 48), "uint8"),
        O: T.Tensor((5,), "uint8"),
        P: T.Tensor((5, 48), "uint8"),
        Q: T.Tensor((5,), "int32"),
    ):
        with T.Kernel(1, threads=32):
            d, o = T.alloc_fragment((5, 48), "uint8"), T.alloc_fragment((5,), "uint8")
            w, q = T.alloc_fragment((5, 48), "int32"), T.alloc_fragment((5,), "int32")
            for i, j in T.Parallel(5, 48):
                d[i, j] = T.max(A[i, j], B[i, j]) - T.min(A[i, j], B[i, j])
                w[i, j] = T.cast(d[i, j], "int32")
            T.reduce_sum(d, o, dim=1)
            T.reduce_sum(w, q, dim=1)
            for i, j in T.Parallel(5, 48):
                P[i, j] = T.min(d[i, j], o[i])
            T.copy(o, O)
            T.copy(q, Q)

    a, b = whole(5, 48, dtype=torch.uint8, most=255), whole(5, 48, dtype=torch.uint8, most=255)
    d = (a.int() - b.int()).abs()
    o = d.sum(1) % 256
    return (
        kernel,
        [a, b, zeros(5, dtype=torch.uint8), zeros(5, 48, dtype=torch.uint8), zeros(5, dtype=torch.int32)],
        {2: o.to(torch.uint8), 3: torch.minimum(d, o[:, None]).to(torch.uint8), 4: d.sum(1).int()},
    )


@case
def complement_in_a_branch() -> Case:  # numba 10261
    @T.prim_func
    def kernel(A: T.Tensor((64,), "uint64"), O: T.Tensor((64,), "uint64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                v = T.alloc_var("uint64", 0)
                if i % 3 == 1:
                    v = ~A[i]
                elif i % 3 == 2:
                    v = A[i] >> T.uint64(63)
                O[i] = v

    a = torch.randint(-(2**63), 2**63 - 1, (64,))
    i = torch.arange(64)
    w = torch.where(i % 3 == 1, ~a, torch.where(i % 3 == 2, (a < 0).long(), 0))
    return kernel, [a.view(torch.uint64), zeros(64, dtype=torch.uint64)], {1: w.view(torch.uint64)}


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
def loops_with_dependent_bounds() -> Case:
    @T.prim_func
    def kernel(O: T.Tensor((12, 4), "int32"), n: T.int32):
        with T.Kernel(12, threads=1) as b:
            a, c, d, e = (
                T.alloc_var("int32", 0),
                T.alloc_var("int32", 0),
                T.alloc_var("int32", 0),
                T.alloc_var("int32", 0),
            )
            for i in range(b):
                for j in range(i, b, 3):
                    a += i * 10 + j
            for i in range(n, -b, -5):
                c = c * 3 + i
            for i in T.serial(b, n):
                for j in T.serial(0, i - 4):
                    d += j
                else:
                    d += 1
            for i in range(3, b):
                if i > 7:
                    break
                e += i
            O[b, 0] = a
            O[b, 1] = c
            O[b, 2] = d
            O[b, 3] = e

    n, rows = 7, []
    for b in range(12):
        a = sum(i * 10 + j for i in range(b) for j in range(i, b, 3))
        c = 0
        for i in range(n, -b, -5):
            c = c * 3 + i
        d = sum(sum(range(max(0, i - 4))) + 1 for i in range(b, n))
        rows.append([a, c, d, sum(i for i in range(3, b) if i <= 7)])
    return kernel, [zeros(12, 4, dtype=torch.int32), n], {0: torch.tensor(rows, dtype=torch.int32)}


@case
def same_name_in_inner_loops() -> Case:
    @T.prim_func
    def kernel(O: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=1) as b:
            s = T.alloc_var("int32", 0)
            for i in range(b):
                s += i
                for j in range(2):
                    for i in range(3):
                        s += 100 * i + j
                s += 10000
            O[b] = s

    def meaning(b):
        s = 0
        for i in range(b):
            s += i
            for j in range(2):
                for i in range(3):
                    s += 100 * i + j
            s += 10000
        return s

    return kernel, [zeros(6, dtype=torch.int32)], {0: torch.tensor([meaning(b) for b in range(6)], dtype=torch.int32)}


@case
def scalars_of_all_types() -> Case:
    @T.prim_func
    def kernel(
        a: T.int64,
        b: T.uint8,
        c: T.float64,
        d: T.bool,
        e: T.int8,
        f: T.float16,
        O: T.Tensor((8,), "float64"),
        P: T.Tensor((4,), "int64"),
    ):
        with T.Kernel(1, threads=32):
            O[0] = c
            O[1] = c * T.cast(b, "float64")
            O[2] = T.cast(f, "float64")
            O[3] = T.if_then_else(d, 1.0, 2.0)
            P[0] = a * 2 + 1
            P[1] = T.cast(b, "int64") - 300
            P[2] = T.cast(e, "int64") * a // 7
            P[3] = a >> 33

    a, b, c, e = 2**40 + 3, 200, math.pi, -100
    w = torch.tensor([c, c * 200, float(torch.tensor(0.1).half()), 1.0, 0, 0, 0, 0], dtype=torch.float64)
    return (
        kernel,
        [a, b, c, True, e, 0.1, zeros(8, dtype=torch.float64), zeros(4, dtype=torch.int64)],
        {6: w, 7: torch.tensor([a * 2 + 1, -100, e * a // 7, a >> 33])},
    )


@case
def atomic_results_are_old_values() -> Case:
    @T.prim_func
    def kernel(N: T.Tensor((1,), "int32"), O: T.Tensor((96,), "int32")):
        with T.Kernel(3, threads=32):
            for _ in T.Parallel(32):
                at = T.atomic_add(N[0], 1, return_prev=True)
                O[at] = O[at] + 1

    return (
        kernel,
        [zeros(1, dtype=torch.int32), zeros(96, dtype=torch.int32)],
        {0: torch.tensor([96], dtype=torch.int32), 1: torch.ones(96, dtype=torch.int32)},
    )


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
def running_maxima_of_masked_rows() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((4, 96), "float32"), O: T.Tensor((4, 2), "float32")):
        with T.Kernel(1, threads=32):
            f, m, n, s, d = (
                T.alloc_fragment((4, 32), "float32"),
                T.alloc_fragment((4,), "float32"),
                T.alloc_fragment((4,), "float32"),
                T.alloc_fragment((4,), "float32"),
                T.alloc_fragment((4,), "float32"),
            )
            T.fill(m, -T.infinity("float32"))
            T.clear(s)
            for t in T.serial(3):
                T.copy(A[0:4, t * 32 : t * 32 + 32], f)
                T.reduce_max(f, n, dim=1)
                for i in T.Parallel(4):
                    n[i] = T.max(n[i], m[i])
                for i, j in T.Parallel(4, 32):
                    f[i, j] = T.if_then_else(n[i] == -T.infinity("float32"), 0.0, T.exp2(f[i, j] - n[i]))
                T.reduce_sum(f, d, dim=1)
                for i in T.Parallel(4):
                    s[i] = s[i] * T.if_then_else(m[i] == n[i], 1.0, T.exp2(m[i] - n[i])) + d[i]
                    m[i] = n[i]
            for i in T.Parallel(4):
                O[i, 0] = m[i]
                O[i, 1] = s[i]

    a = whole(4, 96)
    a[0] = -math.inf
    a[1, :64] = -math.inf
    a[2, 32:] = -math.inf
    m = a.amax(1)
    return (
        kernel,
        [a, zeros(4, 2)],
        {1: torch.stack([m, torch.where(m.isinf(), 0.0, torch.exp2(a - m[:, None]).sum(1))], 1)},
    )


@case
def sum_that_rounds_at_each_step() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((40, 32), "bfloat16"), O: T.Tensor((32,), "bfloat16"), P: T.Tensor((32,), "float16")):
        with T.Kernel(1, threads=32):
            s, h = T.alloc_fragment((32,), "bfloat16"), T.alloc_fragment((32,), "float16")
            T.clear(s)
            T.clear(h)
            for t in T.serial(40):
                for i in T.Parallel(32):
                    s[i] += A[t, i]
                    h[i] = h[i] * T.float16(0.5) + T.cast(A[t, i], "float16")
            T.copy(s, O)
            T.copy(h, P)

    a = torch.randn(40, 32).bfloat16()
    s, h = torch.zeros(32).bfloat16(), torch.zeros(32).half()
    for t in range(40):
        s = s + a[t]
        h = (h * 0.5) + a[t].half()
    return kernel, [a, zeros(32, dtype=torch.bfloat16), zeros(32, dtype=torch.float16)], {1: s, 2: h}


@case
def products_of_small_integers() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "int8"), B: T.Tensor((48, 64), "int8"), C: T.Tensor((32, 48), "int32")):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_shared((32, 64), "int8"),
                T.alloc_shared((48, 64), "int8"),
                T.alloc_fragment((32, 48), "int32"),
            )
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, -7)
            T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C)

    a, b = whole(32, 64, dtype=torch.int8, most=127), whole(48, 64, dtype=torch.int8, most=127)
    a[0], b[0] = -128, -128
    return kernel, [a, b, zeros(32, 48, dtype=torch.int32)], {2: a.int() @ b.int().t() - 7}


@case
def two_buffers_by_hand() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((7, 40), "float32"), O: T.Tensor((7, 40), "float32")):
        with T.Kernel(1, threads=40):
            s = T.alloc_shared((2, 40), "float32")
            T.copy(A[0, 0:40], s[0, 0:40])
            for t in T.serial(7):
                if t < 6:
                    T.copy(A[t + 1, 0:40], s[(t + 1) % 2, 0:40])
                for i in T.Parallel(40):
                    O[t, i] = s[t % 2, 39 - i] + s[t % 2, (i + 1) % 40]

    a = whole(7, 40)
    return kernel, [a, zeros(7, 40)], {1: a.flip(1) + a.roll(-1, 1)}


test_reported_again = case.test()
