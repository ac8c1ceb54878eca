# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on Halide, TVM, Inductor and Taichi: rules of simplifiers, masks, scans and reducers."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, any_ints, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I8, I16, I32, I64, HALF = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
)  # fmt: skip


@case
def last_mark_that_is_not_missing() -> Case:
    """Triton-lang/triton #3063: a scan of int16 whose results were widened behind it."""

    @T.prim_func
    def kernel(X: T.Tensor((96,), "int16"), V: T.Tensor((96,), "float32"), O: T.Tensor((96,), "float32")):
        with T.Kernel(1, threads=32):
            s, w = T.alloc_shared((96,), "int16"), T.alloc_fragment((96,), "int16")
            for i in T.Parallel(96):
                w[i] = T.if_then_else(X[i] >= 0, X[i], T.int16(-1))
            T.copy(w, s)
            T.cummax(s)
            for i in T.Parallel(96):
                O[i] = T.if_then_else(s[i] != -1, V[T.max(T.cast(s[i], "int32"), 0)], 0.0)

    x = torch.where(torch.rand(96) < 0.2, torch.arange(96), -1).to(I16)
    v = whole(96)
    last = x.cummax(0).values.long()
    return kernel, [x, v, zeros(96)], {2: torch.where(last >= 0, v[last.clamp(min=0)], 0.0)}


