# SPDX-License-Identifier: Apache-2.0
"""Reducers: what nests fold into them, however they are written, against float64; and nests that do more than fold."""

import random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.ir.node import find
from torch_tile.ir.stmt import For, Store
from torch_tile.tileop.reduce.op import Reduce


def gemv(M, N, block_m, block_n, dtype, threads=128):
    """A product of a matrix with a vector, its rows folded by a reducer."""

    @T.prim_func
    def main(A: T.Tensor((M, N), dtype), x: T.Tensor((N,), dtype), y: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block_m), threads=threads) as bm:
            a = T.alloc_fragment((block_m, block_n), dtype)
            v = T.alloc_fragment((block_n,), dtype)
            acc = T.alloc_reducer((block_m,), "float32", op="sum", replication="all")
            T.clear(acc)
            for bn in T.Pipelined(T.ceildiv(N, block_n), num_stages=2):
                T.copy(A[bm * block_m, bn * block_n], a)
                T.copy(x[bn * block_n], v)
                for i, j in T.Parallel(block_m, block_n):
                    acc[i] += T.cast(a[i, j], "float32") * T.cast(v[j], "float32")
            T.finalize_reducer(acc)
            T.copy(acc, y[bm * block_m])

    return main


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemv(dtype, way, seed):
    rng = random.Random(seed)
    m, n = rng.randint(1, 90), rng.randint(1, 150)
    kernel = gemv(m, n, rng.choice([16, 32]), rng.choice([16, 48, 64]), dtype, rng.choice([32, 128]))
    a, x = torch.randn(m, n).to(getattr(torch, dtype)), torch.randn(n).to(getattr(torch, dtype))
    y = torch.full((m,), float("nan"))
    way(kernel, a, x, y)
    torch.testing.assert_close(y.double(), a.double() @ x.double(), rtol=1e-4, atol=1e-4)


def test_epochs(way):
    """The protocol of four calls, in a loop: begin, fold, end into a tile, again; under conditions and inner loops."""

    @T.prim_func
    def kernel(
        A: T.Tensor((3, 20, 24), "float32"), top: T.Tensor((3, 20), "float32"), low: T.Tensor((3, 2), "float32")
    ):
        with T.Kernel(1, threads=64):
            peak = T.alloc_reducer(20, "float32", op="max")
            least = T.alloc_reducer((1, 2), "float32", op="min")
            out = T.alloc_fragment((20,), "float32")
            for k in T.serial(3):
                T.reducer_init(peak)
                T.reducer_init(least, 0.5)
                for i, j in T.Parallel(20, 6):
                    for n in T.serial(4):
                        value = A[k, i, j * 4 + n]
                        if value < 1.0:
                            T.reducer_update(peak[i], value)
                    T.reducer_update(least[0, 1], A[k, i, j])
                T.finalize_reducer(peak, out)
                T.copy(out, top[k, 0])
                T.copy(least, low[k, 0])

    a = torch.randn(3, 20, 24).clamp(-3, 0.99) + (torch.rand(3, 20, 24) < 0.1) * 5
    top, low = torch.full((3, 20), float("nan")), torch.full((3, 2), float("nan"))
    way(kernel, a, top, low)
    assert torch.equal(top, a.masked_fill(a >= 1, -torch.inf).amax(2))
    assert torch.equal(low[:, 1], a[:, :, :6].amin((1, 2)).clamp(max=0.5)) and (low[:, 0] == 0.5).all()


