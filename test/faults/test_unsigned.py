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


def test_numbers_of_64_bits_that_all_threads_have(way):
    """A variable keeps one for some threads; of two, the lesser and the greater are taken. NumPy 2.5 refuses both."""

    @T.prim_func
    def kernel(O: T.Tensor((32, 3), "uint64"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                x = T.alloc_var("uint64", 3)
                last = T.cast(n, "uint64")
                if i >= 7:
                    x = last
                O[i, 0] = x
                O[i, 1] = T.max(last, T.cast(n - 5, "uint64"))
                O[i, 2] = T.min(last, T.cast(n - 5, "uint64"))

    o = torch.zeros(32, 3, dtype=torch.uint64)
    way(kernel, o, -1)
    assert o.tolist() == [[3 if i < 7 else 2**64 - 1, 2**64 - 1, 2**64 - 6] for i in range(32)]
