# SPDX-License-Identifier: Apache-2.0
"""Small programs after kinds of reports on Triton, TVM, TileLang, Halide, Taichi and FlashAttention: rows that see
nothing, dimensions of one element with odd strides, permutations by bits, roundings, and random numbers by shifts.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I16, I32, I64, U8, U32, U64 = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32, torch.uint64,
)  # fmt: skip


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
def places_with_their_bits_reversed() -> Case:  # taichi's FFTs
    @T.prim_func
    def kernel(X: T.Tensor((128,), "float32"), Y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(128):
                r = T.alloc_var("uint32", 0)
                for bit in T.unroll(7):
                    r = (r << 1) | ((T.cast(i, "uint32") >> T.cast(bit, "uint32")) & 1)
                Y[T.cast(r, "int32")] = X[i]

    x, y = whole(128), zeros(128)
    for i in range(128):
        y[int(f"{i:07b}"[::-1], 2)] = x[i]
    return kernel, [x, zeros(128)], {1: y}


@case
def pipeline_of_more_stages_than_turns() -> Case:
    k = T.dynamic("k")

    @T.prim_func
    def kernel(A: T.Tensor((k, 32), "float32"), C: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            s, c = T.alloc_shared((16, 32), "float32"), T.alloc_fragment((32,), "float32")
            r = T.alloc_fragment((32,), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, 16), num_stages=4):
                T.copy(A[step * 16, 0], s)
                T.reduce_sum(s, r, dim=0)
                for i in T.Parallel(32):
                    c[i] += r[i]
            T.copy(c, C)

    rows = int(torch.tensor([0, 1, 17, 40])[torch.randint(4, ())])
    a = whole(rows, 32)
    return kernel, [a, whole(32)], {1: a.sum(0)}


@case
def product_over_blocks_that_a_mask_keeps() -> Case:  # block-sparse products
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 128), "float16"), B: T.Tensor((128, 32), "float16"), mask: T.Tensor((4,), "bool"),
        C: T.Tensor((32, 32), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if mask[k]:
                    T.copy(A[0, k * 32], a)
                    T.copy(B[k * 32, 0], b)
                    T.gemm(a, b, c)
            T.copy(c, C)

    a, b, mask = whole(32, 128, dtype=torch.half), whole(128, 32, dtype=torch.half), counts(4, 2).bool()
    kept = a.float() * mask.repeat_interleave(32)
    return kernel, [a, b, mask, zeros(32, 32)], {3: kept @ b.float()}


@case
def parts_of_a_ragged_inner_size_added_at_once() -> Case:  # split k
    @T.prim_func
    def kernel(A: T.Tensor((17, 75), "float32"), B: T.Tensor((75, 9), "float32"), C: T.Tensor((17, 9), "float32")):
        with T.Kernel(3, threads=64) as part:
            a, b = T.alloc_shared((32, 32), "float32"), T.alloc_shared((32, 16), "float32")
            c = T.alloc_fragment((32, 16), "float32")
            T.copy(A[0, part * 32], a)
            T.copy(B[part * 32, 0], b)
            T.gemm(a, b, c, clear_accum=True)
            for i, j in T.Parallel(32, 16):
                if i < 17 and j < 9:
                    T.atomic_add(C[i, j], c[i, j])

    a, b, c = whole(17, 75), whole(75, 9), whole(17, 9)
    return kernel, [a, b, c.clone()], {2: c + a @ b}


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
def elements_kept_side_by_side() -> Case:  # stream compaction
    @T.prim_func
    def kernel(X: T.Tensor((100,), "int32"), Y: T.Tensor((100,), "int32"), count: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((100,), "int32")
            for i in T.Parallel(100):
                s[i] = T.if_then_else(X[i] > 0, 1, 0)
            T.cumsum(s)
            for i in T.Parallel(100):
                if X[i] > 0:
                    Y[s[i] - 1] = X[i]
            count[0] = s[99]

    x, y = whole(100, dtype=I32), zeros(100, dtype=I32)
    kept = x[x > 0]
    y[: len(kept)] = kept
    return kernel, [x, zeros(100, dtype=I32), zeros(1, dtype=I32)], {1: y, 2: torch.tensor([len(kept)], dtype=I32)}


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
def row_of_one_whose_stride_is_odd() -> Case:
    step, across = T.dynamic("step, across")

    @T.prim_func
    def kernel(
        X: T.StridedTensor((1, 64), (step, 1), "float16"), Y: T.StridedTensor((64, 1), (1, across), "float16"),
        O: T.Tensor((2, 64), "float16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((1, 64), "float16")
            T.copy(X, s)
            for i in T.Parallel(64):
                O[0, i] = s[0, i] + 1
                O[1, i] = Y[i, 0]

    x, y = whole(64, dtype=torch.half), whole(64, dtype=torch.half)
    odd = [int(torch.randint(0, 99, ())) for _ in range(2)]
    args = [x.as_strided((1, 64), (odd[0], 1)), y.as_strided((64, 1), (1, odd[1])), zeros(2, 64, dtype=torch.half)]
    return kernel, args, {2: torch.stack([x + 1, y])}


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
def both_operands_transposed() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((48, 32), "float16"), B: T.Tensor((24, 48), "float16"), C: T.Tensor((24, 32), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((48, 32), "float16"), T.alloc_shared((24, 48), "float16")
            c, t = T.alloc_fragment((32, 24), "float32"), T.alloc_shared((24, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=True, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(32, 24):
                t[j, i] = c[i, j]
            T.copy(t, C)

    a, b = whole(48, 32, dtype=torch.half), whole(24, 48, dtype=torch.half)
    return kernel, [a, b, zeros(24, 32)], {2: b.float() @ a.float()}


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
def digits_sorted_by_counting() -> Case:  # a pass of a radix sort
    @T.prim_func
    def kernel(X: T.Tensor((64,), "uint8"), Y: T.Tensor((64,), "uint8")):
        with T.Kernel(1, threads=64):
            count = T.alloc_shared((16,), "int32")
            place = T.alloc_shared((16,), "int32")
            rank = T.alloc_shared((64,), "int32")
            for d in T.Parallel(16):
                total = T.alloc_var("int32", 0)
                for i in T.serial(64):
                    if (X[i] >> 4) == d:
                        rank[i] = total
                        total += 1
                count[d] = total
            for d in T.Parallel(16):
                before = T.alloc_var("int32", 0)
                for e in T.serial(d):
                    before += count[e]
                place[d] = before
            for i in T.Parallel(64):
                Y[place[T.cast(X[i] >> 4, "int32")] + rank[i]] = X[i]

    x = counts(64, 256, U8)
    return kernel, [x, zeros(64, dtype=U8)], {1: x[torch.sort(x.int() >> 4, stable=True).indices]}


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
def parallel_of_a_size_that_only_the_call_tells() -> Case:
    n = T.dynamic("n")

    @T.prim_func
    def kernel(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 100), threads=32) as b:
            for i in T.Parallel(T.min(100, n - b * 100)):
                Y[b * 100 + i] = X[n - 1 - b * 100 - i]

    rows = int(torch.randint(0, 350, ()))
    x = whole(rows)
    return kernel, [x, zeros(rows)], {1: x.flip(0)}


@case
def while_in_a_pipeline() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((6, 64), "int32"), Y: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            for k in T.Pipelined(6, num_stages=2):
                T.copy(X[k, 0], s)
                n = T.alloc_var("int32", 0)
                while n < 64 and s[n] != 2:
                    n += 1
                Y[k] = n

    x = whole(6, 64, dtype=I32, most=2)
    x[0] = 0
    return (
        kernel,
        [x, zeros(6, dtype=I32)],
        {1: torch.tensor([next((n for n, v in enumerate(r) if v == 2), 64) for r in x.tolist()], dtype=I32)},
    )


@case
def copies_between_ranks() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((3, 4, 32), "float16"), Y: T.Tensor((4, 32), "float32"), Z: T.Tensor((3, 32), "float16")):
        with T.Kernel(3, threads=32) as b:
            s = T.alloc_shared((4, 32), "float16")
            f = T.alloc_fragment((32,), "float16")
            T.copy(X[b, 0:4, 0:32], s)
            T.copy(s[3, 0:32], f)
            T.copy(f, Z[b, 0:32])
            if b == 1:
                T.copy(s, Y)

    x = whole(3, 4, 32, dtype=torch.half)
    return kernel, [x, zeros(4, 32), zeros(3, 32, dtype=torch.half)], {1: x[1].float(), 2: x[:, 3]}


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
def tensors_without_dimensions_but_one() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((1,), "float32"), flag: T.Tensor((1,), "bool"), Y: T.Tensor((1, 1, 1), "float32")):
        with T.Kernel(1, threads=32):
            f = T.alloc_fragment((1, 1), "float32")
            T.copy(X[0:1], f[0, 0:1])
            for i, j in T.Parallel(1, 1):
                f[i, j] = T.if_then_else(flag[0], f[i, j] * 2, f[i, j] - 1)
            T.copy(f, Y[0, 0:1, 0:1])

    x, flag = whole(1), counts(1, 2).bool()
    return kernel, [x, flag, zeros(1, 1, 1)], {2: torch.where(flag, x * 2, x - 1).view(1, 1, 1)}


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
def gather_of_negative_and_wide_places() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((10,), "float32"), P: T.Tensor((30,), "int64"), Y: T.Tensor((30,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(30):
                p = P[i]
                if p < 0:
                    p = p + 10
                Y[i] = T.if_then_else(T.And(p >= 0, p < 10), X[T.clamp(p, 0, 9)], -1.0)

    x, p = whole(10), torch.randint(-12, 12, (30,))
    p[0], p[1] = 2**40, -(2**40)
    q = torch.where(p < 0, p + 10, p)
    y = torch.where((q >= 0) & (q < 10), x[q.clamp(0, 9)], -1.0)
    return kernel, [x, p, zeros(30)], {2: y}


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
def product_with_one_column_and_bias_row() -> Case:
    @T.prim_func
    def kernel(
        A: T.Tensor((33, 64), "bfloat16"),
        B: T.Tensor((64, 1), "bfloat16"),
        c: T.Tensor((1,), "float32"),
        O: T.Tensor((33, 1), "float32"),
    ):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((48, 64), "bfloat16"), T.alloc_shared((64, 8), "bfloat16")
            acc = T.alloc_fragment((48, 8), "float32")
            T.copy(A[0, 0], a)
            T.copy(B[0, 0], b)
            for i, j in T.Parallel(48, 8):
                acc[i, j] = c[0]
            T.gemm(a, b, acc)
            for i in T.Parallel(48):
                if i < 33:
                    O[i, 0] = acc[i, 0]

    a, b, c = whole(33, 64, dtype=torch.bfloat16), whole(64, 1, dtype=torch.bfloat16), whole(1)
    return kernel, [a, b, c, zeros(33, 1)], {3: a.float() @ b.float() + c}


@case
def int8_product_of_ragged_sizes() -> Case:
    @T.prim_func
    def kernel(A: T.Tensor((20, 70), "int8"), B: T.Tensor((25, 70), "int8"), O: T.Tensor((20, 25), "int32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((32, 32), "int8"), T.alloc_shared((32, 32), "int8")
            acc = T.alloc_fragment((32, 32), "int32")
            T.clear(acc)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[0, k * 32], b)
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc[0:20, 0:25], O)

    a, b = (torch.randint(-128, 128, s).to(I8) for s in ((20, 70), (25, 70)))
    return kernel, [a, b, zeros(20, 25, dtype=I32)], {2: a.int() @ b.int().t()}


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
def value_before_and_behind_a_swap_in_shared_memory() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            T.copy(X, s)
            for stage in T.serial(6):
                for i in T.Parallel(64):
                    other = i ^ (1 << stage)
                    if i < other:
                        low = T.min(s[i], s[other])
                        high = T.max(s[i], s[other])
                        s[i] = low
                        s[other] = high
            T.copy(s, Y)

    x = torch.randint(-99, 99, (64,), dtype=I32)
    y = x.clone()
    for stage in range(6):
        for i in range(64):
            o = i ^ (1 << stage)
            if i < o:
                y[i], y[o] = min(int(y[i]), int(y[o])), max(int(y[i]), int(y[o]))
    return kernel, [x, zeros(64, dtype=I32)], {1: y}


test_reported_freshly = case.test()
