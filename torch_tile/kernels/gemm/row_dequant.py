# SPDX-License-Identifier: Apache-2.0
"""Multiply one row by weights of 4 bits: eight slices of the row's columns take the places of eight rows.

Tensor cores multiply tiles of 16 x 8 at least. For one row, seven of eight columns would be idle. Here K is cut into
slices of a group each. Row `j * 8 + s` of a tile is slice `s` of row `j` of the weights. Column `s` of the other
operand is slice `s` of a. A result is the sum of the product's entries where both slices are the same. So a block has
few rows of the weights. A warp reads eight groups of one row at once, which lie side by side in memory.
May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, round_up, start_early, strided, typical
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.gemm.formats import TABLE, pairs_of
from torch_tile.kernels.gemm.packed import Piece, Problem, Spec, finish, weight
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.measured_rules import verdict

SLICES = 8  # columns of the smallest product of tensor cores


@dataclass(frozen=True)
class Group:
    """The `width` columns of a slice that share a scale, in the order in which tensor cores take them.

    Sums have no order. Four lanes share a row of an operand of mma.sync. Each takes a quarter of the columns, so that
    it widens whole words. Lane l holds slots 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of 16.
    """

    width: int

    def column(self, slot: Any) -> Any:
        """Return the column of a slot."""
        return slot % 8 // 2 * (self.width // 4) + slot // 8 * 2 + slot % 2

    def word(self, slot: Any, fields: int) -> Any:
        """Return the word that holds the column of a slot."""
        each = self.width // (4 * fields)  # words of a lane
        return slot % 8 // 2 * each + (slot // (4 * fields) if each > 1 else 0)

    def field(self, slot: Any) -> Any:
        """Return a column whose field lies at the same place of its word as the column of a slot."""
        return slot // 8 % 4 * 2 + slot % 2


class Fetched:
    """Words, scales and zeros of one matrix in registers. A block loads each group of a step a step ahead.

    Nothing passes through shared memory. So many warps have their own loads in flight, and none waits for another.
    """

    def __init__(self, config: Config, words: tuple[Any, int], kinds: Sequence[Any], given: Sequence[Any]):
        """Allocate registers for a step of `given`: a matrix, its scales and its zeros, or None. `words` are the dtype
        and the number of words of a group, and `kinds` describe scales and zeros.
        """
        (dtype, self.words), self.kinds, self.given = words, kinds, given
        self.groups = [
            [
                T.alloc_fragment((config.block_n, self.words), dtype),
                *(kind and T.alloc_fragment((config.block_n, 1), kind.dtype) for kind in kinds),
            ]
            for _ in range(config.stages)
        ]

    def fetch(self, number: int, col: Any, step: Any) -> None:
        """Begin to load the group of that number of each slice in a step. `col` is the first row of the weights."""
        words, *factors = self.groups[number]
        first = (step * len(self.groups) + number) * SLICES
        for r, i in T.Parallel(*words.shape, eviction_policy="no_allocate"):  # each is read once
            words[r, i] = self.given[0][col + r // SLICES, (first + r % SLICES) * self.words + i]
        for kind, source, found in zip(self.kinds, self.given[1:], factors, strict=True):
            if kind:
                for r, i in T.Parallel(*found.shape):
                    found[r, i] = source[kind.place(col + r // SLICES, first + r % SLICES + i)]


@T.macro
def multiply(
    config: Config, spec: Spec, row: Any, matrices: Sequence[Any], table: Any, cols: tuple[Any, Any], steps: Any
) -> Any:
    """Compute the products of all pairs of slices of one tile. `cols` are the first rows of its weights, and of those
    of the next tile. The first step of that is loaded beside the last one of this tile.
    """
    products = list[Any]()
    for _ in matrices:
        product = T.alloc_fragment((config.block_n, SLICES), "float32")
        T.clear(product)
        products.append(product)
    for step in T.serial(steps - 1):
        add_step(config, spec, row, matrices, table, products, step, (cols[0], step + 1))
    add_step(config, spec, row, matrices, table, products, steps - 1, (cols[1], 0))
    return products


@T.macro
def add_step(
    config: Config, spec: Spec, row: Any, matrices: Sequence[Any], table: Any, products: Sequence[Any], step: Any,
    following: tuple[Any, Any],
) -> None:  # fmt: skip
    """Add the products of a step, and begin to load the `following` one: its weights' first row, and its number."""
    width = spec.storage.group
    for number, _ in enumerate(matrices[0].groups):
        loaded, columns = (T.alloc_fragment((SLICES, width), spec.operand) for _ in range(2))
        T.copy(row[(step * config.stages + number) * SLICES, 0], loaded)
        for s, c in T.Parallel(SLICES, width):
            columns[s, c] = loaded[s, Group(width).column(c)]
        for matrix, product in zip(matrices, products, strict=True):
            words, scales, zeros = matrix.groups[number]
            scale, zero = converted(spec, spec.storage.scale, scales), converted(spec, spec.storage.zero, zeros)
            weights = widened(spec, words, zero, table)
            matrix.fetch(number, *following)
            total = T.alloc_fragment(product.shape, "float32")
            T.gemm(weights, columns, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for r, s in T.Parallel(*product.shape):
                product[r, s] += total[r, s] * T.cast(scale[r, 0], "float32")


@T.macro
def widened(spec: Spec, words: Any, zero: Any, table: Any) -> Any:
    """Unpack the weights of a group of each slice."""
    width, fields, rows = spec.storage.group, spec.storage.fields, words.shape[0]
    group, piece = Group(width), Piece(0, width, width)
    weights = T.alloc_fragment((rows, width), spec.operand)
    for r, c in T.Parallel(rows, width):
        weights[r, c] = T.cast(
            weight(spec, words[r, group.word(c, fields)], group.field(c), r, piece, None, zero, table, c), spec.operand
        )
    return weights


@T.macro
def converted(spec: Spec, kind: Any, stored: Any) -> Any:
    """Convert the scales or zeros of a group of each slice. None if there are none."""
    if stored is None:
        return None
    found = T.alloc_fragment(stored.shape, spec.taken(kind))
    for r, i in T.Parallel(*stored.shape):
        found[r, i] = kind.value(stored[r, i], found.dtype) if kind.power else T.cast(stored[r, i], found.dtype)
    return found


@library_jit
def row_dequant_matmul(config: Config, spec: Spec, held: int) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for one row a, given as groups, of which a block holds
    `held`.

    `config.blocks` blocks take one tile of the weights after the other. A step has `config.stages` groups of a slice.
    """
    rows, storage = config.block_n // SLICES, spec.storage
    m, n, _, _, types = spec.types()
    groups = T.dynamic("pieces")

    @T.prim_func
    def row_dequant_gemm(
        a: strided("a", (groups, storage.group), spec.product.dtype, multiple=spec.product.vector), *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):  # fmt: skip
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            table = pairs_of(storage.format, storage.high_first, spec.operand) if storage.coded else None
            start_early()
            bs, scales, zeros, _ = spec.sort(operands)
            nothing = [None] * len(bs)
            given = zip(bs, scales or nothing, zeros or nothing, strict=True)
            words, kinds = (storage.words, storage.group // storage.fields), (storage.scale, storage.zero)
            matrices = [Fetched(config, words, kinds, each) for each in given]
            for matrix in matrices:
                for number, _ in enumerate(matrix.groups):
                    matrix.fetch(number, block * rows, 0)
            row = T.alloc_shared((held, storage.group), spec.operand)
            T.copy(a[0, 0], row)
            parts = [T.alloc_shared((config.block_n, SLICES), "float32") for _ in matrices]
            for iteration in T.serial(T.ceildiv(T.ceildiv(n, rows) - block, config.blocks)):
                col = (iteration * config.blocks + block) * rows
                cols = col, col + config.blocks * rows
                steps = T.ceildiv(groups, SLICES * config.stages)
                products = multiply(config, spec, row, matrices, table, cols, steps)
                for part, product in zip(parts, products, strict=True):
                    T.copy(product, part)
                for j in T.Parallel(rows):
                    if col + j < n:
                        sums = [sum(part[j * SLICES + s, s] for s in range(SLICES)) for part in parts]
                        out[0, col + j] = finish(spec, sums, operands, 0, col + j)

    return row_dequant_gemm


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of one row by words of int32 whose groups have a scale each."""
    storage, sizes = spec.storage, typical(problem)
    weights = sizes.n * sizes.k * sizes.products
    return (
        not isinstance(problem.m, torch.SymInt)  # another call may have more rows
        and not isinstance(problem.k, torch.SymInt)
        and problem.m == 1
        and machine.is_gpu
        and problem.aligned
        and storage.words == torch.int32
        and storage.group >= LEAST_GROUP
        and bool(storage.scale)
        and problem.k % storage.group == 0
        and verdict("dequant.slices", machine.target, False, weights=weights, coded=problem.coded)
    )


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of one row and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    groups = a.view(-1, spec.storage.group)
    machine.kernel(row_dequant_matmul)(config, spec, groups_held(config, len(groups)))(groups, *operands, out)


# Tilings. They change the speed, never the result.

ROWS, THREADS = 128, 256  # of a tile, and of a block
LEAST_GROUP = 64  # columns that share a scale: a product of tensor cores for each
AHEAD = 256  # columns of a slice in a step, of all matrices together
RESIDENT = 2, 3, 1  # blocks of a multiprocessor: four would have no registers for a step


def groups_held(config: Config, groups: int) -> int:
    """Return how many groups of a row a block holds: all, rounded up to whole steps."""
    return round_up(groups, SLICES * config.stages)


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None if no block can hold the row.

    Two or three blocks share a multiprocessor, whichever leaves fewer tiles to the fullest one.
    """
    group, tiles = spec.storage.group, -(-typical(problem).n * SLICES // ROWS)
    stages = max(1, AHEAD // group // problem.products)
    configs = [
        Config(SLICES, ROWS, group, THREADS, stages, blocks=count * machine.num_sms, resident=count)
        for count in RESIDENT
    ]
    fitting = [config for config in configs if blocks_fit(config, spec, problem.k // group, machine)]
    return min(fitting, key=lambda config: -(-tiles // config.blocks) * max(2, config.resident), default=None)


def blocks_fit(config: Config, spec: Spec, groups: int, machine: Machine) -> bool:
    """Return whether a multiprocessor has shared memory for all of its blocks, whose rows have so many groups."""
    one = footprint(config, spec, groups_held(config, groups)).bytes
    return config.resident * one <= machine.target.shared_limit


def footprint(config: Config, spec: Spec, held: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of the groups of a row, a table, and what lanes add up."""
    operand = 8 * spec.operand.itemsize
    tiles = [Tile(held, config.block_k, operand)]
    tiles += [Tile(config.block_n, SLICES, 32) for _ in spec.storage.transposed]
    return Footprint((*tiles, Tile(1, TABLE, operand)) if spec.storage.coded else tuple(tiles), bulk)
