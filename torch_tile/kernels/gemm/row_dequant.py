# SPDX-License-Identifier: Apache-2.0
"""Multiply one row by weights of 4 bits: eight slices of the row's columns take the places of eight rows.

Tensor cores multiply tiles of 16 x 8 at least. For one row, seven of eight columns would be idle. Here a step of K
is cut into slices. Row `s * rows + j` of the tile is slice `s` of row `j` of the weights. Column `s` of the other
operand is slice `s` of a. A result is the sum of the product's entries where both slices are the same. So a block has
few rows of the weights, and all multiprocessors have equally many. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, start_early, strided, typical, vector_of
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
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


@T.macro
def multiply(config: Config, spec: Spec, a: Any, operands: Sequence[Any], col: Any, steps: Any) -> Any:
    """Compute the products of all pairs of slices of one tile: the rows of the weights from `col` on."""
    bn, bk, storage = config.block_n, config.block_k, spec.storage
    rows, words, groups = bn // SLICES, bk // storage.fields, bk // storage.group
    bs, scales, zeros, _ = spec.sort(operands)
    a_tile = T.alloc_shared((SLICES, bk), spec.operand)
    tiles, products = list[Any](), list[Any]()
    for _ in bs:
        b_tile = T.alloc_shared((rows, SLICES * words), storage.words)
        beside: list[Any] = [
            T.alloc_shared((rows, SLICES * groups), kind.dtype) if kind else None
            for kind in (storage.scale, storage.zero)
        ]
        tiles.append((b_tile, *beside))
        product = T.alloc_fragment((bn, SLICES), "float32")
        T.clear(product)
        products.append(product)
    for step in T.Pipelined(steps, num_stages=config.stages):
        T.copy(a[step * SLICES, 0], a_tile)
        for number, (b_tile, scale_tile, zero_tile) in enumerate(tiles):
            T.copy(bs[number][col, step * SLICES * words], b_tile)
            for given, tile in ((scales, scale_tile), (zeros, zero_tile)):
                if tile is not None:
                    T.copy(given[number][col, step * SLICES * groups], tile)
        for (b_tile, scale_tile, zero_tile), product in zip(tiles, products, strict=True):
            sums = [T.alloc_fragment((bn, SLICES), "float32") for _ in range(groups)]
            factors: list[Any] = [
                [of_slices(spec, kind, tile, rows, groups, number) for number, _ in enumerate(sums)]
                for kind, tile in ((storage.scale, scale_tile), (storage.zero, zero_tile))
            ]
            for number, (total, zero) in enumerate(zip(sums, factors[1], strict=True)):
                add_group(spec, (a_tile, b_tile), (rows, words, number), zero, total)
            for total, scale in zip(sums, factors[0], strict=True):
                for r, s in T.Parallel(bn, SLICES):
                    product[r, s] += total[r, s] * T.cast(scale[r, 0], "float32")
    return products


@T.macro
def add_group(
    spec: Spec, operands: tuple[Any, Any], place: tuple[int, int, int], zero: Any, total: Any
) -> None:  # fmt: skip
    """Multiply one group of each slice. `place` is the rows of the tile, the words of a slice, and the group."""
    (a_tile, b_tile), (rows, words, number), width, fields = operands, place, spec.storage.group, spec.storage.fields
    group, piece = Group(width), Piece(0, width, width)
    found = T.alloc_fragment((SLICES * rows, width // fields), b_tile.dtype)
    for r, word in T.Parallel(SLICES * rows, width // fields):
        found[r, word] = b_tile[r % rows, r // rows * words + number * (width // fields) + word]
    weights = T.alloc_fragment((SLICES * rows, width), spec.operand)
    for r, c in T.Parallel(SLICES * rows, width):
        weights[r, c] = T.cast(
            weight(spec, found[r, group.word(c, fields)], group.field(c), r, piece, None, zero, None), spec.operand
        )
    loaded, columns = (T.alloc_fragment((SLICES, width), spec.operand) for _ in range(2))
    T.copy(a_tile[0, number * width], loaded)
    for s, c in T.Parallel(SLICES, width):
        columns[s, c] = loaded[s, group.column(c)]
    T.gemm(weights, columns, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)


@T.macro
def of_slices(spec: Spec, kind: Any, tile: Any, rows: int, groups: int, number: int) -> Any:
    """Read the scale or zero of each slice's group of that number. None if there is none."""
    if tile is None:
        return None
    factor = T.alloc_fragment((SLICES * rows, 1), spec.taken(kind))
    for r, i in T.Parallel(SLICES * rows, 1):
        stored = tile[r % rows, r // rows * groups + number + i]
        factor[r, i] = kind.value(stored, factor.dtype) if kind.power else T.cast(stored, factor.dtype)
    return factor


@library_jit
def row_dequant_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for one row a, given as pieces of `block_k` columns.

    `config.blocks` blocks take one tile of the weights after the other.
    """
    rows, bk = config.block_n // SLICES, config.block_k
    m, n, _, _, types = spec.types()
    pieces = T.dynamic("pieces")

    @T.prim_func
    def row_dequant_gemm(
        a: strided("a", (pieces, bk), spec.product.dtype, multiple=spec.product.vector), *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):  # fmt: skip
        with T.Kernel(config.blocks, threads=config.threads) as block:
            start_early()
            parts = [T.alloc_shared((config.block_n, SLICES), "float32") for _ in spec.storage.transposed]
            for iteration in T.serial(T.ceildiv(T.ceildiv(n, rows) - block, config.blocks)):
                col = (iteration * config.blocks + block) * rows
                products = multiply(config, spec, a, operands, col, T.ceildiv(pieces, SLICES))
                for part, product in zip(parts, products, strict=True):
                    T.copy(product, part)
                for j in T.Parallel(rows):
                    if col + j < n:
                        sums = [sum(part[s * rows + j, s] for s in range(SLICES)) for part in parts]
                        out[0, col + j] = finish(spec, sums, operands, 0, col + j)

    return row_dequant_gemm


def spec_for(spec: Spec, problem: Problem, tensors: Sequence[torch.Tensor], machine: Machine) -> Spec | None:
    """Return the spec with scales and zeros that bulk copies bring, or None if this kernel cannot compute the product.

    The weights are words of int32 whose groups have a scale each. Rows of all operands are whole pieces of 16 bytes.
    """
    storage, count, sizes = spec.storage, len(spec.storage.transposed), typical(problem)
    if (
        isinstance(problem.m, torch.SymInt)  # another call may have more rows
        or isinstance(problem.k, torch.SymInt)
        or problem.m != 1
        or not (machine.is_gpu and machine.target.has_wgmma and problem.aligned)
        or storage.words != torch.int32
        or storage.format
        or storage.group < LEAST_GROUP
        or not storage.scale
        or problem.k % storage.group
        or not verdict("dequant.slices", machine.target, False, weights=sizes.n * sizes.k * sizes.products)
    ):
        return None
    changes: dict[str, Any] = {}
    first = 1 + count
    for name, kind in (("scale", storage.scale), ("zero", storage.zero)):
        if kind:
            factors, first = tensors[first : first + count], first + count
            if kind.transposed or vector_of(factors, [x.shape[-1] for x in factors]) == 1:
                return None
            changes[name] = replace(kind, whole=PIECE_BYTES // kind.dtype.itemsize)
    return replace(spec, storage=replace(storage, **changes))


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of one row and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    machine.kernel(row_dequant_matmul)(config, spec)(a.view(-1, config.block_k), *operands, out)


# Tilings. They change the speed, never the result.

ROWS, THREADS = 128, 256  # of a tile, and of a block
LEAST_GROUP = 64  # columns that share a scale: a product of tensor cores for each
PIECE_BYTES = 16  # of a row, at which bulk copies begin
LONGEST, LONGEST_OF_SEVERAL = 256, 512  # columns of a slice in a step, of one matrix and of several
MOST_STAGES = 6


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `spec_for` allows. None if no step fits.

    A step has whole groups, and K whole pieces of a slice's columns. Of those steps that leave the least of the last
    one empty it is the longest.
    """
    storage, best = spec.storage, None
    factors = [kind.dtype.itemsize for kind in (storage.scale, storage.zero) if kind]
    longest = LONGEST if problem.products == 1 else LONGEST_OF_SEVERAL
    for bk in (size for size in (512, 256, 128, 64) if size <= longest):
        pieces = all(SLICES * (bk // storage.group) * size % PIECE_BYTES == 0 for size in factors)
        if bk % storage.group or problem.k % bk or not pieces:
            continue
        config = Config(SLICES, ROWS, bk, THREADS, stages=2, blocks=machine.num_sms)
        steps = -(-problem.k // (SLICES * bk))
        if (best is None or steps * bk < best[0]) and footprint(config, spec, True).fits(machine.target):
            best = steps * bk, config
    if best is None:
        return None
    config = best[1]
    stages = most_stages(
        lambda count: footprint(replace(config, stages=count), spec, True), range(MOST_STAGES, 0, -1), machine.target
    )
    return replace(config, stages=stages)


def footprint(config: Config, spec: Spec, bulk: bool) -> Footprint:
    """Compute the shared memory of slices of a, words, scales, zeros, and what warps add up."""
    rows, bk, storage = config.block_n // SLICES, config.block_k, spec.storage
    loop, products = (Part.LOOP,), len(storage.transposed)
    tiles = [Tile(SLICES, bk, 8 * spec.operand.itemsize, config.stages, loop)]
    tiles += [Tile(rows, SLICES * bk, storage.bits, config.stages, loop)] * products
    for kind in filter(None, (storage.scale, storage.zero)):
        columns = SLICES * bk // storage.group
        tiles += [Tile(rows, columns, 8 * kind.dtype.itemsize, config.stages, loop)] * products
    tiles += [Tile(config.block_n, SLICES, 32, bulk=False)] * products
    return Footprint(tuple(tiles), bulk)
