# SPDX-License-Identifier: Apache-2.0
"""Splits of a product over warps: every element has its place, operands match what one instruction reads."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torch_tile.intrinsics.matrix import FRAGMENTS, places
from torch_tile.ir.layout import Layout
from torch_tile.tileop.gemm.partition import Partition, partitions, transposed


def points(layout: Layout, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each register of each thread, `[threads, registers]`."""
    registers = 1 + sum((d.size - 1) * d.stride for dim in layout.dims for d in dim if d.axis == "r")
    thread, register = np.meshgrid(np.arange(threads), np.arange(registers), indexing="ij")
    found = []
    for dim in layout.dims:
        index = np.zeros_like(thread)
        for d in dim:
            index = index * d.size + (thread if d.axis == "t" else register) // d.stride % d.size
        found.append(index)
    return found[0], found[1]


def some_partition(rng: random.Random) -> tuple[Partition, int, int, int]:
    shape = FRAGMENTS[rng.choice(list(FRAGMENTS))]
    warps = rng.choice([1, 2, 3, 4, 6, 8])
    m, n, k = (unit * rng.randrange(1, 7) for unit in (shape.m, shape.n, shape.k))
    return rng.choice(list(partitions(shape, m, n, warps, "Square"))), m, n, k


@pytest.mark.parametrize("turn", range(20))
def test_every_element_has_its_places(turn: int, seed: int) -> None:
    p, m, n, k = some_partition(random.Random(seed))
    for layout, (rows, columns), copies in (
        (p.accumulator(m, n), (m, n), p.copies),
        (p.operand_a(m, k), (m, k), p.copies * p.columns),
        (p.operand_b(k, n), (k, n), p.copies * p.rows),
    ):
        i, j = points(layout, 32 * p.warps)
        counts = np.zeros((rows, columns), int)
        np.add.at(counts, (i, j), 1)
        assert (counts == copies).all()
        assert np.prod([d.size for d in layout.replicas]) == copies


@pytest.mark.parametrize("turn", range(20))
def test_registers_are_those_of_the_instruction(turn: int, seed: int) -> None:
    """Registers from (tile * tiles + tile) * each on are one instruction's, at the tile's corner of the warp's box."""
    p, m, n, k = some_partition(random.Random(seed))
    m_tiles, n_tiles = p.tiles(m, n)
    k_tiles = k // p.shape.k
    for operand, layout, tiles, unit in (
        ("d", p.accumulator(m, n), (m_tiles, n_tiles), (p.shape.m, p.shape.n)),
        ("a", p.operand_a(m, k), (m_tiles, k_tiles), (p.shape.m, p.shape.k)),
        ("b", transposed(p.operand_b(k, n)), (n_tiles, k_tiles), (p.shape.n, p.shape.k)),
    ):
        each = p.shape.registers(operand)
        inner = places(getattr(p.shape, operand))
        inner = inner[::-1] if operand == "b" else inner
        i, j = points(layout, 32 * p.warps)
        assert i.shape[1] == tiles[0] * tiles[1] * each
        for warp in range(p.warps):
            corner = i[32 * warp, 0], j[32 * warp, 0]
            for first in range(tiles[0]):
                for second in range(tiles[1]):
                    at = slice(32 * warp, 32 * warp + 32), slice((first * tiles[1] + second) * each, None)
                    np.testing.assert_array_equal(i[at][:, :each], corner[0] + first * unit[0] + inner[0])
                    np.testing.assert_array_equal(j[at][:, :each], corner[1] + second * unit[1] + inner[1])


@pytest.mark.parametrize("types", ["m16n8k16", "m16n8k32"])
def test_accumulators_are_the_left_operand_of_the_next_product(types: str, seed: int) -> None:
    """With one column of warps, C cast to 16 bits is an A operand in place; of 8 bits it is not."""
    shape = FRAGMENTS[types]
    p = Partition(shape, 4, 1, 4)
    k = 32 * random.Random(seed).randrange(1, 5)
    ours, wanted = (points(layout, 128) for layout in (p.accumulator(128, k), p.operand_a(128, k)))
    assert all((a == b).all() for a, b in zip(ours, wanted, strict=True)) == (types == "m16n8k16")


@pytest.mark.parametrize(
    ("m", "n", "warps", "policy", "expected"),
    [
        (128, 128, 4, "Square", (2, 2)),
        (128, 256, 8, "Square", (2, 4)),
        (64, 64, 4, "FullRow", (4, 1)),
        (64, 64, 4, "FullCol", (1, 4)),
        (16, 64, 4, "FullRow", (1, 4)),
        (48, 64, 4, "Square", (1, 4)),
        (144, 24, 8, "Square", (1, 1)),
        (16, 8, 4, "Square", (1, 1)),
    ],
)
def test_policies(m: int, n: int, warps: int, policy: str, expected: tuple[int, int]) -> None:
    best = next(partitions(FRAGMENTS["m16n8k16"], m, n, warps, policy))
    assert (best.rows, best.columns) == expected
