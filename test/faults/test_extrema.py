# SPDX-License-Identifier: Apache-2.0
"""T.max, T.min and T.clamp keep NaN, and -0.0 is below 0.0: folded, half folded and loaded."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

import torch_tile.language as T
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Binary, const

NUMBERS = [0.0, -0.0, 1.0, -math.inf, math.nan]
PAIRS = list(product(NUMBERS, repeat=2))


def _larger(a: float, b: float) -> float:
    if a != a or b != b:
        return math.nan
    return max(a, b, key=lambda x: (x, math.copysign(1, x)))


def _smaller(a: float, b: float) -> float:
    return -_larger(-a, -b) if a == a and b == b else math.nan


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_folded_as_loaded(dtype: str, way: Callable[..., None]) -> None:
    @T.prim_func
    def choose(A: T.Tensor((25,), dtype), B: T.Tensor((25,), dtype), O: T.Tensor((11, 25), dtype)):
        with T.Kernel(1, threads=32):
            for n, (x, y) in enumerate(PAIRS):
                O[0, n] = T.max(A[n], B[n])
                O[1, n] = T.max(A[n], y)
                O[2, n] = T.max(x, B[n])
                O[3, n] = T.max(T.cast(x, dtype), T.cast(y, dtype))
                O[4, n] = T.min(A[n], B[n])
                O[5, n] = T.min(A[n], y)
                O[6, n] = T.min(x, B[n])
                O[7, n] = T.min(T.cast(x, dtype), T.cast(y, dtype))
                O[8, n] = T.clamp(A[n], y, 1.0)
            for i in T.Parallel(25):
                O[9, i] = T.max(A[i], B[i])
                O[10, i] = T.min(A[i], B[i])

    a, b = torch.tensor(PAIRS, dtype=getattr(torch, dtype)).T.contiguous()
    out = torch.zeros((11, 25), dtype=a.dtype)
    way(choose, a, b, out)
    for n, (x, y) in enumerate(PAIRS):
        largest, smallest = str(_larger(x, y)), str(_smaller(x, y))
        limited = str(_smaller(_larger(x, y), 1.0))
        want = [largest] * 4 + [smallest] * 4 + [limited, largest, smallest]
        assert [str(v) for v in out[:, n].tolist()] == want, (x, y)


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_numbers_outside_kernels(x: float, y: float) -> None:
    assert str(T.max(x, y)) == str(_larger(x, y)) and str(T.min(x, y)) == str(_smaller(x, y))
    for op, want in (("max", _larger(x, y)), ("min", _smaller(x, y))):
        assert str(evaluate(Binary(op, const(x, T.float32), const(y, T.float32)), {})) == str(want)


def test_integers_stay_exact() -> None:
    assert T.max(2**70, 2**70 + 1) == 2**70 + 1 and type(T.max(3, 4)) is int and str(T.min(0, -0.0)) == "-0.0"
