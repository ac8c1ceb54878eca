# SPDX-License-Identifier: Apache-2.0
"""A nest that touches only fragments runs its own iterations, however far the fragment it follows reaches."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.threads.bind_loop import _Binder


def numbered(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) / 4


def line(size, extent, threads, write):
    """The first `extent` of `size` elements are written."""

    @T.prim_func
    def kernel(X: T.Tensor((size,), "float32"), O: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=threads):
            f = T.alloc_fragment((size,), "float32")
            T.copy(X, f)
            write(f, extent)
            T.copy(f, O)

    return kernel


@T.macro
def stores(f, n):
    for i in T.Parallel(n):
        f[i] = -5.0


@T.macro
def updates(f, n):
    for i in T.Parallel(n):
        f[i] = f[i] * 2 + 1


@T.macro
def fills(f, n):
    T.fill(f[0:n], 7.0)


@T.macro
def clears(f, n):
    T.clear(f[0:n])


@T.macro
def copies(f, n):
    g = T.alloc_fragment((n,), "float32")
    T.fill(g, 3.0)
    T.copy(g, f[0:n])


@T.macro
def copies_behind(f, n):
    g = T.alloc_fragment((f.shape[0],), "float32")
    for i in T.Parallel(f.shape[0]):
        g[i] = i
    T.copy(g[0:n], f[0:n])


@T.macro
def branches(f, n):
    for i in T.Parallel(n):
        if f[i] > 1:
            f[i] = -1
        else:
            f[i] = f[i] + 1


@T.macro
def repeats(f, n):
    for i in T.Parallel(n):
        while f[i] < 1000:
            f[i] = f[i] + 999


@T.macro
def skips(f, n):
    for i in T.Parallel(n):
        if f[i] > 3:
            continue
        f[i] = -1


@T.macro
def skips_in_a_loop(f, n):
    for i in T.Parallel(n):
        for j in T.serial(3):
            if f[i] > 3:
                continue
            f[i] = f[i] + j + 2


def added(x):
    for j in range(3):
        x = torch.where(x > 3, x, x + j + 2)
    return x


RESULTS = {
    stores: lambda x, n: torch.full_like(x, -5),
    updates: lambda x, n: x * 2 + 1,
    fills: lambda x, n: torch.full_like(x, 7),
    clears: lambda x, n: torch.zeros_like(x),
    copies: lambda x, n: torch.full_like(x, 3),
    copies_behind: lambda x, n: torch.arange(float(n)),
    branches: lambda x, n: torch.where(x > 1, -1, x + 1),
    repeats: lambda x, n: torch.where(x < 1, torch.where(x + 999 < 1000, x + 1998, x + 999), x + 999),
    skips: lambda x, n: torch.where(x > 3, x, -1),
    skips_in_a_loop: lambda x, n: added(x),
}


NAMES = [write.__name__ for write in RESULTS]


@pytest.mark.parametrize("write", RESULTS, ids=NAMES)
@pytest.mark.parametrize(("size", "threads"), [(256, 128), (100, 32), (96, 128), (512, 64)])
def test_the_rest_of_a_fragment_is_kept(way, write, size, threads):
    for extent in (1, size // 3, size - 1):
        if extent == 1 and write in (fills, clears, copies, copies_behind):
            continue
        x = numbered(size)
        o = torch.zeros(size)
        want = x.clone()
        want[:extent] = RESULTS[write](x[:extent], extent)
        way(line(size, extent, threads, write), x, o)
        assert torch.equal(o, want), (extent, (o != want).nonzero()[:3].tolist())


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("columns", [3, 8, 24])
def test_the_rest_of_a_matrix_is_kept(way, rows, columns):
    @T.prim_func
    def kernel(X: T.Tensor((16, 24), "float32"), O: T.Tensor((16, 24), "float32"), P: T.Tensor((16, 24), "float32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((16, 24), "float32")
            g = T.alloc_fragment((16, 24), "float32")
            T.copy(X, f)
            T.copy(X, g)
            for i, j in T.Parallel(rows, columns):
                f[i, j] = f[i, j] - 7
            for j, i in T.Parallel(columns, rows):
                g[i, j] = -1
            T.copy(f, O)
            T.copy(g, P)

    x, o, p = numbered(16, 24), torch.zeros(16, 24), torch.zeros(16, 24)
    way(kernel, x, o, p)
    want, other = x.clone(), x.clone()
    want[:rows, :columns] -= 7
    other[:rows, :columns] = -1
    assert torch.equal(o, want) and torch.equal(p, other)


@pytest.mark.parametrize(("rows", "columns"), [(64, 20), (40, 32), (33, 5)])
def test_the_rest_of_an_accumulator_is_kept(way, rows, columns):
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 32), "float16"), O: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 32), "float16")
            c = T.alloc_fragment((64, 32), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            for i, j in T.Parallel(rows, columns):
                c[i, j] = 1000
            T.copy(c, O)

    a, b = torch.randint(-3, 4, (64, 32)).half(), torch.randint(-3, 4, (32, 32)).half()
    o, want = torch.zeros(64, 32), a.float() @ b.float()
    want[:rows, :columns] = 1000
    way(kernel, a, b, o)
    assert torch.equal(o, want)


@pytest.mark.parametrize("period", [8, 32])
@pytest.mark.parametrize("extent", [5, 32, 48, 64, 200])
def test_a_nest_longer_than_the_fragment_runs_whole(way, period, extent):
    """Through the remainder of an index, and under a condition that keeps the index in the fragment."""

    @T.prim_func
    def kernel(P: T.Tensor((period,), "int32"), O: T.Tensor((3, extent), "int32")):
        with T.Kernel(1, threads=32):
            t = T.alloc_fragment((period,), "int32")
            u = T.alloc_fragment((extent,), "int32")
            T.copy(P, t)
            for i in T.Parallel(extent):
                O[0, i] = t[i % period]
            for i in T.Parallel(extent):
                u[i] = t[i % period] + 1
            for i in T.Parallel(extent):
                O[1, i] = u[i]
            for i in T.Parallel(extent):
                if i < period:
                    O[2, i] = t[i]
                else:
                    O[2, i] = -1

    p, o = torch.arange(period, dtype=torch.int32) + 1, torch.zeros(3, extent, dtype=torch.int32)
    way(kernel, p, o)
    at = torch.arange(extent)
    want = p[at % period]
    assert torch.equal(o, torch.stack([want, want + 1, torch.where(at < period, want, -1)]))


def test_without_guards_the_fault_is_seen(monkeypatch):
    """The tests above fail where the padding is not told from the fragment proper."""
    monkeypatch.setattr(_Binder, "_stays_in_padding", lambda *_: True)
    o = torch.zeros(256)
    torch_tile.compile(line(256, 100, 128, stores), target="cuda:sm_80").interpret(numbered(256), o)
    assert (o[100:] == -5).all()
