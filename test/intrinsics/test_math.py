# SPDX-License-Identifier: Apache-2.0
"""Functions of scalars; their values are tested header by header in test/csrc."""

import pytest
import torch

import torch_tile.language as T
from torch_tile import jit


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_a_literal_takes_the_width_of_its_neighbour(name):
    @jit(target="cpu")
    def clamp():
        @T.prim_func
        def kernel(x: T.Tensor((64,), "int64"), y: T.Tensor((64,), "int64")):
            with T.Kernel(1):
                for i in T.Parallel(64):
                    y[i] = getattr(T, name)(x[i], 0)

        return kernel

    x, y = torch.randint(-(2**40), 2**40, (64,)), torch.zeros(64, dtype=torch.int64)
    clamp()(x, y)
    assert torch.equal(y, getattr(torch, name)(x, torch.zeros_like(x)))
