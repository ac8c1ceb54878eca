# SPDX-License-Identifier: Apache-2.0
"""Intrinsics run from their declared effects and meanings."""

import time

import numpy as np
import pytest
import torch

from torch_tile.intrinsics import memory as tm
from torch_tile.intrinsics.matrix import FRAGMENTS, PRODUCTS, ldmatrix, mma, places, stmatrix
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, cast
from torch_tile.ir.stmt import Do


def test_shuffles_and_votes(build):
    b = build(64)
    x = torch.randint(0, 100, (64,), dtype=torch.int32)
    source = b.tensor("x", x)
    value, lane = b.load(source, b.thread), b.thread % 32
    made = {
        "xor": tm.shuffle_xor(value, 5), "lane": tm.shuffle(value, (lane * 7) % 32), "up": tm.shuffle_up(value, 3),
        "down": tm.shuffle_down(value, 4), "any": cast(tm.vote_any(value < 2), dt.int32),
        "all": cast(tm.vote_all(value < 99), dt.int32), "ballot": cast(tm.ballot(value < 50), dt.int32),
    }  # fmt: skip
    outs = {name: b.tensor(name, torch.zeros(64, dtype=torch.int32)) for name in made}
    assert not b.run(*(b.store(outs[n], b.thread, v) for n, v in made.items()))
    got = dict(zip(["x", *made], b.tensors, strict=True))
    rows, lanes = x.view(2, 32), np.arange(32)
    wanted = {"xor": rows[:, lanes ^ 5], "lane": rows[:, lanes * 7 % 32], "up": rows[:, np.maximum(lanes - 3, 0)],
              "down": rows[:, np.where(lanes + 4 < 32, lanes + 4, lanes)]}  # fmt: skip
    wanted["up"][:, :3], wanted["any"] = rows[:, :3], (rows < 2).any(1, keepdim=True).expand(2, 32).int()
    wanted["all"] = (rows < 99).all(1, keepdim=True).expand(2, 32).int()
    for name, want in wanted.items():
        assert torch.equal(got[name].view(2, 32), want), name
    for row, word in zip(rows, got["ballot"].view(2, 32)[:, 0].tolist(), strict=True):
        assert [word >> k & 1 for k in range(32)] == (row < 50).int().tolist()


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
@pytest.mark.parametrize("scope", ["global", "shared"])
def test_atomics(build, dtype, scope, rng):
    b = build(96)
    to = getattr(torch, dtype)
    places_ = torch.from_numpy(rng.integers(0, 7, 96)).int()
    at, total = b.tensor("at", places_), b.tensor("total", torch.zeros(7, dtype=to))
    old = b.tensor("old", torch.zeros(96, dtype=to))
    memory = total if scope == "global" else b.shared("s", 7, dtype)
    one = cast(b.load(at, b.thread), memory.dtype)
    add = tm.atomic(b.address(memory, b.load(at, b.thread)), one, "add")
    stmts = [b.store(old, b.thread, add)]
    if scope == "shared":
        clear = b.when(b.thread < 7, b.store(memory, b.thread, 0.0 if to.is_floating_point else 0))
        out = b.when(b.thread < 7, b.store(total, b.thread, b.load(memory, b.thread)))
        stmts = [clear, tm.barrier(), *stmts, tm.barrier(), out]
    findings = b.run(*stmts)
    assert not findings, findings.report()
    counts = torch.bincount(places_, minlength=7)
    assert torch.equal(b.tensors[1].long(), counts * torch.arange(7))
    for k in range(7):  # each thread saw a different total on the way
        assert b.tensors[2][places_ == k].long().sort().values.tolist() == [k * n for n in range(int(counts[k]))]


def test_dp4a(build, rng):
    b = build(32)
    x = [torch.from_numpy(rng.integers(-(2**31), 2**31, 32, dtype=np.int64)).int() for _ in range(3)]
    a, y = [b.tensor("abc"[n], v) for n, v in enumerate(x)], b.tensor("y", torch.zeros(32, dtype=torch.int32))
    assert not b.run(b.store(y, b.thread, tm.dp4a(*(b.load(v, b.thread) for v in a))))
    dot = (x[0].view(torch.int8).long() * x[1].view(torch.int8).long()).view(32, 4).sum(1)
    assert torch.equal(b.tensors[3], (x[2] + dot).int())


def whole_warp(values, digits, rng):
    """A matrix with these registers, and the registers `[32, count]` of random numbers."""
    rows, columns = places(digits)
    matrix = np.zeros((rows.max() + 1, columns.max() + 1))
    registers = rng.integers(-4, 5, rows.shape).astype(float)
    matrix[rows, columns] = registers
    return matrix, registers


