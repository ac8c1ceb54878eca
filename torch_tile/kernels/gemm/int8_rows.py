# SPDX-License-Identifier: Apache-2.0
"""Multiply few int8 rows by weights of 1, 2 or 4 bits on integer tensor cores. The bytes of the weights bound the time.

The product is made transposed, `w @ a^T`: weights are widened in registers, and few rows of a are few columns. Rows of
a are put into the order in which a lane widens whole words of weights. Sums are exact in int32.
Assumes that `fits`, and what scaled.py assumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, dynamic, round_up, start_early, strided, view_as
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.gemm import spec as gemm_spec
from torch_tile.kernels.gemm.packed import read
from torch_tile.kernels.gemm.row_dequant import ROWS, SLICES, THREADS, Fetched
from torch_tile.kernels.gemm.tiling import MOST_JOINED, Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.split_k import share_with_cluster, sum_in_cluster

COLUMNS = 8, 16, 24, 32, 48, 64  # of wgmma's tile: rows of a
LANE_BYTES = 16  # of a row of weights that a lane reads at once
PART = 1024  # columns of a row of a that a block puts into order
LONGEST_RUN = 256  # columns whose weights fit into registers beside those of the next run
MOST_COLUMNS = 1 << 16  # of a: sums of 2^15 times as much stay in int32


@dataclass(frozen=True)
class ColumnOrder:
    """The order in which a product sums up the columns of a run of `width` columns.

    Four lanes share a row of an operand. Lane q of them holds slots 4 q to 4 q + 3 of 16, as four bytes. These are the
    same fields of four bytes of a word. So a lane widens whole words, and each is read by one lane.
    """

    width: int
    bits: int  # of a field

    @property
    def words(self) -> int:
        """Number of words of a lane."""
        return self.width * self.bits // 128

    @property
    def fields(self) -> int:
        """Number of fields of a byte."""
        return 8 // self.bits

    def word(self, slot: Any) -> Any:
        """Return the word of a run that holds the column of a slot."""
        return slot % 16 // 4 * self.words + slot // (16 * self.fields)

    def field(self, slot: Any) -> Any:
        """Return which fields of a word's bytes the slot takes; 0 are the lowest bits."""
        return slot // 16 % self.fields

    @property
    def columns(self) -> int:
        """Number of columns of a word."""
        return 4 * self.fields

    def slot(self, word: Any, field: Any, byte: Any) -> Any:
        """Return the slot of a field of a byte of a run's word."""
        return word % self.words * (16 * self.fields) + field * 16 + word // self.words * 4 + byte

    def column(self, slot: Any) -> Any:
        """Return the column of a slot."""
        return self.word(slot) * 4 * self.fields + slot % 4 * self.fields + self.field(slot)


@dataclass(frozen=True)
class Fields:
    """How fields of `bits` become bytes: the number of a field, in two's complement if it is `signed`, less `offset`.

    A byte is `times` as large as that number. It uses all 8 bits if half of the fields' range is subtracted. Else it
    uses 7, so that the difference has a bit for its sign.
    """

    bits: int
    signed: bool
    offset: int

    @property
    def zero_point(self) -> int:
        """Return the zero point: what is subtracted from a field, read without a sign."""
        return self.offset + (self.half if self.signed else 0)

    @property
    def half(self) -> int:
        """Return half of the range of a field."""
        return 1 << (self.bits - 1)

    @property
    def place(self) -> int:
        """Return the place of a field's lowest bit in its byte."""
        return (8 if self.zero_point == self.half else 7) - self.bits

    @property
    def times(self) -> int:
        """Return the factor from a number to the byte that holds it."""
        return 1 << self.place

    def bytes_of(self, word: Any, number: Any) -> Any:
        """Widen field `number` of each byte of a word of int32."""
        moved = word >> self.bits * number << self.place
        fields = moved & four(((1 << self.bits) - 1) << self.place)
        sign = self.half << self.place if self.signed else 0
        if self.place + self.bits == 8:
            return fields if self.signed else fields ^ four(0x80)
        if not self.zero_point:
            return fields
        # No byte borrows from the next: its highest bit is 1 meanwhile.
        return ((fields ^ four(0x80 | sign)) - four(self.zero_point << self.place)) ^ four(0x80)


