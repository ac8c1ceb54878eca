# SPDX-License-Identifier: Apache-2.0
"""Branches on an index whose arms store the same element: g++ 12 miscompiles them where it may fuse products."""

import pytest
import torch

import torch_tile.language as T

ARMS = [(2.0, 0.25), (1.5, 7.0), (0.25, 1.5)]


def branches(columns, first, less, more):
    @T.prim_func
    def kernel(A: T.Tensor((4, columns), "float32"), B: T.Tensor((4, columns), "float32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(4, columns):
                if j >= first:
                    A[i, j] = B[i, j] - less
                else:
                    A[i, j] = A[i, j] * more

    return kernel


@pytest.mark.parametrize("less, more", ARMS)
@pytest.mark.parametrize("columns, first", [(48, 13), (48, 32), (64, 16)])
def test_arms_that_store_one_element(way, columns, first, less, more):
    a, b = torch.randn(4, columns), torch.randn(4, columns)
    want = a * more
    want[:, first:] = b[:, first:] - less
    way(branches(columns, first, less, more), a, b)
    assert torch.equal(a, want)
