# SPDX-License-Identifier: Apache-2.0
"""Shared tiles whose sizes a call brings."""

from types import SimpleNamespace

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError

m, n = T.dynamic("m, n")


@T.prim_func
def turned(A: T.Tensor((m, n), "float32"), B: T.Tensor((n, m), "float32"), extra: T.int32):
    """Each block turns a column of tiles (m, extra + 16)."""
    with T.Kernel(T.ceildiv(n, extra + 16), threads=64) as bx:
        width = extra + 16
        tile = T.alloc_shared((m, width), "float32")
        T.copy(A[0, bx * width], tile)
        for i, j in T.Parallel(width, m):
            B[bx * width + i, j] = tile[j, i] + extra


@pytest.mark.parametrize("sizes", [(5, 40, 0), (33, 17, 4)])
def test_a_tile_of_the_sizes_of_a_call(way, sizes):
    rows, columns, extra = sizes
    a, b = torch.randn(rows, columns), torch.full((columns, rows), torch.nan)
    way(turned, a, b, extra)
    assert torch.equal(b, a.mT + extra)


def test_one_compiled_kernel_for_each_size():
    kernel = torch_tile.compile(turned, target="cpu")
    for rows, columns, extra in ((8, 64, 0), (8, 32, 0), (9, 64, 0), (8, 64, 4)):
        a, b = torch.randn(rows, columns), torch.zeros(columns, rows)
        kernel(a, b, extra)
        assert torch.equal(b, a.mT + extra)
    assert kernel.specialised(a, b, 0) is kernel.specialised(a[:, :32].contiguous(), b[:32], 0)
    assert "compiled at calls, for the sizes m, extra" in kernel.get_kernel_source()
    assert "tile_main" in kernel.specialised(a, b, 4).get_kernel_source()
    with pytest.raises(LaunchError, match="must have dtype"):
        kernel(a.double(), b, 0)


def test_an_eager_kernel_with_a_result():
    @torch_tile.jit(target="cpu")
    def reversed_rows(A, size: T.int32):
        count = T.dynamic("count")
        A: T.Tensor((count,), "float32")
        B = T.empty((count,), "float32")
        with T.Kernel(T.ceildiv(count, size), threads=32) as bx:
            tile = T.alloc_shared((size,), "float32")
            T.copy(A[bx * size], tile)
            for i in T.Parallel(size):
                B[bx * size + i] = tile[size - 1 - i]
        return B

    a = torch.randn(24)
    assert torch.equal(reversed_rows(a, 8), a.reshape(3, 8).flip(1).flatten())
    assert torch.equal(reversed_rows(a, 24), a.flip(0))


def test_a_size_that_no_chip_has():
    kernel = torch_tile.compile(turned, target="cuda:sm_80")
    with pytest.raises(TileError, match="shared memory"):
        kernel.interpret(torch.zeros(4000, 16), torch.zeros(16, 4000), 0)
    with pytest.raises(TileError, match="positive"):
        torch_tile.compile(turned, target="cpu")(torch.zeros(0, 16), torch.zeros(16, 0), 0)


def test_a_size_that_a_loop_decides():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.serial(1, 4):
                    tile = T.alloc_shared((i * 16,), "float32")
                    T.copy(A[0], tile)

        torch_tile.compile(kernel, target="cpu")

    assert caught.value.code == "dynamic_tile"


def test_other_errors_are_raised_before_a_call():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((m, n), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32):
                shared, rows = T.alloc_shared((m,), "float32"), T.alloc_fragment((n,), "float32")
                for i in T.Parallel(4):
                    shared[i] = rows[i] + shared[i]

        torch_tile.compile(kernel, target="cpu")

    assert [each.code for each in caught.value.diagnostics] == ["dynamic_tile"]
    assert "rows" in str(caught.value)
    assert "shared" not in caught.value.diagnostics[0].message


def test_kernels_of_many_sizes_are_forgotten(monkeypatch):
    monkeypatch.setattr(torch_tile.kernel, "MOST_FORMS", 2)
    kernel = torch_tile.compile(turned, target="cpu")
    made = SimpleNamespace(specialised=lambda *args: made)  # in place of what a compiler makes
    monkeypatch.setattr(kernel, "make", lambda sizes: made)
    for columns in (16, 32, 48, 64):
        a, b = torch.randn(2, columns), torch.zeros(columns, 2)
        kernel.specialised(a, b, columns - 16)
        assert len(kernel.made) <= 2
