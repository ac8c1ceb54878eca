# SPDX-License-Identifier: Apache-2.0
"""Small programs for what reported ones share: atomics, more dimensions, macros, sizes of the call, floats."""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, any_ints, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I32, I64, U16, U32, HALF = (
    torch.int32, torch.int64, torch.uint16, torch.uint32, torch.float16,
)  # fmt: skip


# Atomics and their old values.


@case
def bits_set_cleared_and_turned_by_all_blocks() -> Case:
    @T.prim_func
    def kernel(B: T.Tensor((40,), "int32"), O: T.Tensor((3,), "int32")):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(10):
                T.atomic_or(O[0], 1 << B[b * 10 + i])
                T.atomic_and(O[1], ~(1 << B[b * 10 + i]))
                T.atomic_xor(O[2], 1 << B[b * 10 + i])

    b = counts(40, 31)
    one, two, three = 0, -1, 5
    for v in b.tolist():
        one, two, three = one | 1 << v, two & ~(1 << v), three ^ 1 << v
    return kernel, [b, ints([0, -1, 5])], {1: ints([one, two, three])}


@case
def tickets_of_all_threads() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((96,), "int32"), counter: T.Tensor((1,), "int32"), O: T.Tensor((96,), "int32")):
        with T.Kernel(3, threads=32) as b:
            for i in T.Parallel(32):
                if X[b * 32 + i] > 0:
                    old = T.atomic_add(counter[0], 1, return_prev=True)
                    T.atomic_add(O[old], X[b * 32 + i] * 0 + 1)

    x = whole(96, dtype=I32)
    n = int((x > 0).sum())
    return kernel, [x, zeros(1, dtype=I32), zeros(96, dtype=I32)], {1: ints([n]), 2: (torch.arange(96) < n).int()}


@case
def extrema_of_unsigned_and_wide_numbers_by_atomics() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((64,), "uint32"),
        Y: T.Tensor((64,), "int64"),
        O: T.Tensor((2,), "uint32"),
        P: T.Tensor((2,), "int64"),
    ):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(32):
                T.atomic_max(O[0], X[b * 32 + i])
                T.atomic_min(O[1], X[b * 32 + i])
                T.atomic_max(P[0], Y[b * 32 + i])
                T.atomic_min(P[1], Y[b * 32 + i])

    x, y = any_ints(U32, 64), any_ints(I64, 64)
    v = x.long()
    return (
        kernel,
        [x, y, ints([5, 2**32 - 1], U32), torch.tensor([0, 0])],
        {
            2: ints([max(5, int(v.max())), int(v.min())], U32),
            3: torch.stack([y.max().clamp(min=0), y.min().clamp(max=0)]),
        },
    )


@case
def sums_of_halves_by_atomics_in_shared_memory() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((128,), "float16"), O: T.Tensor((5,), "float16")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((5,), "float16")
            T.fill(s, 1.0)
            for i in T.Parallel(128):
                T.atomic_add(s[i * i % 5], X[i])
            T.copy(s, O)

    x = whole(128, dtype=HALF, most=2)
    o = torch.ones(5).index_add(0, torch.arange(128) ** 2 % 5, x.float())
    return kernel, [x, zeros(5, dtype=HALF)], {1: o.half()}


@case
def histogram_of_two_digits_at_once() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((200,), "uint16"), H: T.Tensor((2, 16), "int32")):
        with T.Kernel(2, threads=64) as d:
            s = T.alloc_shared((16,), "int32")
            T.clear(s)
            for i in T.Parallel(200):
                T.atomic_add(s[T.cast(X[i] >> T.cast(d * 4, "uint16"), "int32") & 15], 1)
            T.copy(s, H[d, 0:16])

    x = any_ints(U16, 200)
    v = x.int()
    return (
        kernel,
        [x, zeros(2, 16, dtype=I32)],
        {1: torch.stack([torch.bincount(v >> s & 15, minlength=16) for s in (0, 4)]).int()},
    )


# Three and four dimensions.


