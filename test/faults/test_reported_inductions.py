# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on LLVM, Triton, TVM and Inductor, about loops that others turn into vectors: values
that follow from the index, the last index that fits, recurrences, stores that later statements of a turn read again.

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
I8, I16, I32, I64, U16, U32 = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32


@case
def element_stored_then_its_neighbour_then_itself() -> Case:  # llvm 63602
    @T.prim_func
    def kernel(A: T.Tensor((384,), "int32")):
        with T.Kernel(1, threads=1):
            for n in T.serial(127):
                A[3 * n + 1] = 1
                A[3 * n] = A[3 * n] & 1
                A[3 * n + 1] = A[3 * n + 1] + 1

    a = whole(384, dtype=I32)
    want = a.clone()
    want[1:381:3] = 2
    want[0:381:3] &= 1
    return kernel, [a], {0: want}


@case
def last_index_that_fits_in_an_expression() -> Case:  # llvm 219211
    @T.prim_func
    def kernel(A: T.Tensor((5, 72), "int32"), O: T.Tensor((5,), "int32")):
        with T.Kernel(5, threads=32) as b:
            found = T.alloc_var("int32", -1)
            for i in T.serial(72):
                if A[b, i] == 42:
                    found = i * 4
            O[b] = found

    a = torch.zeros(5, 72, dtype=I32)
    for row, places in enumerate(([], [1], [0, 71], [40, 3], [17])):
        a[row, places] = 42
    want = [max([4 * i for i in range(72) if r[i] == 42], default=-1) for r in a.tolist()]
    return kernel, [a, zeros(5, dtype=I32)], {1: ints(want)}


@case
def parity_kept_where_another_counter_is_zero() -> Case:  # llvm 173459
    @T.prim_func
    def kernel(S: T.Tensor((8,), "int64"), O: T.Tensor((8,), "int64"), last: T.int64):
        with T.Kernel(8, threads=1) as b:
            other, kept, k = T.alloc_var("int64", S[b]), T.alloc_var("int64", 7), T.alloc_var("int64", 0)
            while k <= last:
                if other == 0:
                    kept = k & 1
                k += 1
                other += 1
            O[b] = kept

    starts = [-3, 0, 1, -2, -5, -6, 2**63 - 3, -(2**63)]
    want = [-s & 1 if -5 <= s <= 0 else 7 for s in starts]
    return kernel, [ints(starts, I64), zeros(8, dtype=I64), 5], {1: ints(want, I64)}


@case
def count_in_a_byte_that_wraps() -> Case:  # llvm 176954
    @T.prim_func
    def kernel(A: T.Tensor((300,), "bool"), O: T.Tensor((2,), "int8")):
        with T.Kernel(1, threads=32):
            n, m = T.alloc_var("int8", 0), T.alloc_var("int8", 0)
            for i in T.serial(300):
                n += T.cast(A[i], "int8")
                if A[i]:
                    m = m + T.int8(1)
            O[0] = n
            O[1] = m

    a = torch.rand(300) < 0.7
    a[:200] = True
    count = int(a.sum())
    return kernel, [a, zeros(2, dtype=I8)], {1: ints([count, count], I8)}


@case
def short_counter_up_to_the_smaller_of_two() -> Case:  # llvm 180781
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int16"), O: T.Tensor((4, 2), "uint16")):
        with T.Kernel(4, threads=32) as b:
            bits, last = T.alloc_var("uint16", 40854), T.alloc_var("uint16", 9)
            n = T.min(T.cast(C[b], "int32"), 5)
            for i in T.serial(n):
                bits ^= T.cast(i, "uint16")
                last = T.cast(i, "uint16")
            O[b, 0] = bits
            O[b, 1] = last

    c = ints([6, 3, 0, -1], I16)
    want = []
    for n in (5, 3, 0, 0):
        bits = 40854
        for i in range(n):
            bits ^= i
        want.append([bits, n - 1 if n else 9])
    return kernel, [c, ints(np.zeros((4, 2)), U16)], {1: ints(want, U16)}


@case
def two_recurrences_that_read_the_old_values() -> Case:  # llvm 204349
    @T.prim_func
    def kernel(R: T.Tensor((12,), "float64"), S: T.Tensor((12,), "float64"), O: T.Tensor((2,), "float64")):
        with T.Kernel(1, threads=32):
            p, q = T.alloc_var("float64", 1.0), T.alloc_var("float64", 2.0)
            for i in T.serial(12):
                new = S[i] * q - R[i] * p
                other = R[i] * q + S[i] * p
                p = new
                q = other
            O[0] = p
            O[1] = q

    r, s = whole(12, dtype=torch.float64, most=3), whole(12, dtype=torch.float64, most=3)
    p, q = 1, 2
    for x, y in zip(r.tolist(), s.tolist(), strict=True):
        p, q = y * q - x * p, x * q + y * p
    return kernel, [r, s, zeros(2, dtype=torch.float64)], {2: torch.tensor([p, q], dtype=torch.float64)}


