# SPDX-License-Identifier: Apache-2.0
"""Philox 4x32-10 against its published words, and curand's way to draw from it."""

import math

import numpy as np
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def philox(counter, key):
    """The four words, in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k, second % 2**32, (first >> 32) ^ d ^ m, first % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def sequence(seed, seq, off, count):
    """The numbers `off` and on of a sequence."""
    key = seed % 2**32, seed >> 32
    return [philox((n // 4 % 2**32, n // 4 >> 32, seq % 2**32, seq >> 32), key)[n % 4] for n in range(off, off + count)]


def test_known_answers():
    """Those published with the Random123 library."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_words(way):
    """A sequence of its own for each row, from a place that is no multiple of four."""
    seed, offset = 2**40 + 12345, 6

    @T.prim_func
    def kernel(A: T.Tensor((3, 11), "uint32")):
        with T.Kernel(3, threads=32) as bx:
            T.rng_init(seed, bx * 1000, offset)
            for j in T.serial(11):
                A[bx, j] = T.rng_rand()

    a = torch.zeros(3, 11, dtype=torch.uint32)
    way(kernel, a)
    assert a.tolist() == [sequence(seed, row * 1000, offset, 11) for row in range(3)]


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_threads_have_sequences_of_their_own(target):
    @T.prim_func
    def kernel(A: T.Tensor((2, 64, 5), "uint32")):
        with T.Kernel(2, threads=64) as bx:
            tx = T.get_thread_binding()
            T.rng_init(42)
            for j in T.serial(5):
                A[bx, tx, j] = T.rng_rand()

    a = torch.zeros(2, 64, 5, dtype=torch.uint32)
    made = tilelang.compile(kernel, target=target)
    findings = made.interpret(a)
    assert not findings, findings.report()
    assert a.reshape(128, 5).tolist() == [sequence(42, row, 0, 5) for row in range(128)]
    assert not made.cubin.warnings


@pytest.mark.parametrize("bit", [32, 64])
def test_floats(bit, way):
    kind = f"float{bit}"

    @T.prim_func
    def kernel(U: T.Tensor((6,), kind), N: T.Tensor((6,), kind)):
        with T.Kernel(1, threads=32):
            T.rng_init(7, 3)
            for j in T.serial(6):
                U[j] = T.rng_rand_float(bit)
            for j in T.serial(6):
                N[j] = T.rng_rand_float(bit, "normal")

    u, n = (torch.zeros(6, dtype=getattr(torch, kind)) for _ in "un")
    way(kernel, u, n)
    words = np.array(sequence(7, 3, 0, 48), np.uint64)
    if bit == 32:
        wanted = words / 2**32 + 2.0**-33
        first, second = wanted[6:12:2], wanted[7:12:2]
    else:
        wanted = (words[::2] ^ (words[1::2] << np.uint64(21))) / 2**53 + 2.0**-54
        first, second = wanted[6:12:2], wanted[7:12:2]
    length, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    normal = np.stack((length * np.sin(angle), length * np.cos(angle)), 1).ravel()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if bit == 32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(u.double(), torch.from_numpy(wanted[:6]), **tolerance)
    torch.testing.assert_close(n.double(), torch.from_numpy(normal), **tolerance)


def test_what_is_refused():
    with pytest.raises(TileError, match="rng_init"):

        @T.prim_func
        def without(A: T.Tensor((1,), "uint32")):
            with T.Kernel(1):
                A[0] = T.rng_rand()

    with pytest.raises(TileError, match="Philox"):

        @T.prim_func
        def other(A: T.Tensor((1,), "uint32")):
            with T.Kernel(1):
                T.rng_init(1, 0, 0, "curandStateXORWOW_t")
