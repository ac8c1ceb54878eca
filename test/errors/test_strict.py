# SPDX-License-Identifier: Apache-2.0
"""Kernels that compile, but not to what strict=True asks for."""

import pytest

import torch_tile
import torch_tile.language as T


def slow_schedule():
    @T.prim_func
    def kernel(x: T.Tensor((1024, 128), "float32")):
        with T.Kernel(1, threads=1024) as _:  # here
            kept = T.alloc_fragment((1024, 128), "float32")
            T.copy(x, kept)
            total = T.alloc_fragment((128,), "float32")
            T.reduce_sum(kept, total, dim=0)
            for i, j in T.Parallel(1024, 128):
                x[i, j] = kept[i, j] - total[j]

    torch_tile.compile(kernel, target="cuda:sm_90", strict=True)


CASES = {"registers spilt": ("slow_schedule", slow_schedule)}


@pytest.mark.parametrize("name", CASES)
def test_refused(name, refused):
    code, case = CASES[name]
    problem = refused(case, code, "T.Kernel(1, threads=1024)")
    assert "bytes of registers spilt" in str(problem) and "leave out strict=True" in str(problem)
