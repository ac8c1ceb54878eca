# SPDX-License-Identifier: Apache-2.0
"""Meanings of the exchanges between lanes, and what copies say that they touch."""

from __future__ import annotations

import numpy as np
import pytest

from torch_tile.intrinsics import lookup, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, const


@pytest.mark.parametrize(
    ("name", "operand", "source"),
    [
        ("shuffle_xor", 5, lambda lane: lane ^ 5),
        ("shuffle", 7, lambda lane: 7),
        ("shuffle_up", 3, lambda lane: lane - 3 if lane >= 3 else lane),
        ("shuffle_down", 3, lambda lane: lane + 3 if lane < 29 else lane),
    ],
)
def test_shuffles(name: str, operand: int, source, seed: int) -> None:
    value = np.random.default_rng(seed).normal(size=(3, 32))
    for other in (operand, np.full((3, 32), operand)):
        got = lookup(name).meaning(value, other, ())
        np.testing.assert_array_equal(got, value[:, [source(lane) for lane in range(32)]])


def test_votes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = np.concatenate([rng.random((2, 32)) < 0.5, np.zeros((1, 32), bool), np.ones((1, 32), bool)])
    ballot = lookup("ballot").meaning(bits, ())
    assert ballot.dtype == np.uint32
    assert all(int(ballot[w, 9]) == sum(1 << i for i in range(32) if bits[w, i]) for w in range(4))
    assert lookup("vote_any").meaning(bits, ())[2:, 0].tolist() == [False, True]
    assert lookup("vote_all").meaning(bits, ())[:, 5].tolist() == [bool(row.all()) for row in bits]


def test_dp4a(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-128, 128, (2, 32, 4), dtype=np.int8) for _ in range(2))
    c = rng.integers(-1000, 1000, (2, 32), dtype=np.int32)
    got = lookup("dp4a").meaning(x.view(np.int32)[..., 0], y.view(np.int32)[..., 0], c, ())
    np.testing.assert_array_equal(got, c + (x.astype(int) * y).sum(-1))


@pytest.mark.parametrize(
    "op, want", [("add", 11), ("max", 6), ("min", 5), ("and", 4), ("or", 7), ("xor", 3), ("exchange", 6)]
)
def test_atomics(op: str, want: int) -> None:
    assert lookup("atomic").meaning(np.array([5]), np.array([6]), (op,)) == want


def address(dtype: dt.DType, scope: str) -> Address:
    return Address(Buffer("x", (const(64, dt.int32),), dtype, scope), (const(0, dt.int32),))


def test_effects_and_spelling() -> None:
    copy = memory.cp_async(address(dt.float16, "shared"), address(dt.float16, "global"), 16, 16).call
    effects = lookup("cp_async").effects(copy)
    assert [(e.operand, e.kind, e.elements, e.asynchronous) for e in effects] == [(0, "w", 8, True), (1, "r", 8, True)]
    assert lookup("cp_async").spelling(copy) == "cp_async<16>"
    wait = memory.cp_async_wait(2).call
    assert lookup("cp_async_wait").spelling(wait) == "cp_async_wait<2>" and not lookup("cp_async_wait").effects(wait)
    total = memory.atomic(address(dt.float32, "global"), const(1, dt.float32), "max")
    assert lookup("atomic").spelling(total) == "atomic_max" and total.dtype == dt.float32
    assert lookup("barrier").spelling(memory.barrier().call) == "barrier"