@pytest.mark.parametrize("types", sorted(PRODUCTS), ids="-".join)
def test_mma(build, types, rng):
    name = PRODUCTS[types]
    shape, b = FRAGMENTS[name], build(64)
    names = ["float32" if t == "tf32" else t for t in types]
    made, local, tensors = {}, {}, {}
    stmts = []
    for x, dtype in zip("abd", names, strict=True):
        matrix, registers = whole_warp(b, getattr(shape, x), rng)
        count = registers.shape[1]
        local[x] = b.local(x + "r", count + 1, dtype)
        data = torch.from_numpy(np.abs(registers) if "uint8" in dtype else registers).repeat(2, 1)
        made[x] = np.abs(matrix) if "uint8" in dtype else matrix
        tensors[x] = b.tensor(x, data.reshape(-1).to(getattr(torch, dtype)))
        for r in range(count):
            stmts.append(b.store(local[x], r + 1, b.load(tensors[x], b.thread * count + r)))
    stmts.append(mma(*(b.address(local[x], 1) for x in "dab"), name, types))
    count = shape.registers("d")
    stmts += [b.store(tensors["d"], b.thread * count + r, b.load(local["d"], r + 1)) for r in range(count)]
    assert not b.run(*stmts)
    rows, columns = places(shape.d)
    want = (made["a"] @ made["b"] + made["d"])[rows, columns]
    assert np.array_equal(b.tensors[2].double().view(2, 32, count).numpy(), np.stack([want, want]))


@pytest.mark.parametrize(("count", "trans"), [(1, False), (2, True), (4, False), (4, True)])
def test_matrix_loads_and_stores(build, count, trans, rng):
    b = build(32)
    x = torch.from_numpy(rng.permutation(8 * 8 * count).astype(np.int16))
    source, target = b.tensor("x", x), b.tensor("y", torch.zeros_like(x))
    s, q, r = b.shared("s", 64 * count, "int16"), b.shared("q", 64 * count, "int16"), b.local("r", 2 * count, "int16")
    i = Var("i", dt.int32, "loop")
    fill = b.loop(i, 0, 2 * count, b.store(s, i * 32 + b.thread, b.load(source, i * 32 + b.thread)))
    row = (b.thread % (8 * count)) * 8
    lane = Var("lane", dt.int32, "loop")
    stmts = [
        fill, tm.barrier(), b.at(1, ldmatrix(b.address(r, 0), b.address(s, row), count, trans)),
        b.at(2, stmatrix(b.address(q, row), b.address(r, 0), count, trans)), tm.warp_barrier(),
        b.loop(lane, 0, 2 * count, b.store(target, lane * 32 + b.thread, b.load(q, lane * 32 + b.thread))),
    ]  # fmt: skip
    findings = b.run(*stmts)
    assert not findings, findings.report()
    assert torch.equal(b.tensors[1], x)
    assert all(banks.ways == 1 for banks in findings.banks.values())


def test_matrix_loads_need_a_barrier(build):
    for before, wrong in ((tm.barrier(), 0), (tm.warp_barrier(), 0), (tm.cp_async_commit(), 1)):
        b = build(32)
        s, r = b.shared("s", 64, "float16"), b.local("r", 2, "float16")
        stores = [b.store(s, b.thread * 2 + k, 1.0) for k in range(2)]
        load = b.at(4, ldmatrix(b.address(r, 0), b.address(s, (b.thread % 8) * 8), 1))
        findings = b.run(*stores, before, load)
        assert [f.kind for f in findings] == ["race"] * wrong


def test_atomics_of_all_threads_to_one_place(build):
    b = build(128)
    y = b.tensor("y", torch.zeros(1, dtype=torch.int32))
    one = cast(b.thread, dt.int32)
    assert not b.run(Do(tm.atomic(b.address(y, 0), one, "max")))
    assert b.tensors[0].item() == 127


@pytest.mark.slow
def test_a_large_step_is_quick(build, rng):
    """128 x 128 x 32 by 256 threads: 2 x 16 mma per warp and what they need takes tenths of a second."""
    b = build(256)
    s, q = b.shared("s", 128 * 32, "float16"), b.shared("q", 32 * 128, "float16")
    x = b.tensor("x", torch.randn(128 * 32).half())
    c, a, bb = b.local("c", 64), b.local("a", 16, "float16"), b.local("b", 16, "float16")
    i, k, m, n, j = (Var(n, dt.int32, "loop") for n in "ikmnj")
    at = b.thread * 8 + i * 2048
    copies = [tm.cp_async(b.address(t, at), b.address(x, at), 16, 16) for t in (s, q)]
    row = (b.thread % 16) * 32 + (b.thread // 16 % 2) * 8 + k * 16
    types = ("float16", "float16", "float32")
    step = [
        b.loop(m, 0, 2, ldmatrix(b.address(a, m * 8), b.address(s, (b.thread // 128) * 2048 + m * 512 + row), 4)),
        b.loop(n, 0, 2, ldmatrix(b.address(bb, n * 8), b.address(q, row + n * 512), 4)),
        b.loop(
            j, 0, 16, mma(b.address(c, j * 4), b.address(a, j // 8 * 8), b.address(bb, j % 4 * 4), "m16n8k16", types)
        ),
    ]
    program = [
        *(b.store(c, r, 0.0) for r in range(64)),
        b.loop(i, 0, 2, *copies),
        tm.cp_async_commit(),
        tm.cp_async_wait(0),
        tm.barrier(),
        b.loop(k, 0, 2, *step),
    ]
    start = time.process_time()  # a busy machine takes longer
    assert not b.run(*program)
    assert time.process_time() - start < 1.0
