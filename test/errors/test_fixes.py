# SPDX-License-Identifier: Apache-2.0
"""What authors often write wrong: the message names the line, and its fix is for this kernel."""

import warnings

import pytest

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def whole_tensor_of_more_dimensions():
    @T.prim_func
    def kernel(A: T.Tensor((4, 64, 32), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((64, 32), "float32")
            T.copy(A, tile)  # here

    tilelang.compile(kernel)


def tile_into_more_dimensions():
    @T.prim_func
    def kernel(A: T.Tensor((4, 2, 32), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((32,), "float32")
            T.clear(tile)
            T.copy(tile, A)  # here

    tilelang.compile(kernel)


def sums_the_wrong_way_round():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float16"), B: T.Tensor((48, 32), "float16")):
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((48, 32), "float16")
            c = T.alloc_fragment((48, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=True, clear_accum=True)  # here

    tilelang.compile(kernel)


def operand_without_its_transpose():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float16"), B: T.Tensor((48, 32), "float16")):
        with T.Kernel(1) as _:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((48, 32), "float16")
            c = T.alloc_fragment((64, 48), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, clear_accum=True)  # here

    tilelang.compile(kernel)


def reduction_along_the_other_dimension():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float32")):
        with T.Kernel(1) as _:
            out = T.alloc_fragment((64,), "float32")
            T.reduce_sum(A, out, dim=0)  # here

    tilelang.compile(kernel)


def loop_over_rows():
    @T.prim_func
    def kernel(A: T.Tensor((8, 64), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            for row in A:  # here
                T.copy(row, C)

    tilelang.compile(kernel)


def loop_over_elements():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8,), "float32")
            T.copy(A, tile)
            for x in tile:  # here
                C[0] = x

    tilelang.compile(kernel)


CASES = {
    whole_tensor_of_more_dimensions: ("copy_shape", "T.copy(A, tile)"),
    tile_into_more_dimensions: ("copy_shape", "T.copy(tile, A)"),
    sums_the_wrong_way_round: ("gemm_shape", "T.gemm(a, b, c, transpose_B=True, clear_accum=True)"),
    operand_without_its_transpose: ("gemm_shape", "T.gemm(a, b, c, clear_accum=True)"),
    reduction_along_the_other_dimension: ("reduce_shape", "T.reduce_sum(A, out, dim=0)"),
    loop_over_rows: ("region_as_value", "for row in A:"),
    loop_over_elements: ("region_as_value", "for x in tile:"),
}
FIXES = {
    whole_tensor_of_more_dimensions: "`A[i, 0, 0]`",
    tile_into_more_dimensions: "`A[i, j, 0]`",
    sums_the_wrong_way_round: "give `c` the shape (64, 48)",
    operand_without_its_transpose: "transpose_A=False, transpose_B=True",
    reduction_along_the_other_dimension: "pass dim=1",
    loop_over_rows: "`for i in T.serial(A.shape[0])`: `A[i, 0]` is row i",
    loop_over_elements: "`for i in T.serial(tile.shape[0])`: `tile[i]` is element i",
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_the_fix_is_for_this_kernel(case, refused):
    problem = refused(case, *CASES[case])
    assert FIXES[case] in problem.diagnostics[0].fix


def test_a_tile_of_other_rows_is_told_no_leading_index(refused):
    """Extents that do not agree behind the leading ones get no index in front."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64, 32), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((64, 16), "float32")
            T.copy(A, tile)

    with pytest.raises(TileError) as caught:
        tilelang.compile(kernel)
    assert caught.value.code == "copy_shape" and "A[i" not in caught.value.diagnostics[0].fix


def scaled(n, blocks):
    """A kernel that doubles n numbers, by blocks that its grid counts."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), C: T.Tensor((n,), "float32")):
        with T.Kernel(blocks, threads=32) as bx:
            for i in T.Parallel(32):
                C[bx * 32 + i] = A[bx * 32 + i] * 2.0

    return kernel


def test_a_grid_without_blocks_is_warned_of():
    with pytest.warns(UserWarning, match=r"(?s)no_blocks.*T.Kernel\(0\) has no block.*T.ceildiv") as found:
        tilelang.compile(scaled(20, 20 // 32))
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilelang.compile(scaled(20, T.ceildiv(20, 32)))
        tilelang.compile(scaled(0, T.ceildiv(0, 32)))  # of an empty tensor
