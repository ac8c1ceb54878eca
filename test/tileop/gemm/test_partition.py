# SPDX-License-Identifier: Apache-2.0
"""Splits of a product over warps: every element has its place, operands match what one instruction reads."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torch_tile.intrinsics.matrix import FRAGMENTS, places
from torch_tile.ir.layout import Layout
from torch_tile.tileop.gemm.partition import (
    Partition,
    WarpgroupPartition,
    instruction_columns,
    partitions,
    transposed,
    warpgroup_partitions,
)


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


def points_warpgroup_partition(layout: Layout, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each register of each thread, `[threads, registers]`."""
    thread, register = np.meshgrid(np.arange(threads), np.arange(layout.extent("r")), indexing="ij")
    found = []
    for digits in layout.dims:
        index = np.zeros_like(thread)
        for d in digits:
            index = index * d.size + (thread if d.axis == "t" else register) // d.stride % d.size
        found.append(index)
    return found[0], found[1]


def accumulator(t: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where register `r` of thread `t` of a warpgroup lies in 64 x N, as the instruction set defines it."""
    return 16 * (t // 32) + t % 32 // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2


def operand_a(t: np.ndarray, v: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for the registers of A of one instruction: 64 x 16, 64 x 32 or 64 x 8 for 16, 8 or 32 bits."""
    row = 16 * (t // 32) + t % 32 // 4
    if bits == 16:
        return row + 8 * (v // 2 % 2), 2 * (t % 4) + v % 2 + 8 * (v // 4)
    if bits == 8:
        return row + 8 * (v // 4 % 2), 4 * (t % 4) + v % 4 + 16 * (v // 8)
    return row + 8 * (v % 2), t % 4 + 4 * (v // 2)


def corner(p: WarpgroupPartition, group: int, m: int, n: int) -> tuple[int, int]:
    """The first row and column of a warpgroup's box."""
    return group // p.columns % p.rows * (m // p.rows), group % p.columns * (n // p.columns)


PARTS = [WarpgroupPartition(*x) for x in ((1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 2), (2, 2, 4), (3, 1, 3), (1, 2, 4))]


@pytest.mark.parametrize("p", PARTS, ids=str)
def test_accumulators_are_those_of_the_instruction(p: WarpgroupPartition, seed: int) -> None:
    rng = random.Random(seed)
    tiles, blocks = rng.randrange(1, 4), rng.randrange(1, 33)
    m, n = 64 * tiles * p.rows, 8 * blocks * p.columns
    i, j = points_warpgroup_partition(p.accumulator(m, n), 128 * p.groups)
    t, r = np.meshgrid(np.arange(128), np.arange(4 * blocks), indexing="ij")
    row, column = accumulator(t, r)
    assert i.shape == (128 * p.groups, tiles * 4 * blocks)
    for group in range(p.groups):
        top, left = corner(p, group, m, n)
        for tile in range(tiles):
            at = slice(128 * group, 128 * group + 128), slice(tile * 4 * blocks, (tile + 1) * 4 * blocks)
            np.testing.assert_array_equal(i[at], top + 64 * tile + row)
            np.testing.assert_array_equal(j[at], left + column)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("p", PARTS, ids=str)
def test_operands_in_registers_are_those_of_the_instruction(p: WarpgroupPartition, bits: int, seed: int) -> None:
    rng = random.Random(seed)
    tiles, steps, step = rng.randrange(1, 3), rng.randrange(1, 5), 256 // bits
    m, k, each = 64 * tiles * p.rows, steps * step, step // 2
    i, j = points_warpgroup_partition(p.operand_a(m, k, bits), 128 * p.groups)
    t, v = np.meshgrid(np.arange(128), np.arange(each), indexing="ij")
    row, column = operand_a(t, v, bits)
    assert i.shape[1] == tiles * steps * each
    for group in range(p.groups):
        for tile in range(tiles):
            for ks in range(steps):
                first = (tile * steps + ks) * each
                at = slice(128 * group, 128 * group + 128), slice(first, first + each)
                np.testing.assert_array_equal(i[at], corner(p, group, m, 8)[0] + 64 * tile + row)
                np.testing.assert_array_equal(j[at], step * ks + column)


@pytest.mark.parametrize("p", PARTS, ids=str)
def test_every_element_has_its_places_warpgroup_partition(p: WarpgroupPartition) -> None:
    m, n, k = 128 * p.rows, 24 * p.columns, 32
    for layout, sizes, copies in (
        (p.accumulator(m, n), (m, n), p.copies), (p.operand_a(m, k, 16), (m, k), p.copies * p.columns),
    ):  # fmt: skip
        counts = np.zeros(sizes, int)
        np.add.at(counts, points_warpgroup_partition(layout, 128 * p.groups), 1)
        assert (counts == copies).all()
        assert np.prod([d.size for d in layout.replicas]) == copies


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_an_accumulator_cast_to_16_bits_is_the_next_left_operand_in_place(bits: int, groups: int) -> None:
    """With one column of warpgroups; of 8-bit operands the columns of K are in another order."""
    p = WarpgroupPartition(groups, 1, groups)
    for m, n in ((64 * groups, 64), (128 * groups, 32), (64 * groups, 256)):
        assert (p.accumulator(m, n) == p.operand_a(m, n, bits)) == (bits == 16)


def test_two_columns_of_warpgroups_each_hold_half_of_it() -> None:
    p = WarpgroupPartition(1, 2, 2)
    assert p.accumulator(64, 64) != p.operand_a(64, 64, 16)


@pytest.mark.parametrize(
    ("n", "floats", "integers"),
    [
        (8, 8, 8), (16, 16, 16), (24, 24, 24), (40, 40, 8), (56, 56, 8), (72, 72, 24), (80, 80, 80), (88, 88, 8),
        (176, 176, 176), (192, 192, 192), (248, 248, 8), (256, 256, 256), (320, 160, 160), (384, 192, 192),
        (512, 256, 256), (520, 104, 8), (576, 192, 192), (12, 0, 0), (4, 0, 0), (0, 0, 0),
    ],
)  # fmt: skip
def test_the_widest_instruction(n: int, floats: int, integers: int) -> None:
    assert instruction_columns(n, "bfloat16") == instruction_columns(n, "float8_e4m3fn") == floats
    assert instruction_columns(n, "int8") == integers


@pytest.mark.parametrize(
    ("m", "n", "groups", "policy", "expected"),
    [
        (64, 64, 1, "Square", (1, 1)),
        (128, 256, 2, "Square", (2, 1)),
        (256, 128, 2, "Square", (2, 1)),
        (128, 128, 2, "FullCol", (1, 2)),
        (64, 256, 2, "Square", (1, 2)),
        (64, 512, 2, "FullCol", (1, 2)),
        (64, 512, 2, "FullRow", (1, 2)),
        (192, 160, 3, "Square", (3, 1)),
        (128, 192, 3, "Square", (1, 3)),
        (256, 256, 4, "FullRow", (4, 1)),
        (256, 256, 4, "FullCol", (1, 4)),
        (64, 8, 2, "Square", (1, 1)),
    ],
)
def test_policies_warpgroup_partition(m: int, n: int, groups: int, policy: str, expected: tuple[int, int]) -> None:
    best = next(warpgroup_partitions(m, n, groups, policy, "bfloat16"))
    assert (best.rows, best.columns) == expected
    assert best.copies == groups // (expected[0] * expected[1])


@pytest.mark.parametrize(("m", "n"), [(32, 64), (96, 64), (64, 12), (64, 4)])
def test_what_no_split_shares(m: int, n: int) -> None:
    assert not list(warpgroup_partitions(m, n, 2, "Square", "float16"))
