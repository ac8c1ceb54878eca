# SPDX-License-Identifier: Apache-2.0
"""Parameters T.ptr, T.make_tensor and T.match_buffer."""

import linecache

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.ir.node import alike
from torch_tile.simulator.tile.interpreter import evaluate


def test_tensors_whose_sizes_are_scalars(way):
    @T.prim_func
    def kernel(a: T.ptr, b: T.ptr, c: T.ptr, m: T.int32, n: T.int32, k: T.int32):
        A = T.make_tensor(a, (m, k), "float16")
        B = T.make_tensor(b, (k, n), "float16")
        C = T.make_tensor(c, (m, n), "float32")
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=128) as (bx, by):
            x = T.alloc_shared((32, 32), "float16")
            y = T.alloc_shared((32, 32), "float16")
            z = T.alloc_fragment((32, 32), "float32")
            T.clear(z)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[by * 32, step * 32], x)
                T.copy(B[step * 32, bx * 32], y)
                T.gemm(x, y, z)
            T.copy(z, C[by * 32, bx * 32])

    for m, n, k in ((40, 48, 72), (64, 32, 33)):
        a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n)
        way(kernel, a, b.flatten(), c, m, n, k)
        torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)


def test_a_part_of_a_larger_tensor_with_strides(way):
    @T.prim_func
    def kernel(a: T.ptr, b: T.handle, n: T.int32, s: T.int32):
        A = T.make_tensor(a, (n, 16), "float32", strides=(s, 1))
        B = T.match_buffer(b, (n, 16), "float32")
        with T.Kernel(n, threads=32) as bx:
            for i in T.Parallel(20):
                if i < 16:
                    B[bx, i] = A[bx, i] + A[bx, i + 4]

    a, b = torch.randn(5, 24), torch.zeros(4, 16)
    way(kernel, a, b, 4, 24)
    wanted = a[:4, :16].clone()
    wanted[:, :12] += a[:4, 4:16]
    assert torch.equal(b, wanted)


def test_a_matched_buffer_binds_its_sizes(way):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(a: T.handle, b: T.handle("float32"), unused: T.ptr):
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = T.make_tensor(A, (n,), "int32")[bx * 32 + i]

    a, b = torch.randn(50), torch.zeros(50)
    way(kernel, a, b, None)
    assert torch.equal(b, a.view(torch.int32).float())


def test_an_eager_kernel_takes_pointers():
    @torch_tile.jit(target="cpu")
    def double(a: T.ptr, b: T.ptr, n: T.int32):
        A = T.make_tensor(a, (n,), "float32")
        B = T.make_tensor(b, (n,), "float32")
        with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
            for i in T.Parallel(64):
                B[bx * 64 + i] = A[bx * 64 + i] * 2

    for n in (10, 100):
        a, b = torch.randn(100), torch.zeros(100)
        double(a, b, n)
        assert torch.equal(b[:n], a[:n] * 2) and not b[n:].any()


@T.prim_func
def square(a: T.ptr, n: T.int32):
    A = T.make_tensor(a, (n, n), "float32")
    with T.Kernel(n, threads=32) as bx:
        for i in T.Parallel(32):
            A[bx, i] = A[bx, i] * 2


def test_tensors_that_are_too_small_are_refused():
    kernel = torch_tile.compile(square, target="cpu")
    a = torch.ones(16)
    kernel(a, 4)
    assert torch.equal(a, torch.full((16,), 2.0))
    with pytest.raises(LaunchError, match="must have 25 elements, got 16"):
        kernel(a, 5)
    with pytest.raises(LaunchError, match="contiguous"):
        kernel(torch.ones(16, 2)[:, 0], 4)
    with pytest.raises(LaunchError, match="float32"):
        kernel(a.double(), 4)


def indexed(a):
    a[0] = 1


def declared_twice(a):
    T.make_tensor(a, (8,), "float32")
    T.make_tensor(a, (9,), "float32")


@pytest.mark.parametrize("body", [indexed, declared_twice, lambda a: T.make_tensor(3, (8,))])
def test_what_pointers_cannot(body):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(a: T.ptr):
            with T.Kernel(1, threads=32):
                body(a)

    assert caught.value.code == "bad_argument"


