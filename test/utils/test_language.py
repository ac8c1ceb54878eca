# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile import utils


def test_questions_about_buffers():
    seen = {}

    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile, own, mine = T.alloc_shared((4, 4)), T.alloc_fragment((4, 4)), T.alloc_local((4,))
            for name, value in (("A", A), ("tile", tile[0:2, :]), ("own", own[1, 1]), ("mine", mine)):
                ask = utils.is_global, utils.is_shared, utils.is_shared_dynamic, utils.is_fragment, utils.is_local
                seen[name] = [f(value) for f in ask]
            seen["shapes"] = [utils.retrieve_shape(x) for x in (A, A[n : n + 2, :], own[1, 1])]
            seen["strides"] = utils.retrieve_stride(A)
            seen["regions"] = [utils.language.to_buffer_region(x) for x in (A, A[n : n + 2, :], own[1, 1])]
            seen["full"] = [utils.is_full_region(r) for r in (A[:, :], A[0:8, 0:4], A[1:8, :], A[n : n + 8, :])]
            T.clear(tile)

    assert seen["A"] == [True, False, False, False, False] and seen["tile"] == [False, True, True, False, False]
    assert seen["own"] == [False, False, False, True, False] and seen["mine"] == [False, False, False, False, True]
    assert seen["shapes"] == [[8, 4], [2, 4], [1, 1]] and seen["strides"] == [4, 1]
    assert seen["full"] == [True, True, False, False]
    assert [r.buffer.name for r in seen["regions"]] == ["A", "A", "own"]
    assert utils.retrieve_stride(T.Tensor((), "float32")) == []
    assert utils.retrieve_stride(T.Tensor((3, 4), "float32")) == [4, 1]
    with pytest.raises(TypeError, match="got int"):
        utils.language.to_buffer_region(3)
    assert utils.array_reduce([2, 3, 4]) == 24
    with pytest.raises(TypeError, match="a buffer, region or element is wanted, got int"):
        utils.is_global(3)
