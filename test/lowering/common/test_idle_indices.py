# SPDX-License-Identifier: Apache-2.0
import os

import pytest

import torch_tile.language as T
from torch_tile.lowering.common.idle_indices import idle_indices


@pytest.mark.parametrize("is_library", [False, True])
def test_a_copy_that_a_loop_repeats(monkeypatch, is_library):
    """The library's own lines are left out: one text serves several forms of operands."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 64), "float32"), b: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            tile, total = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for _step in T.Pipelined(4, num_stages=2):
                T.copy(a, tile)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += tile[i, j]
            T.copy(total, b)

    if is_library:
        monkeypatch.setattr("torch_tile.diagnostics.errors._PACKAGE", os.path.dirname(__file__))
    found = [each.code for each in idle_indices(kernel.program)]
    assert found == ([] if is_library else ["repeated_copy"])
