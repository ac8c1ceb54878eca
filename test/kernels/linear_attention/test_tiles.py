# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.kernels.linear_attention.tiles import invert_triangle


@torch_tile.jit
def inverses(size):
    """A kernel that inverts matrices `[N, C, C]`, given below their diagonals."""
    count = T.dynamic("count")

    @T.prim_func
    def invert(lower: T.Tensor((count, size, size)), out: T.Tensor((count, size, size))):
        with T.Kernel(count, threads=128) as n:
            tile = T.alloc_shared((size, size), "float32")
            inverse = T.alloc_shared((size, size), "float32")
            T.copy(lower[n, 0:size, 0:size], tile)
            invert_triangle(tile, inverse)
            T.copy(inverse, out[n, 0:size, 0:size])

    return invert


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_triangles_are_inverted(size, alike, problems):
    """Also where all keys are nearly one key: terms of a block's inverse then cancel."""
    keys = torch.nn.functional.normalize(problems.tensor(3, size, 64) * (1 - alike) + problems.tensor(3, 1, 64), dim=-1)
    lower = (keys @ keys.mT).tril(-1)
    found = torch.empty_like(lower)
    inverses(size)(lower, found)
    expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower.double())
    assert (found - expected).abs().max() <= 2**-11 * expected.abs().max()