def test_a_pointer_is_given_as_its_tensor():
    """Launches cannot check what lies at an address."""

    @T.prim_func
    def kernel(a: T.ptr, n: T.int32):
        with T.Kernel(1, is_cpu=True):
            A = T.make_tensor(a, (n,), "float32")
            for i in T.serial(n):
                A[i] = A[i] * 2.0

    x = torch.randn(7)
    made = torch_tile.compile(kernel, target="cpu")
    with pytest.raises(LaunchError, match=r"`a` is an address.* give the tensor, not its data_ptr\(\)"):
        made(x.data_ptr(), 7)
    wanted = 2 * x
    made(x, 7)
    assert torch.equal(x, wanted)


# Tables of pointers.


def addresses(tensors):
    return torch.tensor([t.data_ptr() for t in tensors])


@T.prim_func
def grouped(
    a: T.Tensor((T.dynamic("g"),), T.ptr), b: T.Tensor((T.dynamic("g"),), "handle"),
    c: T.Tensor((T.dynamic("g"),), T.ptr), rows: T.Tensor((T.dynamic("g"),), "int32"), n: T.int32, k: T.int32,
):  # fmt: skip
    with T.Kernel(T.ceildiv(n, 32), a.shape[0], threads=128) as (bx, group):
        m = rows[group]
        A = T.make_tensor(a[group], (m, k), "float16")
        B = T.make_tensor(b[group], (k, n), "float16")
        C = T.make_tensor_from_addr(c[group], (m, n), "float32")
        x = T.alloc_shared((32, 32), "float16")
        y = T.alloc_shared((32, 32), "float16")
        z = T.alloc_fragment((32, 32), "float32")
        for by in T.serial(T.ceildiv(m, 32)):
            T.clear(z)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[by * 32, step * 32], x)
                T.copy(B[step * 32, bx * 32], y)
                T.gemm(x, y, z)
            T.copy(z, C[by * 32, bx * 32])


def groups(rows, n, k):
    """Operands of a grouped product, results that hold NaN, and the arguments of a call."""
    a = [torch.randn(m, k).half() for m in rows]
    b = [torch.randn(k, n).half() for _ in rows]
    c = [torch.full((m, n), torch.nan) for m in rows]
    return a, b, c, (addresses(a), addresses(b), addresses(c), torch.tensor(rows, dtype=torch.int32), n, k)


def test_a_grouped_product_by_tables_of_pointers(way, request):
    if "gpu" in request.node.name:
        pytest.skip("addresses of CPU tensors")
    a, b, c, arguments = groups((40, 0, 7, 64), 40, 72)
    way(grouped, *arguments)
    for x, y, z in zip(a, b, c, strict=True):
        torch.testing.assert_close(z.double(), x.double() @ y.double(), rtol=1e-3, atol=1e-2)


@pytest.mark.cuda
def test_a_grouped_product_on_a_gpu():
    compiled = torch_tile.compile(grouped, target="cuda")
    a, b, c, arguments = groups((40, 0, 7, 64), 40, 72)
    there = [[t.cuda() for t in each] for each in (a, b, c)]
    compiled(*(addresses(each).cuda() for each in there), arguments[3].cuda(), *arguments[4:])
    for x, y, z in zip(a, b, there[2], strict=True):
        torch.testing.assert_close(z.cpu().double(), x.double() @ y.double(), rtol=1e-3, atol=1e-2)


def test_a_table_in_a_loop_with_strides(way, request):
    if "gpu" in request.node.name:
        pytest.skip("addresses of CPU tensors")

    @T.prim_func
    def kernel(table: T.Tensor((5,), T.ptr), out: T.Tensor((5, 20), "float32"), n: T.int32, s: T.int32):
        with T.Kernel(1, threads=32):
            for group in T.serial(5):
                A = T.make_tensor(table[group], (n, 3), "float32", strides=(s, 1), align=4)
                for i in T.Parallel(20):
                    out[group, i] = A[i, 1] + A[i, 3]  # no column 3: 0
                for i in T.Parallel(20):
                    A[i, 0] = group

    whole = torch.randn(5, 12, 8)
    parts = whole[:, 1:10, 1:4]
    wanted, out = torch.zeros(5, 20), torch.full((5, 20), torch.nan)
    wanted[:, :9] = parts[:, :, 1]
    after = whole.clone()
    after[:, 1:10, 1] = torch.arange(5.0)[:, None]
    way(kernel, addresses(parts), out, 9, 8)
    assert torch.equal(out, wanted) and torch.equal(whole, after)


