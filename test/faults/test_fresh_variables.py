# SPDX-License-Identifier: Apache-2.0
"""Variables that the author gives no value: they start at 0, in every iteration anew."""

import pytest
import torch

import torch_tile
import torch_tile.language as T


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64", "bool"])
def test_they_start_at_zero(way, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), C: T.Tensor((64,), dtype)):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                fresh = T.alloc_var(dtype)
                if A[i] != T.cast(0, dtype):
                    fresh = A[i]
                B[i] = fresh
            for i in T.serial(64):
                again = T.alloc_var(dtype, scope="local.var")
                C[i] = again
                again = A[i]

    a = torch.randint(0, 2, (64,)).to(getattr(torch, dtype))
    b, c = torch.ones_like(a), torch.ones_like(a)
    way(kernel, a, b, c)
    assert torch.equal(a, b) and not c.any()


def test_sums_need_no_value(way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as b:
            total = T.alloc_var("float32")
            for k in T.serial(32):
                total += A[b, k]
            B[b] = total

    a, b = torch.randint(-9, 9, (4, 32)).float(), torch.full((4,), torch.nan)
    way(kernel, a, b)
    assert torch.equal(b, a.sum(1))


def test_the_compilers_own_stay_undefined():
    """An `if` that does more than give a name two values makes a variable: nothing is stored into it before."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            if A[b] > 0:
                x = A[b] * 2
                A[b] = x
            else:
                x = A[b] - 1
            A[b] = x
            y = T.alloc_var("float32")
            y += x

    text = repr(kernel)
    assert "x = T.alloc_var(T.float32, ...)" in text and "y = T.alloc_var(T.float32, 0" in text
    assert "float x;" in torch_tile.compile(kernel, target="cpu").get_kernel_source()
