# SPDX-License-Identifier: Apache-2.0
"""Literals of 64-bit types are as wide as their type in the text of both languages."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

AMOUNTS = [0, 1, 30, 31, 32, 40, 61]


def shifts(dtype):
    one, three = getattr(T, dtype)(1), getattr(T, dtype)(3)

    @T.prim_func
    def kernel(A: T.Tensor((7,), dtype), O: T.Tensor((4, 7), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                O[0, i] = one << A[i]
                O[1, i] = (three << A[i]) - 1
                O[2, i] = ~(one << A[i]) & A[i]
                O[3, i] = (one << i) << 32

    return kernel


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_shifted_literals(way, dtype):
    of = getattr(torch, dtype)
    a, o = torch.tensor(AMOUNTS).to(of), torch.zeros(4, 7, dtype=of)
    way(shifts(dtype), a, o)
    want = [[1 << n for n in AMOUNTS], [(3 << n) - 1 for n in AMOUNTS], [~(1 << n) & n for n in AMOUNTS]]
    want.append([1 << n << 32 for n in range(7)])
    assert o.tolist() == want


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_text_names_the_type(dtype, target):
    """The simulator runs the program, so the text itself is looked at."""
    text = torch_tile.compile(shifts(dtype), target=target).get_kernel_source()
    assert f"({dtype}_t)1 << A" in text and f"({dtype}_t)3 << A" in text
    assert " 1 << A" not in text and "(3 << A" not in text


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_other_literals_stay_plain(target):
    @T.prim_func
    def kernel(A: T.Tensor((7,), "int64"), B: T.Tensor((7,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                A[i] = A[i] * 3 + 1
                B[i] = 1 << B[i]

    text = torch_tile.compile(kernel, target=target).get_kernel_source()
    assert "_t)1" not in text and "_t)3" not in text
