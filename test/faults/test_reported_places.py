# SPDX-License-Identifier: Apache-2.0
"""Small programs after reports on other compilers: places that are computed: gathers, scatters, permutations and
atomics.

Numbers behind a name are those of the report.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, counts, ints, whole, zeros

import torch_tile.language as T

case = Cases()
I32, I64, U8 = torch.int32, torch.int64, torch.uint8


@case
def atomic_results_are_old_values() -> Case:
    @T.prim_func
    def kernel(N: T.Tensor((1,), "int32"), O: T.Tensor((96,), "int32")):
        with T.Kernel(3, threads=32):
            for _ in T.Parallel(32):
                at = T.atomic_add(N[0], 1, return_prev=True)
                O[at] = O[at] + 1

    return (
        kernel,
        [zeros(1, dtype=torch.int32), zeros(96, dtype=torch.int32)],
        {0: torch.tensor([96], dtype=torch.int32), 1: torch.ones(96, dtype=torch.int32)},
    )


@case
def atomic_extrema_of_literals() -> Case:
    """Tile-ai/tilelang #2758: the lower bits of a float32 were taken for a half."""

    @T.prim_func
    def kernel(B: T.Tensor((4,), "float16"), C: T.Tensor((4,), "bfloat16")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                T.atomic_max(B[i], 42.0)
                T.atomic_min(C[i], -0.5)

    b, c = torch.tensor([0.0, 50, -1, 42]).half(), torch.tensor([0.0, -3, 1, -0.5]).bfloat16()
    return kernel, [b, c], {0: b.clamp(min=42), 1: c.clamp(max=-0.5)}


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


test_reported_places = case.test()
