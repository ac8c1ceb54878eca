# SPDX-License-Identifier: Apache-2.0
"""Multiply few rows by weights of 4 bits: the warps of a block cut K.

Slices of K take places of rows, and fields are multiplied as they lie in their words (see row_dequant.py).
Here a warp keeps its columns of a in registers, in the order of fields. So no tile of a lies in shared memory, and no
barrier stands before the first product. All warps read the same rows of the weights at once, and neighbouring blocks
neighbouring rows: memory is read from its beginning to its end. Sums of groups go through shared memory. There a tile
of rows is joined, and scales are applied. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.common import Machine, power_of_two, round_up, start_early, strided, typical, vector_of
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.gemm import row_dequant
from torch_tile.kernels.gemm.formats import TABLE, pairs_of
from torch_tile.kernels.gemm.packed import Factor, Problem, Spec, finish
from torch_tile.kernels.gemm.row_dequant import (
    BACK,
    COLUMNS,
    FIELDS,
    IN_PLACE,
    LIFTED,
    MOST,
    SLICES,
    excess,
    order_of,
    power_of_two as float_of,
    takes_off,
    unsigned,
)
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit

RUN = 8  # groups of a row whose factors a lane reads at once


@dataclass(frozen=True)
class Parts:
    """The parts of K and the rows of the weights that warps and their lanes take.

    A unit are the rows of the weights in one product of tensor cores. A chunk are the groups of its slices. A step is a
    chunk of a unit. `chunks` are those of a warp.
    """

    config: Config
    chunks: int

    @property
    def slices(self) -> int:
        """Number of slices of K in a product."""
        return SLICES // self.config.block_m

    @property
    def half(self) -> int:
        """Number of rows of the weights in half a unit."""
        return self.config.block_m

    @property
    def groups(self) -> int:
        """Number of groups that the warps of a block cover."""
        return self.config.splits * self.chunks * self.slices

    @property
    def teams(self) -> int:
        """Number of units that the warps of a block take at once."""
        return self.config.threads // (WARP * self.config.splits)

    @property
    def units(self) -> int:
        """Number of units of a tile."""
        return self.config.block_n // (2 * self.half)

    def cut(self, thread: Any) -> Any:
        """Return which part of K a thread's warp has."""
        return thread // WARP if self.teams == 1 else thread // WARP % self.config.splits

    def group(self, thread: Any, chunk: int) -> Any:
        """Return the group of a lane's slice in a chunk."""
        return (self.cut(thread) + chunk * self.config.splits) * self.slices + thread % WARP // 4 % self.slices

    def unit(self, thread: Any, step: Any) -> Any:
        """Return the unit of a step."""
        return step // self.chunks * self.teams + (0 if self.teams == 1 else thread // WARP // self.config.splits)

    def row(self, block: Any, unit: Any) -> Any:
        """Return the first row of the weights of a block's unit. Neighbouring blocks have neighbouring units."""
        return (unit * self.config.blocks + block) * 2 * self.half


@T.macro
def fetch(parts: Parts, words: Any, bs: Sequence[Any], place: tuple[Any, Any], step: Any, chunk: int) -> None:
    """Begin to load the words of a step. `place` are the block and the thread. Each word is read once."""
    block, thread = place
    each = words.shape[0] // (2 * len(bs))
    row = parts.row(block, parts.unit(thread, step)) + thread % WARP // 4 // parts.slices
    begin = parts.group(thread, chunk) * 4 * each + thread % 4 * each
    for index, b in enumerate(bs):
        for side in [*range(2)]:
            at = (index * 2 + side) * each
            T.copy(
                b[row + side * parts.half, begin : begin + each], words[at : at + each], eviction_policy="no_allocate"
            )


