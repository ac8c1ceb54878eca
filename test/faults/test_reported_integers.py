# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: integers: numbers at the ends of their types, quotients and
remainders, bits, types that are mixed.

Numbers behind a name are those of the report.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I16, I32, I64, U8, U32, U64 = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint32,
    torch.uint64,
)


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
def mask_that_turns_carry() -> Case:
    """Triton-lang/triton-ascend #2040: the mask of the first turn was taken for that of all."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), L: T.Tensor((3,), "int32"), B: T.Tensor((3, 32), "float32")):
        with T.Kernel(1, threads=32):
            inside = T.alloc_fragment((32,), "bool")
            T.fill(inside, True)
            for t in T.serial(3):
                for i in T.Parallel(32):
                    inside[i] = inside[i] and i < L[t]
                for i in T.Parallel(32):
                    B[t, i] = T.if_then_else(inside[i], A[i], -9.0)

    a, wanted = whole(32), torch.full((3, 32), -9.0)
    for turn, n in enumerate((4, 4, 2)):
        wanted[turn, :n] = a[:n]
    return kernel, [a, torch.tensor([4, 12, 2]).int(), torch.zeros(3, 32)], {2: wanted}


@case
def quotients_of_negative_sums() -> Case:
    """Apache/tvm #2308, #5922, #10232, #10336: rules of division that hold for natural numbers alone."""

    @T.prim_func
    def kernel(O: T.Tensor((41, 5), "int32"), n: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(41):
                x = i - 20
                O[i, 0] = n - (0 - x * 5) // 2 - 1 + (37 + (x + 7) * -5) // 2
                O[i, 1] = (241 + 48 * x) // 16
                O[i, 2] = (x * 8 + 7) // 16
                O[i, 3] = x % 20 // 2 * 2 % 4
                O[i, 4] = (10 * x + 5) // 10 * 7 + (x * 6 + 4) % 9

    def meaning(x: int) -> list[int]:
        ends = x % 20 // 2 * 2 % 4, (10 * x + 5) // 10 * 7 + (x * 6 + 4) % 9
        return [50 - (0 - x * 5) // 2 - 1 + (37 + (x + 7) * -5) // 2, (241 + 48 * x) // 16, (x * 8 + 7) // 16, *ends]

    return kernel, [torch.zeros(41, 5).int(), 50], {0: torch.tensor([meaning(x) for x in range(-20, 21)]).int()}


@case
def lengths_of_chains_of_halves_and_triples() -> Case:  # numba's Collatz loops
    @T.prim_func
    def kernel(X: T.Tensor((50,), "int64"), Y: T.Tensor((50,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                n = T.alloc_var("int64", X[i])
                steps = T.alloc_var("int32", 0)
                while n != 1:
                    if n % 2 == 0:
                        n = n // 2
                    else:
                        n = 3 * n + 1
                    steps += 1
                Y[i] = steps

    def steps(n: int) -> int:
        found = 0
        while n != 1:
            n, found = n // 2 if n % 2 == 0 else 3 * n + 1, found + 1
        return found

    x = counts(50, 1000, I64) + 1
    return kernel, [x, zeros(50, dtype=I32)], {1: torch.tensor([steps(int(n)) for n in x], dtype=I32)}


@case
def three_indices_from_one_by_odd_sizes() -> Case:  # tvm's fused axes
    @T.prim_func
    def kernel(X: T.Tensor((5, 7, 11), "float32"), Y: T.Tensor((11, 5, 7), "float32")):
        with T.Kernel(T.ceildiv(385, 64), threads=64) as b:
            for t in T.Parallel(64):
                n = b * 64 + t
                if n < 385:
                    Y[n % 11, n // 77, n // 11 % 7] = X[n // 77, n // 11 % 7, n % 11]

    x = whole(5, 7, 11)
    return kernel, [x, zeros(11, 5, 7)], {1: x.permute(2, 0, 1).contiguous()}


@case
def upper_halves_of_products() -> Case:  # halide's mul_shift_right
    @T.prim_func
    def kernel(X: T.Tensor((40,), "int16"), Y: T.Tensor((40,), "int16"), O: T.Tensor((2, 40), "int16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                wide = T.cast(X[i], "int32") * T.cast(Y[i], "int32")
                O[0, i] = T.cast(wide >> 16, "int16")
                O[1, i] = T.cast(T.clamp((wide + 16384) >> 15, -32768, 32767), "int16")

    x, y = (torch.randint(-(2**15), 2**15, (40,)).to(I16) for _ in range(2))
    x[0], y[0] = -(2**15), -(2**15)
    wide = x.long() * y.long()
    rows = torch.stack([wide >> 16, ((wide + 16384) >> 15).clamp(-(2**15), 2**15 - 1)])
    return kernel, [x, y, zeros(2, 40, dtype=I16)], {2: rows.to(I16)}


@case
def sums_and_differences_that_saturate() -> Case:  # halide's saturating_add
    @T.prim_func
    def kernel(X: T.Tensor((60,), "int8"), Y: T.Tensor((60,), "int8"), O: T.Tensor((3, 60), "int8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                x, y = T.cast(X[i], "int16"), T.cast(Y[i], "int16")
                O[0, i] = T.cast(T.max(T.min(x + y, 127), -128), "int8")
                O[1, i] = T.cast(T.clamp(x - y, -128, 127), "int8")
                O[2, i] = T.cast((x + y + 1) >> 1, "int8")

    x, y = (torch.randint(-128, 128, (60,)).to(I8) for _ in range(2))
    a, b = x.int(), y.int()
    rows = torch.stack([(a + b).clamp(-128, 127), (a - b).clamp(-128, 127), (a + b + 1) >> 1])
    return kernel, [x, y, zeros(3, 60, dtype=I8)], {2: rows.to(I8)}


@case
def numbers_by_shifts_and_exclusive_ors() -> Case:  # xorshift and PCG
    @T.prim_func
    def kernel(X: T.Tensor((40,), "uint32"), S: T.Tensor((40,), "uint64"), O: T.Tensor((2, 40), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                x = T.alloc_var("uint32", X[i])
                s = T.alloc_var("uint64", S[i])
                for _ in T.serial(3):
                    x = x ^ (x << 13)
                    x = x ^ (x >> 17)
                    x = x ^ (x << 5)
                    s = s * T.uint64(6364136223846793005) + T.uint64(1442695040888963407)
                O[0, i] = x
                mixed = T.cast(((s >> 18) ^ s) >> 27, "uint32")
                turn = T.cast(s >> 59, "uint32")
                O[1, i] = (mixed >> turn) | (mixed << ((32 - turn) & 31))

    def made(x: int, s: int) -> tuple[int, int]:
        for _ in range(3):
            x ^= x << 13 & 2**32 - 1
            x ^= x >> 17
            x ^= x << 5 & 2**32 - 1
            s = (s * 6364136223846793005 + 1442695040888963407) % 2**64
        mixed, turn = ((s >> 18) ^ s) >> 27 & 2**32 - 1, s >> 59
        return x, (mixed >> turn | mixed << (32 - turn & 31)) & 2**32 - 1

    x, s = ([int(v) for v in torch.randint(1, n, (40,))] for n in (2**32, 2**62))
    rows = list(zip(*map(made, x, s), strict=True))
    return kernel, [ints(x, U32), ints(s, U64), ints([[0] * 40] * 2, U32)], {2: ints(rows, U32)}


@case
def sum_of_integers_beside_one_of_floats() -> Case:  # an exact counter beside a sum that rounds
    @T.prim_func
    def kernel(X: T.Tensor((300,), "float16"), S: T.Tensor((1,), "float32"), N: T.Tensor((1,), "int64")):
        with T.Kernel(T.ceildiv(300, 64), threads=32) as b:
            f, n = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "int64")
            rf, rn = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "int64")
            for i in T.Parallel(64):
                inside = b * 64 + i < 300
                f[i] = T.if_then_else(inside, T.cast(X[T.min(b * 64 + i, 299)], "float32"), 0.0)
                n[i] = T.if_then_else(inside and f[i] < 0, T.int64(4294967296), T.int64(0))
            T.reduce_sum(f, rf, dim=0)
            T.reduce_sum(n, rn, dim=0)
            T.atomic_add(S[0], rf[0])
            T.atomic_add(N[0], rn[0])

    x = whole(300, dtype=torch.half)
    return kernel, [x, zeros(1), zeros(1, dtype=I64)], {1: x.float().sum()[None], 2: (x < 0).sum()[None] * 2**32}


@case
def bits_of_bytes_counted_and_gathered() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((48,), "uint8"), N: T.Tensor((48,), "uint8"), W: T.Tensor((12,), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(48):
                n = T.alloc_var("uint8", X[i])
                n = n - ((n >> 1) & 85)
                n = (n & 51) + ((n >> 2) & 51)
                N[i] = (n + (n >> 4)) & 15
            for i in T.Parallel(12):
                w = T.alloc_var("uint32", 0)
                for k in T.unroll(4):
                    w = w | (T.cast(X[i * 4 + k], "uint32") << (8 * k))
                W[i] = w

    x = counts(48, 256, U8)
    n = torch.tensor([int(v).bit_count() for v in x], dtype=U8)
    return kernel, [x, zeros(48, dtype=U8), ints([0] * 12, U32)], {1: n, 2: x.view(U32)}


@case
def literals_that_leave_a_type() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((8,), "float32"),
        H: T.Tensor((8,), "float16"),
        D: T.Tensor((8,), "float64"),
        O: T.Tensor((3, 8), "float32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                O[0, i] = T.min(X[i], 3e38)
                H[i] = T.cast(X[i] * 30000.0, "float16")
                D[i] = T.cast(X[i], "float64") * 0.1
                O[1, i] = X[i] + 16777217.0
                O[2, i] = T.cast(T.cast(X[i], "float64") + 0.1, "float32")

    x = whole(8)
    x[0] = math.inf
    return (
        kernel,
        [x, zeros(8, dtype=torch.half), zeros(8, dtype=torch.float64), zeros(3, 8)],
        {
            1: (x * 30000).half(),
            2: x.double() * 0.1,
            3: torch.stack([x.clamp(max=3e38), x + 16777217.0, (x.double() + 0.1).float()]),
        },
    )


@case
def shared_tile_used_in_two_types() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "float32"), Z: T.Tensor((64,), "uint8")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((64,), "int32")
            b = T.alloc_shared((64,), "float32")
            c = T.alloc_shared((64,), "uint8")
            T.copy(X, a)
            for i in T.Parallel(64):
                b[i] = T.cast(a[63 - i], "float32") * 0.5
            for i in T.Parallel(64):
                c[i] = T.cast(b[(i + 7) % 64] > 0, "uint8")
            T.copy(b, Y)
            T.copy(c, Z)

    x = whole(64, dtype=I32)
    y = x.flip(0).float() * 0.5
    return kernel, [x, zeros(64), zeros(64, dtype=U8)], {1: y, 2: (y.roll(-7) > 0).to(U8)}


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
def quotient_of_what_a_loop_carries() -> Case:  # triton 2672
    @T.prim_func
    def kernel(X: T.Tensor((5, 24), "float32"), O: T.Tensor((5, 24), "float32"), n: T.int32):
        with T.Kernel(5, threads=32) as b:
            over, under = T.alloc_fragment((24,), "float32"), T.alloc_fragment((24,), "float32")
            q = T.alloc_fragment((24,), "float32")
            T.fill(over, 1.0)
            T.copy(X[b, 0:24], under)
            T.copy(X[b, 0:24], q)
            for _ in T.serial(n):
                for i in T.Parallel(24):
                    q[i] = over[i] / under[i]
            T.copy(q, O[b, 0:24])

    x = torch.pow(2.0, torch.randint(-3, 4, (5, 24)))
    return kernel, [x, zeros(5, 24), 1], {1: 1 / x}


@case
def quotients_by_two_negative_constants() -> Case:  # halide 7584
    @T.prim_func
    def kernel(X: T.Tensor((50,), "int32"), O: T.Tensor((2, 50), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(50):
                O[0, i] = ((-128 + i * -79) // -1) // -71 - 128 - 128 - 128
                O[1, i] = (X[i] // -1) // -71

    x = whole(50, dtype=I32, most=2000)
    first = [((-128 + i * -79) // -1) // -71 - 384 for i in range(50)]
    return kernel, [x, zeros(2, 50, dtype=I32)], {1: ints([first, [(v // -1) // -71 for v in x.tolist()]])}


@case
def quotients_of_scaled_sums() -> Case:  # halide 3154, 2949
    @T.prim_func
    def kernel(E: T.Tensor((80,), "uint8"), A: T.Tensor((80,), "int32"), O: T.Tensor((4, 80), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(80):
                O[0, i] = ((54 - 97) * (23 + T.cast(E[i], "int32"))) // 222
                O[1, i] = ((-67 * 120) * (-73 + A[i])) // 69
                O[2, i] = (-3 * (A[i] + 5)) // 6
                O[3, i] = (-3 * (i + 5)) % 6

    e, a = counts(80, 256, torch.uint8), whole(80, dtype=I32, most=100)
    rows = [
        [-43 * (23 + v) // 222 for v in e.tolist()], [-8040 * (v - 73) // 69 for v in a.tolist()],
        [-3 * (v + 5) // 6 for v in a.tolist()], [-3 * (i + 5) % 6 for i in range(80)],
    ]  # fmt: skip
    return kernel, [e, a, zeros(4, 80, dtype=I32)], {2: ints(rows)}


@case
def distances_of_narrow_numbers() -> Case:  # halide 6242
    @T.prim_func
    def kernel(X: T.Tensor((60,), "uint16"), O: T.Tensor((60,), "uint16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                wide = T.max(T.uint32(1644162364), T.cast(X[i], "uint32"))
                m = T.max(T.cast(wide, "uint16"), X[i])
                O[i] = T.if_then_else(m > T.uint16(24514), m - T.uint16(24514), T.uint16(24514) - m)

    x = [int(v) for v in torch.randint(0, 2**16, (60,))]
    wanted = [abs(24514 - max(1644162364 % 65536, v)) for v in x]
    return kernel, [ints(x, torch.uint16), zeros(60).to(torch.uint16)], {1: ints(wanted, torch.uint16)}


@case
def remainders_by_the_number_itself() -> Case:  # halide 4082
    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), Y: T.Tensor((40,), "int32"), O: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                O[0, i] = X[i] % X[i] + T.abs(X[i] // X[i] - Y[i])
                O[1, i] = T.if_then_else(T.max(Y[i], X[i]) < T.max(X[i], X[i]), 5, Y[i] // 22)
                O[2, i] = (X[i] * Y[i]) % X[i]

    x, y = counts(40, 100) - 50, whole(40, dtype=I32, most=300)
    x = torch.where(x == 0, 7, x)
    rows = torch.stack([(1 - y).abs(), y // 22, torch.zeros_like(x)])
    return kernel, [x, y, zeros(3, 40, dtype=I32)], {2: rows.int()}


@case
def hash_by_products_and_a_loaded_size() -> Case:  # taichi 6118
    @T.prim_func
    def kernel(
        P: T.Tensor((20, 3), "uint32"),
        Q: T.Tensor((3,), "uint32"),
        S: T.Tensor((1,), "uint32"),
        O: T.Tensor((2, 20), "uint32"),
    ):
        with T.Kernel(20, threads=32) as b:
            h = T.alloc_var("uint32", 0)
            for i in T.unroll(3):
                h ^= P[b, i] * Q[i]
            O[0, b] = h % S[0]
            O[1, b] = h // S[0]

    p, q, size = counts(60, 3000, I64).view(20, 3).tolist(), [1, 2654435761, 805459861], 524288
    hashes = [a[0] * q[0] % 2**32 ^ a[1] * q[1] % 2**32 ^ a[2] * q[2] % 2**32 for a in p]
    wanted = ints([[h % size for h in hashes], [h // size for h in hashes]], U32)
    args = [ints(p, U32), ints(q, U32), ints([size], U32), ints(np.zeros((2, 20)), U32)]
    return kernel, args, {3: wanted}


@case
def quotient_of_equal_numbers_as_an_integer() -> Case:  # taichi 8487
    @T.prim_func
    def kernel(O: T.Tensor((1024,), "int32")):
        with T.Kernel(4, threads=128) as b:
            for i in T.Parallel(256):
                t = T.cast(b * 256 + i + 1, "float32")
                O[b * 256 + i] = T.cast(T.abs(t) / t, "int32")

    return kernel, [zeros(1024, dtype=I32)], {0: torch.ones(1024, dtype=I32)}


@case
def generator_of_numbers_below_a_bound() -> Case:  # numba 7170
    @T.prim_func
    def kernel(S: T.Tensor((30,), "uint64"), O: T.Tensor((30,), "uint64")):
        with T.Kernel(30, threads=1) as b:
            s = T.alloc_var("uint64", S[b])
            r = T.alloc_var("uint64", 0)
            for _ in T.serial(9):
                s = s * T.uint64(6364136223846793005) + T.uint64(1442695040888963407)
                r += (s >> T.uint64(33)) % T.uint64(10000)
            O[b] = r

    seeds, wanted = [int(v) for v in torch.randint(-(2**62), 2**62, (30,))], []
    for s in seeds:
        r = 0
        for _ in range(9):
            s = (s * 6364136223846793005 + 1442695040888963407) % 2**64
            r += (s >> 33) % 10000
        wanted.append(r)
    return kernel, [ints(seeds, U64), ints([0] * 30, U64)], {1: ints(wanted, U64)}


test_reported_integers = case.test()
