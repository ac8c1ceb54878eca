# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: loops and branches: break and continue, bounds, values that loops
carry, names that are bound again.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I32, I64 = torch.int32, torch.int64


def is_prime(n: int) -> bool:
    """Whether no smaller number but one divides a number."""
    return n > 1 and all(n % k for k in range(2, n))


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
def stores_across_continue() -> Case:
    """Taichi-dev/taichi #882: what the skipped statement stores was taken for the value of the next turn."""

    @T.prim_func
    def kernel(O: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=1) as n:
            a, b = T.alloc_var("int32", 10), T.alloc_var("int32", 0)
            for i in range(n):
                b += a
                a = i
                if i == 5:
                    continue
                a = 100
            a = 1000
            O[n] = a + b

    def meaning(n: int) -> int:
        a, b = 10, 0
        for i in range(n):
            b += a
            a = i if i == 5 else 100
        return 1000 + b

    return kernel, [torch.zeros(8).int()], {0: torch.tensor([meaning(n) for n in range(8)]).int()}


@case
def steps_of_three_from_a_loaded_start() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((90,), "int32"), starts: T.Tensor((6,), "int32"), Y: T.Tensor((6,), "int32")):
        with T.Kernel(6, threads=32) as b:
            total = T.alloc_var("int32", 0)
            for i in T.serial(starts[b], 90, 3):
                if X[i] == 3:
                    continue
                if X[i] == -3:
                    break
                total += X[i] * (i - starts[b] + 1)
            else:
                total += 1000000
            Y[b] = total

    def found(x: list[int], start: int) -> int:
        total = 0
        for i in range(start, 90, 3):
            if x[i] == -3:
                return total
            total += x[i] * (i - start + 1) * (x[i] != 3)
        return total + 1000000

    x, starts = whole(90, dtype=I32, most=3), counts(6, 100)
    x[60:] = x[60:].abs()
    rows = [found(x.tolist(), int(s)) for s in starts]
    return kernel, [x, starts, zeros(6, dtype=I32)], {2: torch.tensor(rows, dtype=I32)}


@case
def two_kernels_over_a_triangle() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((20, 20), "int32"), L: T.Tensor((20, 20), "int32"), R: T.Tensor((20,), "int32")):
        with T.Kernel(20, threads=32) as i:
            for j in T.Parallel(20):
                if j <= i:
                    L[i, j] = X[i, j]
                else:
                    L[i, j] = -L[i, j]
        with T.Kernel(20, threads=32) as i:
            total = T.alloc_var("int32", 0)
            for j in T.serial(i, 20):
                total = total + L[j, i] - L[i, j]
            R[i] = total

    x, low = whole(20, 20, dtype=I32), whole(20, 20, dtype=I32)
    made = torch.where(torch.ones(20, 20).tril().bool(), x, -low)
    rows = torch.stack([(made[i:, i] - made[i, i:]).sum() for i in range(20)]).int()
    return kernel, [x, low, zeros(20, dtype=I32)], {1: made, 2: rows}


@case
def python_in_kernels() -> Case:
    weights = [3, -1, 4]
    table = {"a": 2, "b": 5}

    @T.macro
    def add(acc, *values, scale=1):
        for v in values:
            acc += v * scale
        return acc

    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), Y: T.Tensor((4, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                t = T.alloc_var("int32", 0)
                for n, w in enumerate(weights):
                    t += w * X[(i + n) % 40]
                Y[0, i] = t
                Y[1, i] = sum([X[i] * table[name] for name in sorted(table)])
                Y[2, i] = 1 if -2 < X[i] < 3 else 0
                (a, b), c = (X[i], 1), 2
                Y[3, i] = a + b * c

    x = whole(40, dtype=I32)
    t = 3 * x - x.roll(-1) + 4 * x.roll(-2)
    return kernel, [x, zeros(4, 40, dtype=I32)], {1: torch.stack([t, 7 * x, ((x > -2) & (x < 3)).int(), x + 2])}


@case
def loops_by_hand_over_a_ragged_grid() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((19, 23), "int32"), Y: T.Tensor((23, 19), "int32")):
        with T.Kernel(T.ceildiv(23, 8), T.ceildiv(19, 8), threads=64) as (bx, by):
            s = T.alloc_shared((8, 9), "int32")
            for i, j in T.Parallel(8, 8):
                if by * 8 + i < 19 and bx * 8 + j < 23:
                    s[i, j] = X[by * 8 + i, bx * 8 + j]
            for j, i in T.Parallel(8, 8):
                if by * 8 + i < 19 and bx * 8 + j < 23:
                    Y[bx * 8 + j, by * 8 + i] = s[i, j]

    x = whole(19, 23, dtype=I32)
    return kernel, [x, zeros(23, 19, dtype=I32)], {1: x.t().contiguous()}


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


test_reported_branches = case.test()
