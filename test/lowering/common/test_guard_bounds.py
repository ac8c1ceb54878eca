# SPDX-License-Identifier: Apache-2.0
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.ir.expr import Load, Select
from torch_tile.ir.node import walk
from torch_tile.lowering.common.guard_bounds import guard_bounds


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
                T.evaluate(T.call("atomic", T.address_of(x[i]), x[i], options=("add",)))

    @T.prim_func
    def after(x: T.Tensor((m,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(8):
                if i < m:
                    T.evaluate(T.call("atomic", T.address_of(x[i]), T.if_then_else(i < m, x[i], 0.0), options=("add",)))

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


def wide(dst, src, size):
    return T.evaluate(T.call("vector_copy", T.address_of(dst), T.address_of(src), options=(size,)))


def test_wide_copies_inside_or_outside_as_a_whole(becomes):
    """Rows are a multiple of the vector and it starts at one: nothing but the first element needs to be looked at."""
    m, n = T.dynamic("m"), T.dynamic("n", multiple_of=8)

    @T.prim_func
    def before(x: T.Tensor((m, n), "float16")):
        with T.Kernel(1) as _:
            r = T.alloc_local((8,), "float16")
            for k in T.serial(4):
                wide(r[0], x[k, k * 8], 16)
                wide(x[k, k * 8], r[0], 16)

    @T.prim_func
    def after(x: T.Tensor((m, n), "float16")):
        with T.Kernel(1) as _:
            r = T.alloc_local((8,), "float16")
            for k in T.serial(4):
                if k < m and k * 8 < n:
                    wide(r[0], x[k, k * 8], 16)
                else:
                    for element in T.unroll(8):
                        r[element] = T.float16(0)
                if k < m and k * 8 < n:
                    wide(x[k, k * 8], r[0], 16)

    becomes(guard_bounds, before, after)


def test_wide_copies_that_may_lie_across_an_edge(becomes):
    n = T.dynamic("n")

    @T.prim_func
    def before(x: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            r = T.alloc_local((4,), "float32")
            for k in T.serial(4):
                wide(r[0], x[k * 4], 16)
                wide(x[k * 4], r[0], 16)

    @T.prim_func
    def after(x: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            r = T.alloc_local((4,), "float32")
            for k in T.serial(4):
                if k * 4 + 3 < n:
                    wide(r[0], x[k * 4], 16)
                else:
                    for element in T.unroll(4):
                        r[element] = T.if_then_else(k * 4 + element < n, x[k * 4 + element], 0.0)
                if k * 4 + 3 < n:
                    wide(x[k * 4], r[0], 16)
                else:
                    for element in T.unroll(4):
                        if k * 4 + element < n:
                            x[k * 4 + element] = r[element]

    becomes(guard_bounds, before, after)


def test_asynchronous_copies_have_fewer_valid_bytes(becomes):
    m, n = T.dynamic("m, n")

    def start(dst, src, valid):
        return T.evaluate(T.call("cp_async", T.address_of(dst), T.address_of(src), valid, options=(16,)))

    @T.prim_func
    def before(x: T.Tensor((m, 64), "float16"), y: T.Tensor((n,), "float16")):
        with T.Kernel(1) as _:
            s = T.alloc_shared((8, 8), "float16")
            for i in T.serial(8):
                start(s[i, 0], x[i, 8], T.int32(16))
                start(s[i, 0], x[i, i * 8], T.int32(16))
                start(s[i, 0], y[i * 8], T.int32(16))

    @T.prim_func
    def after(x: T.Tensor((m, 64), "float16"), y: T.Tensor((n,), "float16")):
        with T.Kernel(1) as _:
            s = T.alloc_shared((8, 8), "float16")
            for i in T.serial(8):
                start(s[i, 0], x[i, 8], T.if_then_else(i < m, T.int32(16), 0))
                start(s[i, 0], x[i, i * 8], T.if_then_else(i < m, T.int32(16), 0))
                start(s[i, 0], y[i * 8], T.if_then_else(i * 8 < n, T.min(T.int32(16), (n - i * 8) * 2), 0))

    becomes(guard_bounds, before, after, again=False)


def test_atomics_whose_result_is_used(becomes):
    n = T.dynamic("n")

    @T.prim_func
    def before(x: T.Tensor((n,), "int32")):
        with T.Kernel(4) as b:
            x[b] = T.call("atomic", T.address_of(x[b]), T.int32(1), options=("add",))

    @T.prim_func
    def after(x: T.Tensor((n,), "int32")):
        with T.Kernel(4) as b:
            if b < n:
                x[b] = T.if_then_else(b < n, T.call("atomic", T.address_of(x[b]), T.int32(1), options=("add",)), 0)

    becomes(guard_bounds, before, after, again=False)


def test_addresses_computed_from_memory():
    """The entry of a table that an asynchronous copy goes by has a guard of its own."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), table: T.Tensor((n,), "int32")):
        with T.Kernel(4) as b:
            s = T.alloc_shared((4,), "float32")
            source = T.address_of(x[T.min(T.max(table[b], 0), 63)])
            T.evaluate(T.call("cp_async", T.address_of(s[0]), source, T.int32(4), options=(4,)))

    (guard,) = (x for x in walk(guard_bounds(kernel.program)) if isinstance(x, Select))
    assert isinstance(guard.a, Load) and guard.a.buffer.name == "table"


def test_asynchronous_copies_of_rows_that_are_not_there_are_aligned():
    """The stride of a tensor's only row is no multiple of a run, and may not count in addresses of further rows."""

    @T.prim_func
    def kernel(x: T.Tensor((1, 230), "float16"), out: T.Tensor((1, 230), "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((16, 256), "float16")
            T.async_copy(x[0, 0], tile)
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(tile, out[0, 0])

    x, out = torch.randn(1, 230).half(), torch.full((1, 230), float("nan")).half()
    compiled = torch_tile.compile(kernel, target="cuda:sm_80")
    assert "cp.async of 16 bytes" in str(compiled.schedule)
    findings = compiled.interpret(x, out)
    assert not findings, findings.report()
    assert torch.equal(x, out)
