# SPDX-License-Identifier: Apache-2.0
"""Matrix loads and stores between fragments and shared memory, in the thread interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from torch_tile.intrinsics.matrix import FRAGMENTS
from torch_tile.ir import dtype as dt
from torch_tile.ir.layout import row_major, shared_tile, spread
from torch_tile.tileop.copy import ldmatrix
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm.partition import Partition, transposed

KINDS = {
    "accumulator": lambda p, m, n: p.accumulator(m, n),
    "a": lambda p, m, n: p.operand_a(m, n),
    "a_transposed": lambda p, m, n: transposed(p.operand_a(n, m)),
    "b": lambda p, m, n: p.operand_b(m, n),
    "b_transposed": lambda p, m, n: transposed(p.operand_b(n, m)),
}


def tile(on_threads, layout, shape, types, store, versions=0, target="sm_90"):
    """The copy, its context and its buffers (fragment first)."""
    run = on_threads(128, target)
    held = on_threads.buffer("held", shape, types[0], "fragment", layout)
    lead = (versions,) if versions else ()
    memory = on_threads.buffer("memory", lead + shape, types[1], "shared", shared_tile(lead + shape, types[1].bits))
    region = on_threads.box(memory, *([(versions - 1, 1)] if versions else []))
    whole = on_threads.box(held)
    return (Copy(whole, region) if store else Copy(region, whole)), run, [held, memory]


@pytest.mark.parametrize("store", [True, False], ids=["stmatrix", "ldmatrix"])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits(on_threads, kind: str, store: bool, seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 4])
    p = Partition(FRAGMENTS["m16n8k16"], rows, rng.choice([c for c in (1, 2, 4) if rows * c <= 4]), 4)
    shape = 64 * rng.choice([1, 2]), 64 * rng.choice([1, 2])
    op, run, buffers = tile(on_threads, KINDS[kind](p, *shape), shape, (dt.float16,) * 2, store, rng.choice([0, 3]))
    check(op, run, buffers, store, ".trans" if kind in ("a_transposed", "b") else "")


@pytest.mark.parametrize("kind", ["a", "b_transposed"])
@pytest.mark.parametrize("type_", [dt.int8, dt.float32])
def test_other_widths(on_threads, kind: str, type_, seed: int) -> None:
    p = Partition(FRAGMENTS["m16n8k32" if type_ == dt.int8 else "m16n8k8"], 2, 2, 4)
    op, run, buffers = tile(on_threads, KINDS[kind](p, 64, 64), (64, 64), (type_,) * 2, False)
    check(op, run, buffers, False, "")


def test_converted_on_the_way(on_threads, seed: int) -> None:
    layout = Partition(FRAGMENTS["m16n8k16"], 2, 2, 4).accumulator(64, 48)
    op, run, buffers = tile(on_threads, layout, (64, 48), (dt.float32, dt.bfloat16), True)
    check(op, run, buffers, True, "")


def test_an_odd_number_of_blocks(on_threads) -> None:
    layout = Partition(FRAGMENTS["m16n8k16"], 4, 1, 4).accumulator(64, 24)
    op, run, _ = tile(on_threads, layout, (64, 24), (dt.float16,) * 2, True)
    ldmatrix.lower(op, run.ctx)
    assert run.ctx.build.remarks[-1].became == "stmatrix_x2"


def check(op, run, buffers, store: bool, suffix: str) -> None:
    assert ldmatrix.refuses(op, run.ctx) is None
    tensors = [torch.randint(-99, 99, b.static_shape).to(b.dtype.as_torch()) for b in buffers]
    (fragment, shared), findings = run.run(ldmatrix.lower(op, run.ctx), buffers, tensors)
    assert not findings, findings.report()
    version = shared[-1] if shared.dim() == 3 else shared
    source = tensors[0] if store else tensors[1][-1] if shared.dim() == 3 else tensors[1]
    moved = version if store else fragment
    torch.testing.assert_close(moved, source.to(moved.dtype), rtol=0, atol=0)
    name = "stmatrix" if store else "ldmatrix"
    assert run.ctx.build.remarks[-1].became == f"{name}_x4{suffix}"
    assert all(banks.ways == 1 for (_, what), banks in findings.banks.items() if name in what), findings.report()


@pytest.mark.parametrize(
    ("types", "store", "target", "why"),
    [
        ((dt.float32, dt.float16), False, "sm_90", "float16 is converted to float32"),
        ((dt.float32, dt.float16), True, "sm_80", "cuda:sm_80 has no stmatrix"),
        ((dt.float32, dt.float32), True, "sm_90", "the elements of `held` do not lie as in 8 x 8 matrices"),
        ((dt.float64, dt.float64), True, "sm_90", "`held` is not copied whole"),
    ],
)
def test_refusals(on_threads, types, store: bool, target: str, why: str) -> None:
    layout = Partition(FRAGMENTS["m16n8k16"], 2, 2, 4).accumulator(64, 64)
    op, run, _ = tile(on_threads, layout, (64, 64), types, store, target=target)
    assert ldmatrix.refuses(op, run.ctx) == why


def test_refuses_other_layouts(on_threads) -> None:
    op, run, _ = tile(on_threads, spread((64, 64), 128, 8), (64, 64), (dt.float16,) * 2, True)
    assert ldmatrix.refuses(op, run.ctx) == "the elements of `held` do not lie as in 8 x 8 matrices"
    layout = Partition(FRAGMENTS["m16n8k16"], 4, 1, 4).accumulator(64, 24)
    held = on_threads.buffer("held", (64, 24), dt.float16, "fragment", layout)
    odd = on_threads.buffer("odd", (64, 28), dt.float16, "shared", row_major((64, 28)))
    op = Copy(on_threads.box(held), on_threads.box(odd, None, (0, 24)))
    assert ldmatrix.refuses(op, run.ctx) == "the rows of `odd` are not runs of 16 bytes"
    padded = Partition(FRAGMENTS["m16n8k16"], 2, 1, 2).accumulator(32, 8)
    held = on_threads.buffer("short", (24, 8), dt.float16, "fragment", padded)
    short = on_threads.buffer("tile", (24, 8), dt.float16, "shared", row_major((24, 8)))
    op = Copy(on_threads.box(held), on_threads.box(short))
    assert "`short` is padded to (32, 8)" in ldmatrix.refuses(op, run.ctx)
