# SPDX-License-Identifier: Apache-2.0
"""Integers of indices and sizes wrap when they are stored, not before; int32 of elements wraps at each operation."""

from collections.abc import Callable

import pytest
import torch

import torch_tile.language as T

FACTORS = (2_000_000_000, -1_999_999_999, 123_456_789)


def _wrapped(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _looked_at(x: int) -> list[int]:
    """What depends on the upper bits of a number."""
    return [x >> 8, x // 7, x % 1000, int(x > 5), max(x, -5) // 3, (x if x < 0 else x >> 1) >> 2]


def _looked_at_in_text(x: object) -> list[object]:
    return [
        x >> 8, x // 7, x % 1000, T.cast(x > 5, "int32"), T.max(x, -5) // 3,
        T.if_then_else(x < 0, x, x >> 1) >> 2,
    ]  # fmt: skip


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("of", ["block", "nest", "loop", "scalar", "name"])
def test_what_indices_make_is_exact(of: str, factor: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(O: T.Tensor((4, 32, 6), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                for k in T.serial(2):
                    index = {"block": b, "nest": i, "loop": k, "scalar": n, "name": b + i}[of]
                    y = index * factor
                    for place, value in enumerate(_looked_at_in_text(y)):
                        O[b, i, place] = value

    o = torch.zeros(4, 32, 6, dtype=torch.int32)
    way(kernel, o, 11)
    for b, i in ((0, 0), (1, 3), (3, 31)):
        index = {"block": b, "nest": i, "loop": 1, "scalar": 11, "name": b + i}[of]
        assert o[b, i].tolist() == [_wrapped(v) for v in _looked_at(index * factor)], (b, i)


@pytest.mark.parametrize("factor", FACTORS)
def test_products_of_elements_wrap(factor: int, seed: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32"), P: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                O[i] = (A[i] * factor) >> 8
                P[i] = (A[i] * A[31 - i] + A[i]) >> 3

    torch.manual_seed(seed)
    a = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    o, p = torch.zeros_like(a), torch.zeros_like(a)
    way(kernel, a, o, p)
    values = a.tolist()
    assert o.tolist() == [_wrapped(x * factor) >> 8 for x in values]
    assert p.tolist() == [_wrapped(x * y + x) >> 3 for x, y in zip(values, reversed(values), strict=True)]