@case
def sums_over_the_middle_and_products_by_batch() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((3, 5, 16), "float32"), O: T.Tensor((3, 16), "float32"), P: T.Tensor((5, 3), "float32")):
        with T.Kernel(1, threads=64):
            x, m, r = (
                T.alloc_fragment((3, 5, 16), "float32"),
                T.alloc_fragment((3, 16), "float32"),
                T.alloc_fragment((3, 5), "float32"),
            )
            T.copy(X, x)
            T.reduce_sum(x, m, dim=1)
            T.reduce_max(x, r, dim=2)
            T.copy(m, O)
            for i, j in T.Parallel(5, 3):
                P[i, j] = r[j, i] + x[j, i, 0]

    x = whole(3, 5, 16)
    return kernel, [x, zeros(3, 16), zeros(5, 3)], {1: x.sum(1), 2: (x.amax(2) + x[:, :, 0]).t().contiguous()}


@case
def four_dimensions_permuted_by_a_tile() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((2, 3, 8, 9), "float16"), O: T.Tensor((9, 2, 8, 3), "float16")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((2, 3, 8, 9), "float16")
            T.copy(X, s)
            for a, b, c, d in T.Parallel(9, 2, 8, 3):
                O[a, b, c, d] = s[b, d, c, a]

    x = whole(2, 3, 8, 9, dtype=HALF)
    return kernel, [x, zeros(9, 2, 8, 3, dtype=HALF)], {1: x.permute(3, 0, 2, 1).contiguous()}


@case
def pooling_of_windows_in_two_dimensions() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((4, 11, 13), "float32"), O: T.Tensor((4, 5, 6), "float32"), P: T.Tensor((4, 5, 6), "int32")):
        with T.Kernel(4, threads=32) as c:
            for i, j in T.Parallel(5, 6):
                best, at = T.alloc_var("float32", -T.infinity("float32")), T.alloc_var("int32", -1)
                for di, dj in T.grid(3, 3):
                    v = X[c, i * 2 + di, j * 2 + dj]
                    if v > best:
                        best = v
                        at = (i * 2 + di) * 13 + j * 2 + dj
                O[c, i, j] = best
                P[c, i, j] = at

    x = torch.randperm(4 * 11 * 13).view(4, 11, 13).float()
    y, at = torch.nn.functional.max_pool2d(x, 3, 2, return_indices=True)
    return kernel, [x, zeros(4, 5, 6), zeros(4, 5, 6, dtype=I32)], {1: y, 2: at.int()}


@case
def convolution_with_dilation_and_groups() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((4, 12, 12), "float32"), K: T.Tensor((4, 2, 3, 3), "float32"), O: T.Tensor((4, 8, 8), "float32")
    ):
        with T.Kernel(4, threads=64) as c:
            acc = T.alloc_fragment((8, 8), "float32")
            T.clear(acc)
            for g, p, q in T.grid(2, 3, 3):
                for i, j in T.Parallel(8, 8):
                    acc[i, j] += X[c // 2 * 2 + g, i + 2 * p, j + 2 * q] * K[c, g, p, q]
            T.copy(acc, O[c, 0:8, 0:8])

    x, k = whole(4, 12, 12), whole(4, 2, 3, 3)
    return kernel, [x, k, zeros(4, 8, 8)], {2: torch.nn.functional.conv2d(x[None], k, dilation=2, groups=2)[0]}


@case
def bilinear_values_between_pixels() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((9, 9), "float32"), O: T.Tensor((17, 17), "float32")):
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(17, 17):
                y, x = T.cast(i, "float32") * 0.5, T.cast(j, "float32") * 0.5
                y0, x0 = T.cast(T.floor(y), "int32"), T.cast(T.floor(x), "int32")
                fy, fx = y - T.cast(y0, "float32"), x - T.cast(x0, "float32")
                y1, x1 = T.min(y0 + 1, 8), T.min(x0 + 1, 8)
                O[i, j] = (1 - fy) * ((1 - fx) * X[y0, x0] + fx * X[y0, x1]) + fy * (
                    (1 - fx) * X[y1, x0] + fx * X[y1, x1]
                )

    x = whole(9, 9)
    return (
        kernel,
        [x, zeros(17, 17)],
        {1: torch.nn.functional.interpolate(x[None, None], size=(17, 17), mode="bilinear", align_corners=True)[0, 0]},
    )