def four(byte: int) -> int:
    """Return four copies of a byte as an int32."""
    word = byte * 0x01010101
    return word - (1 << 32) if word >> 31 else word


def fields_of(spec: Any) -> Fields:
    """Return how the weights of a `scaled.Spec` are widened."""
    return Fields(spec.bits, spec.stored[1] == torch.int8, spec.offset)


def column_order(spec: Any) -> ColumnOrder:
    """Return the order of a's columns for a `scaled.Spec`: by runs that share a scale, or by pieces that lanes read."""
    width = 128 if spec.scales[1].grouped else min(4 * LANE_BYTES * spec.fields, LONGEST_RUN)
    return ColumnOrder(width, spec.bits)


@library_jit
def order_rows(slots: ColumnOrder, vector: int) -> Any:
    """Build the kernel that copies rows of a in the order of slots. Columns behind the last are 0."""
    m, k, padded = T.dynamic("m"), dynamic("k", vector), dynamic("padded", slots.width)

    @T.prim_func
    def order_rows(a: strided("a", (m, k), torch.int8, multiple=vector), ordered: T.Tensor((m, padded), torch.int8)):
        with T.Kernel(T.ceildiv(padded, PART), m, threads=128) as (bx, row):
            T.pdl_trigger()
            for place in T.Parallel(PART):
                column = bx * PART + place // slots.width * slots.width + slots.column(place % slots.width)
                if bx * PART + place < padded:
                    ordered[row, bx * PART + place] = T.if_then_else(column < k, a[row, column], 0)

    return order_rows


