# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: floats: roundings, NaN and infinities, sums whose order counts.

Numbers behind a name are those of the report.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, whole, zeros

import torch_tile.language as T

case = Cases()
I32 = torch.int32


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


@case.rounded(1e-5)
def online_softmax_whose_first_blocks_are_masked() -> Case:
    @T.prim_func
    def kernel(
        S: T.Tensor((8, 96), "float32"), first: T.Tensor((8,), "int32"), M: T.Tensor((8,), "float32"),
        L: T.Tensor((8,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            s = T.alloc_fragment((8, 32), "float32")
            new, m, part = (T.alloc_fragment((8,), "float32") for _ in range(3))
            total = T.alloc_fragment((8,), "float32")
            T.fill(m, -T.infinity("float32"))
            T.clear(total)
            for k in T.serial(3):
                for i, j in T.Parallel(8, 32):
                    s[i, j] = T.if_then_else(k * 32 + j >= first[i], S[i, k * 32 + j], -T.infinity("float32"))
                T.reduce_max(s, new, dim=1)
                for i in T.Parallel(8):
                    new[i] = T.max(new[i], m[i])
                for i, j in T.Parallel(8, 32):
                    s[i, j] = T.if_then_else(new[i] == -T.infinity("float32"), 0.0, T.exp(s[i, j] - new[i]))
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(8):
                    factor = T.if_then_else(m[i] == -T.infinity("float32"), 0.0, T.exp(m[i] - new[i]))
                    total[i] = total[i] * factor + part[i]
                    m[i] = new[i]
            T.copy(m, M)
            T.copy(total, L)

    s, first = whole(8, 96), counts(8, 97)
    first[0], first[1] = 96, 64
    seen = s.masked_fill(torch.arange(96) < first[:, None], -math.inf)
    m = seen.amax(1)
    total = torch.exp(seen.double() - m.clamp(min=-100)[:, None]).sum(1).float()
    return kernel, [s, first, zeros(8), zeros(8)], {2: m, 3: total}


@case
def halves_rounded_in_four_ways() -> Case:  # tvm's round, trunc, floor, ceil
    @T.prim_func
    def kernel(X: T.Tensor((24,), "float32"), O: T.Tensor((4, 24), "float32"), P: T.Tensor((24,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(24):
                O[0, i] = T.floor(X[i])
                O[1, i] = T.ceil(X[i])
                O[2, i] = T.trunc(X[i])
                O[3, i] = T.round(X[i])
                P[i] = T.cast(X[i], "int32")

    x = torch.arange(-12, 12) / 4.0
    rows = torch.stack([x.floor(), x.ceil(), x.trunc(), x.round()])
    return kernel, [x, zeros(4, 24), zeros(24, dtype=I32)], {1: rows, 2: x.int()}


@case
def sums_in_bfloat16_by_atomics() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "bfloat16"), Y: T.Tensor((3,), "bfloat16")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(32):
                T.atomic_add(Y[(b * 32 + i) % 3], X[b * 32 + i])

    x = whole(64, dtype=torch.bfloat16, most=1)
    return (
        kernel,
        [x, zeros(3, dtype=torch.bfloat16)],
        {1: torch.stack([x[k::3].float().sum() for k in range(3)]).bfloat16()},
    )


@case
def powers_and_roots_of_negatives() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((9,), "float32"), O: T.Tensor((4, 9), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(9):
                O[0, i] = T.pow(X[i], 2.0)
                O[1, i] = T.sqrt(X[i])
                O[2, i] = X[i] % -3.0
                O[3, i] = T.abs(X[i]) * -0.0

    x = torch.arange(-4.0, 5)
    return kernel, [x, zeros(4, 9)], {1: torch.stack([x * x, x.sqrt(), torch.remainder(x, -3.0), x.abs() * -0.0])}


@case
def float8_round_trip() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float8_e4m3fn"), Z: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                Y[i] = T.cast(T.clamp(X[i], -448.0, 448.0), "float8_e4m3fn")
            for i in T.Parallel(64):
                Z[i] = T.cast(Y[i], "float16") * 2

    x = torch.randn(64) * 100
    y = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    return kernel, [x, torch.zeros(64).to(torch.float8_e4m3fn), zeros(64, dtype=torch.half)], {2: y.half() * 2}


@case
def last_turn_of_a_loop_bounded_by_a_float() -> Case:  # numba 1716
    @T.prim_func
    def kernel(A: T.Tensor((12,), "float64"), O: T.Tensor((12,), "float64")):
        with T.Kernel(12, threads=1) as b:
            x = T.alloc_var("int32", 0)
            for n in T.serial(T.cast(A[b], "int32")):
                x = n
            O[b] = T.cast(x, "float64")

    a = torch.arange(12, dtype=torch.float64) + 0.75
    return kernel, [a, zeros(12, dtype=torch.float64)], {1: (a.floor() - 1).clamp(min=0)}


@case
def signs_of_an_unrolled_pair() -> Case:  # picongpu 655
    @T.prim_func
    def kernel(P: T.Tensor((2, 40), "float32"), O: T.Tensor((3, 40), "float32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((3, 40), "float32")
            T.clear(f)
            for p in T.unroll(2):
                for i in T.Parallel(40):
                    f[0, i] += P[p, i] * T.cast(1 - 2 * p, "float32")
                    f[1, i] += P[p, i] * T.if_then_else(p == 0, 1.0, -1.0)
                    f[2, i] += P[1 - p, i] * (1.0 - 2.0 * p)
            T.copy(f, O)

    p = whole(2, 40)
    d = p[0] - p[1]
    return kernel, [p, zeros(3, 40)], {1: torch.stack([d, d, -d])}


@case.rounded(1e-5)
def logarithm_of_sums_in_one_pass() -> Case:  # triton 236
    @T.prim_func
    def kernel(X: T.Tensor((7, 100), "float32"), O: T.Tensor((7,), "float32")):
        with T.Kernel(7, threads=64) as b:
            x, m = T.alloc_fragment((32,), "float32"), T.alloc_fragment((1,), "float32")
            last, total, part = (
                T.alloc_fragment((1,), "float32"),
                T.alloc_fragment((1,), "float32"),
                T.alloc_fragment((1,), "float32"),
            )
            T.fill(m, -T.infinity("float32"))
            T.clear(total)
            for t in T.serial(4):
                for i in T.Parallel(32):
                    if t * 32 + i < 100:
                        x[i] = X[b, t * 32 + i]
                    else:
                        x[i] = -T.infinity("float32")
                T.copy(m, last)
                T.reduce_max(x, m, dim=0, clear=False)
                for i in T.Parallel(32):
                    x[i] = T.exp(x[i] - m[0])
                T.reduce_sum(x, part, dim=0)
                total[0] = total[0] * T.exp(last[0] - m[0]) + part[0]
            O[b] = T.log(total[0]) + m[0]

    x = torch.randn(7, 100) * 3 + 20
    return kernel, [x, zeros(7)], {1: x.double().logsumexp(1).float()}


@case
def recurrence_from_the_end() -> Case:  # triton 4362
    @T.prim_func
    def kernel(A: T.Tensor((6, 12), "float32"), B: T.Tensor((6, 12), "float32"), O: T.Tensor((6, 12), "float32")):
        with T.Kernel(6, threads=32) as b:
            h = T.alloc_var("float32", 0.0)
            for t in T.serial(11, -1, -1):
                h = A[b, t] * h + B[b, t]
                O[b, t] = h

    a, b = torch.randint(0, 2, (6, 12)).float() - 0.5, whole(6, 12)
    wanted, h = zeros(6, 12), zeros(6)
    for t in range(11, -1, -1):
        h = a[:, t] * h + b[:, t]
        wanted[:, t] = h
    return kernel, [a, b, zeros(6, 12)], {2: wanted}


@case
def small_sums_behind_large_ones() -> Case:  # flash-linear-attention 1095
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), O: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_shared((64,), "float32")
            T.copy(X, f)
            T.cumsum(f, dim=0, reverse=True)
            T.copy(f[32:64], O)

    x = torch.cat([torch.full((32,), 1e8), torch.ones(32)])
    return kernel, [x, zeros(32)], {1: torch.arange(32.0, 0, -1)}


@case
def discounted_sums() -> Case:  # triton 3485, 2359
    @T.prim_func
    def kernel(X: T.Tensor((9, 14), "float32"), O: T.Tensor((9, 14), "float32")):
        with T.Kernel(1, threads=64):
            x = T.alloc_shared((9, 14), "float32")
            T.copy(X, x)
            for t in T.serial(1, 14):
                for i in T.Parallel(9):
                    x[i, t] = x[i, t - 1] * 0.5 + x[i, t]
            T.copy(x, O)

    x = whole(9, 14)
    wanted = x.clone()
    for t in range(1, 14):
        wanted[:, t] += wanted[:, t - 1] * 0.5
    return kernel, [x, zeros(9, 14)], {1: wanted}


test_reported_floats = case.test()
