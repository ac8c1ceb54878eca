# SPDX-License-Identifier: Apache-2.0
"""The `else` of a loop runs where no `break` was taken, whatever kind of loop it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile.language as T

WORDS = torch.tensor([4, 8, 15, 16, 23, 42, 7, 9], dtype=torch.int32)
WANTED = torch.tensor([15, 4, 99, 9], dtype=torch.int32)


def _search(loop: Callable[..., Any]) -> Any:
    @T.prim_func
    def search(A: T.Tensor((8,), "int32"), W: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for n in T.serial(4):
                for i in loop(8):
                    if A[i] == 8:
                        continue
                    if A[i] == W[n]:
                        O[n] = i
                        break
                else:
                    O[n] = -1

    return search


def _range() -> Any:
    @T.prim_func
    def search(A: T.Tensor((8,), "int32"), W: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for n in range(4):
                for i in range(8):
                    if A[i] == W[n]:
                        O[n] = i
                        break
                else:
                    O[n] = -1

    return search


def _while() -> Any:
    @T.prim_func
    def search(A: T.Tensor((8,), "int32"), W: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for n in T.serial(4):
                i = T.alloc_var("int32", 0)
                while i < 8:
                    if A[i] == W[n]:
                        O[n] = i
                        break
                    i += 1
                else:
                    O[n] = -1

    return search


def _outer() -> Any:
    """The `else` of the inner loop goes on with the outer one; the `else` of that is left out by a break, too."""

    @T.prim_func
    def search(A: T.Tensor((8,), "int32"), W: T.Tensor((4,), "int32"), O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for n in T.serial(4):
                for i in T.serial(8):
                    if A[i] == W[n]:
                        O[n] = i
                        break
                else:
                    O[n] = -1
                    break
            else:
                O[0] = 77
            for i in range(8):
                if A[i] == W[3]:
                    O[3] = i

    return search


@pytest.mark.parametrize("make", [lambda: _search(T.serial), lambda: _search(T.unroll), _range, _while, _outer])
def test_of_device_loops(make: Callable[[], Any], way: Callable[..., None]) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    way(make(), WORDS, WANTED, out)
    assert out.tolist() == [2, 0, -1, 7]


def test_of_loops_that_python_runs(way: Callable[..., None]) -> None:
    @T.prim_func
    def search(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=32):
            for n, word in enumerate(("c", "a", "z")):
                for place, letter in enumerate("abc"):
                    if letter == word:
                        O[n] = place
                        break
                else:
                    O[n] = -1

    out = torch.zeros(3, dtype=torch.int32)
    way(search, out)
    assert out.tolist() == [2, 0, -1]


def test_without_a_break_it_always_runs(way: Callable[..., None]) -> None:
    @T.prim_func
    def count(O: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(3):
                O[0] += i
            else:
                O[1] = 5

    out = torch.zeros(2, dtype=torch.int32)
    way(count, out)
    assert out.tolist() == [3, 5]
