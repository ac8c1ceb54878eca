# SPDX-License-Identifier: Apache-2.0
"""One kernel for each mistake with types, shapes, indices and arguments that tracing finds."""

import pytest

import torch_tile
import torch_tile.language as T


def bad_dtype():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.alloc_fragment((4,), "float17")  # here


def bad_dtype_of_cast():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = T.cast(A[1], "complex64")  # here


def bad_dtype_of_parameter():
    T.Tensor((4,), "float17")  # here


def bad_dtype_of_annotation():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "flaot32")):  # here
        with T.Kernel(1) as _:
            A[0] = 1.0


def bad_dtype_in_text():
    @T.prim_func
    def kernel(A: "T.Tensor((4,), 'flaot32')"):  # here
        with T.Kernel(1) as _:
            A[0] = 1.0


def bad_dtype_in_text_of_eager():
    @torch_tile.jit
    def kernel(A: "T.Tensor((4,), 'flaot32')"):  # here
        with T.Kernel(1) as _:
            A[0] = 1.0


def negative_tensor():
    @T.prim_func
    def kernel(A: T.Tensor((4, -4), "float32")):  # here
        with T.Kernel(1) as _:
            A[0, 0] = 1.0


def negative_shared():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.alloc_shared((4, -4), "float32")  # here


def empty_fragment():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((0,), "float32")  # here
            T.clear(tile)

    torch_tile.compile(kernel, target="cpu")


def bad_scope():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.alloc_shared((4,), "float32", scope="texture")  # here


def bad_shape():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.alloc_shared((4, 1.5), "float32")  # here


def bad_grid():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, 2, 3, 4) as _:  # here
            pass


def bad_threads():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=0) as _:  # here
            pass


def wrong_rank():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            A[0, 1, 2] = 1.0  # here


def bad_index():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            A[0, 0] = A[A[1, 1], 2]  # here


def bad_slice():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            T.clear(A[0:8:-2, :])  # here


def empty_slice():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            T.clear(A[5:2, :])  # here


def region_as_value():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            A[0, 0] = A[1, :]  # here


def region_in_arithmetic():
    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            A[0, 0] = 2.0 * A  # here


def iterated_buffer():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for x in A:  # here
                A[0] = x


def bad_operand():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            A[0] = A[1] + "one"  # here


def bad_operand_bits():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            A[0] = A[1] << 2  # here


def wrong_dtype_store():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), x: T.float32):
        with T.Kernel(1) as _:
            A[0] = x * 2  # here


def part_of_an_integer():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1) as _:
            A[0] = 1.5  # here


def wrong_dtype_variable():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), x: T.float32):
        with T.Kernel(1) as _:
            n = T.alloc_var("int32", 0)
            n += x  # here


def bad_loop_range():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(A[0]):  # here
                A[i] = 1.0


def bad_argument():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Pipelined(8, num_stages=-1):  # here
                A[i] = 1.0


def bad_argument_step():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(0, 8, 0):  # here
                A[i] = 1.0


def bad_layout():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 8), "float32")
            T.annotate_layout({tile: lambda i, j: i + j})  # here


def bad_layout_text():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(1) as _:
            T.alloc_shared((8, 8), "float32", layout="[8:8m | 8]")  # here


def narrow_type():
    @T.prim_func
    def kernel(A: T.Tensor((16,), "float4_e2m1fn")):
        with T.Kernel(1) as _:
            tile, total = T.alloc_fragment((16,), A.dtype), T.alloc_fragment((1,), A.dtype)
            T.reduce_sum(tile, total)  # here


CASES = {
    bad_dtype: ("bad_dtype", 'T.alloc_fragment((4,), "float17")'),
    bad_dtype_of_cast: ("bad_dtype", 'T.cast(A[1], "complex64")'),
    bad_dtype_of_parameter: ("bad_dtype", 'T.Tensor((4,), "float17")'),
    bad_dtype_of_annotation: ("bad_dtype", 'T.Tensor((4,), "flaot32")'),
    bad_dtype_in_text: ("bad_dtype", "A: \"T.Tensor((4,), 'flaot32')\""),
    bad_dtype_in_text_of_eager: ("bad_dtype", "A: \"T.Tensor((4,), 'flaot32')\""),
    negative_tensor: ("bad_shape", 'T.Tensor((4, -4), "float32")'),
    negative_shared: ("bad_shape", 'T.alloc_shared((4, -4), "float32")'),
    empty_fragment: ("bad_shape", 'T.alloc_fragment((0,), "float32")'),
    bad_scope: ("bad_scope", 'T.alloc_shared((4,), "float32", scope="texture")'),
    bad_shape: ("bad_shape", 'T.alloc_shared((4, 1.5), "float32")'),
    bad_grid: ("bad_shape", "T.Kernel(1, 2, 3, 4)"),
    bad_threads: ("bad_shape", "T.Kernel(1, threads=0)"),
    wrong_rank: ("wrong_rank", "A[0, 1, 2]"),
    bad_index: ("bad_index", "A[A[1, 1], 2]"),
    bad_slice: ("bad_slice", "A[0:8:-2, :]"),
    empty_slice: ("bad_slice", "A[5:2, :]"),
    region_as_value: ("region_as_value", "A[0, 0]"),
    region_in_arithmetic: ("region_as_value", "2.0 * A"),
    iterated_buffer: ("region_as_value", "for x in A:"),
    bad_operand: ("bad_operand", 'A[1] + "one"'),
    bad_operand_bits: ("bad_operand", "A[1]"),
    wrong_dtype_store: ("wrong_dtype_store", "A[0]"),
    part_of_an_integer: ("wrong_dtype_store", "A[0]"),
    wrong_dtype_variable: ("wrong_dtype_store", "n += x"),
    bad_loop_range: ("bad_loop_range", "T.serial(A[0])"),
    bad_argument: ("bad_argument", "T.Pipelined(8, num_stages=-1)"),
    bad_layout: ("bad_layout", "T.annotate_layout({tile: lambda i, j: i + j})"),
    bad_layout_text: ("bad_layout", 'T.alloc_shared((8, 8), "float32", layout="[8:8m | 8]")'),
    bad_argument_step: ("bad_argument", "T.serial(0, 8, 0)"),
    narrow_type: ("narrow_type", "T.reduce_sum(tile, total)"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


def test_misspelt_dtypes_are_guessed(refused):
    problem = refused(bad_dtype_of_annotation, *CASES[bad_dtype_of_annotation])
    assert "did you mean 'float32'?" in str(problem)
