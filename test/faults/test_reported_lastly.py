# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on TileLang, Triton, TVM, Halide, Taichi and Numba: numbers at the ends of
their types, atomics, breaks and conditions.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I32, I64, U32, U64 = torch.int32, torch.int64, torch.uint32, torch.uint64


@case
def trailing_digits_of_wide_numbers() -> Case:  # numba 1386
    @T.prim_func
    def kernel(U: T.Tensor((30,), "uint64"), O: T.Tensor((2, 30), "uint64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(30):
                us = U[i] % 1000000
                O[0, i] = (10**15 + us) * 1000
                O[1, i] = (us + T.uint64(10**19)) // 7

    u = [int(v) for v in torch.randint(0, 2**62, (30,))]
    rows = [[(10**15 + v % 1000000) * 1000 for v in u], [(v % 1000000 + 10**19) // 7 for v in u]]
    return kernel, [ints(u, U64), ints(np.zeros((2, 30)), U64)], {1: ints(rows, U64)}


@case
def sums_modulo_a_wide_prime() -> Case:  # numba 4631, 4124
    @T.prim_func
    def kernel(X: T.Tensor((40,), "uint64"), Y: T.Tensor((40,), "uint64"), O: T.Tensor((2, 40), "uint64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                z = T.alloc_var("uint64", X[i] + Y[i])
                if z >= 2**61 - 1:
                    z = z - (2**61 - 1)
                O[0, i] = z
                O[1, i] = (X[i] * Y[i] + 3698061793) % 515024571323837

    p = 2**61 - 1
    x, y = ([int(v) for v in torch.randint(0, p, (40,))] for _ in range(2))
    rows = [
        [a + b - p if a + b >= p else a + b for a, b in zip(x, y, strict=True)],
        [(a * b + 3698061793) % 2**64 % 515024571323837 for a, b in zip(x, y, strict=True)],
    ]
    return kernel, [ints(x, U64), ints(y, U64), ints(np.zeros((2, 40)), U64)], {2: ints(rows, U64)}


@case
def seeds_at_the_top_by_a_length() -> Case:  # numba 125
    n = T.dynamic("n")

    @T.prim_func
    def kernel(S: T.Tensor((n,), "uint32"), O: T.Tensor((2, n), "uint32")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            for k in T.Parallel(32):
                i = b * 32 + k
                if i < n:
                    O[0, i] = S[i] // T.cast(n, "uint32")
                    O[1, i] = S[i] % T.cast(n, "uint32")

    s = [2**32 - 1 - int(v) for v in torch.randint(0, 1000, (45,))]
    return (
        kernel,
        [ints(s, U32), ints(np.zeros((2, 45)), U32)],
        {1: ints([[v // 45 for v in s], [v % 45 for v in s]], U32)},
    )


@case
def square_of_a_constant_that_wraps() -> Case:  # numba 3112
    @T.prim_func
    def kernel(H: T.Tensor((1,), "uint32"), O: T.Tensor((2,), "uint32"), W: T.Tensor((2,), "uint64")):
        with T.Kernel(1, threads=32):
            h = T.uint32(2166136261)
            O[0] = h * h
            O[1] = H[0] * H[0]
            W[0] = T.cast(h * h, "uint64")
            W[1] = T.cast(H[0] * H[0], "uint64")

    h = 2166136261
    args = [ints([h], U32), ints([0, 0], U32), ints([0, 0], U64)]
    return kernel, args, {1: ints([h * h] * 2, U32), 2: ints([h * h % 2**32] * 2, U64)}


@case
def growing_number_in_a_loop() -> Case:  # numba 9937
    @T.prim_func
    def kernel(O: T.Tensor((4,), "int64"), base: T.int64, frequency: T.int64):
        with T.Kernel(4, threads=1) as b:
            result = T.alloc_var("int64", 0)
            for i in T.serial(T.cast(b + 1, "int64") * frequency):
                factor = T.alloc_var("int64", base + i % 2)
                if i > 10:
                    factor -= 1
                result = result * factor + base
            O[b] = result

    def meaning(turns):
        result = 0
        for i in range(turns):
            result = result * (5 + i % 2 - (i > 10)) + 5
        return result

    return kernel, [zeros(4, dtype=I64), 5, 7], {0: ints([meaning(7 * (b + 1)) for b in range(4)], I64)}


@case
def one_above_the_largest_number() -> Case:  # numpy 8522, numba 9990
    @T.prim_func
    def kernel(X: T.Tensor((4,), "uint64"), O: T.Tensor((3, 4), "uint64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[0, i] = X[i] + 1
                O[1, i] = T.uint64(18446744073709551615) + T.cast(i, "uint64")
                O[2, i] = X[i] - 1

    x = [2**64 - 1, 0, 2**63, 1]
    rows = [[v + 1 for v in x], [2**64 - 1 + i for i in range(4)], [v - 1 for v in x]]
    return kernel, [ints(x, U64), ints(np.zeros((3, 4)), U64)], {1: ints(rows, U64)}


@case
def shift_as_a_quotient_by_the_top_power() -> Case:  # halide 976
    @T.prim_func
    def kernel(X: T.Tensor((30,), "int32"), O: T.Tensor((4, 30), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(30):
                O[0, i] = X[i] >> 31
                O[1, i] = X[i] // (1 << 30)
                O[2, i] = X[i] // T.int32(-2147483648)
                O[3, i] = X[i] % T.int32(-2147483648)

    x = [int(v) for v in torch.randint(-(2**31), 2**31, (27,))] + [-(2**31), 2**31 - 1, 0]
    rows = [[v >> 31 for v in x], [v // 2**30 for v in x], [v // -(2**31) for v in x], [v % -(2**31) for v in x]]
    return kernel, [ints(x), zeros(4, 30, dtype=I32)], {1: ints(rows)}


@case
def maximum_of_bytes_that_wrap() -> Case:  # halide 3818
    @T.prim_func
    def kernel(C: T.Tensor((50,), "uint8"), D: T.Tensor((50,), "uint8"), O: T.Tensor((50,), "uint16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                O[i] = T.cast(T.max(D[i], T.max(C[i], D[i]) + T.uint8(87)), "uint16")

    c, d = ([int(v) for v in torch.randint(0, 256, (50,))] for _ in range(2))
    wanted = [max(b, (max(a, b) + 87) % 256) for a, b in zip(c, d, strict=True)]
    return (
        kernel,
        [ints(c, torch.uint8), ints(d, torch.uint8), ints([0] * 50, torch.uint16)],
        {2: ints(wanted, torch.uint16)},
    )


@case
def remainders_of_narrow_ramps() -> Case:  # halide 5998
    @T.prim_func
    def kernel(X: T.Tensor((20,), "int8"), O: T.Tensor((3, 20), "int8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(20):
                e = T.cast(52 + i * 3, "int8")
                d = X[i] | T.int8(1)
                O[0, i] = (T.int8(113) // T.int8(-71)) % d
                O[1, i] = e % d
                O[2, i] = (e // d) % T.int8(-26)

    x = [int(v) for v in torch.randint(-128, 128, (20,))]
    d, e = [v | 1 for v in x], [52 + 3 * i for i in range(20)]
    rows = [
        [-2 % b for b in d],
        [a % b for a, b in zip(e, d, strict=True)],
        [a // b % -26 for a, b in zip(e, d, strict=True)],
    ]
    return kernel, [ints(x, torch.int8), ints(np.zeros((3, 20)), torch.int8)], {1: ints(rows, torch.int8)}


@case
def divisor_kept_from_zero_by_a_maximum() -> Case:  # halide 2845
    @T.prim_func
    def kernel(A: T.Tensor((60,), "int32"), B: T.Tensor((60,), "int32"), O: T.Tensor((60,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(60):
                t = A[i] + B[i] - 2
                q = T.max(T.min(((A[i] - B[i]) * 128) // (T.max(t, 10) * 2), 128), -128)
                O[i] = T.if_then_else(t > 10, T.clamp(q * 51 // 128 + 7, 0, 16383), 7)

    a, b = whole(60, dtype=I32, most=30), whole(60, dtype=I32, most=30)
    t = a + b - 2
    q = ((a - b) * 128 // (t.clamp(min=10) * 2)).clamp(-128, 128)
    return kernel, [a, b, zeros(60, dtype=I32)], {2: torch.where(t > 10, (q * 51 // 128 + 7).clamp(0, 16383), 7).int()}


@case
def remainder_of_a_remainder() -> Case:  # tvm 20181
    @T.prim_func
    def kernel(A: T.Tensor((24,), "int32"), O: T.Tensor((4, 36), "int32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((24,), "int32")
            s = T.alloc_shared((24,), "int32")
            T.copy(A, f)
            T.copy(f, s)
            for i in T.Parallel(36):
                O[0, i] = (i % 6) % 4
                O[1, i] = s[(i % 9) % 6 * 4 + (i % 6) % 4]
                O[2, i] = (i % 8) // 3 % 2
                O[3, i] = A[((i + 5) % 10) % 4 + i // 9]

    a, i = whole(24, dtype=I32, most=99), torch.arange(36)
    rows = [i % 6 % 4, a[i % 9 % 6 * 4 + i % 6 % 4], i % 8 // 3 % 2, a[(i + 5) % 10 % 4 + i // 9]]
    return kernel, [a, zeros(4, 36, dtype=I32)], {1: torch.stack(rows).int()}


@case
def quotient_rounded_up_of_a_parameter() -> Case:  # tvm 18684
    @T.prim_func
    def kernel(O: T.Tensor((6,), "int32"), n: T.int32, m: T.int32):
        with T.Kernel(1, threads=1):
            O[0] = T.ceildiv(n, 10)
            O[1] = T.ceildiv(n, T.int32(10))
            O[2] = T.ceildiv(-n, 10)
            O[3] = T.ceildiv(n, m)
            O[4] = T.ceildiv(m, n)
            O[5] = T.ceildiv(n + 2147483600, 10)

    wanted = [3, 3, -2, -(24 // 7), 0, -((-(24 + 2147483600)) // 10)]
    return kernel, [zeros(6, dtype=I32), 24, -7], {0: ints(wanted)}


@case
def slot_taken_by_one_addition_for_a_row() -> Case:  # triton 7402
    @T.prim_func
    def kernel(C: T.Tensor((1,), "int32"), O: T.Tensor((8, 20), "int32"), K: T.Tensor((8,), "int32")):
        with T.Kernel(5, threads=32):
            at = T.alloc_shared((1,), "int32")
            for _ in T.Parallel(1):
                at[0] = T.atomic_add(C[0], 1, return_prev=True)
            for j in T.Parallel(20):
                O[at[0], j] = 2 + j
            if at[0] < 5:
                K[at[0]] = at[0] + 1

    rows = torch.cat([(torch.arange(20) + 2).expand(5, 20), torch.zeros(3, 20)])
    args = [zeros(1, dtype=I32), zeros(8, 20, dtype=I32), zeros(8, dtype=I32)]
    return kernel, args, {0: ints([5]), 1: rows.int(), 2: ints([1, 2, 3, 4, 5, 0, 0, 0])}


@case
def sums_at_given_places() -> Case:  # triton 558
    n = T.dynamic("n")

    @T.prim_func
    def kernel(I: T.Tensor((n,), "int64"), V: T.Tensor((n,), "float32"), O: T.Tensor((50,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=128) as b:
            for k in T.Parallel(64):
                if b * 64 + k < n:
                    T.atomic_add(O[I[b * 64 + k]], V[b * 64 + k])

    i, v, o = torch.randint(0, 50, (217,)), whole(217), whole(50)
    return kernel, [i, v, o.clone()], {2: o.index_put((i,), v, accumulate=True)}


@case
def places_given_to_half_of_all() -> Case:  # flagtree 1083
    @T.prim_func
    def kernel(X: T.Tensor((512,), "int32"), C: T.Tensor((2,), "int32"), O: T.Tensor((512,), "int32")):
        with T.Kernel(2, threads=128) as b:
            for k in T.Parallel(256):
                i = b * 256 + k
                if X[i] % 2 == 0:
                    at = T.atomic_add(C[0], 1, return_prev=True)
                    O[at] = 1
                else:
                    back = T.atomic_add(C[1], 1, return_prev=True)
                    O[511 - back] += 10

    x = whole(512, dtype=I32, most=50)
    even = int((x % 2 == 0).sum())
    wanted = ints([1] * even + [10] * (512 - even))
    return kernel, [x, zeros(2, dtype=I32), zeros(512, dtype=I32)], {1: ints([even, 512 - even]), 2: wanted}


@case
def store_before_continue_and_a_test_behind_it() -> Case:  # taichi 4494, 7307
    @T.prim_func
    def kernel(S: T.Tensor((12,), "int32"), X: T.Tensor((12,), "int32"), Y: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=32):
            for p in T.serial(12):
                if S[p] == 0:
                    X[p] = 1
                    continue
                if S[p] != 0:
                    Y[p] = 7
                X[p] = 100

    s = counts(12, 2)
    args = [s, zeros(12, dtype=I32), zeros(12, dtype=I32)]
    return kernel, args, {1: torch.where(s == 0, 1, 100).int(), 2: torch.where(s == 0, 0, 7).int()}


@case
def continue_and_break_of_one_loop() -> Case:  # taichi 5562
    @T.prim_func
    def kernel(O: T.Tensor((8, 10), "int32"), stop: T.int32):
        with T.Kernel(8, threads=32) as b:
            for i in T.serial(10):
                if i % 2 == 0:
                    continue
                O[b, i] = i + 1
                if stop != 0 and i >= b:
                    break

    wanted = torch.zeros(8, 10, dtype=I32)
    for b in range(8):
        for i in range(1, 10, 2):
            wanted[b, i] = i + 1
            if i >= b:
                break
    return kernel, [zeros(8, 10, dtype=I32), 1], {0: wanted}


@case
def value_from_before_two_loops() -> Case:  # taichi 847
    @T.prim_func
    def kernel(V: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(4, threads=1) as b:
            a = T.alloc_var("int32", V[b])
            for i in T.serial(n):
                for j in T.serial(n):
                    V[b] = a + V[b]
                    if j == 1:
                        a = a + i

    def meaning(v, n):
        a = v
        for i in range(n):
            for j in range(n):
                v = a + v
                a += i if j == 1 else 0
        return v

    v = counts(4, 9)
    return kernel, [v.clone(), 3], {0: ints([meaning(x, 3) for x in v.tolist()])}


@case
def break_under_a_constant_condition() -> Case:  # taichi 5982
    @T.prim_func
    def kernel(O: T.Tensor((3, 6), "int32")):
        with T.Kernel(1, threads=32):
            if 1 > 0:
                for i in T.unroll(3):
                    O[0, i] = 1
                    if 1 < 0:
                        break
                    O[0, i + 3] = 2
            for i in range(6):
                if 1 > 0:  # noqa: SIM102
                    if i == 4:
                        break
                O[1, i] = i + 1
            for i in range(6):
                if 1 < 0:
                    continue
                O[2, i] = 9

    return kernel, [zeros(3, 6, dtype=I32)], {0: ints([[1] * 3 + [2] * 3, [1, 2, 3, 4, 0, 0], [9] * 6])}


@case
def numbers_without_equal_digits() -> Case:  # taichi 5874
    @T.prim_func
    def kernel(O: T.Tensor((1000,), "uint8"), C: T.Tensor((1,), "int32")):
        with T.Kernel(10, threads=32) as b:
            for k in T.Parallel(100):
                n = b * 100 + k
                ok = T.alloc_var("bool", True)
                for i in T.unroll(3):
                    for j in range(i + 1, 3):
                        if (n // T.int32(10) ** i) % 10 == (n // T.int32(10) ** j) % 10:
                            ok = False
                            break
                    if not ok:
                        break
                if ok:
                    O[n] = T.uint8(1)
                    T.atomic_add(C[0], 1)

    wanted = [int(len(set(f"{n:03}")) == 3) for n in range(1000)]
    return kernel, [zeros(1000, dtype=torch.uint8), zeros(1, dtype=I32)], {0: ints(wanted, torch.uint8), 1: ints([720])}


@case
def bytes_at_the_ends_of_their_range() -> Case:  # flagtree 982
    @T.prim_func
    def kernel(
        X: T.Tensor((6, 30), "float32"),
        O: T.Tensor((6, 30), "int8"),
        D: T.Tensor((2,), "int32"),
        zero: T.int32,
        one: T.int32,
    ):
        with T.Kernel(6, threads=32) as b:
            if zero > one:
                D[0] = 77
            if zero < one:
                for i in T.Parallel(30):
                    q = T.clamp(T.round(X[b, i] * 100.0), -128.0, 127.0)
                    O[b, i] = T.cast(q, "int8")
            if zero > one:
                D[1] = 78
                for i in T.Parallel(30):
                    O[b, i] = T.int8(0)

    x = whole(6, 30)
    return (
        kernel,
        [x, zeros(6, 30, dtype=torch.int8), zeros(2, dtype=I32), 0, 1],
        {1: (x * 100).clamp(-128, 127).to(torch.int8), 2: zeros(2, dtype=I32)},
    )


@case
def sum_between_branches_that_nobody_or_one_takes() -> Case:  # triton 11153
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 40), "float32"),
        X: T.Tensor((40,), "float32"),
        Y: T.Tensor((4,), "float32"),
        S: T.Tensor((40,), "int32"),
        no: T.int32,
    ):
        with T.Kernel(4, threads=64) as b:
            a, r = T.alloc_fragment((40,), "float32"), T.alloc_fragment((1,), "float32")
            if no == 0:
                for i in T.Parallel(40):
                    if b == 0:
                        S[i] = i
            if no != 1:
                for i in T.Parallel(40):
                    a[i] = A[b, i] * X[i]
                T.reduce_sum(a, r, dim=0)
                if no == 0 and b == 0:
                    S[0] = 99
                Y[b] = r[0] + Y[b]

    a, x, y = whole(4, 40), whole(40), whole(4)
    s = torch.arange(40, dtype=I32)
    s[0] = 99
    return kernel, [a, x, y.clone(), zeros(40, dtype=I32), 0], {2: a @ x + y, 3: s}


test_reported_lastly = case.test()
