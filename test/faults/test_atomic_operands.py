# SPDX-License-Identifier: Apache-2.0
"""Operands of atomics that C++ computes in another type than the element's: the text is accepted by NVRTC."""

import pytest

import torch_tile
import torch_tile.language as T

FAR = 2_000_000_000
VALUES = {
    "and": lambda b, i: (b * FAR) & 255,
    "or": lambda b, i: (i * 100_000_000) | 1,
    "xor": lambda b, i: (b * FAR) ^ i,
    "not": lambda b, i: ~(b * FAR) & 7,
    "shift": lambda b, i: (b * FAR) >> 8,
    "select": lambda b, i: T.if_then_else(i < 3, b * FAR, 1) & 3,
    "maximum": lambda b, i: T.max((b * FAR) & 7, i),
}


def kernel_of(value, dtype):
    @T.prim_func
    def sums(O: T.Tensor((4,), dtype)):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                T.atomic_add(O[b], value(b, i))

    return sums


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", VALUES)
def test_widened_operands(case, dtype):
    kernel = kernel_of(VALUES[case], dtype)
    assert torch_tile.compile(kernel, target="cuda:sm_80").cubin
