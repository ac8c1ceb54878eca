# SPDX-License-Identifier: Apache-2.0
"""Literals of 64-bit types are as wide as their type in the text of both languages."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

AMOUNTS = [0, 1, 30, 31, 32, 40, 61]


def shifts(dtype):
    one, three = getattr(T, dtype)(1), getattr(T, dtype)(3)

    @T.prim_func
    def kernel(A: T.Tensor((7,), dtype), O: T.Tensor((5, 7), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                O[0, i] = one << A[i]
                O[1, i] = (three << A[i]) - 1
                O[2, i] = ~(one << A[i]) & A[i]
                O[3, i] = (one << i) << 32
                O[4, i] = (three >> (A[i] & 1)) << 53

    return kernel


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_shifted_literals(way, dtype):
    of = getattr(torch, dtype)
    a, o = torch.tensor(AMOUNTS).to(of), torch.zeros(5, 7, dtype=of)
    way(shifts(dtype), a, o)
    want = [[1 << n for n in AMOUNTS], [(3 << n) - 1 for n in AMOUNTS], [~(1 << n) & n for n in AMOUNTS]]
    want += [[1 << n << 32 for n in range(7)], [3 >> (n & 1) << 53 for n in AMOUNTS]]
    assert o.tolist() == want


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_choices_of_literals(way, dtype):
    """What is computed from a choice of two literals has 64 bits, and 64 bits of an index whose literals are int32."""
    large = 2_000_000_001
    of = getattr(T, dtype)

    @T.prim_func
    def kernel(A: T.Tensor((7,), dtype), B: T.Tensor((7,), "int32"), O: T.Tensor((5, 7), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                a = T.if_then_else(A[i] == 0, of(3), of(large))
                b = T.if_then_else(A[i] < 31, T.if_then_else(A[i] == 1, of(5), of(7)), of(large))
                O[0, i] = a << A[i]
                O[1, i] = a * b
                O[2, i] = (a + b) >> 1
                O[3, i] = ~(a << 31) >> 40
                O[4, i] = T.cast(B[T.if_then_else(B[i] == 0, 0, large) * 2 % 7], dtype)

    kind = getattr(torch, dtype)
    x, o = torch.tensor(AMOUNTS).to(kind), torch.zeros(5, 7, dtype=kind)
    y = torch.arange(7, dtype=torch.int32)
    way(kernel, x, y, o)
    low, size = (0, 2**64) if dtype == "uint64" else (-(2**63), 2**64)
    wrapped = lambda v: (v - low) % size + low  # noqa: E731
    a = [3 if n == 0 else large for n in AMOUNTS]
    b = [(5 if n == 1 else 7) if n < 31 else large for n in AMOUNTS]
    want = [[wrapped(v << n) for v, n in zip(a, AMOUNTS, strict=True)]]
    want += [[wrapped(v * w) for v, w in zip(a, b, strict=True)], [(v + w) >> 1 for v, w in zip(a, b, strict=True)]]
    want += [[wrapped(~wrapped(v << 31)) >> 40 for v in a], [0] + [large * 2 % 7] * 6]
    assert o.tolist() == want


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_text_names_the_type(dtype, target):
    """The simulator runs the program, so the text itself is looked at."""
    text = torch_tile.compile(shifts(dtype), target=target).get_kernel_source()
    for literal in (1, 3):
        assert f"({dtype}_t){literal} << A" in text or f"tile::wrapping_shl<{dtype}_t>({literal}, A" in text
    assert " 1 << A" not in text and "(3 << A" not in text


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_other_literals_stay_plain(target):
    @T.prim_func
    def kernel(A: T.Tensor((7,), "int64"), B: T.Tensor((7,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(7):
                A[i] = A[i] * 3 + 1
                B[i] = 1 << B[i]

    text = torch_tile.compile(kernel, target=target).get_kernel_source()
    assert "_t)1" not in text and "_t)3" not in text
