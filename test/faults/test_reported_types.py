# SPDX-License-Identifier: Apache-2.0
"""Programs after reported kinds of silent faults in types, literals, copies, products and atomics.

Each is written anew for our language, and compared with what torch or plain Python makes of it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole, zeros

import torch_tile.language as T

case = Cases()


# -- types, literals and bits ------------------------------------------------------------------------------------------


@case
def sums_of_mixed_integers() -> Case:
    """uint8 plus int8 neither wraps at 256 nor takes the sign of one of them."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "uint8"), B: T.Tensor((64,), "int8"), C: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                C[0, i] = T.cast(A[i], "int32") + B[i]
                C[1, i] = T.cast(A[i], "int32") * T.cast(B[i], "int32")
                C[2, i] = T.cast(A[i] + A[i], "int32")

    a, b = torch.randint(0, 256, (64,)).to(torch.uint8), torch.randint(-128, 128, (64,)).to(torch.int8)
    rows = [a.int() + b.int(), a.int() * b.int(), (a + a).int()]
    return kernel, [a, b, zeros(3, 64).int()], {2: torch.stack(rows)}


@case
def comparisons_of_unsigned_numbers() -> Case:
    """Numbers from 2**31 on are not negative."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "uint32"), B: T.Tensor((40,), "uint32"), C: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                C[0, i] = T.if_then_else(A[i] < B[i], 1, 0)
                C[1, i] = T.cast(T.max(A[i], B[i]) >> 1, "int32")
                C[2, i] = T.cast(A[i] // 7, "int32")

    a, b = (torch.randint(0, 2**32, (40,)) for _ in range(2))
    wanted = torch.stack([(a < b).int(), (torch.maximum(a, b) >> 1).int(), (a // 7).int()])
    return kernel, [a.to(torch.uint32), b.to(torch.uint32), zeros(3, 40).int()], {2: wanted}


@case
def arithmetic_shift_of_negative_numbers() -> Case:
    """`>>` keeps the sign of signed types, and fills unsigned ones with zeros."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int16"), B: T.Tensor((2, 40), "int16"), C: T.Tensor((40,), "uint16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                B[0, i] = A[i] >> 3
                B[1, i] = A[i] << 5
                C[i] = T.cast(A[i], "uint16") >> 3

    a = torch.randint(-(2**15), 2**15, (40,)).to(torch.int16)
    rows = torch.stack([a >> 3, (a.int() << 5).to(torch.int16)])
    logical = ((a.int() & 0xFFFF) >> 3).to(torch.uint16)
    return kernel, [a, torch.zeros_like(rows), torch.zeros_like(logical)], {1: rows, 2: logical}


@case
def least_number_of_a_type() -> Case:
    """The least int32 as a literal, negated, as an absolute value and divided."""

    @T.prim_func
    def kernel(A: T.Tensor((3,), "int32"), B: T.Tensor((4, 3), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(3):
                B[0, i] = -A[i]
                B[1, i] = T.abs(A[i])
                B[2, i] = T.if_then_else(A[i] == -2147483648, 7, 8)
                B[3, i] = A[i] // 2 - A[i] % 1000

    a = torch.tensor([-(2**31), 2**31 - 1, -(2**31) + 1]).int()
    rows = [-a, a.abs(), torch.where(a == -(2**31), 7, 8).int(), a // 2 - a % 1000]
    return kernel, [a, zeros(4, 3).int()], {1: torch.stack(rows)}


@case
def literal_beyond_single_precision() -> Case:
    """A double keeps 2**53 + 1 apart, and 0.1 has its own digits."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float64"), B: T.Tensor((2, 4), "float64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                B[0, i] = A[i] + 9007199254740992.0
                B[1, i] = A[i] * 0.1

    a = torch.tensor([2.0, 4.0, -2.0, 1e-30], dtype=torch.float64)
    return kernel, [a, torch.zeros(2, 4).double()], {1: torch.stack([a + 2.0**53, a * 0.1])}


@case
def rounding_of_halves_to_even() -> Case:
    """float32 becomes bfloat16 and float16 by nearest even, ties and overflow included."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "bfloat16"), C: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[i] = A[i]
                C[i] = A[i]

    lower = torch.tensor([0x8000, 0x7FFF, 0x8001, 0]).repeat(16).int()
    bits = torch.randint(0, 2**15, (64,), dtype=torch.int32) << 16 | lower
    a = bits.view(torch.float32)
    a = torch.where(a.isfinite(), a, 65520.0)
    return kernel, [a, zeros(64).bfloat16(), zeros(64).half()], {1: a.bfloat16(), 2: a.half()}


@case
def denormal_halves() -> Case:
    """The least numbers of float16 are kept and multiplied, not flushed."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float16"), B: T.Tensor((64,), "float16"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[i] = A[i] * 0.5
                C[i] = T.cast(A[i], "float32") * 1024.0

    a = torch.randint(0, 2048, (64,)).to(torch.int16).view(torch.float16)
    return kernel, [a, zeros(64).half(), zeros(64)], {1: a * 0.5, 2: a.float() * 1024}


@case
def signed_zeros_and_infinities() -> Case:
    """Products and quotients keep signs of zeros; 0 * inf is NaN."""

    @T.prim_func
    def kernel(A: T.Tensor((6,), "float32"), B: T.Tensor((6,), "float32"), C: T.Tensor((4, 6), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(6):
                C[0, i] = A[i] * B[i]
                C[1, i] = A[i] / B[i]
                C[2, i] = A[i] + 0.0
                C[3, i] = 0.0 - A[i]

    inf = float("inf")
    a, b = torch.tensor([0.0, -0.0, inf, -inf, 1.0, -1.0]), torch.tensor([-1.0, 1.0, 0.0, -inf, -0.0, inf])
    return kernel, [a, b, zeros(4, 6)], {2: torch.stack([a * b, a / b, a + 0.0, 0.0 - a])}


@case
def comparisons_with_nan() -> Case:
    """`!=` holds, all other comparisons do not, and `not (x < y)` is not `x >= y`."""

    @T.prim_func
    def kernel(A: T.Tensor((5,), "float32"), B: T.Tensor((5,), "float32"), C: T.Tensor((5, 5), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(5):
                C[0, i] = T.if_then_else(A[i] < B[i], 1, 0)
                C[1, i] = T.if_then_else(A[i] >= B[i], 1, 0)
                C[2, i] = T.if_then_else(A[i] != B[i], 1, 0)
                C[3, i] = T.if_then_else(T.Not(A[i] < B[i]), 1, 0)
                C[4, i] = T.if_then_else(T.Not(A[i] == B[i]), 1, 0)

    nan = float("nan")
    a, b = torch.tensor([nan, 1.0, nan, 2.0, -1.0]), torch.tensor([1.0, nan, nan, 2.0, 1.0])
    rows = [a < b, a >= b, a != b, ~(a < b), ~(a == b)]
    return kernel, [a, b, zeros(5, 5).int()], {2: torch.stack(rows).int()}


@case
def sum_that_must_not_be_reordered() -> Case:
    """(a + b) - a is not b in floating point."""

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32"), C: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                C[0, i] = (A[i] + B[i]) - A[i]
                C[1, i] = A[i] * B[i] - A[i] * B[i]

    a, b = torch.randn(32) * 1e6, torch.randn(32)
    return kernel, [a, b, zeros(2, 32)], {2: torch.stack([(a + b) - a, torch.zeros(32)])}


@case
def truth_values_as_numbers() -> Case:
    """Truth values are added, multiplied and chosen as 0 and 1."""

    @T.prim_func
    def kernel(
        A: T.Tensor((40,), "bool"), B: T.Tensor((40,), "bool"), C: T.Tensor((3, 40), "int32"),
        D: T.Tensor((40,), "bool"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                C[0, i] = T.cast(A[i], "int32") + T.cast(B[i], "int32")
                C[1, i] = T.if_then_else(A[i] and T.Not(B[i]), 5, 6)
                C[2, i] = T.if_then_else(A[i] == B[i], 1, 0)
                D[i] = A[i] or B[i]

    a, b = torch.rand(40) > 0.5, torch.rand(40) > 0.5
    rows = [a.int() + b.int(), torch.where(a & ~b, 5, 6).int(), (a == b).int()]
    return kernel, [a, b, zeros(3, 40).int(), zeros(40).bool()], {2: torch.stack(rows), 3: a | b}


@case
def count_of_bits() -> Case:
    """popcount and clz of negative and unsigned numbers."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "uint32"), B: T.Tensor((2, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                B[0, i] = T.popcount(A[i])
                B[1, i] = T.clz(A[i])

    a = torch.randint(0, 2**32, (40,)) >> torch.randint(0, 33, (40,))
    rows = [[x.bit_count() for x in a.tolist()], [32 - x.bit_length() for x in a.tolist()]]
    return kernel, [a.to(torch.uint32), zeros(2, 40).int()], {1: torch.tensor(rows).int()}


@case
def bits_of_floats() -> Case:
    """The exponent of a float from its bits, and back."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "float32"), B: T.Tensor((40,), "int32"), C: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                B[i] = ((T.reinterpret(A[i], "int32") >> 23) & 255) - 127
                C[i] = T.reinterpret(T.reinterpret(A[i], "int32") ^ -2147483648, "float32")

    a = torch.randn(40) * 1000
    return kernel, [a, zeros(40).int(), zeros(40)], {1: torch.frexp(a)[1] - 1, 2: -a}


@case
def conversions_through_narrow_types() -> Case:
    """int32 to int8 and back wraps, float to uint8 does not go through int8."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), F: T.Tensor((40,), "float32"), B: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                B[0, i] = T.cast(T.cast(A[i], "int8"), "int32")
                B[1, i] = T.cast(T.cast(F[i], "uint8"), "int32")
                B[2, i] = T.cast(T.cast(A[i], "uint16"), "int32")

    a, f = torch.randint(-(2**20), 2**20, (40,)).int(), torch.rand(40) * 255
    rows = [a.to(torch.int8).int(), f.to(torch.uint8).int(), a & 0xFFFF]
    return kernel, [a, f, zeros(3, 40).int()], {2: torch.stack(rows)}


@case
def wide_product_of_narrow_operands() -> Case:
    """Two int32 are multiplied in 64 bits where one is widened first."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "int32"), B: T.Tensor((40,), "int32"), C: T.Tensor((2, 40), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                C[0, i] = T.cast(A[i], "int64") * B[i]
                C[1, i] = T.cast(A[i], "int64") << 20

    a, b = (torch.randint(-(2**31), 2**31, (40,)).int() for _ in range(2))
    return kernel, [a, b, zeros(2, 40).long()], {2: torch.stack([a.long() * b, a.long() << 20])}


@case
def quotients_by_powers_of_two() -> Case:
    """`x // 8` of negative numbers is a shift, `x % 8` a mask; truncation is neither."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                B[0, i] = A[i] // 8
                B[1, i] = A[i] % 8
                B[2, i] = T.truncdiv(A[i], 8)
                B[3, i] = T.truncmod(A[i], 8)

    a = torch.randint(-100, 100, (64,)).int()
    rows = [a // 8, a % 8, torch.div(a, 8, rounding_mode="trunc"), torch.fmod(a, 8)]
    return kernel, [a, zeros(4, 64).int()], {1: torch.stack(rows)}


@case
def quotients_by_negative_divisors() -> Case:
    """Divisors that only the data tells, of both signs."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int64"), B: T.Tensor((64,), "int64"), C: T.Tensor((2, 64), "int64"), n: T.int64):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                C[0, i] = A[i] // B[i] + A[i] % B[i]
                C[1, i] = (A[i] - n) // n

    a, b = torch.randint(-(2**40), 2**40, (64,)), torch.randint(1, 99, (64,)) * torch.tensor([1, -1]).repeat(32)
    return kernel, [a, b, zeros(2, 64).long(), -7], {2: torch.stack([a // b + a % b, (a + 7) // -7])}


# -- copies, products, atomics, several kernels ------------------------------------------------------------------------


@case
def copies_of_padded_rows() -> Case:
    """TileLang #2581: a part of a shared tile whose rows are longer than the part."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 24), "float32"), B: T.Tensor((16, 24), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((16, 40), "float32")
            T.fill(s, 9.0)
            T.copy(A, s[0:16, 3:27])
            T.copy(s[0:16, 3:27], B)

    a = whole(16, 24)
    return kernel, [a, zeros(16, 24)], {1: a}


@case
def copy_by_few_threads() -> Case:
    """TileLang #2562: blocks of fewer threads than a warp."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 64), "float32"), B: T.Tensor((5, 64), "float32")):
        with T.Kernel(5, threads=24) as b:
            s = T.alloc_shared((64,), "float32")
            T.copy(A[b, 0:64], s)
            for i in T.Parallel(64):
                s[i] = s[i] * 2.0
            T.copy(s, B[b, 0:64])

    a = whole(5, 64)
    return kernel, [a, zeros(5, 64)], {1: 2 * a}


@case
def copy_of_one_element() -> Case:
    """TileLang #1150: dimensions of one element."""

    @T.prim_func
    def kernel(A: T.Tensor((1, 3, 5, 1), "int32"), B: T.Tensor((1, 3, 5, 1), "int32")):
        with T.Kernel(5, 3, threads=64) as (x, y):
            s = T.alloc_shared((1,), "int32")
            T.copy(A[0, y, x, 0:1], s)
            T.copy(s, B[0, y, x, 0:1])

    a = whole(1, 3, 5, 1, dtype=torch.int32, most=99)
    return kernel, [a, torch.zeros_like(a)], {1: a}


@case
def copy_that_converts() -> Case:
    """A copy between types, through shared memory and a fragment."""

    @T.prim_func
    def kernel(A: T.Tensor((9, 33), "float32"), B: T.Tensor((9, 33), "bfloat16"), C: T.Tensor((9, 33), "int8")):
        with T.Kernel(1, threads=32):
            s, f = T.alloc_shared((9, 33), "bfloat16"), T.alloc_fragment((9, 33), "int8")
            T.copy(A, s)
            T.copy(s, B)
            T.copy(s, f)
            T.copy(f, C)

    a = torch.randn(9, 33) * 30
    half = a.bfloat16()
    return kernel, [a, torch.zeros_like(half), zeros(9, 33).to(torch.int8)], {1: half, 2: half.to(torch.int8)}


@case
def persistent_tiles_that_no_group_divides() -> Case:
    """TileLang #2433: every tile is taken once."""

    @T.prim_func
    def kernel(B: T.Tensor((5, 11), "int32")):
        with T.Kernel(6, threads=32) as b:
            for x, y in T.Persistent([5, 11], 6, b):
                T.atomic_add(B[x, y], x * 11 + y + 1)

    return kernel, [zeros(5, 11).int()], {0: torch.arange(1, 56).view(5, 11).int()}


@case
def atomics_of_all_to_one() -> Case:
    """All threads of all blocks update few elements."""

    @T.prim_func
    def kernel(
        A: T.Tensor((96,), "int32"), B: T.Tensor((3,), "int32"), C: T.Tensor((1,), "int32"), D: T.Tensor((1,), "int32")
    ):
        with T.Kernel(3, threads=32) as b:
            for i in T.Parallel(32):
                T.atomic_add(B[i % 3], A[b * 32 + i])
                T.atomic_max(C[0], A[b * 32 + i])
                T.atomic_min(D[0], A[b * 32 + i])

    a = whole(96, dtype=torch.int32, most=1000)
    sums = torch.stack([a.view(3, 32)[:, k::3].sum() for k in range(3)]).int()
    start = [a, zeros(3).int(), zeros(1).int(), zeros(1).int()]
    return kernel, start, {1: sums, 2: a.max().clamp(min=0)[None], 3: a.min().clamp(max=0)[None]}


@case
def histogram_in_shared_memory() -> Case:
    """Atomics on a shared tile, which is cleared before and stored behind them."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 200), "uint8"), B: T.Tensor((2, 16), "int32")):
        with T.Kernel(2, threads=64) as b:
            s = T.alloc_shared((16,), "int32")
            T.clear(s)
            for i in T.Parallel(200):
                T.atomic_add(s[A[b, i] & 15], 1)
            T.copy(s, B[b, 0:16])

    a = torch.randint(0, 256, (2, 200)).to(torch.uint8)
    counts = torch.stack([torch.bincount(row.long() & 15, minlength=16) for row in a])
    return kernel, [a, zeros(2, 16).int()], {1: counts.int()}


@case
def product_whose_inner_size_is_ragged() -> Case:
    """A product of halves with a rest in every dimension, transposed operands included."""

    @T.prim_func
    def kernel(A: T.Tensor((37, 45), "float16"), B: T.Tensor((29, 45), "float16"), C: T.Tensor((37, 29), "float32")):
        with T.Kernel(1, 2, threads=128) as (bx, by):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 32, k * 32], a)
                T.copy(B[bx * 32, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 32, bx * 32])

    a, b = whole(37, 45).half(), whole(29, 45).half()
    return kernel, [a, b, zeros(37, 29)], {2: a.float() @ b.float().t()}


@case
def product_of_a_product() -> Case:
    """The accumulator of one product is an operand of the next."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float16"), B: T.Tensor((32, 32), "float16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            p, h = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(p)
            T.gemm(a, b, p)
            T.copy(p, h)
            T.clear(c)
            T.gemm(h, b, c)
            T.copy(c, C)

    a, b = whole(32, 32, most=2).half(), whole(32, 32, most=2).half()
    first = (a.float() @ b.float()).half()
    return kernel, [a, b, zeros(32, 32)], {2: first.float() @ b.float()}


@case
def second_kernel_reads_what_the_first_wrote() -> Case:
    """Two kernels of one function, whose blocks do not match."""

    @T.prim_func
    def kernel(A: T.Tensor((50,), "float32"), B: T.Tensor((50,), "float32"), C: T.Tensor((50,), "float32")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(25):
                B[b * 25 + i] = A[b * 25 + i] + 1.0
        with T.Kernel(5, threads=32) as b:
            for i in T.Parallel(10):
                C[b * 10 + i] = B[49 - b * 10 - i] * 2.0

    a = whole(50)
    return kernel, [a, zeros(50), zeros(50)], {1: a + 1, 2: (a + 1).flip(0) * 2}


@case.of_threads
def neighbours_of_warps() -> Case:
    """Shuffles cross within a warp, and not from one warp to the other."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            B[t] = T.shfl_xor(A[t], 5) * 1000 + T.shfl_xor(A[t], 16)

    a, at = whole(64, dtype=torch.int32, most=99), torch.arange(64)
    return kernel, [a, zeros(64).int()], {1: a[at ^ 5] * 1000 + a[at ^ 16]}


test_reported_types = case.test()
