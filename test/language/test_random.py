# SPDX-License-Identifier: Apache-2.0
"""Random generators against published words, and curand's ways to draw from them."""

import math
import random

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
    else:  # curand 10.4.5: uniform from one word, and normal from four
        wanted = words / 2**32 + 2.0**-32
        pairs = (words[6:18:2] ^ (words[7:18:2] << np.uint64(21))) / 2**53 + 2.0**-54
        first, second = pairs[::2], pairs[1::2]
    length, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
    normal = np.stack((length * np.sin(angle), length * np.cos(angle)), 1).ravel()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if bit == 32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(u.double(), torch.from_numpy(wanted[:6]), **tolerance)
    torch.testing.assert_close(n.double(), torch.from_numpy(normal), **tolerance)


# What curand 10.4.5 draws: for a seed, a sequence and a place the first six words, and floats at one of these.
KNOWN = {
    "XORWOW": {
        (0, 0, 0): [3179217846, 1883133293, 2220552389, 674260989, 306521119, 1986458431],
        (1234, 5, 7): [3351265907, 3629609298, 415430802, 1173093345, 689711927, 2227153417],
        (2**64 - 1, 99999999999, 123456789012): [145126066, 3395278908, 4206722444, 2462048201, 1452727101, 11794885],
        (8346259103, 1, 0): [4228497528, 2326123923, 1988574778, 3407312732, 2286738109, 1684636792],
    },
    "MRG32k3a": {
        (0, 0, 0): [545508615, 1368065476, 1327943825, 3546985268, 951893240, 2290915747],
        (1234, 5, 7): [2068833513, 469510173, 681930214, 929420860, 3667764238, 2341050593],
        (2**64 - 1, 99999999999, 123456789012): [3428078410, 3231100387, 1798466082, 2247901189, 1988202910, 410085370],
        (8346259103, 1, 0): [1619447606, 4280674402, 1603730516, 2231166925, 929648713, 2203382165],
    },
}  # fmt: skip
FLOATS = {  # of (1234, 5, 7): uniform and normal, of 32 and of 64 bits
    "XORWOW": {
        (32, "uniform"): [0.780277371, 0.84508425, 0.0967250243, 0.273132086],
        (64, "uniform"): [0.845084632748764, 0.27313203529753799, 0.51854963644414109, 0.61089903842023596],
        (32, "normal"): [-0.582404733, 0.396252871, 2.13863754, -0.313043892],
        (64, "normal"): [0.57408677750461135, -0.084031964018545333, -0.73549862331711346, -0.87890888332844863],
    },
    "MRG32k3a": {
        (32, "uniform"): [0.481687844, 0.109316356, 0.158774257, 0.216397658],
        (64, "uniform"): [0.48168783860112502, 0.10931635597886481, 0.15877425069543963, 0.21639765711201131],
        (32, "normal"): [0.766436994, 0.934608161, 1.87587416, 0.402044475],
        (64, "normal"): [0.76643695395237599, 0.93460816421061066, 1.8758742001806028, 0.40204448793176695],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_words_of_recurrences(kind, way):
    """The same program takes seeds, sequences and places from memory."""
    places = torch.tensor([[n - 2**64 if n >= 2**63 else n for n in place] for place in KNOWN[kind]])

    @T.prim_func
    def kernel(P: T.Tensor((len(KNOWN[kind]), 3), "int64"), A: T.Tensor((len(KNOWN[kind]), 6), "uint32")):
        with T.Kernel(len(KNOWN[kind]), threads=32) as bx:
            T.rng_init(P[bx, 0], P[bx, 1], P[bx, 2], f"curandState{kind}_t")
            for j in T.serial(6):
                A[bx, j] = T.rng_rand()

    a = torch.zeros(len(places), 6, dtype=torch.uint32)
    way(kernel, places, a)
    assert a.tolist() == list(KNOWN[kind].values())


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("bit", [32, 64])
def test_floats_of_recurrences(kind, bit, way):
    @T.prim_func
    def kernel(U: T.Tensor((4,), f"float{bit}"), N: T.Tensor((4,), f"float{bit}")):
        with T.Kernel(1, threads=32):
            T.rng_init(1234, 5, 7, f"curandState{kind}_t")
            for j in T.serial(4):
                U[j] = T.rng_rand_float(bit)
            T.rng_init(1234, 5, 7, f"curandState{kind}_t")
            for j in T.serial(4):
                N[j] = T.rng_rand_float(bit, "normal")

    u, n = (torch.zeros(4, dtype=getattr(torch, f"float{bit}")) for _ in "un")
    way(kernel, u, n)
    close = 1e-6 if bit == 32 else 1e-14
    for dist, got in ("uniform", u), ("normal", n):
        wanted = torch.tensor(FLOATS[kind][bit, dist], dtype=torch.float64)
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_place_is_so_many_numbers_ahead(kind, seed):
    """Each thread begins at its own place of one sequence."""
    rng = random.Random(seed)
    start, number = rng.randrange(2**64), rng.randrange(2**20)

    @T.prim_func
    def kernel(A: T.Tensor((64, 3), "uint32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            T.rng_init(start, number, tx, f"curandState{kind}_t")
            for j in T.serial(3):
                A[tx, j] = T.rng_rand()

    a = torch.zeros(64, 3, dtype=torch.uint32)
    made = tilelang.compile(kernel, target="cuda:sm_90a")
    findings = made.interpret(a)
    assert not findings, findings.report()
    rows = a.tolist()
    assert all(rows[n][1:] == rows[n + 1][:2] for n in range(63)) and len({row[0] for row in rows}) == 64
    assert made.cubin


def test_what_is_refused():
    with pytest.raises(TileError, match="rng_init"):

        @T.prim_func
        def without(A: T.Tensor((1,), "uint32")):
            with T.Kernel(1):
                A[0] = T.rng_rand()

    with pytest.raises(TileError, match="generator"):

        @T.prim_func
        def other(A: T.Tensor((1,), "uint32")):
            with T.Kernel(1):
                T.rng_init(1, 0, 0, "curandStateMtgp32_t")
