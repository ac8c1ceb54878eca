# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on TileLang, Triton, TVM, Halide, Taichi and Numba: values that loops carry, folded
quotients, tiles that several operations share.

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
def rows_packed_behind_each_other() -> Case:  # triton 11378
    @T.prim_func
    def kernel(
        L: T.Tensor((6,), "int32"), X: T.Tensor((6, 10), "float32"), O: T.Tensor((60,), "float32"),
        S: T.Tensor((7,), "int32"), n: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            at = T.alloc_var("int32", 0)
            for t in T.serial(n):
                S[t] = at
                for i in T.Parallel(10):
                    if i < L[t]:
                        O[at + i] = X[t, i]
                at += L[t]
            S[n] = at

    lengths, x = counts(6, 11), whole(6, 10)
    packed = torch.cat([x[t, : lengths[t]] for t in range(6)])
    starts = torch.cat([torch.zeros(1, dtype=I64), lengths.cumsum(0)]).int()
    args = [lengths, x, zeros(60), zeros(7, dtype=I32), 6]
    return kernel, args, {2: torch.cat([packed, zeros(60 - len(packed))]), 3: starts}


@case
def choice_repeated_by_unrolling() -> Case:  # halide 1697
    @T.prim_func
    def kernel(X: T.Tensor((20,), "int32"), O: T.Tensor((20,), "int32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((20,), "int32")
            T.copy(X, f)
            for _ in T.unroll(5):
                for i in T.Parallel(20):
                    f[i] = T.if_then_else(f[i] > 7, f[i] - 1, f[i])
            T.copy(f, O)

    x = counts(20, 20)
    return kernel, [x, zeros(20, dtype=I32)], {1: torch.where(x > 7, (x - 5).clamp(min=7), x)}


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
def names_of_a_macro_inside_another() -> Case:  # halide 4850
    @T.macro
    def inner(x):
        t = x + 1
        return t * 2

    @T.macro
    def outer(x):
        t = x * 10
        u = inner(t)
        return u + t

    @T.prim_func
    def kernel(O: T.Tensor((30,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(30):
                t = i + 100
                u = outer(i)
                O[i] = t * 1000 + u

    i = torch.arange(30)
    return kernel, [zeros(30, dtype=I32)], {0: ((i + 100) * 1000 + (i * 10 + 1) * 2 + i * 10).int()}


def is_prime(n: int) -> bool:
    """Whether no smaller number but one divides a number."""
    return n > 1 and all(n % k for k in range(2, n))


@case
def primes_by_a_loop_with_a_break() -> Case:  # taichi 5935
    @T.prim_func
    def kernel(C: T.Tensor((1,), "int32"), O: T.Tensor((120,), "int32")):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(30):
                n = b * 30 + i
                prime, k = T.alloc_var("bool", True), T.alloc_var("int32", 2)
                while k * k <= n:
                    if n % k == 0:
                        prime = False
                        break
                    k += 1
                if prime and n > 1:
                    T.atomic_add(C[0], 1)
                    O[n] = k

    def root(n):
        k = 2
        while k * k <= n:
            k += 1
        return k

    wanted = [root(n) if is_prime(n) else 0 for n in range(120)]
    args = [zeros(1, dtype=I32), zeros(120, dtype=I32)]
    return kernel, args, {0: ints([sum(v > 0 for v in wanted)]), 1: ints(wanted)}


@case
def primes_up_to_a_root() -> Case:  # taichi 6113
    @T.prim_func
    def kernel(C: T.Tensor((1,), "int32")):
        with T.Kernel(100, threads=1) as b:
            result = T.alloc_var("bool", True)
            for k in T.serial(2, T.cast(T.sqrt(T.cast(b, "float32")), "int32") + 1):
                if b % k == 0:
                    result = False
                    break
            if result and b > 1:
                T.atomic_add(C[0], b)

    return kernel, [zeros(1, dtype=I32)], {0: ints([sum(n for n in range(100) if is_prime(n))])}


@case
def variable_given_twice_around_a_condition() -> Case:  # taichi 8744
    @T.prim_func
    def kernel(
        A: T.Tensor((10, 2), "float32"), B: T.Tensor((10, 2), "float32"), O: T.Tensor((10,), "int32"), n: T.int32
    ):
        with T.Kernel(10, threads=32) as i:
            box, x0 = T.alloc_var("float32", A[i, 0]), T.alloc_var("float32", 0.0)
            x0 = box
            if i == n:
                x0 = x0 + 1.0
            box = B[i, 0]
            x1 = box
            O[i] = T.cast(x0 == x1, "int32") + 2 * T.cast(x0 < x1, "int32")

    a, b = whole(10, 2, most=1), whole(10, 2, most=1)
    x0, x1 = a[:, 0] + (torch.arange(10) == 7), b[:, 0]
    return kernel, [a, b, zeros(10, dtype=I32), 7], {2: ((x0 == x1).int() + 2 * (x0 < x1).int())}


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
def window_reflected_at_edges() -> Case:  # taichi 7430
    @T.prim_func
    def kernel(X: T.Tensor((3, 12, 12), "float32"), W: T.Tensor((5, 5), "float32"), O: T.Tensor((3, 6, 6), "float32")):
        with T.Kernel(3, threads=64) as b:
            f = T.alloc_fragment((6, 6), "float32")
            T.clear(f)
            for wh, ww in T.grid(5, 5):
                for oh, ow in T.Parallel(6, 6):
                    ih, iw = T.alloc_var("int32", 2 * oh + wh - 2), T.alloc_var("int32", 2 * ow + ww - 2)
                    if ih < 0:
                        ih = T.abs(ih)
                    if iw < 0:
                        iw = T.abs(iw)
                    if ih >= 12:
                        ih = 22 - ih
                    if iw >= 12:
                        iw = 22 - iw
                    f[oh, ow] += X[b, ih, iw] * W[wh, ww]
            T.copy(f, O[b, 0:6, 0:6])

    x, w = whole(3, 12, 12), whole(5, 5)
    padded = torch.nn.functional.pad(x[:, None], (2, 2, 2, 2), mode="reflect")
    return kernel, [x, w, zeros(3, 6, 6)], {2: torch.nn.functional.conv2d(padded, w[None, None], stride=2)[:, 0]}


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
def loops_from_negative_starts() -> Case:  # numba 4489
    @T.prim_func
    def kernel(X: T.Tensor((15,), "int32"), O: T.Tensor((15,), "int32"), n: T.int32):
        with T.Kernel(15, threads=32) as b:
            i = b - n
            total = T.alloc_var("int32", X[i % 15])
            for j in T.serial(-n, 5):
                total += X[j % 15] * (j + 1)
                if j > i:
                    continue
                for k in range(j, 0):
                    total += k
            O[b] = total

    def meaning(x, i, n):
        total = x[i % 15]
        for j in range(-n, 5):
            total += x[j % 15] * (j + 1)
            total += sum(range(j, 0)) if j <= i else 0
        return total

    x = whole(15, dtype=I32)
    return kernel, [x, zeros(15, dtype=I32), 10], {1: ints([meaning(x.tolist(), b - 10, 10) for b in range(15)])}


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


@case
def tiles_of_one_name_in_two_loops() -> Case:  # tvm 767
    @T.prim_func
    def kernel(O: T.Tensor((5, 2, 50), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            for i in T.serial(n):
                for j in T.serial(2):
                    a = T.alloc_shared((50,), "float32")
                    for k in T.Parallel(50):
                        a[k] = 1.0 * k + j
                    for k in T.Parallel(50):
                        O[i, j, k] = a[49 - k]
                for j in T.serial(2):
                    a = T.alloc_shared((25,), "float32")
                    for k in T.Parallel(25):
                        a[k] = 1000.0 * k + i
                    for k in T.Parallel(25):
                        O[i, j, 2 * k] += a[24 - k]

    k, j, i = torch.arange(50.0), torch.arange(2.0)[:, None], torch.arange(5.0)[:, None, None]
    wanted = ((49 - k) + j + torch.zeros(5, 1, 1)).clone()
    wanted[:, :, ::2] += 1000 * torch.arange(24.0, -1, -1) + i
    return kernel, [zeros(5, 2, 50), 5], {0: wanted}


@case
def producer_whose_split_fits_no_consumer() -> Case:  # tvm 2898
    @T.prim_func
    def kernel(A: T.Tensor((48,), "float16"), D: T.Tensor((48,), "float16")):
        with T.Kernel(2, threads=32) as b:
            c = T.alloc_shared((32,), "float16")
            for o in T.serial(4):
                for i in T.Parallel(10):
                    if o * 10 + i < 32:  # noqa: SIM102
                        if b * 32 + o * 10 + i < 48:
                            c[o * 10 + i] = A[b * 32 + o * 10 + i] + 1.0
            for i in T.Parallel(32):
                if b * 32 + i < 48:
                    D[b * 32 + i] = c[i] * 2.0

    a = whole(48, dtype=torch.float16)
    return kernel, [a, zeros(48, dtype=torch.float16)], {1: (a + 1) * 2}


@case
def loop_cut_at_a_condition_of_the_outer_index() -> Case:  # tvm 6785
    @T.prim_func
    def kernel(A: T.Tensor((36, 9), "int32"), O: T.Tensor((36, 9), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(36):
                for x in T.Parallel(9):
                    if i < 18:
                        O[i, x] = A[i, 8 - x] * 2
                    else:
                        O[i, x] = A[35 - i, x] - i

    a = whole(36, 9, dtype=I32)
    below = torch.cat([a[:18].flip(1) * 2, a[:18].flip(0) - torch.arange(18, 36)[:, None]])
    return kernel, [a, zeros(36, 9, dtype=I32)], {1: below.int()}


@case
def guard_whose_bound_is_negative() -> Case:  # facebookexperimental/tvm 6
    @T.prim_func
    def kernel(X: T.Tensor((130,), "float32"), O: T.Tensor((130,), "float32")):
        with T.Kernel(2, threads=32) as b:
            for v in T.serial(16):
                for k in T.Parallel(8):
                    if b * 128 + v * 8 + k < 130:
                        O[b * 128 + v * 8 + k] = T.max(X[b * 128 + v * 8 + k], 0.0)
                if b * 128 + v * 8 + 7 < 130:
                    O[b * 128 + v * 8 + 7] += 100.0

    x = whole(130)
    wanted = x.clamp(min=0)
    wanted[7:128:8] += 100
    return kernel, [x, zeros(130)], {1: wanted}


@case
def product_into_columns_of_a_wider_tensor() -> Case:  # pytorch 134041
    @T.prim_func
    def kernel(A: T.Tensor((37, 24), "float16"), B: T.Tensor((24, 40), "float16"), C: T.Tensor((37, 100), "float32")):
        with T.Kernel(2, threads=128) as b:
            s, t = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 40), "float16")
            c = T.alloc_fragment((32, 40), "float32")
            T.clear(c)
            T.copy(A[b * 32, 0], s)
            T.copy(B[0, 0], t)
            T.gemm(s, t, c)
            T.copy(c, C[b * 32 : b * 32 + 32, 33:73])

    a, b, c = whole(37, 24, dtype=torch.float16), whole(24, 40, dtype=torch.float16), whole(37, 100)
    wanted = c.clone()
    wanted[:, 33:73] = a.float() @ b.float()
    return kernel, [a, b, c], {2: wanted}


@case
def row_repeated_through_global_memory() -> Case:  # triton 7957
    @T.prim_func
    def kernel(A: T.Tensor((32, 48), "bool"), W: T.Tensor((32, 48), "int32"), O: T.Tensor((2, 32, 48), "int32")):
        with T.Kernel(3, 2, threads=64) as (n, m):
            row = T.alloc_fragment((16,), "int32")
            T.fill(row, m)
            for i, j in T.Parallel(16, 16):
                W[m * 16 + i, n * 16 + j] = row[j] * 10 + j
            T.sync_threads()
            for i, j in T.Parallel(16, 16):
                O[0, m * 16 + i, n * 16 + j] = W[m * 16 + i, n * 16 + 15 - j]
                O[1, m * 16 + i, n * 16 + j] = T.cast(A[m * 16 + i, n * 16 + j], "int32")

    a = torch.rand(32, 48) > 0.5
    m, j = torch.arange(32)[:, None] // 16, torch.arange(48) % 16
    wanted = {1: (m * 10 + j).int(), 2: torch.stack([m * 10 + 15 - j, a]).int()}
    return kernel, [a, zeros(32, 48, dtype=I32), zeros(2, 32, 48, dtype=I32)], wanted


@case
def product_of_two_transposes() -> Case:  # triton 1666, 1840
    @T.prim_func
    def kernel(A: T.Tensor((48, 32), "float16"), B: T.Tensor((64, 48), "float16"), C: T.Tensor((32, 64), "float32")):
        with T.Kernel(1, threads=128):
            s, t = T.alloc_shared((16, 32), "float16"), T.alloc_shared((64, 16), "float16")
            c = T.alloc_fragment((32, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[k * 16, 0], s)
                T.copy(B[0, k * 16], t)
                T.gemm(s, t, c, transpose_A=True, transpose_B=True)
            T.copy(c, C)

    a, b = whole(48, 32, dtype=torch.float16), whole(64, 48, dtype=torch.float16)
    return kernel, [a, b, zeros(32, 64)], {2: a.float().T @ b.float().T}


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
def quadratic_form_by_blocks() -> Case:  # triton 584, 375
    @T.prim_func
    def kernel(W: T.Tensor((48, 48), "float32"), X: T.Tensor((48, 20), "float32"), O: T.Tensor((20,), "float32")):
        with T.Kernel(1, threads=128):
            w, x = T.alloc_fragment((16, 16), "float32"), T.alloc_shared((16, 20), "float32")
            s, o, p = (
                T.alloc_fragment((16, 20), "float32"),
                T.alloc_fragment((20,), "float32"),
                T.alloc_fragment((20,), "float32"),
            )
            T.clear(o)
            ws = T.alloc_shared((16, 16), "float32")
            for ci in T.serial(3):
                T.clear(s)
                for cj in T.serial(ci, 3):
                    T.copy(W[ci * 16, cj * 16], w)
                    for i, j in T.Parallel(16, 16):
                        ws[i, j] = T.if_then_else(ci * 16 + i <= cj * 16 + j, w[i, j], 0.0)
                    T.copy(X[cj * 16, 0], x)
                    for k in T.serial(16):
                        for i, j in T.Parallel(16, 20):
                            s[i, j] += ws[i, k] * x[k, j]
                for i, j in T.Parallel(16, 20):
                    s[i, j] = s[i, j] * s[i, j]
                T.reduce_sum(s, p, dim=0)
                for j in T.Parallel(20):
                    o[j] += p[j]
            T.copy(o, O)

    w, x = whole(48, 48, most=2), whole(48, 20, most=2)
    return kernel, [w, x, zeros(20)], {2: (w.triu() @ x).square().sum(0)}


@case
def two_repetitions_of_one_pair() -> Case:  # bledden/triton-msl 9
    @T.prim_func
    def kernel(O: T.Tensor((2, 8), "int32")):
        with T.Kernel(1, threads=32):
            p = T.alloc_fragment((2,), "int32")
            a, b = T.alloc_shared((2, 4), "int32"), T.alloc_shared((4, 2), "int32")
            for i in T.Parallel(2):
                p[i] = 7 - 3 * i
            for i, j in T.Parallel(2, 4):
                a[i, j] = p[i]
            for i, j in T.Parallel(4, 2):
                b[i, j] = p[j]
            for i in T.Parallel(8):
                O[0, i] = a[i // 4, i % 4]
                O[1, i] = b[i // 2, i % 2]

    return kernel, [zeros(2, 8, dtype=I32)], {0: ints([[7] * 4 + [4] * 4, [7, 4] * 4])}


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


@case
def tile_first_met_by_a_short_loop() -> Case:  # tilelang 2957
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), O: T.Tensor((2, 256), "float32")):
        with T.Kernel(1, threads=256):
            f = T.alloc_fragment((256,), "float32")
            T.fill(f, 5.0)
            for i in T.Parallel(100):
                f[i] = A[i]
            for i in T.Parallel(256):
                O[0, i] = f[i] * 2.0
            for i in T.Parallel(256):
                f[i] = A[i] + 1.0
            for i in T.Parallel(100):
                O[1, i] = f[i]
            for i in T.Parallel(256):
                if i >= 100:
                    O[1, i] = f[i]

    a = whole(256)
    first = torch.cat([a[:100] * 2, torch.full((156,), 10.0)])
    return kernel, [a, zeros(2, 256)], {1: torch.stack([first, a + 1])}


@case
def operands_of_a_product_copied_away() -> Case:  # tilelang 2954
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), C: T.Tensor((64, 64), "float32"),
        P: T.Tensor((64, 32), "float16"), Q: T.Tensor((32, 64), "float16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, s = T.alloc_fragment((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            b, t = T.alloc_shared((32, 64), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(a, s)
            T.copy(b, t)
            for i, j in T.Parallel(64, 32):
                P[i, j] = s[63 - i, j]
            for i, j in T.Parallel(32, 64):
                Q[i, j] = t[i, 63 - j]
            T.copy(c, C)

    a, b = whole(64, 32, dtype=torch.float16), whole(32, 64, dtype=torch.float16)
    args = [a, b, zeros(64, 64), zeros(64, 32, dtype=torch.float16), zeros(32, 64, dtype=torch.float16)]
    return kernel, args, {2: a.float() @ b.float(), 3: a.flip(0), 4: b.flip(1)}


@case
def tile_stored_by_loops_in_order() -> Case:  # tilelang 2396
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float32"), O: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((16, 16), "float32")
            T.copy(A, f)
            for i in T.serial(16):
                for j in T.serial(16):
                    O[i, j] = f[i, j] + 1.0

    a = torch.arange(256.0).view(16, 16)
    return kernel, [a, zeros(16, 16)], {1: a + 1}


@case
def diagonal_of_a_tile() -> Case:  # tilelang 1096
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), O: T.Tensor((16, 16), "float16")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((16, 16), "float16")
            T.copy(A, f)
            for i in T.Parallel(16):
                f[i, i] = f[i, i] + 1.0
            T.copy(f, O)

    a = whole(16, 16, dtype=torch.float16)
    return kernel, [a, zeros(16, 16, dtype=torch.float16)], {1: a + torch.eye(16).half()}


test_reported_later = case.test()
