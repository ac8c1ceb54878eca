# SPDX-License-Identifier: Apache-2.0
"""int32 of elements wraps at each operation alone, and not at all beside an index, in a comparison or a cast to int64.

No simplification, sign or interval may be taken from numbers that do not wrap where they do.
"""

from collections.abc import Callable

import pytest
import torch

import torch_tile.language as T

ENDS = (0, 1, -1, 5, 715_827_883, 1_431_655_766, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, -1_073_741_825)


def _wrap(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _alone_in_text(a: object, b: object) -> list[object]:
    """Functions of the upper bits of what elements alone make."""
    return [
        (a * 6) // 3, (a * 4) % 8, (a * 4 + (b & 3)) // 4, T.min(a + 1, a), T.max(a * 3, a), (a - b) // 2,
        ((a & 0x7FFFFFFF) * 3) // 7, ((a & 0x7FFFFFFF) + (b & 0x7FFFFFFF)) % 1000, (a << 2) >> 2, -a // 5,
        ((a & 0x7FFFFFFF) * 2 >> 20) % 3000,
    ]  # fmt: skip


def _alone(a: int, b: int) -> list[int]:
    w = _wrap
    return [
        w(a * 6) // 3, w(a * 4) % 8, w(w(a * 4) + (b & 3)) // 4, min(w(a + 1), a), max(w(a * 3), a), w(a - b) // 2,
        w((a & 0x7FFFFFFF) * 3) // 7, w((a & 0x7FFFFFFF) + (b & 0x7FFFFFFF)) % 1000, w(a << 2) >> 2, w(-a) // 5,
        (w((a & 0x7FFFFFFF) * 2) >> 20) % 3000,
    ]  # fmt: skip


def _beside_in_text(a: object, b: object, n: object) -> list[object]:
    """The same where an index `n` is an operand, or the value is compared or cast."""
    return [
        (a * 4 + n) // 3, (n - a * b) >> 5, (a * 6) // (3 + n), T.max(a * 3, n) // 2, (a + b) % (n + 7),
        T.cast(a * 4 > b, "int32"), T.cast(a + 1 > a, "int32"), T.cast(T.cast(a * 4, "int64") >> 20, "int32"),
        T.cast((T.cast(a - b, "int64") + n) >> 3, "int32"), (-a + n) // 9, ((a * 4) // 4 + n) >> 1,
    ]  # fmt: skip


def _beside(a: int, b: int, n: int) -> list[int]:
    return [
        (a * 4 + n) // 3, (n - a * b) >> 5, (a * 6) // (3 + n), max(a * 3, n) // 2, (a + b) % (n + 7),
        int(a * 4 > b), int(a + 1 > a), (a * 4) >> 20, (a - b + n) >> 3, (-a + n) // 9, (a + n) >> 1,
    ]  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
def test_widths(named: bool, seed: int, way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32"), O: T.Tensor((2, 32, 11), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                if named:
                    a = T.alloc_var("int32", A[i])
                    b = T.alloc_var("int32", B[i])
                    for place, value in enumerate(_alone_in_text(a, b)):
                        O[0, i, place] = value
                    for place, value in enumerate(_beside_in_text(a, b, i)):
                        O[1, i, place] = value
                else:
                    for place, value in enumerate(_alone_in_text(A[i], B[i])):
                        O[0, i, place] = value
                    for place, value in enumerate(_beside_in_text(A[i], B[i], i)):
                        O[1, i, place] = value

    torch.manual_seed(seed)
    a = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32)
    a[: len(ENDS)] = torch.tensor(ENDS, dtype=torch.int32)
    b = a[torch.randperm(32)].contiguous()
    o = torch.zeros(2, 32, 11, dtype=torch.int32)
    way(kernel, a, b, o)
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        assert o[0, i].tolist() == _alone(x, y), (i, x, y)
        assert o[1, i].tolist() == [_wrap(v) for v in _beside(x, y, i)], (i, x, y)