@T.macro
def hold(a: Any, slots: ColumnOrder, part: Any, row: Any, runs: int, threads: int) -> None:
    """Put a part of a row, so many runs, into the order of slots. A thread has all columns of a word of weights."""
    first, each, fields = part * runs, slots.width // slots.columns, slots.fields

    def place(i: Any, w: Any, c: Any) -> tuple[Any, Any]:
        word = i * each + w
        return word % threads, word // threads * slots.columns + c

    shape = runs, each, slots.columns
    loaded, ordered = (T.alloc_fragment(shape, "int8") for _ in range(2))
    layout = T.Fragment(shape, forward_fn=place)
    T.annotate_layout({loaded: layout, ordered: layout})
    for i, w, c in T.Parallel(*shape):
        loaded[i, w, c] = a[0, (first + i) * slots.width + w * slots.columns + c]
    for i, w, c in T.Parallel(*shape):
        ordered[i, w, c] = loaded[i, w, c % 4 * fields + c // 4]
    for i, w, field, byte in T.Parallel(runs, each, fields, 4):
        row[first + i, slots.slot(w, field, byte)] = ordered[i, w, field * 4 + byte]


@T.macro
def multiply(config: Config, spec: Any, a: Any, operands: Sequence[Any], col: Any, first: Any, last: Any) -> Any:
    """Compute `w @ a^T` of a tile over the steps `first <= step < last` of K, in units of `Fields.times`."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    (b, _, scale_b), fields, slots, kind = operands[:3], fields_of(spec), column_order(spec), spec.scales[1]
    per_word = 32 // fields.bits
    a_tile = T.alloc_shared((bm, bk), "int8")
    b_tile = T.alloc_shared((bn, bk // per_word), "int32")
    scale_tile = T.alloc_shared(kind.place(bn, bk // slots.width), "float32") if kind.grouped else None
    product = T.alloc_fragment((bn, bm), "float32" if kind.grouped else "int32")
    T.clear(product)
    for step in T.Pipelined(first, last, num_stages=config.stages):
        T.copy(a[0, step * bk], a_tile)
        T.copy(b[col, step * (bk // per_word)], b_tile)
        if kind.grouped:
            T.copy(scale_b[kind.place(col, step * (bk // slots.width))], scale_tile)
        starts = [*range(0, bk, slots.width)]
        sums = [T.alloc_fragment((bn, bm), "int32") if kind.grouped else product for _ in starts]
        for at, total in zip(starts, sums, strict=True):
            words = read(b_tile, False, slice(at // per_word, (at + slots.width) // per_word), bn)
            T.gemm(
                widened(fields, slots, words, bn), a_tile[0:bm, at : at + slots.width], total,
                transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=kind.grouped,
            )  # fmt: skip
        if kind.grouped:
            for number, total in enumerate(sums):
                for j, i in T.Parallel(bn, bm):
                    product[j, i] += T.cast(total[j, i], "float32") * scale_tile[kind.place(j, number)]
    return product


@T.macro
def widened(fields: Fields, slots: ColumnOrder, words: Any, rows: int) -> Any:
    """Widen the fields of a run to bytes."""
    weights = T.alloc_fragment((rows, slots.width), "int8")
    fours = T.alloc_fragment((rows, slots.width // 4), "int32")  # four bytes each
    for j, four in T.Parallel(rows, slots.width // 4):
        fours[j, four] = fields.bytes_of(words[j, slots.word(four * 4)], slots.field(four * 4))
    for j, slot in T.Parallel(rows, slots.width):
        weights[j, slot] = T.cast(T.cast(fours[j, slot // 4] >> slot % 4 * 8, "uint8"), "int8")
    return weights


@library_jit
def int8_rows_matmul(config: Config, spec: Any) -> Any:
    """Build the kernel `out = epilogue((a * scale_a) @ (w * scale_b)^T, ..., aux)` from ordered rows of a. `splits`
    blocks of a cluster each sum up a part of K of one tile.
    """
    bm, bn, bk, count = config.block_m, config.block_n, config.block_k, config.splits
    times, (kind_a, kind_b) = fields_of(spec).times, spec.scales
    m, n, k = T.dynamic("m"), T.dynamic("n"), dynamic("k", column_order(spec).width)
    words = dynamic("words", LANE_BYTES // 4)
    types = [
        strided("b", (n, words), torch.int32, multiple=LANE_BYTES // 4, align=LANE_BYTES),
        kind_a.type("scale_a"), kind_b.type("scale_b"), *spec.product.operand_types(1, m, n, k)[2],
    ]  # fmt: skip
    own = -(-bn // count)  # rows of the weights

    @T.prim_func
    def int8_rows_gemm(
        a: T.Tensor((m, k), torch.int8), *operands: types, out: T.Tensor((m, n), spec.product.out_dtype)
    ):
        steps = T.ceildiv(k, bk)
        with T.Kernel(T.ceildiv(n, bn) * count, threads=config.threads, cluster_dims=count) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            T.pdl_sync()
            split, bx = block % count, block // count
            share = T.ceildiv(steps, count)
            product = multiply(config, spec, a, operands, bx * bn, split * share, T.min(split * share + share, steps))
            parts = share_with_cluster([product], count)
            for row, j in T.Parallel(bm, own):
                place, col = T.min(split * own + j, bn - 1), bx * bn + split * own + j
                total = T.cast(sum_in_cluster(parts[0], (place, row), count), "float32") * (1 / times)
                if split * own + j < bn:
                    factor = operands[1][kind_a.place(row, 0)]
                    if not kind_b.grouped:
                        factor = factor * operands[2][kind_b.place(col, 0)]
                    out[row, col] = gemm_spec.finish(spec.product, [total * factor], operands[3:], 0, row, col)
            if count > 1:
                T.cluster_sync()  # until then the other blocks read this block's part

    return int8_rows_gemm


@library_jit
def int8_row_matmul(config: Config, spec: Any, held: int) -> Any:
    """Build the kernel `out = epilogue((a * scale_a) @ (w * scale_b)^T, ..., aux)` for one row of a.

    Slices of a run each take the places of rows (see row_dequant.py). A block holds `held` runs: all, and zeros behind.
    `config.blocks` blocks take one tile of the weights after the other. A step has `config.stages` runs of a slice.
    """
    slots, fields, (kind_a, kind_b) = column_order(spec), fields_of(spec), spec.scales
    m, n, k = T.dynamic("m"), T.dynamic("n"), dynamic("k", spec.product.vector)
    words, rows = dynamic("words", LANE_BYTES // 4), config.block_n // SLICES
    types = [
        strided("b", (n, words), torch.int32, multiple=LANE_BYTES // 4, align=LANE_BYTES),
        kind_a.type("scale_a"), kind_b.type("scale_b"), *spec.product.operand_types(1, m, n, k)[2],
    ]  # fmt: skip

    @T.prim_func
    def int8_row_gemm(
        a: strided("a", (m, k), torch.int8, multiple=spec.product.vector), *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):  # fmt: skip
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            matrix = Fetched(config, (torch.int32, 4 * slots.words), (), operands[:1])
            for number, _ in enumerate(matrix.groups):
                matrix.fetch(number, block * rows, 0)
            row = T.alloc_shared((held, slots.width), "int8")
            runs = min(held, part_of(config, spec.bits)[1])
            for number in T.serial(held // runs):
                hold(a, slots, number, row, runs, config.threads)
            part = T.alloc_shared((config.block_n, SLICES), "int32")
            for iteration in T.serial(T.ceildiv(T.ceildiv(n, rows) - block, config.blocks)):
                col = (iteration * config.blocks + block) * rows
                product = T.alloc_fragment((config.block_n, SLICES), "int32")
                T.clear(product)
                steps = T.ceildiv(k, slots.width * SLICES * config.stages)
                for step in T.serial(steps - 1):
                    add_step(config, fields, slots, row, matrix, product, step, (col, step + 1))
                add_step(config, fields, slots, row, matrix, product, steps - 1, (col + config.blocks * rows, 0))
                T.copy(product, part)
                for j in T.Parallel(rows):
                    if col + j < n:
                        total = T.cast(sum(part[j * SLICES + s, s] for s in range(SLICES)), "float32")
                        factor = operands[1][kind_a.place(0, 0)] * operands[2][kind_b.place(col + j, 0)]
                        value = total * (1 / fields.times) * factor
                        out[0, col + j] = gemm_spec.finish(spec.product, [value], operands[3:], 0, 0, col + j)

    return int8_row_gemm


@T.macro
def add_step(
    config: Config,
    fields: Fields,
    slots: ColumnOrder,
    row: Any,
    matrix: Any,
    product: Any,
    step: Any,
    following: tuple[Any, Any],
) -> None:
    """Add the products of one step of slices, and begin to load the `following` one."""
    for number, (words,) in enumerate(matrix.groups):
        weights = widened(fields, slots, words, config.block_n)
        matrix.fetch(number, *following)
        first = (step * config.stages + number) * SLICES
        T.gemm(
            weights, row[first : first + SLICES, 0 : slots.width], product,
            transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
        )  # fmt: skip


def fits(spec: Any, k: int, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: rows of int8 by fewer bits, in whole pieces of 16 bytes. If
    runs of columns have scales of their own, bulk copies must be able to read them.
    """
    of_a, of_b = spec.scales
    return (
        machine.is_gpu
        and machine.target.has_wgmma
        and spec.bits < 8
        and spec.product.vector > 1
        and k <= MOST_COLUMNS
        and not of_a.grouped
        and (not of_b.grouped or (of_b.shared == 1 and (of_b.bulk or of_b.along)))
    )


def run(spec: Any, tensors: list[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of `tensors`, a and the operands of `scaled.prepare`, into `out`."""
    a, b, *operands = tensors
    slots, (m, k) = column_order(spec), a.shape
    words = view_as(b, torch.int32)
    if config.blocks:
        machine.kernel(int8_row_matmul)(config, spec, runs_held(config, spec.bits, k))(a, words, *operands, out)
        return
    ordered = a.new_empty((m, round_up(k, slots.width)))
    machine.kernel(order_rows)(slots, spec.product.vector)(a, ordered)
    machine.kernel(int8_rows_matmul)(config, spec)(ordered, words, *operands, out)


def part_of(config: Config, bits: int) -> tuple[int, int]:
    """Return the fewest runs of a row whose words all threads share evenly, and a part's runs."""
    words = config.block_k * bits // 32
    least = config.threads // math.gcd(config.threads, words)
    return least, least * max(1, HELD * config.threads // (least * config.block_k))


def runs_held(config: Config, bits: int, k: int) -> int:
    """Return how many runs of a row a block holds: those of whole steps, in whole parts."""
    least, most = part_of(config, bits)
    held = round_up(-(-k // config.block_k), math.lcm(SLICES * config.stages, least))
    return round_up(held, min(held, most))


# Tilings. They change the speed, never the result.

ROW_BYTES, SHORT_ROW_BYTES = 256, 128  # of a row of weights that a step takes, for up to 16 rows of a, and for more
LONGEST_STEP = 1024  # columns
LEAST_STAGES, MOST_STAGES = 3, 5
LEAST_STEPS = 4  # of a block of a cluster
HELD = 64  # bytes of a row that a thread has in registers at once
ROW_BLOCKS, FEW_BLOCKS, ROW_STAGES = 4, 2, 2  # of one row: blocks of a multiprocessor, and runs of a slice in a step
LEAST_RUNS = 4  # of a step: their scales of a row are 16 bytes, as bulk copies want


def config_for(m: int, n: int, k: int, spec: Any, machine: Machine) -> Config | None:
    """Choose the tiling of a product that fits. None if there are too many rows."""
    alone = isinstance(m, int) and isinstance(k, int) and m == 1
    if alone and not spec.scales[1].grouped and (found := _row_config(n, k, spec, machine)):
        return found
    rows = next((count for count in COLUMNS if m <= count), None)
    if rows is None:
        return None
    row_bytes = ROW_BYTES if rows <= 16 else SHORT_ROW_BYTES
    least = column_order(spec).width * (LEAST_RUNS if spec.scales[1].grouped else 1)
    config = Config(rows, 128, max(min(row_bytes * spec.fields, LONGEST_STEP), least), 256, transposed=True)
    if -(-n // 128) * 5 < machine.num_sms * 3:
        count, splits = -(-n // 64), 1
        while (
            splits < MOST_JOINED
            and splits * count <= machine.num_sms
            and k // (2 * splits) >= LEAST_STEPS * config.block_k
        ):
            splits *= 2
        resident = 2 if splits * count > machine.num_sms and rows <= 16 else 1
        config = replace(config, block_n=64, threads=128, splits=splits, cluster=splits > 1, resident=resident)
    while (stages := _stages(config, spec, machine)) < LEAST_STAGES and config.block_k > least:
        config = replace(config, block_k=config.block_k // 2)
    return replace(config, stages=stages)


def _row_config(n: int, k: int, spec: Any, machine: Machine) -> Config | None:
    """Choose the tiling of one row by slices, with as many blocks as have room for the row. None if not one has, or if
    single bits in many rows would leave steps half empty.

    Two blocks of a multiprocessor take few rows of weights, as each block puts the row into order.
    """
    slots = column_order(spec)
    config = Config(1, ROWS, slots.width, THREADS, ROW_STAGES, SLICES, transposed=True)
    one = row_footprint(config, spec, runs_held(config, spec.bits, k)).bytes
    runs = -(-k // slots.width)
    partial = runs * 10 < 7 * round_up(runs, SLICES * ROW_STAGES)  # steps that have few of their runs
    if spec.bits == 1 and partial and n * SLICES > ROW_BLOCKS * machine.num_sms * ROWS:
        return None
    few = n * SLICES <= FEW_BLOCKS * machine.num_sms * ROWS
    most = ROW_BLOCKS if spec.bits < 4 or spec.offset else ROW_BLOCKS - 1  # else ptxas spills
    blocks = min(FEW_BLOCKS if few else most, machine.target.shared_limit // one)
    return replace(config, blocks=blocks * machine.num_sms, resident=blocks) if blocks else None


def _stages(config: Config, spec: Any, machine: Machine) -> int:
    """Return the number of stages for which a block has room."""
    room = machine.target.shared_limit // config.resident
    sizes = (footprint(replace(config, stages=count), spec, True).bytes for count in range(1, MOST_STAGES + 1))
    return max(1, sum(size <= room for size in sizes))


def row_footprint(config: Config, spec: Any, held: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of the runs of a row, and of what lanes add up."""
    return Footprint((Tile(held, config.block_k, 8), Tile(config.block_n, SLICES, 32)), bulk)


def footprint(config: Config, spec: Any, bulk: bool) -> Footprint:
    """Compute the shared memory of rows of a, words, scales of runs, and sums that leave."""
    bm, bn, bk, loop = config.block_m, config.block_n, config.block_k, (Part.LOOP,)
    tiles = [Tile(bm, bk, 8, config.stages, loop), Tile(bn, bk, spec.bits, config.stages, loop)]
    if spec.scales[1].grouped:
        rows, columns = spec.scales[1].place(bn, bk // column_order(spec).width)
        tiles.append(Tile(rows, columns, 32, config.stages, loop))
    tiles.append(Tile(bn, bm, 32, parts=(Part.LEAVING,)))
    return Footprint(tuple(tiles), bulk)