def test_places_of_all_kinds(way, seed):
    """Dimensions in another order, shifted, given by one index; several left out; two reducers; a reducer of halves."""

    @T.prim_func
    def kernel(
        A: T.Tensor((6, 5, 4), "float16"), B: T.Tensor((7, 8), "float32"), C: T.Tensor((2, 4), "float16"),
        D: T.Tensor((1,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            turned = T.alloc_reducer((7, 8), "float32")
            row = T.alloc_reducer((2, 4), "float16", "max")
            whole = T.alloc_reducer((1,), "float32")
            T.clear(turned)
            T.fill(row, -5)
            T.reducer_init(whole, init=3)
            for i, j, k in T.Parallel(6, 5, 4):
                x = T.cast(A[i, j, k], "float32")
                turned[k + 2, i + 1] += x
                row[1, k] = T.max(row[1, k], A[i, j, k])
                whole[0] = x + whole[0] + x
            for i, j in T.Parallel(6, 5):
                whole[0] -= T.cast(A[i, j, 0], "float32")
            T.copy(turned, B)
            T.copy(row, C)
            T.copy(whole, D)

    a = torch.randn(6, 5, 4).half()
    b, c, d = torch.full((7, 8), torch.nan), torch.full((2, 4), torch.nan).half(), torch.full((1,), torch.nan)
    way(kernel, a, b, c, d)
    want = torch.zeros(7, 8, dtype=torch.float64)
    want[2:6, 1:7] = a.double().sum(1).T
    torch.testing.assert_close(b.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(c, torch.stack([torch.full((4,), -5.0).half(), a.amax((0, 1)).clamp(min=-5)]))
    total = 3 + 2 * a.double().sum() - a[..., 0].double().sum()
    torch.testing.assert_close(d[0].double(), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "dtype"), [("bitor", "int32"), ("bitand", "int32"), ("bitxor", "int64"), ("sum", "int8")]
)
def test_integers(op, dtype, way, seed):
    @T.prim_func
    def kernel(A: T.Tensor((9, 40), dtype), out: T.Tensor((9,), dtype)):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((9,), dtype, op=op)
            T.reducer_init(acc)
            for i, j in T.Parallel(9, 40):
                T.reducer_update(acc[i], A[i, j])
            T.copy(acc, out)

    info = torch.iinfo(getattr(torch, dtype))
    a = torch.randint(info.min // 2, info.max // 2, (9, 40)).to(getattr(torch, dtype))
    out = torch.zeros(9, dtype=a.dtype)
    way(kernel, a, out)
    want = torch.full((9,), -1 if op == "bitand" else 0, dtype=a.dtype)
    for j in range(40):
        x = a[:, j]
        want = {"bitor": want | x, "bitand": want & x, "bitxor": want ^ x, "sum": want + x}[op]
    assert torch.equal(out, want)


def test_updates_are_tile_operations():
    """A nest and its reductions, so that threads share the work; not so where nothing meets, or more is done."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((8,), "float32")
            T.clear(acc)
            for i, j in T.Parallel(8, 8):
                acc[i] += A[i, j]
            for i in T.Parallel(8):
                acc[i] += 1
            for i, j in T.Parallel(8, 8):
                acc[i] += A[i, j]
                B[i, j] = acc[i]

    kinds = [type(n) for n in kernel.program.kernels[0].body.stmts if isinstance(n, For | Reduce)]
    assert [k is For for k in kinds] == [True, False, True, True]
    assert not kernel.program.kernels[0].body.stmts[-1].body.stmts[-1].value.buffer.name.endswith("part")
    assert len(list(find(kernel.program, Store))) == 5
    assert "runs in order" in str(tilelang.compile(kernel, target="cuda:sm_80").schedule)


def test_running_totals_run_in_order(way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((4, 6), "float32")):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((4,), "float32")
            T.clear(acc)
            for i, j in T.Parallel(4, 6):
                acc[i] += A[i, j]
                B[i, j] = acc[i]

    a, b = torch.randn(4, 6), torch.full((4, 6), torch.nan)
    way(kernel, a, b)
    torch.testing.assert_close(b, a.cumsum(1), rtol=1e-5, atol=1e-5)


def of_no_operation():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.alloc_reducer((4,), "float32", op="mean")  # here


def bits_of_floats():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.alloc_reducer((4,), "float32", op="bitor")  # here


def no_reducer():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_fragment((4,), "float32")
            T.reducer_init(acc)  # here


def no_element():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_reducer((4,), "float32")
            T.reducer_update(acc, 1.0)  # here


def another_shape():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_reducer((4,), "float32")
            out = T.alloc_fragment((5,), "float32")
            T.finalize_reducer(acc, out)  # here

    tilelang.compile(kernel)


MISTAKES = {
    of_no_operation: ("bad_argument", 'T.alloc_reducer((4,), "float32", op="mean")'),
    bits_of_floats: ("bad_argument", 'T.alloc_reducer((4,), "float32", op="bitor")'),
    no_reducer: ("bad_argument", "T.reducer_init(acc)"),
    no_element: ("bad_argument", "T.reducer_update(acc, 1.0)"),
    another_shape: ("copy_shape", "T.finalize_reducer(acc, out)"),
}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(case, refused):
    refused(case, *MISTAKES[case])


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_machine_code(dtype, target):
    made = tilelang.compile(gemv(1000, 2000, 64, 128, dtype), target=target)
    (found,) = made.resources.values()
    assert not made.cubin.warnings and not found.spills and "in order" not in str(made.schedule), made.schedule
