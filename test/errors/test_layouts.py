# SPDX-License-Identifier: Apache-2.0
"""Mistakes that only targets with layouts can find."""

import pytest

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.lowering import cuda_passes


def passes(kernel):
    program = kernel.program
    for step, _ in cuda_passes(Build(Target.of("cuda:sm_90a"))):
        program = step(program)


def two_products():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_fragment((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            d = T.alloc_fragment((64, 64), "float32")
            T.copy(A, x)
            T.copy(A, b)
            T.gemm(x, b, c, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            T.gemm(b, x, d, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)  # here

    passes(kernel)


def scalar_element():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            if c[1, 2] > 0:  # here
                C[0] = 1

    passes(kernel)


CASES = {
    two_products: ("layout_conflict", "`x` is needed in two layouts at once"),
    scalar_element: ("layout_conflict", "`c` is needed in two layouts at once"),
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda f: f.__name__)
def test_kernel_fails(kernel):
    code, message = CASES[kernel]
    with pytest.raises(tilelang.TileError) as caught:
        kernel()
    (found,) = caught.value.diagnostics
    assert found.code == code and message in found.message
    assert "# here" in found.span.source()
    assert found.notes
