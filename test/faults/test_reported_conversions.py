# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on TVM, Numba, Halide, LLVM, Taichi and Inductor, about conversions between types,
borrows and carries, rotations, saturation, and quotients that simplifiers rewrite.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, any_ints, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I16, I32, I64, U8, U16, U32, U64 = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
F32, F64 = torch.float32, torch.float64


def unary(kind: str, result: str, n: int, function):
    """A kernel that computes one number from each of n."""

    @T.prim_func
    def kernel(X: T.Tensor((n,), kind), O: T.Tensor((n,), result)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[i] = function(X[i])

    return kernel


def binary(kind: str, result: str, n: int, function):
    """A kernel that computes one number from each pair of n."""

    @T.prim_func
    def kernel(X: T.Tensor((n,), kind), Y: T.Tensor((n,), kind), O: T.Tensor((n,), result)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[i] = function(X[i], Y[i])

    return kernel


@case
def unsigned_bytes_to_double() -> Case:  # numba-cuda-mlir 290
    x = counts(40, 256, U8)
    return unary("uint8", "float64", 40, lambda x: T.cast(x, "float64")), [x, zeros(40, dtype=F64)], {1: x.double()}


@case
def large_unsigned_words_to_single() -> Case:  # numba-cuda-mlir 290
    x = any_ints(U32, 40)
    want = torch.from_numpy(np.array(x.tolist(), dtype=np.uint32).astype(np.float32))
    return unary("uint32", "float32", 40, lambda x: T.cast(x, "float32")), [x, zeros(40)], {1: want}


@case
def large_double_to_unsigned_word() -> Case:  # numba-cuda-mlir 290
    x = torch.tensor([3e9, 2.0**31, 4294967295.0, 0.9, 2147483647.5, 0.0, 1e9], dtype=F64)
    want = ints([int(v) for v in x.tolist()], U32)
    return unary("float64", "uint32", 7, lambda x: T.cast(x, "uint32")), [x, ints(np.zeros(7), U32)], {1: want}


@case
def wide_unsigned_to_double() -> Case:  # numba 5864
    x = ints([2**63, 2**64 - 1, 2**53 + 1, 0, 2**63 - 1], U64)
    want = torch.from_numpy(np.array(x.tolist(), dtype=np.uint64).astype(np.float64))
    return unary("uint64", "float64", 5, lambda x: T.cast(x, "float64")), [x, zeros(5, dtype=F64)], {1: want}


@case
def difference_with_its_borrow() -> Case:  # cuda-oxide 228
    @T.prim_func
    def kernel(X: T.Tensor((4,), "uint32"), Y: T.Tensor((4,), "uint32"), O: T.Tensor((4,), "uint32"), b: T.int32):
        with T.Kernel(1, threads=1):
            borrow = T.alloc_var("bool", b > 0)
            for n in T.serial(4):
                d = T.alloc_var("uint32", X[3 - n] - Y[3 - n])
                first = T.alloc_var("bool", X[3 - n] < Y[3 - n])
                second = T.alloc_var("bool", borrow and d == 0)
                O[3 - n] = d - T.cast(borrow, "uint32")
                borrow = first or second

    def words(v):
        return [v >> s & 2**32 - 1 for s in (96, 64, 32, 0)]

    x, y = 0x4509B8C64BF9000000000000, 0x43E88652F329000000000001
    return (
        kernel,
        [ints(words(x), U32), ints(words(y), U32), ints(np.zeros(4), U32), 1],
        {2: ints(words(x - y - 1), U32)},
    )


@case
def sum_with_its_carry_over_words() -> Case:  # numba 4950
    @T.prim_func
    def kernel(X: T.Tensor((3, 4), "uint32"), O: T.Tensor((3, 5), "uint32")):
        with T.Kernel(3, threads=1) as b:
            carry = T.alloc_var("uint32", 0)
            for n in T.serial(4):
                doubled = (X[b, n] << 1) + carry
                O[b, n] = doubled
                carry = X[b, n] >> 31
            O[b, 4] = carry

    x = any_ints(U32, 12).view(3, 4)
    want = []
    for row in x.tolist():
        v = 2 * sum(w << 32 * n for n, w in enumerate(row))
        want.append([v >> 32 * n & 2**32 - 1 for n in range(5)])
    return kernel, [x, ints(np.zeros((3, 5)), U32)], {1: ints(want, U32)}


@case
def quotient_rounded_up_of_an_argument() -> Case:  # tvm 18684
    @T.prim_func
    def kernel(N: T.Tensor((9,), "int32"), O: T.Tensor((2, 9), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(9):
                O[0, i] = T.ceildiv(N[i], 10)
                O[1, i] = T.ceildiv(n, N[i] % 7 + 1)

    n = [24, -24, 2**31 - 1, -(2**31), 0, 1, -1, 10, -9]
    want = [[-(-v // 10) for v in n], [-(-24 // (v % 7 + 1)) for v in n]]
    return kernel, [ints(n), zeros(2, 9, dtype=I32), 24], {1: ints(want)}


@case
def remainder_of_a_quotient_times_two() -> Case:  # tvm 10336
    @T.prim_func
    def kernel(O: T.Tensor((3, 100), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(100):
                O[0, i] = i % 20 // 2 * 2 % 4
                O[1, i] = i % 20 * 2 // 4 % 3
                O[2, i] = (i * 6 + 5) // 4 % 5 - (i * 6 + 5) % 4 // 3

    i = torch.arange(100, dtype=I32)
    want = torch.stack([i % 20 // 2 * 2 % 4, i % 20 * 2 // 4 % 3, (i * 6 + 5) // 4 % 5 - (i * 6 + 5) % 4 // 3])
    return kernel, [zeros(3, 100, dtype=I32)], {0: want}


@case
def ramp_whose_remainder_changes_in_the_middle() -> Case:  # tvm 8852
    @T.prim_func
    def kernel(O: T.Tensor((8, 4), "int32"), base: T.int32):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(8, 4):
                O[i, j] = (base * 8 + i * 4 + j + 3) % 8 * 100 + (base * 8 + i * 4 + j + 3) // 8

    v = 8 * -3 + torch.arange(32, dtype=I32).view(8, 4) + 3
    return kernel, [zeros(8, 4, dtype=I32), -3], {0: v % 8 * 100 + v // 8}


@case
def remainder_compared_with_zero() -> Case:  # tvm 4127
    @T.prim_func
    def kernel(X: T.Tensor((50,), "int32"), O: T.Tensor((50,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                O[i] = T.if_then_else(X[i] % 6 != 0, T.if_then_else(X[i] % -4 != 0, 3, 2), 1)

    x = whole(50, dtype=I32, most=40)
    want = torch.where(x % 6 != 0, torch.where(x % 4 != 0, 3, 2), 1).int()
    return kernel, [x, zeros(50, dtype=I32)], {1: want}


@case
def rotation_by_any_amount() -> Case:  # funnel shifts by zero
    @T.prim_func
    def kernel(X: T.Tensor((40,), "uint32"), N: T.Tensor((40,), "uint32"), O: T.Tensor((2, 40), "uint32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                n = N[i] & 31
                O[0, i] = (X[i] << n) | (X[i] >> ((32 - n) & 31))
                O[1, i] = (X[i] >> n) | (X[i] << (-n & 31))

    x, n = any_ints(U32, 40), ints(list(range(40)), U32)
    pairs = list(zip(x.tolist(), n.tolist(), strict=True))
    left = [(v << (s & 31) | v >> (32 - (s & 31))) % 2**32 if s & 31 else v for v, s in pairs]
    right = [(v >> (s & 31) | v << (32 - (s & 31))) % 2**32 if s & 31 else v for v, s in pairs]
    return kernel, [x, n, ints(np.zeros((2, 40)), U32)], {2: ints([left, right], U32)}


@case
def sign_extended_by_two_shifts() -> Case:  # InstCombine of shl and ashr
    x = any_ints(I32, 40)
    kernel = unary("int32", "int32", 40, lambda x: ((x << 19) >> 19) + ((x & 255) ^ 128) - 128)
    low = [((v & 8191) ^ 4096) - 4096 for v in x.tolist()]
    byte = [((v & 255) ^ 128) - 128 for v in x.tolist()]
    return kernel, [x, zeros(40, dtype=I32)], {1: ints([a + b for a, b in zip(low, byte, strict=True)])}


@case
def lowest_bit_and_the_bits_below() -> Case:  # x & -x
    x = any_ints(I64, 40)
    x[3] = 0
    kernel = unary("int64", "int64", 40, lambda x: (x & -x) ^ ((x - 1) & (x ^ -1)))
    want = ints([(v & -v) ^ ((v - 1) & ~v) for v in x.tolist()], I64)
    return kernel, [x, zeros(40, dtype=I64)], {1: want}


@case
def absolute_difference_of_unsigned_bytes() -> Case:  # halide absd
    x, y = counts(60, 256, U8), counts(60, 256, U8)
    kernel = binary("uint8", "uint8", 60, lambda x, y: T.if_then_else(x > y, x - y, y - x))
    return kernel, [x, y, zeros(60, dtype=U8)], {2: (x.int() - y.int()).abs().to(U8)}


@case
def bytes_between_two_by_a_weight() -> Case:  # halide lerp
    @T.prim_func
    def kernel(
        X: T.Tensor((50,), "uint8"), Y: T.Tensor((50,), "uint8"), W: T.Tensor((50,), "uint8"),
        O: T.Tensor((50,), "uint8"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                w = T.cast(W[i], "int32")
                O[i] = T.cast((T.cast(X[i], "int32") * (255 - w) + T.cast(Y[i], "int32") * w + 127) // 255, "uint8")

    x, y, w = (counts(50, 256, U8) for _ in range(3))
    w[0], w[1] = 0, 255
    want = (x.int() * (255 - w.int()) + y.int() * w.int() + 127) // 255
    return kernel, [x, y, w, zeros(50, dtype=U8)], {3: want.to(U8)}


@case
def shift_rounded_to_the_nearest() -> Case:  # halide rounding_shift_right
    x = any_ints(I16, 60)
    kernel = unary("int16", "int16", 60, lambda x: T.cast((T.cast(x, "int32") + 8) >> 4, "int16"))
    return kernel, [x, zeros(60, dtype=I16)], {1: ((x.int() + 8) >> 4).to(I16)}


@case
def average_of_signed_numbers_without_a_wider_type() -> Case:  # halide halving_add
    x, y = any_ints(I32, 60), any_ints(I32, 60).flip(0)
    kernel = binary("int32", "int32", 60, lambda x, y: (x & y) + ((x ^ y) >> 1))
    return kernel, [x, y, zeros(60, dtype=I32)], {2: ((x.long() + y.long()) >> 1).int()}


@case
def negative_least_number_and_its_absolute_value() -> Case:  # numba 8454: abs of the least number
    x = any_ints(I8, 30)
    kernel = unary("int8", "int8", 30, lambda x: T.if_then_else(x < 0, -x, x))
    want = ints([abs(v) for v in x.tolist()], I8)
    return kernel, [x, zeros(30, dtype=I8)], {1: want}


@case
def truth_of_bits_beyond_the_lowest() -> Case:  # triton: stores of i1
    x = ints([0, 1, 2, 256, -1, -256, 65536, 2**31 - 1])
    kernel = unary("int32", "bool", 8, lambda x: T.cast(x, "bool"))
    return kernel, [x, zeros(8, dtype=torch.bool)], {1: x != 0}


@case
def truth_of_small_floats() -> Case:  # casts to bool through an integer
    x = torch.tensor([0.0, -0.0, 0.25, -0.5, 1e-40, float("nan"), float("inf"), 256.0])
    kernel = unary("float32", "bool", 8, lambda x: T.cast(x, "bool"))
    return kernel, [x, zeros(8, dtype=torch.bool)], {1: x != 0}


@case
def comparisons_of_mixed_signs() -> Case:  # numba: int64 against uint64
    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), Y: T.Tensor((40,), "uint32"), O: T.Tensor((40,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                x, y = T.cast(X[i], "int64"), T.cast(Y[i], "int64")
                O[i] = T.cast(x < y, "int32") * 2 + T.cast(T.cast(X[i], "uint32") < Y[i], "int32")

    x, y = any_ints(I32, 40), any_ints(U32, 40)
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return kernel, [x, y, zeros(40, dtype=I32)], {2: ints([2 * (a < b) + (a % 2**32 < b) for a, b in pairs])}


@case
def halves_of_numbers_of_double_width() -> Case:  # multiply-high by parts
    @T.prim_func
    def kernel(X: T.Tensor((30,), "uint64"), Y: T.Tensor((30,), "uint64"), O: T.Tensor((30,), "uint64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(30):
                a, b = X[i] & T.uint64(2**32 - 1), X[i] >> 32
                c, d = Y[i] & T.uint64(2**32 - 1), Y[i] >> 32
                middle = b * c + ((a * c) >> 32)
                other = a * d + (middle & T.uint64(2**32 - 1))
                O[i] = b * d + (middle >> 32) + (other >> 32)

    x, y = any_ints(I64, 30).view(U64), any_ints(I64, 30).flip(0).contiguous().view(U64)
    want = [a * b >> 64 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return kernel, [x, y, ints([0] * 30, U64)], {2: ints(want, U64)}


@case
def sums_of_bits_by_masks() -> Case:  # population counts
    def count(x):
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24

    x = any_ints(U32, 40)
    want = ints([bin(v).count("1") for v in x.tolist()], U32)
    return unary("uint32", "uint32", 40, count), [x, ints([0] * 40, U32)], {1: want}


@case
def single_precision_of_the_nearest_integers() -> Case:  # round trips of 2^24 and its neighbours
    x = ints([2**24 + d for d in range(-4, 5)] + [-(2**24) - 1, 2**31 - 1, -(2**31)])
    kernel = unary("int32", "int64", 12, lambda x: T.cast(T.cast(x, "float32"), "int64"))
    want = torch.from_numpy(np.array(x.tolist(), dtype=np.int32).astype(np.float32).astype(np.int64))
    return kernel, [x, zeros(12, dtype=I64)], {1: want}


@case
def signs_of_zeros_through_products_and_choices() -> Case:  # fneg and select of signed zeros
    @T.prim_func
    def kernel(X: T.Tensor((6,), "float32"), O: T.Tensor((4, 6), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(6):
                O[0, i] = -X[i]
                O[1, i] = X[i] * -1.0
                O[2, i] = 0.0 - X[i]
                O[3, i] = T.if_then_else(X[i] < 0.0, 0.0 - X[i], X[i]) + -0.0

    x = torch.tensor([0.0, -0.0, 1.0, -2.0, float("inf"), -float("inf")])
    want = torch.stack([-x, x * -1, 0 - x, torch.where(x < 0, 0 - x, x) + -0.0])
    return kernel, [x.clone(), zeros(4, 6)], {1: want}


@case
def both_orders_of_a_comparison_with_nan() -> Case:  # negated comparisons
    @T.prim_func
    def kernel(X: T.Tensor((9,), "float32"), Y: T.Tensor((9,), "float32"), O: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(9):
                less, more = X[i] < Y[i], X[i] >= Y[i]
                O[i] = T.cast(less, "int32") + 2 * T.cast(more, "int32") + 4 * T.cast(not less, "int32")

    values = [float("nan"), 0.0, 1.0]
    x = torch.tensor([a for a in values for _ in values])
    y = torch.tensor([b for _ in values for b in values])
    return kernel, [x, y, zeros(9, dtype=I32)], {2: ((x < y).int() + 2 * (x >= y).int() + 4 * (~(x < y)).int())}


@case
def window_reflected_and_repeated_at_both_ends() -> Case:  # halide boundary conditions
    @T.prim_func
    def kernel(X: T.Tensor((7,), "int32"), O: T.Tensor((2, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                k = (i - 17) % 12
                O[0, i] = X[T.min(k, 12 - k)]
                O[1, i] = X[T.max(0, T.min(6, i - 17))]

    x = whole(7, dtype=I32)
    i = np.arange(40) - 17
    k = i % 12
    want = np.stack([x.numpy()[np.minimum(k, 12 - k)], x.numpy()[np.clip(i, 0, 6)]])
    return kernel, [x, zeros(2, 40, dtype=I32)], {1: torch.from_numpy(want)}


@case
def places_between_sorted_edges() -> Case:  # inductor bucketize
    @T.prim_func
    def kernel(X: T.Tensor((50,), "float32"), E: T.Tensor((6,), "float32"), O: T.Tensor((2, 50), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                left, right = T.alloc_var("int32", 0), T.alloc_var("int32", 0)
                for k in T.serial(6):
                    left += T.cast(E[k] < X[i], "int32")
                    right += T.cast(E[k] <= X[i], "int32")
                O[0, i] = left
                O[1, i] = right

    x, e = whole(50), torch.tensor([-3.0, -1.0, 0.0, 0.0, 2.0, 4.0])
    want = torch.stack([torch.bucketize(x, e), torch.bucketize(x, e, right=True)]).int()
    return kernel, [x, e, zeros(2, 50, dtype=I32)], {2: want}


@case
def roll_and_flip_of_rows() -> Case:  # inductor's negative indices
    @T.prim_func
    def kernel(X: T.Tensor((5, 33), "int32"), O: T.Tensor((2, 5, 33), "int32"), by: T.int32):
        with T.Kernel(5, threads=64) as b:
            for i in T.Parallel(33):
                O[0, b, i] = X[b, (i - by) % 33]
                O[1, b, 32 - i] = X[4 - b, i]

    x = whole(5, 33, dtype=I32)
    return kernel, [x, zeros(2, 5, 33, dtype=I32), -40], {1: torch.stack([x.roll(-40, 1), x.flip(0, 1)])}


@case
def products_over_rows_that_wrap() -> Case:  # inductor cumprod of integers
    @T.prim_func
    def kernel(X: T.Tensor((4, 30), "int32"), O: T.Tensor((4, 30), "int32")):
        with T.Kernel(4, threads=32) as b:
            product = T.alloc_var("int32", 1)
            for i in T.serial(30):
                product *= X[b, i]
                O[b, i] = product

    x = torch.randint(1, 20, (4, 30), dtype=I32)
    want = []
    for row in x.tolist():
        p = 1
        want.append([p := p * v for v in row])
    return kernel, [x, zeros(4, 30, dtype=I32)], {1: ints(want)}


@case
def quotients_floored_and_truncated_of_all_signs() -> Case:  # inductor div with rounding modes
    @T.prim_func
    def kernel(X: T.Tensor((60,), "int32"), Y: T.Tensor((60,), "int32"), O: T.Tensor((4, 60), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                O[0, i] = X[i] // Y[i]
                O[1, i] = X[i] % Y[i]
                O[2, i] = T.truncdiv(X[i], Y[i])
                O[3, i] = T.truncmod(X[i], Y[i])

    x, y = whole(60, dtype=I32, most=50), whole(60, dtype=I32, most=7)
    y[y == 0] = -1
    want = [x // y, x % y, torch.div(x, y, rounding_mode="trunc"), torch.fmod(x, y)]
    return kernel, [x, y, zeros(4, 60, dtype=I32)], {2: torch.stack(want)}


@case
def mean_and_variance_of_one_and_of_equal_numbers() -> Case:  # inductor's welford of one element
    @T.prim_func
    def kernel(X: T.Tensor((3, 32), "float32"), N: T.Tensor((3,), "int32"), O: T.Tensor((3, 2), "float32")):
        with T.Kernel(3, threads=32) as b:
            mean, square = T.alloc_var("float32", 0.0), T.alloc_var("float32", 0.0)
            for i in T.serial(N[b]):
                delta = T.alloc_var("float32", X[b, i] - mean)
                mean = mean + delta / T.cast(i + 1, "float32")
                square = square + delta * (X[b, i] - mean)
            O[b, 0] = mean
            O[b, 1] = square

    x = torch.full((3, 32), 3.0)
    x[0, 0], x[1, :2] = -5.0, torch.tensor([1.0, 3.0])
    return kernel, [x, ints([1, 2, 32]), zeros(3, 2)], {2: torch.tensor([[-5.0, 0.0], [2.0, 2.0], [3.0, 0.0]])}


test_reported_conversions = case.test()
