# SPDX-License-Identifier: Apache-2.0
"""Kernels that compile, but not to what strict=True asks for; and one that the assembler has no registers for."""

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


def too_few_registers():
    @T.prim_func
    def kernel(
        a: T.Tensor((64, 256), "float16"), b: T.Tensor((256, 256), "float16"), c: T.Tensor((64, 256), "float32")
    ):
        with T.Kernel(1, threads=128) as _:  # here
            T.annotate_min_blocks_per_sm(4)
            left, right = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 256), "float16")
            total = T.alloc_fragment((64, 256), "float32")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(a[0, k * 64], left)
                T.copy(b[k * 64, 0], right)
                T.gemm(left, right, total)
            T.copy(total, c)

    torch_tile.compile(kernel, target="cuda:sm_90")


CASES = {"registers spilled": ("slow_schedule", slow_schedule), "registers": ("too_few_registers", too_few_registers)}
SAID = {
    "registers spilled": ("T.Kernel(1, threads=1024)", "bytes of registers spilled", "leave out strict=True"),
    "registers": ("T.Kernel(1, threads=128)", "have 64 registers each", "fewer blocks by T.annotate_min_blocks_per_sm"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name, refused):
    code, case = CASES[name]
    line, *said = SAID[name]
    problem = refused(case, code, line)
    assert all(text in str(problem) for text in said)
