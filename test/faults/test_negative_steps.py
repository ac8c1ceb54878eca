# SPDX-License-Identifier: Apache-2.0
"""Loops with a negative step run downwards, as in Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile.language as T

RANGES = [(7, -1, -2), (7, -1, -1), (8, 0, -3), (3, 3, -1), (2, 5, -1), (-1, -8, -4), (5, 4, -9)]


@pytest.mark.parametrize("loop", [T.serial, T.unroll, None])
def test_of_known_bounds(loop: Any, way: Callable[..., None]) -> None:
    @T.prim_func
    def count(O: T.Tensor((7, 9), "int32")):
        with T.Kernel(1, threads=32):
            for n, (start, stop, step) in enumerate(RANGES):
                place = T.alloc_var("int32", 0)
                if loop is None:
                    for i in range(start, stop, step):
                        O[n, place] = i
                        place += 1
                else:
                    for i in loop(start, stop, step):
                        O[n, place] = i
                        place += 1

    out = torch.full((7, 9), -99, dtype=torch.int32)
    way(count, out)
    for row, bounds in zip(out.tolist(), RANGES, strict=True):
        assert [x for x in row if x != -99] == list(range(*bounds))


def test_of_bounds_that_the_body_changes(way: Callable[..., None]) -> None:
    @T.prim_func
    def count(A: T.Tensor((2,), "int32"), O: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=1):
            start = T.alloc_var("int32", A[0])
            stop = T.alloc_var("int32", A[1])
            place = T.alloc_var("int32", 0)
            for i in range(start, stop, -2):
                start += 1
                stop -= 1
                O[place] = i
                place += 1

    out = torch.full((9,), -99, dtype=torch.int32)
    way(count, torch.tensor([6, -2], dtype=torch.int32), out)
    assert [x for x in out.tolist() if x != -99] == [6, 4, 2, 0]


def test_step_0_is_refused(refused: Callable[..., Any]) -> None:
    def case() -> None:
        @T.prim_func
        def count(O: T.Tensor((8,), "int32")):
            with T.Kernel(1, threads=32):
                for i in range(7, -1, 0):  # here
                    O[i] = 1

    refused(case, "bad_argument", "range(7, -1, 0)")