@T.macro
def hold(parts: Parts, spec: Spec, a: Any, columns: Any, factors: tuple[Any, Any], thread: Any, chunk: int) -> None:
    """Keep a lane's numbers of a chunk of the rows in registers, in the order of fields.

    `factors` are what `row_dequant.hold` describes: powers and sums of groups.
    """
    (powers, sums), order = factors, order_of(spec)
    count = order.words * FIELDS
    row, group, begin = thread % WARP // 4 // parts.slices, parts.group(thread, chunk), thread % 4 * count
    loaded, wide = T.alloc_local((count,), a.dtype), T.alloc_local((count,), "float32")
    most, total = (T.alloc_local((1,), "float32") for _ in range(2))
    T.copy(a[row, group, begin : begin + count], loaded)
    most[0], total[0] = 0.0, 0.0
    for i in T.unroll(count):
        wide[i] = T.cast(loaded[i], "float32")
    for i in T.unroll(count):
        most[0] = T.max(most[0], T.abs(wide[i]))
        total[0] = total[0] + wide[i]
    for lanes in (1, 2):  # four lanes share a group
        most[0] = T.max(most[0], T.shfl_xor(most[0], lanes))
        if sums is not None:
            total[0] = total[0] + T.shfl_xor(total[0], lanes)
    exponent = T.max(T.min(LIFTED - (T.reinterpret(most[0], "int32") >> 23), MOST), IN_PLACE)
    if thread % 4 == 0 and parts.unit(thread, 0) == 0:
        powers[row, group] = float_of(BACK + (0 if order.coded else IN_PLACE) - exponent)
        if sums is not None:
            sums[row, group] = total[0]
    power = float_of(exponent)
    for pair in T.unroll(count // 2):
        for e in T.vectorized(2):
            columns[chunk * count + pair * 2 + e] = T.cast(
                wide[order.column(pair * 2 + e)] * (power * order.less(pair * 2 + e)), "float16"
            )


def weight_of(spec: Spec, words: Any, table: Any, index: int, product: Any, pair: Any, e: Any) -> Any:
    """Return a weight as a lane's register of a product takes it, from the words of matrix `index`."""
    order = order_of(spec)
    word = words[(index * 2 + pair % 2) * order.words + product // 2]
    _, place, half = order.field(product % 2 * 16 + pair // 2 * 8 + e)
    if table is not None:
        return table[T.table_place(word, place, T.get_thread_binding() % WARP, half)]
    return T.cast(T.nibble_in_place(unsigned(spec, word), place, half), "float16")


@T.macro
def widen(spec: Spec, words: Any, table: Any, index: int) -> Any:
    """Return the weights of a step and of matrix `index` as a lane's registers, in the order of products."""
    steps = 2 * order_of(spec).words
    weights = T.alloc_local((steps * 8,), "float16")
    for product in T.unroll(steps):
        for pair in T.unroll(4):
            for e in T.vectorized(2):
                weights[product * 8 + pair * 2 + e] = weight_of(spec, words, table, index, product, pair, e)
    return weights


@T.macro
def multiply(weights: Any, columns: Any, chunk: int) -> Any:
    """Compute the product of a step by tensor cores. The result is four registers of a lane."""
    steps, total = weights.shape[0] // 8, T.alloc_local((4,), "float32")
    T.clear(total)
    for product in T.unroll(steps):
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", weights, product * 8, columns,
            (chunk * steps + product) * 4, total, 0,
        )  # fmt: skip
    return total


@T.macro
def keep(parts: Parts, total: Any, sums: Any, place: tuple[Any, Any, Any], thread: Any) -> None:
    """Store the entries of a product where both slices are the same: sums of groups, for each row of a.

    `place` are the buffer, the first row of the weights, and the group.
    """
    (buffer, first, group), slices = place, parts.slices
    own, column = thread % WARP // 4, thread % 4 * 2
    row = first + own // slices
    if slices == 1:
        for e in [*range(2)]:
            for side in [*range(2)]:
                sums[buffer, row + side * parts.half, column + e, group] = total[side * 2 + e]
    else:
        if column % slices == own % slices // 2 * 2:
            for side in [*range(2)]:
                found = T.if_then_else(own % 2 == 1, total[side * 2 + 1], total[side * 2])
                sums[buffer, row + side * parts.half, column // slices, group] = found


@T.macro
def factors_of(parts: Parts, kind: Any, stored: Sequence[Any], block: Any, tile: Any) -> Any:
    """Begin to load the scales or zeros of a tile, long before `join` takes them."""
    held, shape, unit = list[Any](), shape_of(parts), 2 * parts.half
    for source in stored:
        found = T.alloc_fragment(shape, kind.dtype)
        T.annotate_layout({found: rows_of_lanes(parts)})
        for r, g in T.Parallel(*shape):
            if r < parts.config.block_n:
                found[r, g] = source[kind.place(parts.row(block, tile * parts.units + r // unit) + r % unit, g)]
        held.append(found)
    return held


@T.macro
def join(
    parts: Parts, spec: Spec, of_groups: Any, factors: tuple[Any, Any], held: tuple[Any, Any], place: tuple[Any, int],
    left: Any,
) -> Any:  # fmt: skip
    """Return the sums of a row of a and of all rows of a tile, of which `left` are there.

    `place` are a buffer and the row of a. `factors` are powers and sums of groups, and `held` scales and zeros.
    """
    (buffer, i), factor = place, spec.storage.scale
    assert factor is not None
    (powers, sums), (scale, zero), shape = factors, held, shape_of(parts)
    scaled, result = T.alloc_fragment(shape, "float32"), T.alloc_fragment(shape[:1], "float32")
    T.annotate_layout({scaled: rows_of_lanes(parts)})
    T.clear(scaled)
    for r, g in T.Parallel(*shape):
        if g < parts.groups and r < left:
            found = of_groups[buffer, r, i, g] * powers[i, g]
            if sums is not None:
                less = excess(spec) if zero is None else T.cast(zero[r, g], "float32") + excess(spec)
                found = found - sums[i, g] * less
            scaled[r, g] = found * factor.value(scale[r, g], "float32")
    T.reduce_sum(scaled, result, dim=1)
    return result


def lanes_of(parts: Parts) -> int:
    """Return how many lanes share a row of sums of groups. A lane takes runs of `RUN`."""
    return min(WARP, power_of_two(-(-parts.groups // RUN)))


def shape_of(parts: Parts) -> tuple[int, int]:
    """Return the rows of a tile's fragments, and the groups. All lanes have as many rows, and as many runs."""
    lanes = lanes_of(parts)
    return round_up(parts.config.block_n, parts.config.threads // lanes), round_up(parts.groups, RUN * lanes)


def rows_of_lanes(parts: Parts) -> Any:
    """Return the layout in which some lanes of a warp have all groups of a row."""
    (rows, groups), lanes = shape_of(parts), lanes_of(parts)
    at_once, each = parts.config.threads // lanes, groups // lanes

    def place(r: Any, g: Any) -> tuple[Any, Any]:
        return r % at_once * lanes + g // RUN % lanes, r // at_once * each + g // (RUN * lanes) * RUN + g % RUN

    return T.Fragment((rows, groups), forward_fn=place)


@library_jit
def cut_dequant_matmul(config: Config, spec: Spec, chunks: int) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for few rows a, which are given as groups.

    `config.splits` warps of a block cut K, and each has `chunks` chunks. Other warps take other rows of the weights. A
    block joins the sums of `config.block_n` rows at a time. `config.stages` steps are in flight.
    """
    parts, storage, stages, order = Parts(config, chunks), spec.storage, config.stages, order_of(spec)
    m, n, _, _, types = spec.types()
    pieces, count = T.dynamic("pieces"), len(storage.transposed)
    rows, unit = config.block_m, 2 * parts.half
    rounds = parts.units // parts.teams * chunks // stages

    @T.prim_func
    def cut_dequant_gemm(
        a: strided("a", (m, pieces, storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            bs, scales, zeros, _ = spec.sort(operands)
            thread = T.get_thread_binding()
            ahead = [T.alloc_local((count * 2 * order.words,), storage.words) for _ in range(stages)]
            for step, words in enumerate(ahead):
                fetch(parts, words, bs, (block, thread), step, step % chunks)
            columns = T.alloc_local((chunks * order.words * FIELDS,), "float16")
            powers, sums = (
                T.alloc_shared((rows, parts.groups), "float32") if x else None for x in (True, takes_off(spec))
            )
            table = pairs_of(storage.format, storage.high_first, torch.float16) if storage.coded else None
            for chunk in [*range(chunks)]:
                hold(parts, spec, a, columns, (powers, sums), thread, chunk)
            joined = [T.alloc_shared(tiles_of(parts), "float32") for _ in bs]
            T.annotate_layout({tiles: T.make_linear_layout(tiles) for tiles in joined})
            units = T.ceildiv(T.ceildiv(n, unit) - block, config.blocks)
            for tile in T.serial(T.ceildiv(units, parts.units)):
                held = [factors_of(parts, storage.scale, scales, block, tile)]
                held.append(factors_of(parts, storage.zero, zeros, block, tile) if zeros else [None] * count)
                left = T.min(units - tile * parts.units, parts.units)
                for one in T.serial(T.min(rounds, T.ceildiv(left * chunks, stages * parts.teams))):
                    for number, words in enumerate(ahead):
                        step, chunk = one * stages + number, number % chunks
                        weights = [widen(spec, words, table, index) for index in [*range(count)]]
                        fetch(parts, words, bs, (block, thread), tile * rounds * stages + step + stages, chunk)
                        place = tile % 2, parts.unit(thread, step) * unit, parts.group(thread, chunk)
                        for matrix, tiles in zip(weights, joined, strict=True):
                            keep(parts, multiply(matrix, columns, chunk), tiles, place, thread)
                for i in [*range(rows)]:
                    results = [
                        join(
                            parts,
                            spec,
                            tiles,
                            (powers, sums),
                            (held[0][index], held[1][index]),
                            (tile % 2, i),
                            left * unit,
                        )
                        for index, tiles in enumerate(joined)
                    ]
                    for r in T.Parallel(shape_of(parts)[0]):
                        col = parts.row(block, tile * parts.units + r // unit) + r % unit
                        if r < config.block_n and i < m and col < n:
                            values = [result[r] for result in results]
                            out[i, col] = finish(spec, values, operands, i, col)

    return cut_dequant_gemm


def tiles_of(parts: Parts) -> tuple[int, ...]:
    """Return the shape of two tiles of sums of groups. Lanes that store side by side meet other banks."""
    return 2, parts.config.block_n, parts.config.block_m, round_up(parts.groups, WARP) + parts.slices


def chunks_of(config: Config, groups: int) -> int:
    """Return how many chunks of K a warp has."""
    return -(-groups // (config.splits * (SLICES // config.block_m)))


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of few rows and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    groups = a.unflatten(1, (-1, spec.storage.group))
    machine.kernel(cut_dequant_matmul)(config, in_runs(spec, operands), chunks_of(config, groups.shape[1]))(
        groups, *operands, out
    )


def in_runs(spec: Spec, operands: Sequence[torch.Tensor]) -> Spec:
    """Return a spec that says whether a lane can read 16 bytes of scales, or of zeros, at once."""

    def read(factor: Factor | None, tensors: Sequence[torch.Tensor]) -> Factor | None:
        """Return how a kind of factors is read."""
        if factor is None or factor.transposed:
            return factor
        return replace(factor, whole=vector_of(tensors, [x.shape[1] for x in tensors]))

    _, scales, zeros, _ = spec.sort(operands)
    storage = replace(spec.storage, scale=read(spec.storage.scale, scales), zero=read(spec.storage.zero, zeros))
    return replace(spec, storage=storage)


# Tilings. They change the speed, never the result.

WARPS = 16  # of a block, at most
AHEAD = 16  # registers of a lane for words in flight; twice as many where all warps cut K
ROWS = 64  # of a tile: twice as many spill
CODES, NUMBERS = 64, 128  # columns of a group
LONGEST_CODES = 11008  # columns of a row
CHUNKS_OF_NUMBERS = 5, 7, 8, 9  # of a row that does not fill all warps
LEAST_WEIGHTS, MOST_WEIGHTS = 1 << 21, 3 << 25  # of such rows, and of codes


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of one row, which row_dequant.py can compute, too."""
    return row_dequant.fits(spec, problem, machine) and problem.m == problem.products == 1 and spec.norm is None


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None where row_dequant.py is as fast or faster.

    Each warp has as few chunks as it can. The warps left over take other rows of the weights.
    """
    n, coded = typical(problem).n, spec.storage.coded
    chunks = -(-problem.k // (problem.group * SLICES))
    weights, fills = n * problem.k, chunks == WARPS and not coded  # a row that all warps cut is faster at any length
    measured = problem.k <= LONGEST_CODES if coded else fills or chunks in CHUNKS_OF_NUMBERS
    measured = measured and problem.group == (CODES if coded else NUMBERS)
    if not measured or weights < LEAST_WEIGHTS or (weights > MOST_WEIGHTS and not fills):
        return None
    cuts = -(-chunks // -(-chunks // WARPS))
    ahead, threads = (1 + fills) * AHEAD * COLUMNS // (2 * problem.group), WARP * cuts * (WARPS // cuts)
    config = Config(1, ROWS, problem.group, threads, ahead, cuts, blocks=machine.num_sms)
    groups = problem.k // problem.group
    config = tiled(config, n, groups)
    return config if footprint(config, spec, chunks_of(config, groups)).fits(machine.target) else None


def tiled(config: Config, n: int, groups: int) -> Config:
    """Return a tiling of whole rounds of its stages, whose tiles are no longer than a block's rows."""
    chunks = chunks_of(config, groups)
    stages = round_up(config.stages, chunks)
    rows = 2 * config.block_m * (config.threads // (WARP * config.splits)) * (stages // chunks)
    return replace(config, stages=stages, block_n=round_up(min(config.block_n, -(-n // config.blocks)), rows))


def footprint(config: Config, spec: Spec, chunks: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of two tiles of sums for each matrix, and of the groups' powers and sums."""
    parts = Parts(config, chunks)
    factors = 1 + takes_off(spec)
    table = (Tile(1, TABLE, 16),) if spec.storage.coded else ()
    buffers, rows, count, groups = tiles_of(parts)
    sums = (Tile(buffers * rows * count, groups, 32),) * len(spec.storage.transposed)
    return Footprint((*sums, Tile(factors * config.block_m, parts.groups, 32), *table), bulk)