@case
def bytes_whose_sums_meet_a_constant() -> Case:
    """Halide/Halide #5998: a comparison was solved for its operand as if the sum did not wrap."""

    @T.prim_func
    def kernel(X: T.Tensor((256,), "int8"), O: T.Tensor((4, 256), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                O[0, i] = T.if_then_else(T.max(X[i], T.int8(107)) + T.int8(81) == T.int8(-68), 1, 0)
                O[1, i] = T.if_then_else(X[i] * T.int8(3) == T.int8(1), 1, 0)
                O[2, i] = T.if_then_else(X[i] + T.int8(100) < T.int8(0), 1, 0)
                O[3, i] = T.if_then_else(T.cast(X[i] + T.int8(100), "int32") < 0, 1, 0)

    x = torch.arange(-128, 128).to(I8)
    v = x.int()
    rows = [(v.clamp(min=107) + 81).to(I8) == -68, (v * 3).to(I8) == 1, (v + 100).to(I8) < 0, (v + 100).to(I8) < 0]
    return kernel, [x, zeros(4, 256, dtype=I32)], {1: torch.stack(rows).int()}


@case
def choices_with_common_parts() -> Case:
    """Halide/Halide #6017, #6160: rules that move a sum in or out of a choice."""

    @T.prim_func
    def kernel(X: T.Tensor((60,), "int32"), Z: T.Tensor((60,), "int32"), O: T.Tensor((5, 60), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(60):
                c = X[i] > 0
                O[0, i] = T.Select(c, 3 - Z[i], 3)
                O[1, i] = T.Select(c, Z[i], 5) + T.Select(c, X[i], 7) - T.Select(c, 1, X[i])
                O[2, i] = T.Select(c, X[i] * 3, 6) - X[i]
                O[3, i] = T.Select(c, Z[i] + X[i], Z[i]) * T.Select(X[i] <= 0, 1, -1)
                O[4, i] = T.Select(T.Select(c, Z[i], X[i]) > 0, T.Select(c, 1, 2), T.Select(X[i] > 1, 3, 4))

    x, z = whole(60, dtype=I32), whole(60, dtype=I32)
    c = x > 0
    rows = [
        torch.where(c, 3 - z, 3),
        torch.where(c, z + x - 1, 12 - x),
        torch.where(c, x * 3, 6) - x,
        torch.where(c, z + x, z) * torch.where(x <= 0, 1, -1),
        torch.where(torch.where(c, z, x) > 0, torch.where(c, 1, 2), torch.where(x > 1, 3, 4)),
    ]
    return kernel, [x, z, zeros(5, 60, dtype=I32)], {2: torch.stack(rows).int()}


@case
def sums_and_products_of_the_smaller_and_larger() -> Case:
    """Halide/Halide #5788, #6174: max(x, y) * min(x, y) is x * y of integers, and not of floats with NaN."""

    @T.prim_func
    def kernel(
        X: T.Tensor((36,), "float32"),
        Y: T.Tensor((36,), "float32"),
        P: T.Tensor((36,), "int32"),
        O: T.Tensor((3, 36), "float32"),
        Q: T.Tensor((3, 36), "int32"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(36):
                O[0, i] = T.max(X[i], Y[i]) + T.min(X[i], Y[i])
                O[1, i] = T.max(X[i], Y[i]) - T.min(Y[i], X[i])
                O[2, i] = T.max(X[i], Y[i]) * T.min(X[i], Y[i])
                Q[0, i] = T.max(P[i], P[35 - i]) * T.min(P[i], P[35 - i])
                Q[1, i] = T.max(P[i], T.min(P[i], P[35 - i]) - 3)
                Q[2, i] = T.max(P[i], P[i] // 8 * 8 + 5)

    ends = torch.tensor([0.0, -0.0, 1.5, -math.inf, math.inf, math.nan])
    x, y = ends.repeat(6), ends.repeat_interleave(6)
    p = any_ints(I32, 36)
    p[3:20] = whole(17, dtype=I32, most=40)
    high, low = torch.maximum(x, y), torch.minimum(x, y)
    v = p.tolist()
    rows = [[a * b for a, b in zip(v, v[::-1], strict=True)], v, [max(a, a // 8 * 8 + 5) for a in v]]
    rows[1] = [max(a, int(ints([min(a, b) - 3])[0])) for a, b in zip(v, v[::-1], strict=True)]
    return (
        kernel,
        [x, y, p, zeros(3, 36), zeros(3, 36, dtype=I32)],
        {3: torch.stack([high + low, high - low, high * low]), 4: ints(rows)},
    )


@case
def infinity_times_a_choice_of_zero() -> Case:
    """Halide/Halide #6174: x times a choice of 1 and 0 was taken for a choice of x and 0."""

    @T.prim_func
    def kernel(X: T.Tensor((32,), "float32"), M: T.Tensor((32,), "bool"), O: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                O[0, i] = X[i] * T.if_then_else(M[i], 1.0, 0.0)
                O[1, i] = X[i] * T.cast(M[i], "float32")
                O[2, i] = X[i] * 0.0 + 1.0
                O[3, i] = (X[i] - X[i]) + T.Select(M[i], X[i] * 0.0, X[i] / X[i])

    x, m = whole(32), counts(32, 2).bool()
    x[:6] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0, 3e38])
    rows = [x * m, x * m, x * 0 + 1, (x - x) + torch.where(m, x * 0, x / x)]
    return kernel, [x, m, zeros(4, 32)], {2: torch.stack(rows)}


@case
def sums_times_constants_beyond_the_type() -> Case:
    """Halide/Halide #3245: (x + a) * b was multiplied out, and left its type on the way."""

    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), O: T.Tensor((3, 40), "int32"), W: T.Tensor((2, 40), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                O[0, i] = (X[i] + 100000) * 70000
                O[1, i] = (X[i] - 100000) * -70000 // 16
                O[2, i] = ((X[i] + 3) * 8 - X[i] * 8) // 3
                W[0, i] = T.cast((X[i] + 2000000000) * 2, "int64")
                W[1, i] = (T.cast(X[i], "int64") + 2000000000) * 2

    x = any_ints(I32, 40)
    x[5:30] = whole(25, dtype=I32, most=100)
    v = x.tolist()
    wrap = lambda n: (n + 2**31) % 2**32 - 2**31  # noqa: E731
    rows = [
        [(a + 100000) * 70000 for a in v],
        [wrap(wrap(a - 100000) * -70000) // 16 for a in v],
        [wrap(wrap(wrap(a + 3) * 8) - wrap(a * 8)) // 3 for a in v],
    ]
    return (
        kernel,
        [x, zeros(3, 40, dtype=I32), zeros(2, 40, dtype=I64)],
        {1: ints(rows), 2: torch.tensor([[(a + 2000000000) * 2 for a in v]] * 2)},
    )


@case
def five_rows_that_slide_over_a_ragged_end() -> Case:
    """Halide/Halide #6044, #4751: rows that are kept between steps, with a guard in the last step."""

    @T.prim_func
    def kernel(X: T.Tensor((23, 40), "int32"), O: T.Tensor((19, 40), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((12, 40), "int32")
            for step in T.serial(3):
                for i, j in T.Parallel(12, 40):
                    if step == 0 or i >= 4:
                        s[i, j] = T.if_then_else(step * 8 + i < 23, X[T.min(step * 8 + i, 22), j], 0)
                for i, j in T.Parallel(8, 40):
                    if step * 8 + i < 19:
                        O[step * 8 + i, j] = s[i, j] + s[i + 1, j] + s[i + 2, j] + s[i + 3, j] + s[i + 4, j]
                for i, j in T.Parallel(4, 40):
                    s[i, j] = s[i + 8, j]

    x = whole(23, 40, dtype=I32)
    return kernel, [x, zeros(19, 40, dtype=I32)], {1: x.unfold(0, 5, 1).sum(2).int()}


@case
def mask_that_is_always_zero_is_added() -> Case:
    """Halide/Halide #7770: with a sum that adds nothing, the kernel wrote nothing."""

    @T.prim_func
    def kernel(X: T.Tensor((30, 30), "float32"), O: T.Tensor((60, 60), "float32")):
        with T.Kernel(1, threads=64):
            mask, s = T.alloc_fragment((60, 60), "float32"), T.alloc_shared((30, 30), "float32")
            T.copy(X, s)
            for i, j in T.Parallel(60, 60):
                mask[i, j] = T.if_then_else(i // 2 * 2 > i, 1.0, 0.0)
            for i, j in T.Parallel(60, 60):
                O[i, j] = s[i // 2, j // 2] + mask[i, j]

    x = whole(30, 30)
    return kernel, [x, zeros(60, 60)], {1: x.repeat_interleave(2, 0).repeat_interleave(2, 1)}


@case
def product_of_all_elements_with_a_rest() -> Case:
    """Pytorch/pytorch #138542: products of vectors that a loop unrolls, and their rest."""

    @T.prim_func
    def kernel(X: T.Tensor((5, 17), "float32"), O: T.Tensor((5,), "float32")):
        with T.Kernel(5, threads=32) as b:
            s = T.alloc_shared((32,), "float32")
            for i in T.Parallel(32):
                s[i] = T.if_then_else(i < 17, X[b, T.min(i, 16)], 1.0)
            for step in T.serial(5):
                for i in T.Parallel(16):
                    if i < 16 >> step:
                        s[i] = s[i] * s[i + (16 >> step)]
            O[b] = s[0]

    x = torch.randint(1, 3, (5, 17)).float() * (1 - 2 * torch.randint(0, 2, (5, 17)))
    return kernel, [x, zeros(5)], {1: x.prod(1)}


@case
def mask_of_rows_and_mask_of_columns() -> Case:
    """Pytorch/pytorch #93922, #94277: a mask that one dimension alone has, where values have two."""

    @T.prim_func
    def kernel(
        X: T.Tensor((14, 33), "float32"),
        r: T.Tensor((14,), "bool"),
        c: T.Tensor((33,), "bool"),
        O: T.Tensor((14, 33), "float32"),
    ):
        with T.Kernel(1, threads=32):
            x, rows, columns = (
                T.alloc_fragment((14, 33), "float32"),
                T.alloc_shared((14,), "bool"),
                T.alloc_fragment((33,), "bool"),
            )
            T.copy(X, x)
            T.copy(r, rows)
            T.copy(c, columns)
            for i, j in T.Parallel(14, 33):
                x[i, j] = T.if_then_else(rows[i] and not columns[j], 0.0, x[i, j])
            for i, j in T.Parallel(14, 33):
                O[i, j] = T.if_then_else(columns[j] == rows[i], x[i, j], -x[i, j])

    x, r, c = whole(14, 33), counts(14, 2).bool(), counts(33, 2).bool()
    y = torch.where(r[:, None] & ~c, 0.0, x)
    return kernel, [x, r, c, zeros(14, 33)], {3: torch.where(c == r[:, None], y, -y)}


@case
def padding_of_truth_values() -> Case:
    """Pytorch/pytorch #138486: a padded mask, chosen under another mask."""

    @T.prim_func
    def kernel(M: T.Tensor((9, 9), "bool"), O: T.Tensor((12, 13), "bool"), count: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=32):
            s, f, r = (
                T.alloc_shared((12, 13), "bool"),
                T.alloc_fragment((12, 13), "int32"),
                T.alloc_fragment((12,), "int32"),
            )
            for i, j in T.Parallel(12, 13):
                if i >= 1 and i < 10 and j >= 2 and j < 11:
                    s[i, j] = not M[i - 1, j - 2]
                else:
                    s[i, j] = (i + j) % 2 == 0
            for i, j in T.Parallel(12, 13):
                f[i, j] = T.cast(s[i, j], "int32") + T.cast(s[11 - i, j], "int32")
            T.reduce_sum(f, r, dim=1)
            T.copy(s, O)
            T.copy(r, count)

    m = counts(81, 2).bool().view(9, 9)
    y = (torch.arange(12)[:, None] + torch.arange(13)) % 2 == 0
    y[1:10, 2:11] = ~m
    return (
        kernel,
        [m, zeros(12, 13, dtype=torch.bool), zeros(12, dtype=I32)],
        {1: y, 2: (y.int() + y.flip(0).int()).sum(1).int()},
    )


@case
def bits_of_floats_shifted_in_vectors() -> Case:
    """Pytorch/pytorch #135160: the bits of a float were shifted as a float."""

    @T.prim_func
    def kernel(
        X: T.Tensor((64,), "float32"),
        H: T.Tensor((64,), "float16"),
        O: T.Tensor((64,), "int32"),
        P: T.Tensor((64,), "float32"),
        Q: T.Tensor((64,), "int16"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                bits = T.reinterpret(X[i], "int32")
                O[i] = (bits >> 13) - (127 << 10)
                P[i] = T.reinterpret((bits & -65536) | 1, "float32")
                Q[i] = T.reinterpret(H[i], "int16") & T.int16(1023)

    x, h = torch.randn(64), torch.randn(64).half()
    bits = x.view(I32)
    return (
        kernel,
        [x, h, zeros(64, dtype=I32), zeros(64), zeros(64, dtype=I16)],
        {2: (bits >> 13) - (127 << 10), 3: ((bits & -65536) | 1).view(torch.float32), 4: h.view(I16) & 1023},
    )


@case
def choice_of_constants_by_a_constant_mask() -> Case:
    """Pytorch/pytorch #100800: a mask of ones chose the other arm in vectors."""

    @T.prim_func
    def kernel(X: T.Tensor((9,), "float32"), O: T.Tensor((3, 9), "float32")):
        with T.Kernel(1, threads=32):
            mask, ones = T.alloc_fragment((9,), "bool"), T.alloc_shared((9,), "bool")
            T.fill(mask, True)
            T.fill(ones, T.cast(1, "bool"))
            for i in T.Parallel(9):
                O[0, i] = T.if_then_else(mask[i], 0.0, 2.0)
                O[1, i] = T.Select(ones[i], X[i], 2 * X[i])
                O[2, i] = T.Select(T.cast(X[i], "bool"), 1.0, -1.0)

    x = torch.tensor([0.0, -0.0, 0.25, -0.5, math.nan, math.inf, 1e-45, 1.0, -3.0])
    return kernel, [x, zeros(3, 9)], {1: torch.stack([torch.zeros(9), x, torch.where(x.bool(), 1.0, -1.0)])}


@case
def remainders_of_rounded_and_scaled_indices() -> Case:
    """Apache/tvm #10336, #14571: i % 20 // 2 * 2 % 4 is not i % 4."""

    @T.prim_func
    def kernel(O: T.Tensor((6, 90), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(90):
                O[0, i] = i % 20 // 2 * 2 % 4
                O[1, i] = (i - 45) % 20 // 2 * 3 % 4
                O[2, i] = (i * 3 + 1) % 12 // 4 * 4 % 6
                O[3, i] = (i + n) % 2 + (i - n) % 2
                O[4, i] = (i * n) % 6 // 3 * 2 % 3
                O[5, i] = (i // 7 * 7 + i % 7 - i) + (i % 14 // 7 * 7 + i % 7 - i % 14)

    n = int(torch.randint(-20, 20, ()))
    rows = [
        [i % 20 // 2 * 2 % 4 for i in range(90)], [(i - 45) % 20 // 2 * 3 % 4 for i in range(90)],
        [(i * 3 + 1) % 12 // 4 * 4 % 6 for i in range(90)], [(i + n) % 2 + (i - n) % 2 for i in range(90)],
        [(i * n) % 6 // 3 * 2 % 3 for i in range(90)], [0] * 90,
    ]  # fmt: skip
    return kernel, [zeros(6, 90, dtype=I32), n], {0: ints(rows)}


@case
def vectors_that_a_remainder_parts() -> Case:
    """Apache/tvm #8616, #5924: the remainder of a vector of indices was that of its first one and a ramp."""

    @T.prim_func
    def kernel(
        X: T.Tensor((20,), "float32"),
        W: T.Tensor((4, 512), "float32"),
        O: T.Tensor((32, 48), "float32"),
        P: T.Tensor((256,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(32, 48):
                O[i, j] = X[(i * 50 + j) % 20]
            for i in T.Parallel(256):
                P[i] = W[i // 64, i % 64 * 2 + 1]

    x, w = whole(20), whole(4, 512)
    at = (torch.arange(32)[:, None] * 50 + torch.arange(48)) % 20
    return kernel, [x, w, zeros(32, 48), zeros(256)], {2: x[at], 3: w[:, 1:129:2].reshape(-1)}


@case
def remainders_that_are_compared_with_zero() -> Case:
    """Apache/tvm #4127, #2486: a remainder beside zero alone was computed without its sign."""

    @T.prim_func
    def kernel(X: T.Tensor((50,), "int32"), Y: T.Tensor((50,), "int32"), O: T.Tensor((3, 50), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                O[0, i] = T.if_then_else(X[i] % Y[i] != 0, 1, 0)
                O[1, i] = T.if_then_else(X[i] % Y[i] > 0, 1, 0)
                O[2, i] = T.if_then_else(T.truncmod(X[i], Y[i]) < 0, 1, 0) + 27 % 5

    x, y = whole(50, dtype=I32, most=20), whole(50, dtype=I32, most=6)
    y[y == 0] = -3
    a, b = x.tolist(), y.tolist()
    return (
        kernel,
        [x, y, zeros(3, 50, dtype=I32)],
        {
            2: ints(
                [
                    [int(p % q != 0) for p, q in zip(a, b, strict=True)],
                    [int(p % q > 0) for p, q in zip(a, b, strict=True)],
                    [int(math.fmod(p, q) < 0) + 2 for p, q in zip(a, b, strict=True)],
                ]
            )
        },
    )


@case
def reducer_under_a_condition_with_something_in_it() -> Case:
    """Numba/numba #7344: what a sum held before the loop counted once for each thread."""

    @T.prim_func
    def kernel(X: T.Tensor((8, 100), "float32"), M: T.Tensor((8, 100), "bool"), O: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=64):
            x, r = T.alloc_fragment((8, 100), "float32"), T.alloc_fragment((8,), "float32")
            T.fill(r, 2.5)
            for i, j in T.Parallel(8, 100):
                x[i, j] = 0.0
                if M[i, j]:
                    x[i, j] = X[i, j] + 1
            T.reduce_sum(x, r, dim=1, clear=False)
            T.copy(r, O)

    x, m = whole(8, 100), counts(800, 2).bool().view(8, 100)
    return kernel, [x, m, zeros(8)], {2: ((x + 1) * m).sum(1) + 2.5}


@case
def array_that_a_parallel_loop_fills_and_nobody_reads() -> Case:
    """Numba/numba #7105, #8184: local arrays of a loop that one copy served for all iterations."""

    @T.prim_func
    def kernel(P: T.Tensor((30, 2), "float32"), pairs: T.Tensor((50, 2), "int32"), O: T.Tensor((50,), "float32")):
        with T.Kernel(1, threads=32):
            for c in T.Parallel(50):
                v = T.alloc_local((2,), "float32")
                for d in T.unroll(2):
                    v[d] = P[pairs[c, 0], d] - P[pairs[c, 1], d]
                O[c] = v[0] * v[0] + v[1]

    p, pairs = whole(30, 2), counts(100, 30).view(50, 2)
    v = p[pairs[:, 0].long()] - p[pairs[:, 1].long()]
    return kernel, [p, pairs, zeros(50)], {2: v[:, 0] ** 2 + v[:, 1]}


@case
def nested_continues_of_constant_conditions() -> Case:
    """Taichi-dev/taichi #1297: several `continue` under conditions that fold."""

    @T.prim_func
    def kernel(X: T.Tensor((20,), "int32"), O: T.Tensor((20,), "int32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(20):
                if k >= 0:  # noqa: SIM102
                    if X[k] < 0:
                        continue
                if k > 100:
                    continue
                O[k] = 1
                for j in T.serial(3):
                    if j == 1:
                        if X[k] > 2:
                            continue
                        O[k] += 10
                    O[k] += 1

    x = whole(20, dtype=I32)
    return kernel, [x, zeros(20, dtype=I32)], {1: torch.where(x < 0, 0, torch.where(x > 2, 3, 14)).int()}


@case
def what_two_kernels_share_is_kept() -> Case:
    """Taichi-dev/taichi #1390: a pointer that the next kernel uses was removed with the first."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), place: T.Tensor((1,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            T.copy(X, s)
            for i in T.Parallel(64):
                if s[i] == 4:
                    T.atomic_max(place[0], i)
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(32):
                O[b * 32 + i] = X[(place[0] + b * 32 + i) % 64]

    x = whole(64, dtype=I32)
    at = int((x == 4).nonzero().max()) if (x == 4).any() else 0
    return kernel, [x, zeros(1, dtype=I32), zeros(64, dtype=I32)], {1: ints([at]), 2: x.roll(-at)}


@case
def constants_folded_in_an_unrolled_loop() -> Case:
    """Taichi-dev/taichi #1450: a series of an unrolled loop became one constant."""

    @T.prim_func
    def kernel(O: T.Tensor((2,), "float64"), P: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=32):
            term, total, divisor = T.alloc_var("float64", 1.0), T.alloc_var("float64", 0.0), T.alloc_var("int32", 1)
            for _k in T.unroll(10):
                total += term / divisor
                term *= -1 / 4
                divisor += 2
            O[0] = total
            O[1] = term
            P[0] = T.cast(total, "float32")
            P[1] = 1 / 4 * 3 - 2**-3

    total, term = 0.0, 1.0
    for k in range(10):
        total, term = total + term / (2 * k + 1), term * -0.25
    return (
        kernel,
        [torch.zeros(2, dtype=torch.float64), zeros(2)],
        {0: torch.tensor([total, term], dtype=torch.float64), 1: torch.tensor([total, 0.625])},
    )


@case
def product_of_one_tile_by_all_blocks_of_a_grid() -> Case:
    """Jax-ml/jax #26684: blocks of two dimensions of a grid, sizes that the blocks halve."""

    @T.prim_func
    def kernel(A: T.Tensor((48, 76), "float16"), B: T.Tensor((76, 40), "float16"), O: T.Tensor((48, 40), "float16")):
        with T.Kernel(2, 2, threads=64) as (i, j):
            a, b, acc = (
                T.alloc_shared((24, 80), "float16"),
                T.alloc_shared((80, 20), "float16"),
                T.alloc_shared((24, 20), "float32"),
            )
            T.clear(b)
            T.copy(A[i * 24, 0], a)
            T.copy(B[0:76, j * 20 : j * 20 + 20], b[0:76, 0:20])
            for p, q in T.Parallel(24, 20):
                acc[p, q] = 0.0
                for k in T.serial(76):
                    acc[p, q] += T.cast(a[p, k], "float32") * T.cast(b[k, q], "float32")
            T.copy(acc, O[i * 24, j * 20])

    a, b = whole(48, 76, dtype=HALF), whole(76, 40, dtype=HALF)
    return kernel, [a, b, zeros(48, 40, dtype=HALF)], {2: (a.float() @ b.float()).half()}


@case
def row_of_a_column_copied_and_seen_in_another_rank() -> Case:
    """Jax-ml/jax #33260: a copy into a part of one dimension less."""

    @T.prim_func
    def kernel(X: T.Tensor((7,), "float32"), O: T.Tensor((3, 7), "float32")):
        with T.Kernel(1, threads=32):
            x, y = T.alloc_shared((7,), "float32"), T.alloc_shared((3, 7), "float32")
            T.fill(y, 1.0)
            T.copy(X, x)
            T.copy(x, y[1, 0:7])
            T.copy(y[1, 0:7], x)
            T.copy(x, y[2, 0:7])
            T.copy(y, O)

    x = whole(7)
    return kernel, [x, zeros(3, 7)], {1: torch.stack([torch.ones(7), x, x])}


@case
def maxima_of_parts_that_begin_anywhere() -> Case:
    """Triton-lang/triton #2483: results of reductions went through another layout."""

    @T.prim_func
    def kernel(
        X: T.Tensor((16, 32), "int32"),
        O: T.Tensor((16,), "int32"),
        P: T.Tensor((32,), "int32"),
        Q: T.Tensor((16, 32), "int32"),
    ):
        with T.Kernel(1, threads=256):
            x, r, c = (
                T.alloc_fragment((16, 32), "int32"),
                T.alloc_fragment((16,), "int32"),
                T.alloc_fragment((32,), "int32"),
            )
            T.copy(X, x)
            T.reduce_max(x, r, dim=1)
            T.reduce_min(x, c, dim=0)
            for i, j in T.Parallel(16, 32):
                x[i, j] = x[i, j] * 100 + r[i] * 10 + c[j]
            T.copy(r, O)
            T.copy(c, P)
            T.copy(x, Q)

    x = whole(16, 32, dtype=I32)
    r, c = x.amax(1), x.amin(0)
    return (
        kernel,
        [x, zeros(16, dtype=I32), zeros(32, dtype=I32), zeros(16, 32, dtype=I32)],
        {1: r, 2: c, 3: x * 100 + r[:, None] * 10 + c},
    )


@case
def scan_that_adds_ones_of_a_mask_in_a_loop() -> Case:
    """Triton-lang/triton #2361: a scan inside a loop, of constants under the mask of a short row."""

    @T.prim_func
    def kernel(O: T.Tensor((40,), "int64"), n: T.int32):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((16,), "int64")
            before = T.alloc_var("int64", 0)
            for k in T.serial(T.ceildiv(n, 16)):
                for i in T.Parallel(16):
                    s[i] = T.if_then_else(k * 16 + i < n, T.int64(1), T.int64(0))
                T.cumsum(s)
                for i in T.Parallel(16):
                    if k * 16 + i < n:
                        O[k * 16 + i] = s[i] + before
                before += s[15]

    n = int(torch.randint(0, 41, ()))
    i = torch.arange(40)
    return kernel, [zeros(40, dtype=I64), n], {0: torch.where(i < n, i + 1, 0)}


@case
def name_rebound_to_a_constant_in_a_branch() -> Case:
    """Tile-ai/tilelang #2977: a constant that a branch gave a name was there on all ways."""

    @T.prim_func
    def kernel(X: T.Tensor((40,), "int32"), O: T.Tensor((2, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                v = T.alloc_var("int32", X[i])
                if X[i] > 2:
                    v = 2
                elif X[i] < -1:
                    v = T.int32(-1)
                O[0, i] = v
                w = T.alloc_var("float32", 0.5)
                if v == 2:
                    w = 7
                O[1, i] = T.cast(w * 2, "int32")

    x = whole(40, dtype=I32)
    v = x.clamp(-1, 2)
    return kernel, [x, zeros(2, 40, dtype=I32)], {1: torch.stack([v, torch.where(v == 2, 14, 1).int()])}


@case
def reducer_of_more_elements_than_are_finished_at_once() -> Case:
    """Tile-ai/tilelang #2623, #2524: only the first elements of a reducer were combined."""

    @T.prim_func
    def kernel(X: T.Tensor((12, 70), "float32"), O: T.Tensor((12,), "float32"), P: T.Tensor((12,), "float32")):
        with T.Kernel(1, threads=96):
            r, m = T.alloc_reducer((12,), "float32", op="sum"), T.alloc_reducer((12,), "float32", op="max")
            T.clear(r)
            T.fill(m, -100.0)
            for i, j in T.Parallel(12, 70):
                r[i] += X[i, j]
            for i, j in T.Parallel(12, 70):
                m[i] = T.max(m[i], X[i, j])
            T.finalize_reducer(r)
            T.finalize_reducer(m)
            T.copy(r, O)
            T.copy(m, P)

    x = whole(12, 70)
    return kernel, [x, zeros(12), zeros(12)], {1: x.sum(1), 2: x.amax(1)}


@case
def reduction_whose_variables_are_split_and_exchanged() -> Case:
    """Halide/Halide #464, #3424: a split of a reduction that does not divide it."""

    @T.prim_func
    def kernel(X: T.Tensor((11, 13), "int32"), O: T.Tensor((11,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(11):
                acc = T.alloc_var("int32", 0)
                for inner in T.serial(4):
                    for outer in T.serial(T.ceildiv(13, 4)):
                        if outer * 4 + inner < 13:
                            acc = acc * 2 + X[i, outer * 4 + inner]
                O[i] = acc

    x = whole(11, 13, dtype=I32)
    acc = torch.zeros(11, dtype=I32)
    for inner in range(4):
        for k in range(inner, 13, 4):
            acc = acc * 2 + x[:, k]
    return kernel, [x, zeros(11, dtype=I32)], {1: acc}


@case
def all_rows_added_into_one_by_all_threads() -> Case:
    """Numba/numba #7862, #3681: rows of a matrix were added into one row without atomics."""

    @T.prim_func
    def kernel(X: T.Tensor((50, 9), "float32"), O: T.Tensor((9,), "float32")):
        with T.Kernel(5, threads=64) as b:
            s = T.alloc_shared((9,), "float32")
            T.clear(s)
            for i, j in T.Parallel(10, 9):
                T.atomic_add(s[j], X[b * 10 + i, j])
            for j in T.Parallel(9):
                T.atomic_add(O[j], s[j] * 2)

    x, o = whole(50, 9), whole(9)
    return kernel, [x, o.clone()], {1: o + x.sum(0) * 2}


@case
def integer_product_with_a_dimension_of_no_stride() -> Case:
    """Pytorch/pytorch #195066: a dimension of one element with a stride of 0."""
    a0, b1 = T.dynamic("a0, b1")

    @T.prim_func
    def kernel(
        A: T.StridedTensor((1, 64), (a0, 1), "int8"),
        B: T.StridedTensor((64, 1), (1, b1), "int8"),
        O: T.Tensor((1, 1), "int32"),
    ):
        with T.Kernel(1, threads=32):
            a, b, acc = (
                T.alloc_shared((16, 64), "int8"),
                T.alloc_shared((64, 8), "int8"),
                T.alloc_fragment((16, 8), "int32"),
            )
            T.clear(acc)
            T.copy(A[0, 0], a)
            T.copy(B[0, 0], b)
            T.gemm(a, b, acc)
            T.copy(acc[0:1, 0:1], O)

    a, b = any_ints(I8, 64), any_ints(I8, 64)
    return (
        kernel,
        [a.as_strided((1, 64), (0, 1)), b.as_strided((64, 1), (1, 0)), zeros(1, 1, dtype=I32)],
        {2: (a.int() * b.int()).sum().int().view(1, 1)},
    )


@case.of_threads
def threads_of_one_and_a_half_warps_pass_numbers_on() -> Case:
    """Tile-ai/tilelang #2556: a barrier was left out where 48 of 64 threads had taken part."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            s = T.alloc_shared((64,), "int32")
            s[tx] = 0
            if tx < 48:
                s[tx] = X[tx]
            O[tx] = s[63 - tx] * 2

    x = whole(64, dtype=I32)
    s = torch.where(torch.arange(64) < 48, x, 0)
    return kernel, [x, zeros(64, dtype=I32)], {1: s.flip(0) * 2}


test_reported_rules = case.test()
