# SPDX-License-Identifier: Apache-2.0
"""Integers outside an operand's type are compared exactly, as numpy 2 does; as a result they are refused."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_tile.language as T

TESTS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def _compare(dtype: str, number: int) -> Any:
    @T.prim_func
    def one(A: T.Tensor((4,), dtype), O: T.Tensor((10, 4), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[0, i] = A[i] < number
                O[1, i] = A[i] <= number
                O[2, i] = A[i] > number
                O[3, i] = A[i] >= number
                O[4, i] = A[i] == number
                O[5, i] = A[i] != number
                O[6, i] = number < A[i]
                O[7, i] = number >= A[i]
                O[8, i] = T.max(A[i], number) if number < 0 else T.min(A[i], number)
                O[9, i] = T.clamp(A[i], -(2**71), 2**71)

    return one


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
def test_comparisons(dtype: str, way: Callable[..., None]) -> None:
    info = np.iinfo(dtype)
    outside = (int(info.min) - 1, int(info.max) + 1, 2 * int(info.max) + 2, -(2**70))

    numbers = [0, 5, int(info.min), int(info.max)]
    a = torch.from_numpy(np.array(numbers, dtype))

    for number in outside:
        one = _compare(dtype, number)
        out = torch.from_numpy(np.zeros((10, 4), dtype))
        way(one, a, out)
        for row, test in enumerate(TESTS):
            assert out[row].tolist() == [int(test(x, number)) for x in numbers], (test, number)
        assert out[6].tolist() == [int(number < x) for x in numbers]
        assert out[7].tolist() == [int(number >= x) for x in numbers]
        assert out[8].tolist() == out[9].tolist() == numbers


@pytest.mark.parametrize("number", [-1, 256])
def test_extrema_with_numbers_that_no_operand_can_hold(number: int, way: Callable[..., Any]) -> None:
    """A plain number beside an integer of 8 bits is int32, as TVM has it; the store keeps 8 bits of the result."""
    limit = T.min if number < 0 else T.max

    @T.prim_func
    def choose(A: T.Tensor((4,), "uint8"), O: T.Tensor((4,), "uint8"), P: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[i] = limit(A[i], number)
                P[i] = limit(A[i], number)

    a = torch.tensor([0, 1, 128, 255], dtype=torch.uint8)
    o, p = torch.zeros_like(a), torch.zeros(4, dtype=torch.int32)
    way(choose, a, o, p)
    assert o.tolist() == [number % 256] * 4 and p.tolist() == [number] * 4
