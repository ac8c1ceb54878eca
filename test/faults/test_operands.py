# SPDX-License-Identifier: Apache-2.0
"""`and` and `or` of numbers give one of their operands, as in Python; in conditions only their truth counts."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import torch_tile.language as T

VALUES = {
    "int32": [0, 1, 2, -1, 5], "uint8": [0, 1, 255, 7, 128], "float32": [0.0, -0.0, 1.5, float("nan"), -2.0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", VALUES)
def test_operands(dtype: str, way: Callable[..., None]) -> None:
    @T.prim_func
    def choose(A: T.Tensor((25,), dtype), B: T.Tensor((25,), dtype), O: T.Tensor((5, 25), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(25):
                O[0, i] = A[i] or B[i]
                O[1, i] = A[i] and B[i]
                O[2, i] = A[i] or 7
                O[3, i] = 0 or A[i]
                O[4, i] = (A[i] and B[i]) or 3

    pairs = list(product(VALUES[dtype], repeat=2))
    a, b = (torch.tensor(column, dtype=getattr(torch, dtype)) for column in zip(*pairs, strict=True))
    out = torch.zeros((5, 25), dtype=a.dtype)
    way(choose, a, b, out)
    want = [[x or y, x and y, x or 7, 0 or x, (x and y) or 3] for x, y in pairs]
    torch.testing.assert_close(out.T, torch.tensor(want, dtype=a.dtype), rtol=0, atol=0, equal_nan=True)


def test_bools_and_conditions(way: Callable[..., None]) -> None:
    @T.prim_func
    def choose(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32"), O: T.Tensor((3, 4), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                if A[i] and not (B[i] or A[i] == 2):
                    O[0, i] = 1
                O[1, i] = (A[i] > 1) or B[i]
                O[2, i] = 4 if A[i] or B[i] else 5

    a, b = [0, 1, 2, 1], [0, 0, 3, 9]
    out = torch.zeros((3, 4), dtype=torch.int32)
    way(choose, torch.tensor(a, dtype=torch.int32), torch.tensor(b, dtype=torch.int32), out)
    both: Any = list(zip(a, b, strict=True))
    assert out[0].tolist() == [int(bool(x and not (y or x == 2))) for x, y in both]
    assert out[1].tolist() == [int(x > 1 or y) for x, y in both]
    assert out[2].tolist() == [4 if x or y else 5 for x, y in both]
