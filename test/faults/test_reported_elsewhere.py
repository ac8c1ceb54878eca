# SPDX-License-Identifier: Apache-2.0
"""Small programs after bug reports of Triton, TileLang, TVM, Taichi and Numba, which got them wrong silently."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from reported import Case, Cases, whole

import torch_tile.language as T

case = Cases()


@case
def sum_by_48_threads() -> Case:
    """Tile-ai/tilelang #2542: lanes beyond a power of two were dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 48), "float32"), B: T.Tensor((5,), "float32")):
        with T.Kernel(1, threads=48):
            f, o = T.alloc_fragment((5, 48), "float32"), T.alloc_fragment((5,), "float32")
            T.copy(A, f)
            T.reduce_sum(f, o, dim=1)
            T.copy(o, B)

    a = whole(5, 48)
    return kernel, [a, torch.zeros(5)], {1: a.sum(1)}


@case
def scan_of_a_part() -> Case:
    """Tile-ai/tilelang #2523: rows of a part lie further apart than the part is wide."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 40), "int32"), B: T.Tensor((8, 24), "int32")):
        with T.Kernel(1, threads=96):
            s = T.alloc_shared((8, 40), "int32")
            T.copy(A, s)
            T.cumsum(s[0:8, 0:24], dim=1)
            T.copy(s[0:8, 0:24], B)

    a = whole(8, 40).int()
    return kernel, [a, torch.zeros(8, 24).int()], {1: a[:, :24].cumsum(1).int()}


@case
def reducer_whose_size_divides_no_threads() -> Case:
    """Tile-ai/tilelang #2408: groups of threads that hold copies were summed."""

    @T.prim_func
    def kernel(A: T.Tensor((24, 20), "float32"), X: T.Tensor((20,), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=128):
            r = T.alloc_reducer((24,), "float32", "sum", replication="all")
            T.clear(r)
            for i, j in T.Parallel(24, 20):
                r[i] += A[i, j] * X[j]
            T.finalize_reducer(r)
            T.copy(r, B)

    a, x = whole(24, 20), whole(20)
    return kernel, [a, x, torch.zeros(24)], {2: a @ x}


@case
def read_before_the_copy_of_a_turn() -> Case:
    """Tile-ai/tilelang #2668: a pipeline moved the copy before the read of what was there."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 32), "float32"), B: T.Tensor((6, 32), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((32,), "float32")
            for i in T.Parallel(32):
                s[i] = i
            for t in T.Pipelined(6, num_stages=2):
                for i in T.Parallel(32):
                    B[t, i] = s[31 - i]
                T.copy(A[t, 0:32], s)

    a = whole(6, 32)
    return kernel, [a, torch.zeros(6, 32)], {1: torch.cat([torch.arange(32.0)[None], a[:-1]]).flip(1)}


@case
def fill_of_a_part_behind_a_copy() -> Case:
    """Tile-ai/tilelang #2698: no barrier stood between the two writes."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((64,), "float32")
            T.copy(A, s)
            T.fill(s[13:40], -7.0)
            for i in T.Parallel(64):
                B[i] = s[63 - i]

    a = whole(64)
    wanted = a.clone()
    wanted[13:40] = -7
    return kernel, [a, torch.zeros(64)], {1: wanted.flip(0)}


@case
def product_of_fragments_clears() -> Case:
    """Tile-ai/tilelang #2617: clear_accum was ignored, and #2381: the rest of K was dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 24), "float16"), B: T.Tensor((24, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_fragment((64, 24), "float16"), T.alloc_fragment((24, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, 1000.0)
            T.gemm(a, b, c, clear_accum=True)
            T.copy(c, C)

    a, b = whole(64, 24), whole(24, 64)
    return kernel, [a.half(), b.half(), torch.zeros(64, 64)], {2: a @ b}


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


test_reported_elsewhere = case.test()
