# SPDX-License-Identifier: Apache-2.0
"""Indices of tiles that are computed from wide elements: divisors, masks and sums beyond 32 bits."""

from collections.abc import Callable

import pytest
import torch

import torch_tile.language as T

COUNT, SIZE = 24, 12
INDICES: dict[str, Callable[..., object]] = {
    "shifted by 31": lambda x: (x >> 31) % SIZE,
    "shifted by 30": lambda x: (x >> 30) % SIZE,
    "two quotients": lambda x: (x // 65536) // 65536 % SIZE,
    "masked by 31 bits": lambda x: (x & 0x7FFFFFFF) % SIZE,
    "masked and shifted": lambda x: ((x & 0x7FFFFFFF) >> 5) % SIZE,
    "sum": lambda x: (x + 5) % SIZE,
    "product": lambda x: (x * 3 + 7) % SIZE,
    "quotient of a sum": lambda x: (x + 5) // 3 % SIZE,
    "difference": lambda x: (5 - x) % SIZE,
}
TYPES = ["int32", "uint32", "int64"]


def numbers(dtype: str) -> list[int]:
    """Numbers of a type, many of them near its ends; those of int64 leave room for a product."""
    least, most = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1), "int64": (-(2**61), 2**61)}[dtype]
    drawn = torch.randint(least, most, (COUNT - 8,), dtype=torch.int64).tolist()
    return [least, least + 1, most, most - 1, min(most, 2**31), min(most, 2**31 + 3), 7, 2**20, *drawn]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("scope", ["shared", "fragment"])
def test_elements_in_indices_of_tiles(index: str, dtype: str, scope: str, seed: int, way: Callable[..., None]) -> None:
    """An element that is widened to 64 bits, or is an int32, in an index that is taken apart into digits."""
    of = INDICES[index]

    @T.prim_func
    def kernel(X: T.Tensor((COUNT,), dtype), V: T.Tensor((SIZE,), "int32"), O: T.Tensor((COUNT,), "int32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((SIZE,), "int32")
            T.copy(V, s)
            if scope == "shared":
                for i in T.Parallel(COUNT):
                    O[i] = s[of(X[i] if dtype == "int32" else T.cast(X[i], "int64"))]
            else:
                f = T.alloc_fragment((COUNT,), "int32")
                for i in T.Parallel(COUNT):
                    f[i] = s[of(X[i] if dtype == "int32" else T.cast(X[i], "int64"))]
                T.copy(f, O)

    torch.manual_seed(seed)
    x, v = numbers(dtype), torch.randint(-99, 99, (SIZE,), dtype=torch.int32)
    out = torch.zeros(COUNT, dtype=torch.int32)
    way(kernel, torch.tensor(x).to(getattr(torch, dtype)), v, out)
    assert out.tolist() == [v[of(n)].item() for n in x]


def test_offsets_beyond_32_bits(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(L: T.Tensor((4,), "int64"), V: T.Tensor((SIZE,), "int32"), O: T.Tensor((4, 2), "int32"), n: T.int64):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((SIZE,), "int32")
            T.copy(V, s)
            for i in T.Parallel(4):
                O[i, 0] = s[L[i] - 2147483648]
                O[i, 1] = s[L[i] - n + i]

    v, out = torch.arange(SIZE, dtype=torch.int32) * 7, torch.zeros(4, 2, dtype=torch.int32)
    places = torch.tensor([5, 2, 11, 3])
    way(kernel, places + 2**31, v, out, 2**31 + 3)
    assert out.tolist() == [[7 * int(p), 7 * (int(p) - 3 + i)] for i, p in enumerate(places)]