@pytest.mark.parametrize("engine", ["cpu", "meaning", "threads"])
@pytest.mark.parametrize("wrong", [0, 2])
def test_addresses_that_cannot_be(engine, wrong):
    @T.prim_func
    def kernel(table: T.Tensor((1,), T.ptr), out: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            A = T.make_tensor(table[0], (4,), "float32", align=8)
            for i in T.Parallel(4):
                out[i] = A[i]

    x, out = torch.randn(8), torch.zeros(4)
    table = torch.tensor([wrong and x.data_ptr() + wrong])
    if engine == "threads":
        found = torch_tile.compile(kernel, target="cuda:sm_80").interpret(table, out)
        assert "multiple of 8, and not 0" in found.report()
        return
    with pytest.raises(Exception, match="multiple of 8, and not 0"):
        if engine == "cpu":
            torch_tile.compile(kernel, target="cpu")(table, out)
        else:
            evaluate(kernel, table, out)


def of_each_thread(table, n):
    T.make_tensor(table[T.get_thread_binding()], (4,), "float32")


def in_a_nest(table, n):
    for i in T.Parallel(4):
        T.make_tensor(table[i], (4,), "float32")


def in_a_pipeline(table, n):
    for i in T.Pipelined(4, num_stages=2):
        T.make_tensor(table[i], (4,), "float32")


def of_32_bits(table, n):
    T.make_tensor(n, (4,), "float32")


def of_nibbles(table, n):
    T.make_tensor(table[0], (4,), "int4")


def at_odd_places(table, n):
    T.make_tensor(table[0], (4,), "float32", align=3)


def with_a_second_name(table, n):
    T.view(T.make_tensor(table[0], (4,), "float32"), (2, 2))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (of_each_thread, "differs between threads"),
        (in_a_nest, "in a T.Parallel"), (in_a_pipeline, "in a T.Pipelined"),
        (of_32_bits, "of int32"), (of_nibbles, "is int4"), (at_odd_places, "is 3"),
        (with_a_second_name, "lies at an address"),
    ],
)  # fmt: skip
def test_what_addresses_cannot(body, why):
    with pytest.raises(TileError, match=why) as caught:
        traced = T.macro(body)

        @T.prim_func
        def kernel(table: T.Tensor((4,), T.ptr), n: T.int32):
            with T.Kernel(1, threads=32):
                traced(table, n)

        torch_tile.compile(kernel, target="cuda:sm_80")

    assert caught.value.code == "bad_argument"


def test_a_table_behind_a_grid_sync(way, request):
    if "gpu" in request.node.name:
        pytest.skip("addresses of CPU tensors")

    @T.prim_func
    def kernel(table: T.Tensor((4,), T.ptr), rows: T.Tensor((4,), "int32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(4, threads=32) as bx:
            A = T.make_tensor(table[bx], (rows[bx], 8), "float32")
            for i in T.Parallel(8):
                A[0, i] = bx
            T.sync_grid()
            for i in T.Parallel(8):
                B[bx, i] = A[0, i] + A[1, i] + rows[3 - bx]

    a, b, rows = torch.randn(4, 2, 8), torch.zeros(4, 8), torch.tensor([1, 2, 2, 1], dtype=torch.int32)
    second = torch.where(rows[:, None] > 1, a[:, 1], 0)
    way(kernel, addresses(a), rows, b)
    assert torch.equal(b, torch.arange(4.0)[:, None] + second + rows.flip(0)[:, None])


def test_a_table_is_printed_as_it_is_written():
    text = str(grouped.program)
    assert "T.make_tensor(address, (m, k), T.float16, align=16)" in text, text
    linecache.cache["<table>"] = (len(text), None, text.splitlines(keepends=True), "<table>")
    scope = {"T": T}
    exec(compile(text, "<table>", "exec"), scope)
    assert alike(scope["grouped"].program, grouped.program)


def test_the_alignment_of_a_matched_buffer():
    @T.prim_func
    def kernel(given: T.handle):
        A = T.match_buffer(given, (4,), dtype="float32", align=16)
        with T.Kernel(1, threads=32):
            T.clear(A)

    assert kernel.program.params[0].static_shape == (4,)
    with pytest.raises(TileError, match="align"):

        @T.prim_func
        def other(given: T.handle):
            A = T.match_buffer(given, (4,), align=64)
            with T.Kernel(1, threads=32):
                T.clear(A)
