# SPDX-License-Identifier: Apache-2.0
"""`//` and `%` of floats are torch.floor_divide and torch.remainder, infinities, zeros and wide pairs included."""

import math
import re
from itertools import product

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Binary, const

ENDS = [0.0, -0.0, 1.0, -1.0, 5.0, -5.0, 0.1, -0.1, 1e20, -3e30, 1e-30, math.inf, -math.inf, math.nan]


def pairs():
    """Ends with ends, and random pairs over the whole range of exponents."""
    found = list(product(ENDS, repeat=2))
    wide = torch.randn(2, 252) * torch.pow(10.0, torch.randint(-12, 13, (2, 252)))
    return torch.cat([torch.tensor(found), wide.T])


def division(dtype, n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype), Q: T.Tensor((n,), dtype), R: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 64), threads=32) as b:
            for i in T.Parallel(64):
                Q[b * 64 + i] = A[b * 64 + i] // B[b * 64 + i]
                R[b * 64 + i] = A[b * 64 + i] % B[b * 64 + i]

    return kernel


def by_torch(f, a, b):
    """One number at a time: the vectorised torch.remainder gives NaN for pairs far apart."""
    return torch.cat([f(x, y) for x, y in zip(a.split(1), b.split(1), strict=True)])


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    kept = ~want.isnan()
    assert torch.equal(got.signbit()[kept], want.signbit()[kept])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_as_torch(way, dtype):
    a, b = pairs().to(getattr(torch, dtype)).T.contiguous()
    q, r = torch.zeros_like(a), torch.zeros_like(a)
    way(division(dtype, len(a)), a, b, q, r)
    wide = torch.float64 if dtype == "float64" else torch.float32
    same(q, by_torch(torch.floor_divide, a.to(wide), b.to(wide)).to(a.dtype))
    same(r, by_torch(torch.remainder, a.to(wide), b.to(wide)).to(a.dtype))


def test_outside_kernels():
    a, b = pairs().double().T
    for op, f in (("//", torch.floor_divide), ("%", torch.remainder)):
        found = [evaluate(Binary(op, const(x, T.float64), const(y, T.float64)), {}) for x, y in zip(a, b, strict=True)]
        same(torch.tensor(found, dtype=torch.float64), by_torch(f, a, b))


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_operands_are_computed_once(target):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), O: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                O[i] = T.exp(A[i]) % 3.0

    text = torch_tile.compile(kernel, target=target).get_kernel_source()
    assert len(re.findall(r"tile::exp\(", text)) == text.count("floormod<float>(tile::exp(")
