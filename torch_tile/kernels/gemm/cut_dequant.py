# SPDX-License-Identifier: Apache-2.0
"""Multiply few rows by weights of 4 bits: the warps of a block cut K.

Slices of K take places of rows, and fields are multiplied as they lie in their words (see row_dequant.py). Block b of B
and its warps read the weights from their beginning to their end:

    step 0    row 2 b      | warp 0: 8 groups | warp 1: 8 groups | ... |    each lane: 16 bytes of a group
              row 2 b + 1  | warp 0: 8 groups | warp 1: 8 groups | ... |
    step 1    row 2 (b + B) ...

    a lane        words of a step --> products with its columns of a --> sums of groups --> shared memory.
                  Words of later steps are on their way into other registers.
    a tile        One round of the steps in flight, or several, and a barrier.
                  Then a few lanes add up a row of the weights: sums of groups x scales.

Columns of a stay in registers, in the order of fields. So no tile of a lies in shared memory, and no barrier stands
before the first product. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, NamedTuple

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.common import Machine, power_of_two, round_up, start_early, strided, typical, vector_of
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.gemm import row_dequant
from torch_tile.kernels.gemm.formats import TABLE, pairs_of
from torch_tile.kernels.gemm.packed import Factor, Problem, Spec, finish
from torch_tile.kernels.gemm.row_dequant import (
    FIELDS,
    SLICES,
    excess,
    lifting_exponent,
    lowering_power,
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
    def units_at_once(self) -> int:
        """Number of units that the warps of a block take at once."""
        return self.config.threads // (WARP * self.config.splits)

    @property
    def units_of_tile(self) -> int:
        """Number of units of a tile."""
        return self.config.block_n // (2 * self.half)

    @property
    def columns_of_lane(self) -> int:
        """Number of columns of a product in which a lane has sums of groups."""
        return 2 if self.slices == 1 else 1

    @property
    def rounds(self) -> int:
        """Number of times that a tile takes all steps in flight."""
        return self.units_of_tile // self.units_at_once * self.chunks // self.config.stages

    @property
    def fetches_late(self) -> bool:
        """Return whether words are fetched behind products, into the registers of words that these took.

        Else ptxas fetches them earlier, which takes more registers. That is faster in loops of several rounds, and
        where all warps cut K once. Elsewhere it is slower.
        """
        return self.rounds == 1 and (self.units_at_once > 1 or self.chunks > 1)

    def of_sums(self, value: Any, thread: Any, e: int) -> Any:
        """Return a value of the lane that has loaded the numbers in a lane's column `e` of a product."""
        if self.slices == SLICES:
            return value  # the lane itself
        row = (thread % 4 * 2 + e) // self.slices
        return T.shfl_sync(value, (row * self.slices + thread % WARP // 4 % self.slices) * 4)

    def part_of_k(self, thread: Any) -> Any:
        """Return which part of K a thread's warp has."""
        return thread // WARP if self.units_at_once == 1 else thread // WARP % self.config.splits

    def group(self, thread: Any, chunk: int) -> Any:
        """Return the group of a lane's slice in a chunk."""
        return (self.part_of_k(thread) + chunk * self.config.splits) * self.slices + thread % WARP // 4 % self.slices

    def unit(self, thread: Any, step: Any) -> Any:
        """Return the unit of a step."""
        own = 0 if self.units_at_once == 1 else thread // WARP // self.config.splits
        return step // self.chunks * self.units_at_once + own

    def row(self, block: Any, unit: Any) -> Any:
        """Return the first row of the weights of a block's unit. Neighbouring blocks have neighbouring units."""
        return (unit * self.config.blocks + block) * 2 * self.half


@T.macro
def fetch_words(parts: Parts, words: Any, bs: Sequence[Any], place: tuple[Any, Any], step: Any, chunk: int) -> None:
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
def load_columns(
    parts: Parts, spec: Spec, a: Any, columns: Any, factors: tuple[Any, Any, Any], thread: Any, chunk: int
) -> None:
    """Load a lane's numbers of a chunk of the rows into registers, in the order of fields.

    A power of two lifts them, as row_dequant.py describes. `factors` are what a product of the group needs: the power
    that lowers it, the offset of the fields' excess, both in registers, and the group's sum. The last two may be None.
    """
    (powers, offsets, sums), order = factors, order_of(spec)
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
        if takes_off(spec):
            total[0] = total[0] + wide[i]
    for lanes in (1, 2):  # four lanes share a group
        most[0] = T.max(most[0], T.shfl_xor(most[0], lanes))
        if takes_off(spec):
            total[0] = total[0] + T.shfl_xor(total[0], lanes)
    exponent = lifting_exponent(most[0])
    if sums is not None and thread % 4 == 0 and parts.unit(thread, 0) == 0:
        sums[row, group] = total[0]
    lowered = lowering_power(order, exponent)
    for e in [*range(parts.columns_of_lane)]:
        at = chunk * parts.columns_of_lane + e
        powers[at] = parts.of_sums(lowered, thread, e)
        if offsets is not None:
            offsets[at] = parts.of_sums(total[0] * -excess(spec), thread, e)
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
    total = T.alloc_local((4,), "float32")
    T.clear(total)
    add_product(weights, columns, chunk, total)
    return total


@T.macro
def add_product(weights: Any, columns: Any, piece: int, total: Any) -> None:
    """Add the product of weights and of one piece of a lane's columns to its four sums."""
    steps = weights.shape[0] // 8
    for product in T.unroll(steps):
        T.ptx_mma(
            "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", weights, product * 8, columns,
            (piece * steps + product) * 4, total, 0,
        )  # fmt: skip


@T.macro
def store_sums(
    parts: Parts, total: Any, factors: tuple[Any, Any, Any], sums: Any, place: tuple[Any, Any, Any], thread: Any
) -> None:
    """Store the entries of a product where both slices are the same: sums of groups, for each row of a.

    `factors` are the powers and offsets of `load_columns`, and the first of the chunk. `place` are the buffer, the
    first row of the weights, and the group.
    """
    (buffer, first, group), slices = place, parts.slices
    own, column = thread % WARP // 4, thread % 4 * 2
    row, at = first + own // slices, place_in_line(parts, group)
    if slices == 1:
        for e in [*range(2)]:
            for side in [*range(2)]:
                sums[buffer, row + side * parts.half, column + e, at] = restored(total[side * 2 + e], factors, e)
    else:
        if column % slices == own % slices // 2 * 2:
            for side in [*range(2)]:
                found = T.if_then_else(own % 2 == 1, total[side * 2 + 1], total[side * 2])
                sums[buffer, row + side * parts.half, column // slices, at] = restored(found, factors, 0)


def restored(found: Any, factors: tuple[Any, Any, Any], e: int) -> Any:
    """Return the sum of a group without its power and the excess of fields. `e` counts columns of a lane."""
    powers, offsets, first = factors
    lowered = found * powers[first + e]
    return lowered if offsets is None else lowered + offsets[first + e]


def half_of_line(parts: Parts) -> int:
    """Return where the second half of a line of sums begins. Both have the same groups of each `RUN`."""
    return round_up(RUN // 2 * -(-parts.groups // RUN), RUN) + RUN // 2


def place_in_line(parts: Parts, group: Any) -> Any:
    """Return where a line of sums has a group.

    A lane that joins a row takes `RUN` groups by two loads. Halves keep those of neighbouring lanes side by side.
    """
    return group // (RUN // 2) % 2 * half_of_line(parts) + group // RUN * (RUN // 2) + group % (RUN // 2)


@T.macro
def fetch_factors(parts: Parts, kind: Any, stored: Sequence[Any], block: Any, tile: Any) -> Any:
    """Begin to load the scales or zeros of a tile, long before `join_row` takes them."""
    held, shape, unit = list[Any](), shape_of_join(parts), 2 * parts.half
    for source in stored:
        found = T.alloc_fragment(shape, kind.dtype)
        T.annotate_layout({found: layout_of_join(parts)})
        for r, g in T.Parallel(*shape):
            if r < parts.config.block_n:
                found[r, g] = source[kind.place(parts.row(block, tile * parts.units_of_tile + r // unit) + r % unit, g)]
        held.append(found)
    return held


@T.macro
def join_row(
    parts: Parts, spec: Spec, of_groups: Any, sums: Any, held: tuple[Any, Any], place: tuple[Any, int], left: Any
) -> Any:
    """Return the sums of a row of a and of all rows of a tile, of which `left` are there.

    `sums` are those of the groups of a, where there are zeros. `held` are scales and zeros. `place` are a buffer and
    the row of a.
    """
    (buffer, i), factor = place, spec.storage.scale
    assert factor is not None
    (scale, zero), shape = held, shape_of_join(parts)
    scaled, result = T.alloc_fragment(shape, "float32"), T.alloc_fragment(shape[:1], "float32")
    T.annotate_layout({scaled: layout_of_join(parts)})
    T.clear(scaled)
    for r, g in T.Parallel(*shape):
        if g < parts.groups and r < left:
            found = of_groups[buffer, r, i, place_in_line(parts, g)]
            if zero is not None:
                found = found - sums[i, g] * T.cast(zero[r, g], "float32")
            scaled[r, g] = found * factor.value(scale[r, g], "float32")
    T.reduce_sum(scaled, result, dim=1)
    return result


def lanes_of_row(parts: Parts) -> int:
    """Return how many lanes share a row of sums of groups. A lane takes runs of `RUN`."""
    return min(WARP, power_of_two(-(-parts.groups // RUN)))


def shape_of_join(parts: Parts) -> tuple[int, int]:
    """Return the rows of a tile's fragments, and the groups. All lanes have as many rows, and as many runs."""
    lanes = lanes_of_row(parts)
    return round_up(parts.config.block_n, parts.config.threads // lanes), round_up(parts.groups, RUN * lanes)


def layout_of_join(parts: Parts) -> Any:
    """Return the layout in which some lanes of a warp have all groups of a row."""
    (rows, groups), lanes = shape_of_join(parts), lanes_of_row(parts)
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
    rounds = parts.rounds

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
                fetch_words(parts, words, bs, (block, thread), step, step % chunks)
            columns = T.alloc_local((chunks * order.words * FIELDS,), "float16")
            sums = T.alloc_shared((rows, parts.groups), "float32") if zeros else None
            powers, offsets = (
                T.alloc_local((chunks * parts.columns_of_lane,), "float32") if needed else None
                for needed in (True, excess(spec) != 0.0)
            )
            table = pairs_of(storage.format, storage.high_first, torch.float16) if storage.coded else None
            for chunk in [*range(chunks)]:
                load_columns(parts, spec, a, columns, (powers, offsets, sums), thread, chunk)
            joined = [T.alloc_shared(shape_of_sums(parts), "float32") for _ in bs]
            T.annotate_layout({tiles: T.make_linear_layout(tiles) for tiles in joined})
            units = T.ceildiv(T.ceildiv(n, unit) - block, config.blocks)
            for tile in T.serial(T.ceildiv(units, parts.units_of_tile)):
                held = [fetch_factors(parts, storage.scale, scales, block, tile)]
                held.append(fetch_factors(parts, storage.zero, zeros, block, tile) if zeros else [None] * count)
                left = T.min(units - tile * parts.units_of_tile, parts.units_of_tile)
                all_rounds = T.min(rounds, T.ceildiv(left * chunks, stages * parts.units_at_once))
                for one in [*range(1)] if rounds == 1 else T.serial(all_rounds):
                    for number, words in enumerate(ahead):
                        step, chunk = one * stages + number, number % chunks
                        weights = [widen(spec, words, table, index) for index in [*range(count)]]
                        following = tile * rounds * stages + step + stages
                        if not parts.fetches_late:
                            fetch_words(parts, words, bs, (block, thread), following, chunk)
                        factors = powers, offsets, chunk * parts.columns_of_lane
                        place = tile % 2, parts.unit(thread, step) * unit, parts.group(thread, chunk)
                        for matrix, tiles in zip(weights, joined, strict=True):
                            store_sums(parts, multiply(matrix, columns, chunk), factors, tiles, place, thread)
                        if parts.fetches_late:
                            T.sync_warp()  # ptxas moves no load over it
                            fetch_words(parts, words, bs, (block, thread), following, chunk)
                for i in [*range(rows)]:
                    results = [
                        join_row(parts, spec, tiles, sums, (held[0][index], held[1][index]), (tile % 2, i), left * unit)
                        for index, tiles in enumerate(joined)
                    ]
                    for r in T.Parallel(shape_of_join(parts)[0]):
                        col = parts.row(block, tile * parts.units_of_tile + r // unit) + r % unit
                        if r < config.block_n and i < m and col < n:
                            values = [result[r] for result in results]
                            out[i, col] = finish(spec, values, operands, i, col)

    return cut_dequant_gemm


def shape_of_sums(parts: Parts) -> tuple[int, ...]:
    """Return the shape of two tiles of sums of groups. Lanes that store or load side by side meet other banks."""
    rows, least = parts.config.block_m, 2 * half_of_line(parts)
    beside = max(4, 4 * min(lanes_of_row(parts), 4) // rows)  # banks between lines
    return 2, parts.config.block_n, rows, least + (beside - least) % WARP


def chunks_of_warp(config: Config, groups: int) -> int:
    """Return how many chunks of K a warp has."""
    return -(-groups // (config.splits * (SLICES // config.block_m)))


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of few rows and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    groups = a.unflatten(1, (-1, spec.storage.group))
    machine.kernel(cut_dequant_matmul)(
        config, with_runs_of_factors(spec, operands), chunks_of_warp(config, groups.shape[1])
    )(groups, *operands, out)


def with_runs_of_factors(spec: Spec, operands: Sequence[torch.Tensor]) -> Spec:
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
CODES, NUMBERS = 64, 128  # columns of a group
ROWS = 64  # of a tile of several rounds
LEAST_WEIGHTS = 1 << 21  # of a matrix


class Measured(NamedTuple):
    """State a range of problems for which this kernel was faster than row_dequant.py on an H200, and its tiling there.

    `rows` are those of a. `chunks` are those of a row of the weights. `each` bounds the rows of the weights for a
    multiprocessor: the least number, and the first that is too large. `ahead` steps are in flight. A tile is
    `one_round` of these, or has `ROWS` rows.
    """

    coded: bool
    rows: int
    products: int
    chunks: Sequence[int]
    each: tuple[float, float]
    ahead: int
    one_round: bool

    def holds(self, coded: bool, rows: int, products: int, chunks: float, each: float) -> bool:
        """Return whether a problem is in the range. Tiles of one round were measured for whole chunks alone."""
        same = (self.coded, self.rows, self.products) == (coded, rows, products)
        whole = chunks == ceil(chunks) or not self.one_round
        return same and whole and ceil(chunks) in self.chunks and self.each[0] <= each < self.each[1]


ALL, MANY = inf, 80  # rows of the weights for a multiprocessor
MEASURED = (  # coded, rows, products, chunks, each, ahead, one round
    Measured(False, 1, 1, (3,), (15, 20), 2, False),
    Measured(False, 1, 1, (4,), (36, MANY), 2, False),
    Measured(False, 1, 1, (5, 7, 8, 9), (0, MANY), 2, False),
    Measured(False, 1, 1, (5,), (MANY, 160), 3, True),
    Measured(False, 1, 1, (6, 7, 14), (MANY, 115), 4, True),
    Measured(False, 1, 1, (4, 8), (MANY, ALL), 4, True),
    Measured(False, 1, 1, (16,), (0, 48), 4, False),
    Measured(False, 1, 1, (16, 28), (48, ALL), 4, True),
    Measured(False, 1, 2, (4,), (100, 115), 1, False),
    Measured(False, 2, 1, (8,), (36, 60), 2, False),
    Measured(False, 2, 1, (8,), (MANY, ALL), 4, True),
    Measured(False, 2, 1, range(9, 17), (20, MANY), 2, False),
    Measured(False, 2, 1, (16,), (200, ALL), 4, True),
    Measured(False, 2, 1, (32,), (MANY, ALL), 4, False),
    Measured(False, 4, 1, range(16, 21), (15, 48), 2, False),
    Measured(True, 1, 1, (8,), (0, ALL), 4, True),
    Measured(True, 1, 1, range(1, 11), (0, 115), 4, False),
    Measured(True, 1, 1, (14,), (MANY, 115), 4, True),
    Measured(True, 1, 1, (16,), (MANY, ALL), 4, False),
    Measured(True, 1, 1, range(11, 23), (0, MANY), 4, False),
    Measured(True, 1, 1, (28,), (MANY, 115), 16, True),
    Measured(True, 1, 1, (32,), (MANY, ALL), 16, True),
    Measured(True, 1, 2, (8,), (MANY, ALL), 2, False),
)


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: one without a norm that row_dequant.py can compute, too."""
    return row_dequant.fits(spec, problem, machine) and spec.norm is None


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None where row_dequant.py is as fast or faster.

    Each warp has as few chunks as it can. The warps left over take other rows of the weights.
    """
    n, coded, rows = typical(problem).n, spec.storage.coded, power_of_two(problem.m)
    if problem.group != (CODES if coded else NUMBERS) or n * problem.k < LEAST_WEIGHTS:
        return None
    groups = problem.k // problem.group
    chunks = groups * rows / SLICES
    own = coded, rows, problem.products, chunks, n / machine.num_sms
    found = next((measured for measured in MEASURED if measured.holds(*own)), None)
    if found is None:
        return None
    cuts = ceil(chunks / ceil(chunks / WARPS))
    threads, tile = WARP * cuts * (WARPS // cuts), 0 if found.one_round else ROWS
    config = Config(rows, tile, problem.group, threads, found.ahead, cuts, blocks=machine.num_sms)
    config = fit_tile_to_stages(config, n, groups)
    return config if footprint(config, spec, chunks_of_warp(config, groups)).fits(machine.target) else None


def fit_tile_to_stages(config: Config, n: int, groups: int) -> Config:
    """Return a tiling of whole rounds of its stages, at least one. Tiles are no longer than a block's rows."""
    chunks = chunks_of_warp(config, groups)
    stages = round_up(config.stages, chunks)
    rows = 2 * config.block_m * (config.threads // (WARP * config.splits)) * (stages // chunks)
    return replace(config, stages=stages, block_n=round_up(max(1, min(config.block_n, -(-n // config.blocks))), rows))


def footprint(config: Config, spec: Spec, chunks: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of two tiles of sums for each matrix, and of the groups' powers and sums."""
    parts = Parts(config, chunks)
    table = (Tile(1, TABLE, 16),) if spec.storage.coded else ()
    buffers, rows, count, line = shape_of_sums(parts)
    sums = (Tile(buffers * rows * count, line, 32),) * len(spec.storage.transposed)
    zeros = (Tile(config.block_m, parts.groups, 32),) if spec.storage.zero else ()
    return Footprint((*sums, *zeros, *table), bulk)
