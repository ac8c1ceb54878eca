# SPDX-License-Identifier: Apache-2.0
"""T.ceildiv rounds up over the whole range of each type, by divisors of either sign."""

from collections.abc import Callable

import pytest
import torch

import torch_tile.language as T

TYPES = ("uint8", "int8", "int16", "int32", "int64")


@pytest.mark.parametrize("dtype", TYPES)
def test_loaded_numbers(dtype: str, way: Callable[..., None]) -> None:
    info = torch.iinfo(getattr(torch, dtype))
    numbers = [info.min, info.min + 1, 0, 1, 9, info.max // 2, info.max - 5, info.max]
    divisors = [1, 2, 8, 100, info.max] + ([-2, -7, -100] if info.min else [3, 7, 200])

    @T.prim_func
    def divide(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), O: T.Tensor((3, 64), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                x = A[i]
                O[0, i] = T.ceildiv(A[i], B[i])
                O[1, i] = T.ceildiv(x, 8)
                O[2, i] = T.ceildiv(x, divisors[5])

    pairs = [(x, y) for x in numbers for y in divisors]
    a, b = (torch.tensor(column, dtype=getattr(torch, dtype)) for column in zip(*pairs, strict=True))
    out = torch.zeros((3, 64), dtype=a.dtype)
    way(divide, a, b, out)
    assert out[0].tolist() == [-(-x // y) for x, y in pairs]
    assert out[1].tolist() == [-(-x // 8) for x, _ in pairs]
    assert out[2].tolist() == [-(-x // divisors[5]) for x, _ in pairs]


def test_numbers_of_python() -> None:
    assert [T.ceildiv(x, y) for x, y in ((7, 2), (-7, 2), (7, -2), (-7, -2), (8, 2))] == [4, -3, -3, 4, 4]
