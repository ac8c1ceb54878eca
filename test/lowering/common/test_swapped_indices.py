# SPDX-License-Identifier: Apache-2.0
"""Reads whose indices fit in the other order alone are found, by tiles and by elements, and no others."""

import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.common.unread_tails import Ends


def swapped_indices(program):
    return [*Ends(program).swapped.values()]


def product(M, N, K, right, tile=32):
    """Return a product whose tile of B begins at `right(k * tile, bx * tile)`."""

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, tile), T.ceildiv(M, tile), threads=128) as (bx, by):
            a, b = T.alloc_shared((tile, tile), "float32"), T.alloc_shared((tile, tile), "float32")
            c = T.alloc_fragment((tile, tile), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, tile), num_stages=2):
                T.copy(A[by * tile, k * tile], a)
                row, column = right(k * tile, bx * tile)
                T.copy(B[row, column], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * tile, bx * tile])

    return kernel


@pytest.mark.parametrize("sizes", [(64, 40, 96), (33, 200, 65), (50, 64, 300)], ids=str)
def test_tiles(sizes) -> None:
    assert not swapped_indices(product(*sizes, lambda k, n: (k, n)).program)
    (found,) = swapped_indices(product(*sizes, lambda k, n: (n, k)).program)
    assert found.code == "swapped_indices" and "`B` reach" in found.render()
    assert "dimensions 0 and 1" in found.render()


@pytest.mark.parametrize("swapped", [False, True])
def test_written_elements_and_whole_rows(swapped) -> None:
    @T.prim_func
    def rows(X: T.Tensor((12, 70), "float32"), Y: T.Tensor((12, 70), "float32")):
        with T.Kernel(12, threads=32) as bx:
            x = T.alloc_fragment((70,), "float32")
            if swapped:
                T.copy(X[0, bx], x)
            else:
                T.copy(X[bx, 0], x)
            for j in T.Parallel(70):
                if swapped:
                    Y[j, bx] = x[j]
                else:
                    Y[bx, j] = x[j]

    found = [each.render() for each in swapped_indices(rows.program)]
    assert len(found) == 2 * swapped
    if swapped:
        assert "`X` reach (0, 11)" in found[0] and "`Y` reach (69, 11)" in found[1]


@pytest.mark.parametrize("swapped", [False, True])
def test_elements(swapped) -> None:
    @T.prim_func
    def rows(X: T.Tensor((12, 70), "float32"), Y: T.Tensor((12, 70), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(70):
                if swapped:
                    Y[bx, j] = X[j, bx]
                else:
                    Y[bx, j] = X[bx, j]

    assert len(swapped_indices(rows.program)) == swapped


@T.macro
def overshoot(X, i, s):
    T.copy(X[i * 64, 0], s)  # more steps than there are tiles, as splits of a reduction have


@T.macro
def guarded(X, i, s):
    if i * 8 < 24:
        T.copy(X[0, i * 8], s)


@T.macro
def one_index(X, i, s):
    T.copy(X[i * 8, i * 8], s)


@T.macro
def halo(X, i, s):
    T.copy(X[i * 7, 17], s)


@T.macro
def unknown(X, i, s):
    if X[0, 0] > 0:
        T.copy(X[T.cast(X[0, 1], "int32"), i * 8], s)


READS = {"overshoot": overshoot, "guarded": guarded, "one_index": one_index, "halo": halo, "unknown": unknown}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_others(read) -> None:
    @T.prim_func
    def kernel(X: T.Tensor((70, 24), "float32"), Y: T.Tensor((10, 8, 8), "float32")):
        with T.Kernel(10, threads=32) as bx:
            s = T.alloc_shared((8, 8), "float32")
            T.clear(s)
            read(X, bx, s)
            T.copy(s, Y[bx, 0, 0])

    assert not swapped_indices(kernel.program)


def test_the_author_is_warned() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch_tile.compile(product(64, 40, 96, lambda k, n: (n, k)), target="cpu")
    (one,) = [str(each.message) for each in told if "swapped_indices" in str(each.message)]
    assert "T.copy(B[row, column], b)" in one and "reads behind the end give 0" in one
    a, b, c = torch.randn(64, 96), torch.randn(96, 40), torch.empty(64, 40)
    torch_tile.compile(product(64, 40, 96, lambda k, n: (k, n)), target="cpu")(a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(50, 3, 4), (20, 5, 5)], ids=str)
def test_an_index_behind_the_end_is_no_word_about_the_others(sizes) -> None:
    @T.prim_func
    def kernel(X: T.Tensor(sizes, "float32"), Y: T.Tensor((64, *sizes[1:]), "float32")):
        with T.Kernel(64, threads=32) as bx:
            row = T.alloc_fragment(sizes[1:], "float32")
            T.copy(X[bx, :, :], row)
            T.copy(row, Y[bx, :, :])

    assert not swapped_indices(kernel.program)


def heads_first(X, by, bx, s) -> None:
    T.copy(X[by, bx * 8 : bx * 8 + 8, :], s)


def rows_first(X, by, bx, s) -> None:
    T.copy(X[bx * 8 : bx * 8 + 8, by, :], s)


@pytest.mark.parametrize("read, count", [(heads_first, 1), (rows_first, 0)], ids=["heads first", "rows first"])
def test_slices_take_their_extents_along(read, count) -> None:
    @T.prim_func
    def kernel(X: T.Tensor((50, 3, 16), "float32"), Y: T.Tensor((3, 56, 16), "float32")):
        with T.Kernel(7, 3, threads=32) as (bx, by):
            s = T.alloc_shared((8, 16), "float32")
            read(X, by, bx, s)
            T.copy(s, Y[by, bx * 8 : bx * 8 + 8, :])

    assert len(swapped_indices(kernel.program)) == count