@case
def differences_to_the_element_before() -> Case:  # first-order recurrences
    @T.prim_func
    def kernel(A: T.Tensor((50,), "int32"), O: T.Tensor((50,), "int32")):
        with T.Kernel(1, threads=32):
            before = T.alloc_var("int32", 9)
            for i in T.serial(50):
                now = T.alloc_var("int32", A[i])
                O[i] = now - before
                before = now

    a = whole(50, dtype=I32, most=1000)
    return kernel, [a, zeros(50, dtype=I32)], {1: torch.diff(a, prepend=ints([9]))}


@case
def every_third_element_backwards() -> Case:  # reversed accesses with gaps
    @T.prim_func
    def kernel(A: T.Tensor((91,), "int16"), O: T.Tensor((91,), "int16")):
        with T.Kernel(1, threads=32):
            for i in T.serial(90, -1, -3):
                O[90 - i] = A[i] + T.cast(i, "int16")

    a, o = whole(91, dtype=I16), whole(91, dtype=I16)
    want = o.clone()
    for i in range(90, -1, -3):
        want[90 - i] = a[i] + i
    return kernel, [a, o], {1: want}


@case
def sums_where_a_mask_stores_too() -> Case:  # a reduction with conditional stores
    @T.prim_func
    def kernel(A: T.Tensor((70,), "int32"), O: T.Tensor((70,), "int32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_var("int32", 0)
            for i in T.serial(70):
                if A[i] > 0:
                    total += A[i]
                    O[i] = total
            S[0] = total

    a, o = whole(70, dtype=I32, most=9), whole(70, dtype=I32)
    sums = a.clamp(min=0).cumsum(0, dtype=I32)
    return kernel, [a, o, zeros(1, dtype=I32)], {1: torch.where(a > 0, sums, o), 2: sums[-1:]}


@case
def truncated_index_that_wraps() -> Case:  # inductions of narrow types
    @T.prim_func
    def kernel(A: T.Tensor((256,), "int32"), O: T.Tensor((600,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(600):
                narrow = T.cast(i * 3, "uint8")
                O[i] = A[T.cast(narrow, "int32")] + T.cast(T.cast(i, "int8"), "int32")

    a = whole(256, dtype=I32)
    i = torch.arange(600)
    return kernel, [a, zeros(600, dtype=I32)], {1: a[(3 * i) % 256] + i.to(I8).int()}


@case
def division_that_only_a_guard_allows() -> Case:  # hoisted divisions
    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), O: T.Tensor((40,), "int32"), d: T.int32, n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.serial(n):
                if d != 0:
                    O[i] = A[i] // d + n // d
                else:
                    O[i] = -A[i]

    a = whole(40, dtype=I32, most=100)
    return kernel, [a, zeros(40, dtype=I32), 0, 40], {1: -a}


@case
def minimum_and_the_place_where_it_came_last() -> Case:  # select chains of two reductions
    @T.prim_func
    def kernel(A: T.Tensor((3, 65), "int32"), O: T.Tensor((3, 3), "int32")):
        with T.Kernel(3, threads=32) as b:
            least, last, first = T.alloc_var("int32", 2**31 - 1), T.alloc_var("int32", -1), T.alloc_var("int32", -1)
            for i in T.serial(65):
                if A[b, i] < least:
                    first = i
                if A[b, i] <= least:
                    least = A[b, i]
                    last = i
            O[b, 0], O[b, 1], O[b, 2] = least, first, last

    a = whole(3, 65, dtype=I32, most=5)
    a[2] = 2**31 - 1
    want = [[min(r), r.index(min(r)) if min(r) < 2**31 - 1 else -1, 64 - r[::-1].index(min(r))] for r in a.tolist()]
    return kernel, [a, zeros(3, 3, dtype=I32)], {1: ints(want)}


@case
def running_count_of_a_mask_in_a_loop() -> Case:  # triton 2361
    @T.prim_func
    def kernel(O: T.Tensor((64,), "int64"), n: T.int32):
        with T.Kernel(1, threads=64):
            ones = T.alloc_fragment((8,), "int64")
            for k in T.serial(T.ceildiv(n, 8)):
                for i in T.Parallel(8):
                    ones[i] = T.cast(T.if_then_else(k * 8 + i < n, 1, 0), "int64")
                T.cumsum(ones)
                T.copy(ones, O[k * 8 : k * 8 + 8])

    want = torch.zeros(64, dtype=I64)
    for k in range(6):
        want[8 * k : 8 * k + 8] = torch.arange(1, 9).clamp(max=43 - 8 * k)
    return kernel, [zeros(64, dtype=I64), 43], {0: want}


@case
def discounted_sum_by_the_author() -> Case:  # triton 3485
    @T.prim_func
    def kernel(A: T.Tensor((8, 20), "float32"), O: T.Tensor((8, 20), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(20):
                total = T.alloc_var("float32", 0.0)
                for t in T.serial(8):
                    total = total * 0.5 + A[t, i]
                    O[t, i] = total

    a = whole(8, 20)
    rows, total = [], torch.zeros(20)
    for row in a:
        total = total * 0.5 + row
        rows.append(total)
    return kernel, [a, zeros(8, 20)], {1: torch.stack(rows)}


@case
def linear_recurrence_from_the_end() -> Case:  # triton 4362
    @T.prim_func
    def kernel(F: T.Tensor((33,), "float32"), X: T.Tensor((33,), "float32"), O: T.Tensor((33,), "float32")):
        with T.Kernel(1, threads=32):
            state = T.alloc_var("float32", 0.0)
            for t in T.serial(32, -1, -1):
                state = F[t] * state + X[t]
                O[t] = state

    f, x = torch.randint(-1, 2, (33,)).float(), whole(33)
    want, state = torch.zeros(33), 0.0
    for t in range(32, -1, -1):
        want[t] = state = float(f[t]) * state + float(x[t])
    return kernel, [f, x, zeros(33)], {2: want}


@case
def unswitched_condition_that_the_loop_changes() -> Case:  # loop unswitching
    @T.prim_func
    def kernel(A: T.Tensor((30,), "int32"), O: T.Tensor((30,), "int32"), start: T.int32):
        with T.Kernel(1, threads=32):
            on = T.alloc_var("bool", start > 0)
            for i in T.serial(30):
                if on:
                    O[i] = A[i]
                else:
                    O[i] = -A[i]
                if A[i] == 0:
                    on = not on

    a = whole(30, dtype=I32, most=1)
    on, want = True, []
    for x in a.tolist():
        want.append(x if on else -x)
        on = on != (x == 0)
    return kernel, [a, zeros(30, dtype=I32), 1], {1: ints(want)}


@case
def trip_count_at_the_end_of_a_type() -> Case:  # overflow of rounded-up trip counts
    @T.prim_func
    def kernel(O: T.Tensor((4,), "int32"), low: T.int32, high: T.int32):
        with T.Kernel(1, threads=32):
            n, last = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
            for i in T.serial(low, high, 1000):
                n += 1
                last = i
            O[0] = n
            O[1] = last
            m = T.alloc_var("int32", 0)
            for i in T.serial(high - 5, high):
                m += i & 1
            O[2] = m

    low, high = 2**31 - 4100, 2**31 - 1
    turns = range(low, high, 1000)
    want = [len(turns), turns[-1], sum(i & 1 for i in range(high - 5, high)), 0]
    return kernel, [zeros(4, dtype=I32), low, high], {0: ints(want)}


@case
def loop_that_stores_one_value_everywhere() -> Case:  # recognised as a fill
    @T.prim_func
    def kernel(A: T.Tensor((6, 30), "int16"), B: T.Tensor((6, 30), "float32"), n: T.int32):
        with T.Kernel(6, threads=32) as b:
            for i in T.serial(n):
                A[b, i] = T.int16(0x0102)
                B[b, n - 1 - i] = -0.0

    a, f = whole(6, 30, dtype=I16), torch.ones(6, 30)
    wa, wf = a.clone(), f.clone()
    wa[:, :17], wf[:, :17] = 0x0102, -0.0
    return kernel, [a, f, 17], {0: wa, 1: wf}


@case
def copy_of_a_row_onto_the_next() -> Case:  # recognised as a copy, though each row reads the one before
    @T.prim_func
    def kernel(A: T.Tensor((9, 40), "int32")):
        with T.Kernel(1, threads=64):
            for r in T.serial(8):
                for i in T.Parallel(40):
                    A[r + 1, i] = A[r, i] + 1

    a = whole(9, 40, dtype=I32)
    return kernel, [a], {0: a[0] + torch.arange(9, dtype=I32)[:, None]}


@case
def exit_by_the_value_found_or_the_end() -> Case:  # early exits in vectors
    @T.prim_func
    def kernel(A: T.Tensor((6, 33), "int32"), O: T.Tensor((6, 2), "int32")):
        with T.Kernel(6, threads=32) as b:
            total, at = T.alloc_var("int32", 0), T.alloc_var("int32", 33)
            for i in T.serial(33):
                if A[b, i] == 7:
                    at = i
                    break
                total += A[b, i]
            O[b, 0] = at
            O[b, 1] = total

    a = counts(6 * 33, 7).view(6, 33)
    for row, place in enumerate((0, 5, 32, 16)):
        a[row, place] = 7
    want = []
    for r in a.tolist():
        at = r.index(7) if 7 in r else 33
        want.append([at, sum(r[:at])])
    return kernel, [a, zeros(6, 2, dtype=I32)], {1: ints(want)}


@case
def sum_of_absolute_differences_of_bytes() -> Case:  # widened reductions
    @T.prim_func
    def kernel(X: T.Tensor((65,), "uint8"), Y: T.Tensor((65,), "uint8"), O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            total, wrapped = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
            for i in T.serial(65):
                difference = T.cast(X[i], "int32") - T.cast(Y[i], "int32")
                total += T.if_then_else(difference < 0, -difference, difference)
                wrapped += T.cast(X[i] - Y[i], "int32")
            O[0] = total
            O[1] = wrapped

    x, y = counts(65, 256, torch.uint8), counts(65, 256, torch.uint8)
    d = x.int() - y.int()
    want = torch.stack([d.abs().sum(), (d % 256).sum()]).int()
    return kernel, [x, y, zeros(2, dtype=I32)], {2: want}


@case
def dot_products_of_signed_and_unsigned_bytes() -> Case:  # partial reductions
    @T.prim_func
    def kernel(X: T.Tensor((70,), "uint8"), Y: T.Tensor((70,), "int8"), O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            products = T.alloc_fragment((70,), "int32")
            total = T.alloc_fragment((1,), "int32")
            for i in T.Parallel(70):
                products[i] = T.cast(X[i], "int32") * T.cast(Y[i], "int32")
            T.reduce_sum(products, total)
            T.copy(total, O)

    x, y = counts(70, 256, torch.uint8), ints((counts(70, 256) - 128).tolist(), I8)
    x[0], y[0] = 255, -128
    return kernel, [x, y, zeros(1, dtype=I32)], {2: (x.int() * y.int()).sum().int().view(1)}


@case
def two_counters_of_which_one_jumps() -> Case:  # inductions that are none
    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), O: T.Tensor((40,), "int32"), C: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            j = T.alloc_var("int32", 0)
            for i in T.serial(40):
                O[j] = A[i]
                j += 1
                if A[i] < 0:
                    j -= 1
            C[0] = j

    a, o = whole(40, dtype=I32), whole(40, dtype=I32)
    want, j = o.clone(), 0
    for x in a.tolist():
        want[j] = x
        j += x >= 0
    return kernel, [a, o, zeros(1, dtype=I32)], {1: want, 2: ints([j])}


@case
def peeled_first_turn_and_last_turn() -> Case:  # peeling
    @T.prim_func
    def kernel(A: T.Tensor((5, 20), "int32"), O: T.Tensor((5,), "int32"), n: T.int32):
        with T.Kernel(5, threads=32) as b:
            total = T.alloc_var("int32", 0)
            for i in T.serial(n):
                if i == 0:
                    total = A[b, i]
                elif i == n - 1:
                    total = total * 2 - A[b, i]
                else:
                    total += A[b, i]
            O[b] = total

    a = whole(5, 20, dtype=I32)
    return kernel, [a, zeros(5, dtype=I32), 14], {1: 2 * a[:, :13].sum(1, dtype=I32) - a[:, 13]}


@case
def wide_numbers_from_a_narrow_range() -> Case:  # inductor 175966
    @T.prim_func
    def kernel(O: T.Tensor((3, 11), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(11):
                O[0, i] = T.cast(i, "int64") * 1000000000
                O[1, i] = T.int64(1000000000) * i
                O[2, i] = T.cast(i, "int64") << 40

    i = torch.arange(11)
    return kernel, [zeros(3, 11, dtype=I64)], {0: torch.stack([i * 10**9, i * 10**9, i << 40])}


test_reported_inductions = case.test()
