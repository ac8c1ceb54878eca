# SPDX-License-Identifier: Apache-2.0
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.guard_bounds import guard_bounds


def test_ragged_copy(becomes):
    m, n = T.dynamic("m, n")

    @T.prim_func
    def before(x: T.Tensor((m, n), "float32"), out: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 8), m) as (bx, by):
            for j in T.vectorized(8):
                out[by, bx * 8 + j] = x[by, bx * 8 + j] + x[by - 1, j]

    @T.prim_func
    def after(x: T.Tensor((m, n), "float32"), out: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 8), m) as (bx, by):
            for j in T.vectorized(8):
                if bx * 8 + j < n:
                    out[by, bx * 8 + j] = T.if_then_else(bx * 8 + j < n, x[by, bx * 8 + j], 0.0) + T.if_then_else(
                        by - 1 >= 0 and j < n, x[by - 1, j], 0.0
                    )

    becomes(guard_bounds, before, after, again=False)


def test_conditions_around_an_access_count(keeps):
    m = T.dynamic("m")

    @T.prim_func
    def kernel(x: T.Tensor((m,), "float32"), n: T.int32):
        with T.Kernel(T.ceildiv(m, 4)) as b:
            for i in T.serial(4):
                if b * 4 + i < m:
                    x[b * 4 + i] = 1.0
            if n >= 2 and n < m:
                x[n] = T.if_then_else(n + 1 < m, x[n + 1], 0.0) + x[n - 2]
            for i in T.serial(m):
                x[m - 1 - i] = x[i]
            k = n % m
            x[k] = 2.0

    keeps(guard_bounds, kernel)


def test_memory_may_change_after_a_condition(becomes):
    m = T.dynamic("m")

    @T.prim_func
    def before(x: T.Tensor((m,), "float32")):
        with T.Kernel(1) as _:
            v = T.alloc_var("int32", 0)
            if v >= 0 and v < m:
                v += 5
                x[v] = 1.0

    @T.prim_func
    def after(x: T.Tensor((m,), "float32")):
        with T.Kernel(1) as _:
            v = T.alloc_var("int32", 0)
            if v >= 0 and v < m:
                v += 5
                if v >= 0 and v < m:
                    x[v] = 1.0

    becomes(guard_bounds, before, after, again=False)


def test_atomics(becomes):
    m = T.dynamic("m")

    @T.prim_func
    def before(x: T.Tensor((m,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(8):
                T.evaluate(T.call("cpu_atomic", T.address_of(x[i]), x[i], options=("add",)))

    @T.prim_func
    def after(x: T.Tensor((m,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(8):
                if i < m:
                    T.evaluate(
                        T.call("cpu_atomic", T.address_of(x[i]), T.if_then_else(i < m, x[i], 0.0), options=("add",))
                    )

    becomes(guard_bounds, before, after, again=False)


def test_on_chip_memory_is_not_guarded(keeps):
    @T.prim_func
    def kernel(p: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            tile = T.alloc_shared((4,), "int32")
            tile[p[b]] = tile[p[b] + 1]

    keeps(guard_bounds, kernel)


def test_reductions_of_global_memory_stop_at_its_edges():
    m, n = T.dynamic("m, n")

    @T.prim_func
    def kernel(x: T.Tensor((m, n), "float32"), out: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, 2)) as b:
            total = T.alloc_fragment((2,), "float32")
            T.reduce_sum(x[b * 2 : b * 2 + 2, 0:8], total, dim=1)
            T.copy(total, out[b * 2])

    x, out = torch.randn(3, 5), torch.empty(3)
    torch_tile.compile(kernel)(x, out)
    torch.testing.assert_close(out, x.sum(1))