# Macros, Python around kernels, and several kernels.


@case
def macro_that_returns_two_values_in_a_branch() -> Case:
    @T.macro
    def ordered(a, b):
        low, high = T.min(a, b), T.max(a, b)
        return low, high

    @T.prim_func
    def kernel(X: T.Tensor((50,), "int32"), O: T.Tensor((2, 50), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(50):
                if X[i] != 0:
                    low, high = ordered(X[i], X[49 - i])
                    O[0, i] = low
                    O[1, i] = high - low

    x = whole(50, dtype=I32)
    y = x.flip(0)
    low, high = torch.minimum(x, y), torch.maximum(x, y)
    return kernel, [x, zeros(2, 50, dtype=I32)], {1: torch.stack([low, high - low]) * (x != 0)}


@case
def macro_that_writes_into_the_tile_it_is_given() -> Case:
    @T.macro
    def add(tile, value, rows):
        for i, j in T.Parallel(rows, 12):
            tile[i, j] += value * (i + 1)

    @T.prim_func
    def kernel(O: T.Tensor((10, 12), "float32"), n: T.float32):
        with T.Kernel(1, threads=32):
            f, s = T.alloc_fragment((10, 12), "float32"), T.alloc_shared((10, 12), "float32")
            T.clear(f)
            T.clear(s)
            for k in range(3):
                add(f, n + k, 10 - k)
            add(s, n, 4)
            for i, j in T.Parallel(10, 12):
                O[i, j] = f[i, j] * 10 + s[9 - i, j]

    n = float(torch.randint(-5, 5, ()))
    rows = torch.arange(10)
    f = sum((n + k) * (rows + 1) * (rows < 10 - k) for k in range(3))
    s = n * (rows + 1) * (rows < 4)
    return kernel, [zeros(10, 12), n], {0: (f * 10 + s.flip(0))[:, None].expand(10, 12).contiguous()}


@case
def list_of_tiles_chosen_by_python() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((4, 32), "float32"), O: T.Tensor((4, 32), "float32")):
        with T.Kernel(1, threads=32):
            tiles = [T.alloc_fragment((32,), "float32") for _ in range(4)]
            for k, tile in enumerate(tiles):
                T.copy(X[k, 0:32], tile)
            for k in (0, 1, 2, 3):
                for i in T.Parallel(32):
                    tiles[k][i] = tiles[k][i] * 2 + tiles[(k + 1) % 4][i]
            for k, tile in enumerate(reversed(tiles)):
                T.copy(tile, O[k, 0:32])

    x = whole(4, 32)
    t = list(x)
    for k in range(4):
        t[k] = t[k] * 2 + t[(k + 1) % 4]
    return kernel, [x, zeros(4, 32)], {1: torch.stack(t[::-1])}


@case
def three_kernels_that_pass_a_sum_on() -> Case:
    @T.prim_func
    def kernel(
        X: T.Tensor((100,), "int32"),
        P: T.Tensor((4,), "int32"),
        total: T.Tensor((1,), "int32"),
        O: T.Tensor((100,), "int32"),
    ):
        with T.Kernel(4, threads=32) as b:
            f, r = T.alloc_fragment((25,), "int32"), T.alloc_fragment((1,), "int32")
            T.copy(X[b * 25 : b * 25 + 25], f)
            T.reduce_sum(f, r, dim=0)
            P[b] = r[0]
        with T.Kernel(1, threads=32):
            acc = T.alloc_var("int32", 0)
            for k in T.serial(4):
                acc += P[k]
                P[k] = acc - P[k]
            total[0] = acc
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(25):
                O[b * 25 + i] = X[b * 25 + i] - total[0] + P[b]

    x = whole(100, dtype=I32)
    parts = x.view(4, 25).sum(1)
    before = parts.cumsum(0) - parts
    return (
        kernel,
        [x, zeros(4, dtype=I32), zeros(1, dtype=I32), zeros(100, dtype=I32)],
        {1: before.int(), 2: ints([int(x.sum())]), 3: (x.view(4, 25) - x.sum() + before[:, None]).int().view(-1)},
    )


# Sizes of the call, strides and empty loops.


@case
def transpose_of_sizes_of_the_call_in_tiles() -> Case:
    m, n = T.dynamic("m, n")

    @T.prim_func
    def kernel(X: T.Tensor((m, n), "float32"), O: T.Tensor((n, m), "float32")):
        with T.Kernel(T.ceildiv(n, 16), T.ceildiv(m, 16), threads=64) as (bx, by):
            s, t = T.alloc_shared((16, 16), "float32"), T.alloc_shared((16, 16), "float32")
            T.copy(X[by * 16, bx * 16], s)
            T.transpose(s, t)
            T.copy(t, O[bx * 16, by * 16])

    m, n = (int(v) for v in torch.randint(1, 50, (2,)))
    x = whole(m, n)
    return kernel, [x, zeros(n, m)], {1: x.t().contiguous()}


@case
def every_other_column_of_a_wider_tensor() -> Case:
    step, m = T.dynamic("step, m")

    @T.prim_func
    def kernel(X: T.StridedTensor((m, 20), (step, 2), "float32"), O: T.Tensor((m,), "float32")):
        with T.Kernel(m, threads=32) as b:
            f, r = T.alloc_fragment((20,), "float32"), T.alloc_fragment((1,), "float32")
            for j in T.Parallel(20):
                f[j] = X[b, j] * (j + 1)
            T.reduce_sum(f, r, dim=0)
            O[b] = r[0]

    m = int(torch.randint(1, 9, ()))
    x = whole(m, 47)
    return kernel, [x[:, 3:43:2], zeros(m)], {1: (x[:, 3:43:2] * torch.arange(1, 21)).sum(1)}


@case
def loops_whose_bounds_are_the_wrong_way_round() -> Case:
    @T.prim_func
    def kernel(O: T.Tensor((4,), "int32"), a: T.int32, b: T.int32):
        with T.Kernel(1, threads=32):
            n = T.alloc_var("int32", 0)
            for i in T.serial(a, b):
                n += i
            O[0] = n
            n = 0
            for i in range(b, a, -3):
                n += i
            O[1] = n
            n = 0
            for i in T.serial(T.max(a, b), T.min(a, b)):
                n += i + 1000
            O[2] = n
            for _i in T.Parallel(T.max(b - a, 0)):
                T.atomic_add(O[3], 1)

    a, b = (int(v) for v in torch.randint(-9, 9, (2,)))
    return kernel, [zeros(4, dtype=I32), a, b], {0: ints([sum(range(a, b)), sum(range(b, a, -3)), 0, max(b - a, 0)])}


@case
def steps_that_the_call_tells() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((60,), "int32"), O: T.Tensor((2,), "int32"), step: T.int32):
        with T.Kernel(1, threads=32):
            n, last = T.alloc_var("int32", 0), T.alloc_var("int32", -1)
            i = T.alloc_var("int32", 3)
            while i < 60:
                n += X[i]
                last = i
                i += step
            O[0] = n
            O[1] = last

    x, step = whole(60, dtype=I32), int(torch.randint(1, 70, ()))
    return kernel, [x, zeros(2, dtype=I32), step], {1: ints([int(x[3::step].sum()), list(range(3, 60, step))[-1]])}


