# SPDX-License-Identifier: Apache-2.0
"""Unsigned types on every target: extremes, magnitudes, scans and truncated quotients, to the top of the type."""

import numpy as np
import pytest
import torch

import torch_tile.language as T

TYPES = ["uint8", "uint16", "uint32", "uint64"]


def numbers(dtype, rows, columns):
    top = np.iinfo(dtype).max
    found = np.random.randint(0, 100, (rows, columns)).astype(dtype)
    found[:, 3], found[::2, 7], found[1, 5] = top, top // 2 + 11, 0
    return found


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["max", "min", "absmax", "abssum"])
def test_reductions(way, op, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((4, 40), dtype), O: T.Tensor((4,), dtype)):
        with T.Kernel(1, threads=64):
            a, o = T.alloc_fragment((4, 40), dtype), T.alloc_fragment((4,), dtype)
            T.copy(A, a)
            T.reduce(a, o, op, dim=1, clear=True)
            T.copy(o, O)

    a = numbers(dtype, 4, 40)
    fold = {"max": np.max, "min": np.min, "absmax": np.max, "abssum": np.sum}[op]
    o = torch.from_numpy(np.zeros(4, dtype))
    way(kernel, torch.from_numpy(a), o)
    assert o.tolist() == fold(a, axis=1).astype(dtype).tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_truncated_quotients(way, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((40,), dtype), B: T.Tensor((40,), dtype), O: T.Tensor((4, 40), dtype)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(40):
                O[0, i] = T.truncdiv(A[i], B[i])
                O[1, i] = T.truncmod(A[i], B[i])
                O[2, i] = T.max(A[i], B[i])
                O[3, i] = T.min(A[i], B[i])

    a, b = numbers(dtype, 2, 20).reshape(40), np.maximum(numbers(dtype, 2, 20).reshape(40)[::-1].copy(), 1)
    o = torch.from_numpy(np.zeros((4, 40), dtype))
    way(kernel, torch.from_numpy(a), torch.from_numpy(b), o)
    want = [a // b, a % b, np.maximum(a, b), np.minimum(a, b)]
    assert o.tolist() == [row.tolist() for row in want]


@pytest.mark.parametrize("dtype", TYPES)
def test_running_maxima(way, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((4, 40), dtype), O: T.Tensor((4, 40), dtype)):
        with T.Kernel(1, threads=64):
            a, o = T.alloc_fragment((4, 40), dtype), T.alloc_fragment((4, 40), dtype)
            T.copy(A, a)
            T.cummax(a, o, dim=1)
            T.copy(o, O)

    a = numbers(dtype, 4, 40)
    o = torch.from_numpy(np.zeros((4, 40), dtype))
    way(kernel, torch.from_numpy(a), o)
    assert o.tolist() == np.maximum.accumulate(a, axis=1).tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_magnitudes_and_conversions(way, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((40,), dtype), O: T.Tensor((40,), dtype), F: T.Tensor((2, 40), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(40):
                O[i] = T.abs(A[i])
                F[0, i] = A[i]
                F[1, i] = T.cast(A[i], "float32") / 2

    a = numbers(dtype, 2, 20).reshape(40)
    o, f = torch.from_numpy(np.zeros(40, dtype)), torch.zeros(2, 40)
    way(kernel, torch.from_numpy(a), o, f)
    assert o.tolist() == a.tolist()
    assert f.tolist() == [a.astype("float32").tolist(), (a.astype("float32") / 2).tolist()]
