# SPDX-License-Identifier: Apache-2.0
"""T.copy of slices whose lengths are known only at run time."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.ir.node import find
from torch_tile.tileop.copy.op import Copy


@pytest.mark.parametrize("rows", [40, 48])
def test_slices_up_to_the_end_of_a_tensor_are_copied_as_whole_tiles(way, rows):
    @T.prim_func
    def kernel(A: T.Tensor((rows, 32), "float32"), B: T.Tensor((rows, 32), "float32")):
        with T.Kernel(T.ceildiv(rows, 16), threads=32) as bx:
            tile = T.alloc_shared((16, 32), "float32")
            lo = bx * 16
            hi = T.min((bx + 1) * 16, rows)
            T.copy(A[lo:hi, :], tile)
            B[lo : T.min(rows, lo + 16), :] = tile

    assert len(list(find(kernel.program, Copy))) == 2
    a, b = torch.randn(rows, 32), torch.full((rows, 32), torch.nan)
    way(kernel, a, b)
    assert torch.equal(a, b)


def test_slices_of_any_length(way):
    """Longer ones than the tile, empty ones, and ones past the end of the tensor."""

    @T.prim_func
    def kernel(A: T.Tensor((40, 32), "float16"), L: T.Tensor((5,), "int32"), B: T.Tensor((40, 32), "float32")):
        with T.Kernel(5, threads=32) as bx:
            tile = T.alloc_shared((8, 32), "float32")
            n = L[bx]
            T.copy(A[bx * 8 : bx * 8 + n, :], tile)
            for i, j in T.Parallel(8, 32):
                tile[i, j] += 1
            T.copy(tile, B[bx * 8 : bx * 8 + n, :])

    lengths = [5, 8, 20, 0, 9]
    a, b = torch.randn(40, 32).half(), torch.full((40, 32), 9.0)
    way(kernel, a, torch.tensor(lengths, dtype=torch.int32), b)
    for block, n in enumerate(lengths):
        got, want = b[block * 8 : block * 8 + 8], a[block * 8 : block * 8 + 8].float() + 1
        assert torch.equal(got[:n], want[:n]) and (got[n:] == 9).all()


def test_what_a_slice_lacks_reads_as_zero(way):
    @T.prim_func
    def kernel(A: T.Tensor((16,), "float32"), n: T.int32, B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((16,), "float32")
            T.fill(tile, 3)
            T.copy(A[0:n], tile)
            T.copy(tile, B)

    a, b = torch.randn(16), torch.empty(16)
    way(kernel, a, 5, b)
    assert torch.equal(b, torch.where(torch.arange(16) < 5, a, 0))


def test_tensors_of_other_sizes_end_elsewhere(way):
    """A slice up to the end of another tensor than its own keeps its length."""

    @T.prim_func
    def kernel(A: T.Tensor((40,), "float32"), B: T.Tensor((48,), "float32")):
        with T.Kernel(3, threads=32) as bx:
            tile = T.alloc_shared((16,), "float32")
            T.copy(A[bx * 16 : T.min(bx * 16 + 16, 40)], tile)
            T.copy(tile, B[bx * 16 : T.min(bx * 16 + 16, 40)])

    a, b = torch.randn(40), torch.full((48,), 7.0)
    way(kernel, a, b)
    assert torch.equal(b, torch.cat([a, torch.full((8,), 7.0)]))
