# SPDX-License-Identifier: Apache-2.0
"""One kernel for each mistake in a tile op; some are found by tracing, the others when the kernel is compiled."""

import pytest

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.fill import Fill


def gemm_shape():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((16, 8), "float16")
            b = T.alloc_shared((16, 8), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.gemm(a, b, c)  # here

    tilelang.compile(kernel)


def gemm_dtype():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((16, 8), "float16")
            b = T.alloc_shared((8, 16), "int8")
            c = T.alloc_fragment((16, 16), "float32")
            T.gemm(a, b, c)  # here

    tilelang.compile(kernel)


def gemm_scope():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float16")):
        with T.Kernel(1) as _:
            b = T.alloc_shared((8, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.gemm(A, b, c)  # here

    tilelang.compile(kernel)


def copy_shape():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float16")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 16), "float16")
            T.copy(A, tile)  # here

    tilelang.compile(kernel)


def copy_values():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float16")):
        with T.Kernel(1) as _:
            T.copy(A, [1, 2])  # here


def reduce_shape():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            out = T.alloc_fragment((8,), "float32")
            T.reduce_sum(A, out, dim=1)  # here

    tilelang.compile(kernel)


def reduce_into_bool():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32"), B: T.Tensor((16,), "bool")):
        with T.Kernel(1) as _:
            T.reduce_max(A, B, dim=1)  # here

    tilelang.compile(kernel)


def count_into_bool():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "bool"), B: T.Tensor((16,), "bool")):
        with T.Kernel(1) as _:
            T.reduce_sum(A, B, dim=1)  # here

    tilelang.compile(kernel)


def reduce_dim():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            out = T.alloc_fragment((8,), "float32")
            T.reduce_max(A, out, dim=2)  # here


def reduce_dim_of_no_number():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            out = T.alloc_fragment((8,), "float32")
            T.reduce_max(A, out, dim="rows")  # here


def scan_shape():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            out = T.alloc_fragment((8, 16), "float32")
            T.cumsum(A, out)  # here

    tilelang.compile(kernel)


def fill_value():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            T.fill(A, [0.0])  # here


def atomic_target():
    @T.prim_func
    def kernel(A: T.Tensor((16,), "float32")):
        with T.Kernel(1) as _:
            T.atomic_add(1.0, A[0])  # here


def bulk_copy():
    @T.prim_func
    def kernel(A: T.Tensor((64, 68), "float16")):
        with T.Kernel(1, threads=128) as _:
            ready = T.alloc_barrier(1)
            tile = T.alloc_shared((64, 64), "float16")
            with T.role(0, 32):
                T.tma_copy(A[0:64, 0:64], tile, barrier=ready[0])  # here

    tilelang.compile(kernel, target="cuda:sm_90a")


class Unlowered(Fill):
    """An operation whose author has thought of no GPU."""

    infer_layout, lower_cuda = RegisteredOp.infer_layout, RegisteredOp.lower_cuda


def no_lowering():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_fragment((128,), "float32")
            UNLOWERED(tile, 1.0)  # here
            T.copy(tile, A)

    tilelang.compile(kernel, target="cuda:sm_80")


UNLOWERED = T._recorded("fill", Unlowered.build)
CASES = {
    no_lowering: ("no_lowering", "UNLOWERED(tile, 1.0)"),
    gemm_shape: ("gemm_shape", "T.gemm(a, b, c)"),
    gemm_dtype: ("gemm_dtype", "T.gemm(a, b, c)"),
    gemm_scope: ("gemm_scope", "T.gemm(A, b, c)"),
    copy_shape: ("copy_shape", "T.copy(A, tile)"),
    copy_values: ("copy_values", "T.copy(A, [1, 2])"),
    reduce_shape: ("reduce_shape", "T.reduce_sum(A, out, dim=1)"),
    reduce_dim_of_no_number: ("bad_argument", 'T.reduce_max(A, out, dim="rows")'),
    reduce_into_bool: ("wrong_dtype_store", "T.reduce_max(A, B, dim=1)"),
    count_into_bool: ("wrong_dtype_store", "T.reduce_sum(A, B, dim=1)"),
    reduce_dim: ("reduce_dim", "T.reduce_max(A, out, dim=2)"),
    scan_shape: ("scan_shape", "T.cumsum(A, out)"),
    fill_value: ("fill_value", "T.fill(A, [0.0])"),
    atomic_target: ("atomic_target", "T.atomic_add(1.0, A[0])"),
    bulk_copy: ("bulk_copy", "T.tma_copy(A[0:64, 0:64], tile, barrier=ready[0])"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


def test_a_slice_over_several_lines_is_marked_from_its_start(refused):
    def case():
        @T.prim_func
        def kernel(A: T.Tensor((16, 8), "float16")):
            with T.Kernel(1) as _:
                tile = T.alloc_shared((8, 16), "float16")
                T.copy(  # here
                    A[0:16, :],
                    tile,
                )

        tilelang.compile(kernel)

    problem = refused(case, "copy_shape", "T.copy(  # here")
    assert problem.span.end_line == problem.span.line + 3
