# SPDX-License-Identifier: Apache-2.0
import torch_tile.language as T
from torch_tile.lowering.cpu.peel_tails import peel_tails


def test_guarded_load_and_store(becomes):
    """The main part has no guard; the part after it stores nothing, so it is gone."""

    @T.prim_func
    def before(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as b:
            for i in T.vectorized(8):
                if b * 8 + i < n:
                    x[b * 8 + i] = 2.0

    @T.prim_func
    def after(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as b:
            for i in T.vectorized(T.max(T.min(n - b * 8, 8), 0)):
                x[b * 8 + i] = 2.0

    becomes(peel_tails, before, after)


def test_select_leaves_a_tail(becomes):
    @T.prim_func
    def before(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as _:
            tile = T.alloc_shared((8,), "float32")
            for i in T.vectorized(8):
                tile[i] = T.if_then_else(i * 2 + 1 < n, x[i], 0.0)

    got = repr(peel_tails(before.program))
    limit = "T.max(T.min(n // 2, 8), 0)"
    assert f"for i in T.vectorized({limit}):\n            tile[i] = x[i]" in got
    assert f"for i in T.vectorized({limit}, 8):\n            tile[i] = 0.0" in got


def test_nest_is_peeled_at_each_level(becomes):
    m, n = T.dynamic("m, n")

    @T.prim_func
    def before(x: T.Tensor((m, n), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    if i < m and j < n:
                        x[i, j] = 1.0

    @T.prim_func
    def after(x: T.Tensor((m, n), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(T.min(m, 4)):
                for j in T.vectorized(T.min(n, 8)):
                    x[i, j] = 1.0

    becomes(peel_tails, before, after)


def test_what_changes_in_the_loop_is_no_limit(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), p: T.Tensor((8,), "int32")):
        with T.Kernel(8) as b:
            for i in T.vectorized(8):
                if i < p[b]:
                    x[i] = 1.0  # p could be x
            for i in T.vectorized(8):
                k = i * 2
                if i < k - 3:
                    x[i] = 1.0
            for i in T.serial(8):
                if i * i < b:
                    x[i] = 1.0
            for i in T.serial(8):
                if b - i < 3:  # a lower limit
                    x[i] = 1.0
            for i in T.serial(0, 8, 2):
                if i < b:
                    x[i] = 1.0
            for i in T.serial(8):
                if i < b:
                    x[i] = 1.0
                    break

    keeps(peel_tails, kernel)


def test_a_named_index_is_seen_through(becomes):
    n = T.dynamic("n")

    @T.prim_func
    def before(x: T.Tensor((n,), "float32")):
        with T.Kernel(8) as b:
            for i in T.vectorized(8):
                column = b * 8 + i
                if column < n:
                    x[column] = 2.0

    @T.prim_func
    def after(x: T.Tensor((n,), "float32")):
        with T.Kernel(8) as b:
            for i in T.vectorized(T.max(T.min(n - b * 8, 8), 0)):
                column = b * 8 + i
                x[column] = 2.0

    becomes(peel_tails, before, after)
