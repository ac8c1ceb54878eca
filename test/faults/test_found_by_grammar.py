# SPDX-License-Identifier: Apache-2.0
"""Kinds of faults that programs of test/fuzz/grammar.py found first: each over its class of inputs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_tile.language as T


@pytest.mark.parametrize("threads", [32, 64, 128])
def test_threads_with_copies_of_an_element_do_not_meet_in_memory(way: Callable[..., None], threads: int) -> None:
    """One of them stores to memory, and all read it for the fragment."""

    @T.prim_func
    def kernel(W: T.Tensor((12,), "int32"), O: T.Tensor((12,), "int32"), P: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=threads):
            t, u = T.alloc_fragment((12,), "int32"), T.alloc_fragment((12,), "int32")
            T.fill(t, 5)
            T.fill(u, 7)
            for i in T.Parallel(12):
                W[i] = W[i] + 100
                t[i] = W[i] + 1
            for i in T.Parallel(9):
                u[i] = W[i]
                W[i] = 3
            T.copy(t, O)
            T.copy(u, P)

    w = torch.arange(12, dtype=torch.int32)
    o, p = torch.zeros_like(w), torch.zeros_like(w)
    way(kernel, w, o, p)
    assert w.tolist() == [3] * 9 + [109, 110, 111]
    assert o.tolist() == [101 + i for i in range(12)]
    assert p.tolist() == [100 + i for i in range(9)] + [7] * 3


def test_iterations_that_end_early_see_what_was_stored_before(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(W: T.Tensor((2, 8), "int64"), A: T.Tensor((2, 8), "int32"), O: T.Tensor((8, 8), "int64"), at: T.int32):
        with T.Kernel(1, threads=32) as b:
            t = T.alloc_fragment((8, 8), "int64")
            T.fill(t, 0)
            W[b, at] = 5
            for i, j in T.Parallel(1, 8):
                if W[b, at] > 0:
                    t[i, j] = 6
                if A[b, j] != 1:
                    continue
                t[i, j] = t[i, j] + 1
            T.copy(t, O)

    a, o = torch.tensor([[1, 0] * 4] * 2, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.int64)
    way(kernel, torch.zeros(2, 8, dtype=torch.int64), a, o, 3)
    assert o[0].tolist() == [7, 6] * 4 and not o[1:].any()


def test_turns_by_memory_that_the_body_overwrites(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(W: T.Tensor((8,), "int32"), O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((8,), "int32")
            T.copy(W, s)
            for k in range(W[4] % 4):
                for i in T.Parallel(7):
                    W[i] = k
                O[0] = O[0] + 1
            for k in range(s[4] % 4):
                for i in T.Parallel(7):
                    s[i] = k
                O[0] = O[0] + 10

    w, o = torch.full((8,), 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    way(kernel, w, o)
    assert o.tolist() == [33] and w.tolist() == [2] * 7 + [3]


def test_loops_that_only_some_threads_run_hold_no_barrier(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int8"), W: T.Tensor((8, 8), "int64")):
        with T.Kernel(1, threads=32):
            t = T.alloc_fragment((8,), "uint16")
            T.fill(t, 1)
            for i, j in T.Parallel(8, 8):
                W[i, j] = T.cast(t[i], "int64")
                n = T.alloc_var("int32", 0)
                while n < 3 and (A[n] + t[i] != 9 or W[i, j] != 3):
                    n += 1
                    for k in T.serial(0, 7, 1):
                        if A[i] >= 5 and t[i] > W[i, j] + k:
                            continue
                        W[i, j] = W[i, j] + 1

    w = torch.zeros(8, 8, dtype=torch.int64)
    way(kernel, torch.full((8,), 2, dtype=torch.int8), w)
    assert w.eq(22).all()


@pytest.mark.parametrize("scope", ["shared", "global"])
def test_fills_by_an_element_of_the_tile(way: Callable[..., None], scope: str) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=64):
            t = A if scope == "global" else T.alloc_shared((32,), "int32")
            if scope == "shared":
                T.copy(A, t)
            T.fill(t[0:30], t[3] * 2 + t[0])
            T.copy(t, O)

    a, o = torch.arange(32, dtype=torch.int32) + 1, torch.zeros(32, dtype=torch.int32)
    way(kernel, a, o)
    assert o.tolist() == [9] * 30 + [31, 32]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_remainders_of_negative_elements(way: Callable[..., None], dtype: str) -> None:
    greatest = np.iinfo(dtype).max

    @T.prim_func
    def kernel(A: T.Tensor((16,), dtype), O: T.Tensor((4, 16), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                O[0, i] = A[i] % 7
                O[1, i] = A[i] % greatest
                O[2, i] = A[i] // 7
                O[3, i] = T.truncmod(A[i], 100) - T.truncdiv(A[i], 9)

    values = [-greatest - 1, -greatest, -100, -8, -7, -1, 0, 1, 6, 7, 8, 99, 100, greatest - 1, greatest, 5]
    a, o = torch.from_numpy(np.array(values, dtype)), torch.zeros(4, 16, dtype=getattr(torch, dtype))
    way(kernel, a, o)
    assert o[0].tolist() == [x % 7 for x in values]
    assert o[1].tolist() == [x % greatest for x in values]
    assert o[2].tolist() == [x // 7 for x in values]
    trunc: Any = [int(np.fmod(x, 100)) - int(abs(x) // 9) * (1 if x >= 0 else -1) for x in values]
    half = greatest + 1
    assert o[3].tolist() == [(x + half) % (2 * half) - half for x in trunc]


def test_the_least_literal_is_added(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(O: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                O[i] = (((-2147483648) + n) >> (i + 24)) + T.ceildiv(i, 2147483646)

    o = torch.zeros(4, dtype=torch.int32)
    way(kernel, o, 3)
    assert o.tolist() == [-128, -63, -31, -15]


def test_lower_bits_of_products_that_leave_their_type(way: Callable[..., None]) -> None:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), O: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                O[i] = ((5 * T.clamp(A[i], 1365441282, 2147483647)) & 65535) // ((A[3] & 255) | 1)

    a, o = torch.arange(8, dtype=torch.int32) * 300000000, torch.zeros(8, dtype=torch.int32)
    way(kernel, a, o)
    divisor = (a[3].item() & 255) | 1
    assert o.tolist() == [((5 * max(x, 1365441282)) & 65535) // divisor for x in a.tolist()]


@pytest.mark.parametrize("name", ["max", "min", "xor", "add"])
def test_updates_of_uint64(way: Callable[..., None], name: str) -> None:
    top = 2**64 - 1

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), O: T.Tensor((6,), "uint64")):
        with T.Kernel(1, threads=32):
            t = T.alloc_shared((2,), "uint64")
            T.fill(t, T.uint64(top))
            for i in T.Parallel(4):
                getattr(T, f"atomic_{name}")(O[i], T.cast(A[i], "uint64"))
            T.copy(t, O[4:6])

    old = [2**63, 5, top, 0]
    o = torch.tensor([x - 2**64 if x >= 2**63 else x for x in [*old, 0, 0]]).view(torch.uint64)
    values = [7, -1, -9, 2**31 - 1]
    way(kernel, torch.tensor(values, dtype=torch.int32), o)
    join: Any = {"max": max, "min": min, "xor": lambda x, y: x ^ y, "add": lambda x, y: (x + y) % 2**64}[name]
    assert o.view(torch.int64).numpy().view(np.uint64).tolist() == [
        *(join(x, y % 2**64) for x, y in zip(old, values, strict=True)), top, top,
    ]  # fmt: skip


@pytest.mark.parametrize("size, other", [(1, 33), (7, 33), (30, 97), (33, 65)])
def test_registers_that_only_pad_a_share_are_not_missed(way: Callable[..., None], size: int, other: int) -> None:
    """A larger tile gives a small one registers without an element, which scans move along."""

    @T.prim_func
    def kernel(X: T.Tensor((size,), "int64"), Y: T.Tensor((other,), "int8"), O: T.Tensor((size,), "int64")):
        with T.Kernel(1, threads=32):
            small, large = T.alloc_fragment((size,), "int64"), T.alloc_fragment((other,), "int8")
            T.copy(X, small)
            T.copy(Y, large)
            T.cumsum(small, dim=0)
            for i in T.Parallel(1):
                small[i] = large[i]
            T.copy(small, O)

    x, o = torch.arange(size), torch.full((size,), 99)
    way(kernel, x, torch.full((other,), 2, dtype=torch.int8), o)
    assert o.tolist() == [2, *x.cumsum(0)[1:].tolist()]


@pytest.mark.parametrize("dtype", ["uint64", "uint8", "int16"])
def test_indices_by_way_of_types_that_wrap(way: Callable[..., None], dtype: str) -> None:
    """Which threads meet in shared memory is not told from numbers that an index does not have."""
    top = {"uint64": 2**63 + 5, "uint8": 253, "int16": 32000}[dtype]

    @T.prim_func
    def kernel(O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64) as b:
            s = T.alloc_shared((64,), "int32")
            T.fill(s, -1)
            for i in T.Parallel(64):
                s[T.cast((T.cast(i + b, dtype) * 5 + T.cast(top, dtype)) >> 1, "int32") & 63] = 1
            T.copy(s, O)

    low, bits = (-(2**15), 16) if dtype == "int16" else (0, int(dtype.strip("uint")))
    wanted = [-1] * 64
    for i in range(64):
        x = (i * 5 + top - low) % 2**bits + low
        wanted[(x >> 1) & 63] = 1
    o = torch.zeros(64, dtype=torch.int32)
    way(kernel, o)
    assert o.tolist() == wanted


@pytest.mark.parametrize("seed", [7013044, 7014868])
def test_truth_values_among_indices(seed, tmp_path):
    """An index made of a truth value has steps as well: the barrier pass took their divisor and raised."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
    from grammar import generated
    from grammar_run import outcomes

    found = outcomes([generated(seed)], ["sm_80"], tmp_path)
    assert [o.kind for o in found] == ["same"], found