# Floats.


@case
def extended_sum_of_two_floats() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), O: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=32):
            high, low = T.alloc_var("float32", 0.0), T.alloc_var("float32", 0.0)
            for i in T.serial(64):
                total = high + X[i]
                part = total - high
                low = low + ((high - (total - part)) + (X[i] - part))
                high = total
            O[0] = high
            O[1] = low

    x = torch.cat([torch.tensor([2.0**24]), torch.randint(-3, 4, (62,)).float(), torch.tensor([-(2.0**24)])])
    high = low = torch.zeros(())
    for v in x:
        total = high + v
        part = total - high
        low, high = low + ((high - (total - part)) + (v - part)), total
    return kernel, [x, zeros(2)], {1: torch.stack([high, low])}


@case
def steps_between_neighbours_of_floats() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((32,), "float32"), O: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                bits = T.reinterpret(X[i], "int32")
                O[0, i] = T.reinterpret(bits + 1, "float32")
                O[1, i] = T.reinterpret(bits ^ T.int32(-(2**31)), "float32") + 0.0

    x = torch.rand(32) * 10 + 0.5
    return kernel, [x, zeros(2, 32)], {1: torch.stack([torch.nextafter(x, torch.tensor(math.inf)), -x])}


@case
def sums_of_bfloat16_rounded_in_each_step() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((20, 16), "bfloat16"), O: T.Tensor((16,), "bfloat16"), P: T.Tensor((16,), "bfloat16")):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_fragment((16,), "bfloat16"), T.alloc_fragment((16,), "float32")
            T.clear(a)
            T.clear(b)
            for k in T.serial(20):
                for j in T.Parallel(16):
                    a[j] = a[j] + X[k, j]
                    b[j] += X[k, j]
            T.copy(a, O)
            T.copy(b, P)

    x = torch.randn(20, 16).bfloat16()
    a, b = torch.zeros(16).bfloat16(), torch.zeros(16)
    for row in x:
        a, b = (a.float() + row.float()).bfloat16(), b + row.float()
    return kernel, [x, zeros(16, dtype=torch.bfloat16), zeros(16, dtype=torch.bfloat16)], {1: a, 2: b.bfloat16()}


