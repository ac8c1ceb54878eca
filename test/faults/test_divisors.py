# SPDX-License-Identifier: Apache-2.0
"""Integer quotients and remainders of every type, by divisors at which a processor would stop."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError

TYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def division(dtype, n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), dtype), D: T.Tensor((n,), dtype), Q: T.Tensor((n,), dtype), R: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            a, d = T.alloc_fragment((32,), dtype), T.alloc_fragment((32,), dtype)
            q, r = T.alloc_fragment((32,), dtype), T.alloc_fragment((32,), dtype)
            T.copy(A[b * 32], a)
            T.copy(D[b * 32], d)
            for i in T.Parallel(32):
                q[i] = a[i] // d[i]
                r[i] = a[i] % d[i]
            T.copy(q, Q[b * 32])
            T.copy(r, R[b * 32])

    return kernel


def operands(dtype):
    """Extremes and small numbers, by each of them but 0, whose quotient is nobody's."""
    info = np.iinfo(dtype)
    ends = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2]
    numbers = [*range(-9 if info.min else 0, 10), *ends]
    pairs = [(a, d) for a in numbers for d in numbers if d]
    return pairs[:451]  # no multiple of the tile, so that the last is padded


@pytest.mark.parametrize("dtype", TYPES)
def test_quotients_of_ragged_tiles(way, dtype):
    pairs, size = operands(dtype), np.iinfo(dtype).bits

    def wrapped(x):
        x %= 2**size
        return x - 2**size if np.iinfo(dtype).min and x >= 2 ** (size - 1) else x

    a, d = (torch.from_numpy(np.array(column, dtype)) for column in zip(*pairs, strict=True))
    q, r = torch.zeros_like(a), torch.zeros_like(a)
    way(division(dtype, len(pairs)), a, d, q, r)
    assert q.tolist() == [wrapped(x // y) for x, y in pairs]
    assert r.tolist() == [x % y for x, y in pairs]


STOPS = """
import torch, torch_tile
import torch_tile.language as T

@T.prim_func
def kernel(A: T.Tensor((16,), "int32"), O: T.Tensor((2, 16), "int32")):
    with T.Kernel(1, threads=32) as b:
        for i in T.Parallel(16):
            O[0, i] = (i + 5) // (i // 4)
            O[1, i] = (i + 5) % A[i]

o = torch.zeros(2, 16, dtype=torch.int32)
torch_tile.compile(kernel, target="cpu")(torch.zeros(16, dtype=torch.int32), o)
print(o[0, 4:].tolist() == [(i + 5) // (i // 4) for i in range(4, 16)], o[1].abs().sum().item())
"""


def test_naturals_by_zero_do_not_stop_the_process(tmp_path):
    """Indices are divided by C++'s own operators."""
    (tmp_path / "stops.py").write_text(STOPS)
    done = subprocess.run([sys.executable, str(tmp_path / "stops.py")], capture_output=True, text=True, check=False)
    assert done.stdout == "True 0\n", (done.returncode, done.stderr[-2000:])


def test_constant_divisors_stay_plain():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                A[i] = i // 8 + i % 8

    text = torch_tile.compile(kernel, target="cpu").get_kernel_source()
    assert "i / 8 + i % 8" in text


@pytest.mark.parametrize("op", ["//", "%"])
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_literal_zero_is_an_error(op, target):
    @T.prim_func
    def divide(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                if op == "//":
                    B[i] = A[i] // 0
                else:
                    B[i] = A[i] % 0

    with pytest.raises(TileError, match=f"`{op}` cannot take the divisor 0"):
        torch_tile.compile(divide, target=target)
