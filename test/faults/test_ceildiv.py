# SPDX-License-Identifier: Apache-2.0
"""T.ceildiv rounds up over the whole range of each type, by divisors of either sign."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T

TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


@pytest.mark.parametrize("dtype", TYPES)
def test_loaded_numbers(dtype: str, way: Callable[..., None]) -> None:
    info = np.iinfo(dtype)
    numbers = [int(info.min), int(info.min) + 1, 0, 1, 9, int(info.max) // 2, int(info.max) - 5, int(info.max)]
    divisors = [1, 2, 8, 100, int(info.max)] + ([-2, -7, -100] if info.min else [3, 7, 200])

    @T.prim_func
    def divide(A: T.Tensor((64,), dtype), B: T.Tensor((64,), dtype), O: T.Tensor((6, 64), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                x = A[i]
                y = x
                O[0, i] = T.ceildiv(A[i], B[i])
                O[1, i] = T.ceildiv(y, 8)
                O[2, i] = T.ceildiv(x, divisors[5])
                O[3, i] = T.ceildiv(A[i], T.cast(B[i], dtype))
                O[4, i] = T.ceildiv(T.max(A[i], 3), 8)
                O[5, i] = T.ceildiv(100, B[i])

    pairs = [(x, y) for x in numbers for y in divisors]
    a, b = (torch.from_numpy(np.array(column, dtype)) for column in zip(*pairs, strict=True))
    out = torch.from_numpy(np.zeros((6, 64), dtype))
    way(divide, a, b, out)
    assert out[0].tolist() == out[3].tolist() == [-(-x // y) for x, y in pairs]
    assert out[1].tolist() == [-(-x // 8) for x, _ in pairs]
    assert out[2].tolist() == [-(-x // divisors[5]) for x, _ in pairs]
    assert out[4].tolist() == [-(-max(x, 3) // 8) for x, _ in pairs]
    assert out[5].tolist() == [-(-100 // y) for _, y in pairs]


@pytest.mark.parametrize("of", ["block", "nest", "unrolled", "scalar"])
def test_literals_beside_indices(of: str, way: Callable[..., None]) -> None:
    """An index that counts or unrolls leaves a literal near the top of the type, to which nothing may be added."""
    top, long_top = 2**31 - 2, 2**63 - 2

    @T.prim_func
    def divide(O: T.Tensor((4, 2, 8, 4), "int32"), P: T.Tensor((3, 2, 8, 4), "int64"), n: T.int32):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(8):
                for k in T.unroll(4):
                    x = {"block": b, "nest": i, "unrolled": k, "scalar": n}[of]
                    O[0, b, i, k] = T.ceildiv(T.clamp(x, top, top), 613093230)
                    O[1, b, i, k] = T.ceildiv(T.min(x, 1) + (top - 2), 7)
                    O[2, b, i, k] = T.ceildiv(T.max(x, top), T.int32(top + 1))
                    O[3, b, i, k] = T.ceildiv(x - top, 5)
                    P[0, b, i, k] = T.ceildiv(T.int64(long_top) * T.min(x, 1), 5)
                    P[1, b, i, k] = T.ceildiv(T.int64(long_top) * x, 5)
                    P[2, b, i, k] = T.ceildiv(T.cast(x, "int64") + T.int64(long_top - 16), 1000)

    o, p = torch.zeros(4, 2, 8, 4, dtype=torch.int32), torch.zeros(3, 2, 8, 4, dtype=torch.int64)
    way(divide, o, p, 3)
    for b, i, k in itertools.product(range(2), range(8), range(4)):
        x = {"block": b, "nest": i, "unrolled": k, "scalar": 3}[of]
        product = (long_top * x + 2**63) % 2**64 - 2**63  # an index wraps at 64 bits
        assert o[:, b, i, k].tolist() == [4, -(-(min(x, 1) + top - 2) // 7), 1, -(-(x - top) // 5)]
        assert p[:, b, i, k].tolist() == [
            -(-(long_top * min(x, 1)) // 5),
            -(-product // 5),
            -(-(x + long_top - 16) // 1000),
        ]


def test_floats(way: Callable[..., None]) -> None:
    @T.prim_func
    def divide(A: T.Tensor((4,), "float32"), O: T.Tensor((2, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[0, i] = T.ceildiv(A[i], 2.0)
                O[1, i] = T.ceildiv(A[i], -2.0)

    out = torch.zeros(2, 4)
    way(divide, torch.tensor([0.5, 4.0, -0.5, 4.25]), out)
    assert out.tolist() == [[1, 2, 0, 3], [0, -2, 1, -2]]


def test_sizes_keep_the_short_text() -> None:
    """Sizes and positions do not reach the top of their type: one addition and one quotient are enough."""

    @T.prim_func
    def divide(A: T.Tensor((T.dynamic("n"),), "int32"), B: T.Tensor((64,), "uint8"), O: T.Tensor((64,), "int32")):
        with T.Kernel(T.ceildiv(A.shape[0], 64), threads=32) as b:
            for i in T.Parallel(64):
                x = b * 64 + i
                O[i] = T.ceildiv(A.shape[0] - x, 8) + T.ceildiv(T.cast(B[i], "int32"), 8)

    for target in ("cpu", "cuda:sm_90a"):
        text = torch_tile.compile(divide, target=target).get_kernel_source()
        assert "floormod<" not in text and " % " not in text


def test_numbers_of_python() -> None:
    assert [T.ceildiv(x, y) for x, y in ((7, 2), (-7, 2), (7, -2), (-7, -2), (8, 2))] == [4, -3, -3, 4, 4]
    assert T.ceildiv(np.uint8(250), np.uint8(8)) == 32 and T.align_up(np.int8(120), 16) == 128