@case
def comparisons_of_halves_that_round_alike() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((40,), "float32"), O: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                h = T.cast(X[i], "float16")
                O[0, i] = T.if_then_else(T.cast(h, "float32") == X[i], 1, 0)
                O[1, i] = T.if_then_else(h < T.float16(0.1), 1, 0)
                O[2, i] = T.if_then_else(T.cast(h, "float32") < 0.1, 1, 0)

    x = torch.linspace(0.0999, 0.1001, 40)
    h = x.half()
    return (
        kernel,
        [x, zeros(3, 40, dtype=I32)],
        {1: torch.stack([h.float() == x, h < torch.tensor(0.1).half(), h.float() < torch.tensor(0.1)]).int()},
    )


@case
def infinities_in_a_row_max_and_row_sum() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((6, 40), "float32"), O: T.Tensor((4, 6), "float32")):
        with T.Kernel(1, threads=32):
            x, r = T.alloc_fragment((6, 40), "float32"), T.alloc_fragment((6,), "float32")
            T.copy(X, x)
            T.reduce_sum(x, r, dim=1)
            T.copy(r, O[0, 0:6])
            T.reduce_max(x, r, dim=1)
            T.copy(r, O[1, 0:6])
            T.reduce_min(x, r, dim=1)
            T.copy(r, O[2, 0:6])
            T.reduce_abssum(x, r, dim=1)
            T.copy(r, O[3, 0:6])

    x = whole(6, 40)
    x[0, 3], x[1, 5], x[1, 39], x[2, 0], x[3] = math.inf, math.inf, -math.inf, -math.inf, -math.inf
    return kernel, [x, zeros(4, 6)], {1: torch.stack([x.sum(1), x.amax(1), x.amin(1), x.abs().sum(1)])}


@case
def float64_through_every_tile() -> Case:
    @T.prim_func
    def kernel(X: T.Tensor((9, 20), "float64"), O: T.Tensor((9,), "float64"), P: T.Tensor((9, 20), "float64")):
        with T.Kernel(1, threads=64):
            s, f, r = (
                T.alloc_shared((9, 20), "float64"),
                T.alloc_fragment((9, 20), "float64"),
                T.alloc_fragment((9,), "float64"),
            )
            T.copy(X, s)
            for i, j in T.Parallel(9, 20):
                f[i, j] = s[8 - i, 19 - j] * 3.0 + 0.1
            T.reduce_max(f, r, dim=1)
            T.cumsum(s, dim=1)
            T.copy(r, O)
            T.copy(s, P)

    x = whole(9, 20, dtype=torch.float64) + 2.0**-40
    return (
        kernel,
        [x, zeros(9, dtype=torch.float64), zeros(9, 20, dtype=torch.float64)],
        {1: (x.flip(0, 1) * 3 + 0.1).amax(1), 2: x.cumsum(1)},
    )


test_reported_scopes = case.test()
