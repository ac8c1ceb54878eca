# SPDX-License-Identifier: Apache-2.0
"""What a nest reads behind its `continue` is ordered in front of it: not all threads come to a barrier inside."""

from collections.abc import Callable

import pytest
import torch

import torch_tile.language as T


@pytest.mark.parametrize("scope", ["global", "shared"])
@pytest.mark.parametrize("loop", ["while", "for"])
def test_reads_of_a_loop_behind_continue(scope: str, loop: str, seed: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), W: T.Tensor((16,), "int32"), O: T.Tensor((32,), "int32"), n: T.int32):
        with T.Kernel(1, threads=128):
            f = T.alloc_fragment((32,), "int32")
            sums = T.alloc_fragment((32,), "int32")  # in the registers of more threads than there are elements
            T.copy(A, f)
            T.clear(sums)
            told = W if scope == "global" else T.alloc_shared((16,), "int32")
            told[n] = 7
            for i in T.Parallel(32):
                if f[i] <= 1:
                    continue
                total = T.alloc_var("int32", 0)
                if loop == "while":
                    turn = T.alloc_var("int32", 0)
                    while turn < 3:
                        turn += 1
                        total += told[n] * turn
                else:
                    for k in T.serial(3):
                        total += told[n] * (k + 1)
                sums[i] = total
            T.copy(sums, O)

    torch.manual_seed(seed)
    a, o = torch.randint(0, 4, (32,), dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    way(kernel, a, torch.zeros(16, dtype=torch.int32), o, 4)
    assert torch.equal(o, torch.where(a <= 1, 0, 42).int())
