# SPDX-License-Identifier: Apache-2.0
"""Products of few rows with weights of 4 bits by integer tensor cores: a row of a is split into three rows of bytes.

Widening a field of 4 bits to a byte takes a third of the instructions of widening to 16 bits. Runs of columns of a
become integers of 23 bits in units of a power of two; the sum of their bytes times the weights is exact. A number of a
is off by 2^-23 of the largest of its run at most. Assumes that `planes_fit`, and what packed.py assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import Machine, dynamic, power_of_two, strided, vector_of
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.gemm.packed import Problem, Spec, Storage, finish, read
from torch_tile.kernels.gemm.tiling import MOST_JOINED, Config
from torch_tile.kernels.split_k import left_for_cluster, sum_in_cluster

RUN = 128  # columns of a that share a power of two, if groups of columns are not shorter
PLANES = 3  # bytes of a number of a
DIGITS = 22  # bits of a number of a, besides its sign: the highest byte stays below 127
PART = 1024  # columns that a block splits
INFINITE = 255  # exponent of infinities and NaN
LEAST_EXPONENT = 30  # of the largest number of a run, so that neither power of two leaves float32
HALVES = 0x808080  # makes three bytes of either sign three bytes from 0 to 255
BULK_BYTES = 16  # of a row of a tile that a bulk copy brings, at least
UPPER_FIELDS = -0x0F0F0F10  # 0xF0F0F0F0
SIGNS = -0x7F7F7F80  # 0x80808080
WIDENED = 16  # how many times as large a widened field is
COLUMNS = 8, 24, 48  # of wgmma's tile: planes of up to 2, 8 and 16 rows


def columns_for(rows: int) -> int | None:
    """Return the least columns of a tile that hold the planes of so many rows. None if there are too many rows."""
    return next((count for count in COLUMNS if PLANES * rows <= count), None)


def column_of(columns: int, row: Any, plane: int) -> Any:
    """Return the column of a plane of a row. The lowest bytes are plane 0.

    The planes of a row are side by side among 8 columns. Of more columns a thread has all planes of its rows.
    """
    return row * PLANES + plane if columns == 8 else plane * (columns // PLANES) + row


@dataclass(frozen=True)
class ColumnOrder:
    """The order in which a product sums up the columns of a run of `width` columns.

    Four lanes share a row of an operand. Lane q of them holds slots 4 q to 4 q + 3 of 16, as four bytes. These are the
    same fields of four bytes of a word. So a lane widens whole words, and each is read by one lane.
    """

    width: int
    high_first: bool
    bits: int = 4  # of a field

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

    def column(self, slot: Any) -> Any:
        """Return the column of a slot."""
        field = self.fields - 1 - self.field(slot) if self.high_first else self.field(slot)
        return self.word(slot) * 4 * self.fields + slot % 4 * self.fields + field


def column_order(spec: Spec) -> ColumnOrder:
    """Return the order of a run's columns for weights that lie in memory as a `Spec` says."""
    group = spec.storage.group
    return ColumnOrder(min(group, RUN) if group else RUN, spec.storage.high_first)


@jit
def split_rows(dtype: torch.dtype, slots: ColumnOrder, vector: int, columns: int) -> Any:
    """Build the kernel that splits rows of a into planes of bytes, in the order of slots. It also finds what a unit of
    each plane stands for in each run. `column_of` says which of so many columns a plane becomes.
    """
    width, count = slots.width, PART // slots.width
    m, k, runs = T.dynamic("m"), dynamic("k", vector), T.dynamic("runs")

    @T.prim_func
    def split_rows(
        a: strided("a", (m, k), dtype, multiple=vector),
        planes: T.Tensor((columns, k), torch.int8),
        units: T.Tensor((runs, columns), torch.float32),
    ):
        with T.Kernel(T.ceildiv(k, PART), m, threads=128) as (bx, row):
            T.pdl_trigger()
            numbers = T.alloc_fragment((count, width), "float32")
            sizes = T.alloc_fragment((count, width), "int32")
            largest = T.alloc_fragment((count,), "int32")
            for run, slot in T.Parallel(count, width):
                numbers[run, slot] = T.cast(a[row, bx * PART + run * width + slots.column(slot)], "float32")
                sizes[run, slot] = T.reinterpret(numbers[run, slot], "int32") & 0x7FFFFFFF
            T.reduce_max(sizes, largest, dim=1)  # as integers: NaN is above infinity, and that above all numbers
            for run, slot in T.Parallel(count, width):
                value, exponent = numbers[run, slot], T.max(largest[run] >> 23, LEAST_EXPONENT)
                power = T.reinterpret((253 + DIGITS - exponent) << 23, "float32")
                sign = T.if_then_else(value < 0.0, -0x010101, 0x010101)
                endless = T.if_then_else(sizes[run, slot] == INFINITE << 23, sign, 0)
                number = T.if_then_else(exponent == INFINITE, endless, T.cast(T.nearbyint(value * power), "int32"))
                sizes[run, slot] = number + HALVES
            for plane in range(PLANES):
                for run, slot in T.Parallel(count, width):
                    digit = ((sizes[run, slot] >> 8 * plane) & 255) - 128
                    planes[column_of(columns, row, plane), bx * PART + run * width + slot] = T.cast(digit, "int8")
            for run in T.Parallel(count):
                exponent = T.max(largest[run] >> 23, LEAST_EXPONENT)
                power = T.reinterpret((exponent + 1 - DIGITS) << 23, "float32")
                unit = T.if_then_else(exponent == INFINITE, T.reinterpret(largest[run], "float32"), power)
                for plane in range(PLANES):
                    size = T.reinterpret((127 + 8 * plane) << 23, "float32")  # 256^plane
                    units[bx * count + run, column_of(columns, row, plane)] = unit * size

    return split_rows


@T.macro
def multiply(
    config: Config, spec: Spec, planes: Any, units: Any, operands: Sequence[Any], col: Any, first: Any, last: Any
) -> Any:
    """Compute the products `w @ planes^T` of one tile in float32, summed over the spans `first <= span < last` of K.

    A span is so many steps that bulk copies can bring its scales. Loads by threads would be waited for in each step.
    """
    bm, bn, bk, slots = config.block_m, config.block_n, config.block_k, column_order(spec)
    rows = rows_of(bm)
    bs, scales, _, _ = spec.sort(operands)
    storage, width, steps = spec.storage, slots.width, span_of(spec, config)
    wk, groups = bk // storage.fields, storage.groups(bk)
    plane_tile = T.alloc_shared((bm, bk), "int8")
    unit_tile = T.alloc_shared((bk // width, bm), "float32")
    b_tiles, scale_tiles, products = [], [], []
    for _ in bs:
        product = T.alloc_fragment((bn, rows), "float32")
        T.clear(product)
        products.append(product)
        b_tiles.append(T.alloc_shared((bn, wk), storage.words))
        if storage.group and storage.scale:
            scale_tiles.append(T.alloc_shared((bn, steps * groups), storage.scale.dtype))
    for span in T.Pipelined(first, last, num_stages=2):
        for scale, scale_tile in zip(scales, scale_tiles, strict=False):
            T.copy(scale[col, span * (steps * groups)], scale_tile)
        for within in T.Pipelined(steps, num_stages=config.stages):
            step = span * steps + within
            T.copy(planes[0, step * bk], plane_tile)
            T.copy(units[step * (bk // width), 0], unit_tile)
            for which, (b, b_tile, product) in enumerate(zip(bs, b_tiles, products, strict=True)):
                T.copy(b[col, step * wk], b_tile)
                starts = [*range(0, bk, width)]
                sums = [T.alloc_fragment((bn, bm), "int32") for _ in starts]
                for at, total in zip(starts, sums, strict=True):
                    words = read(b_tile, False, slice(at // storage.fields, (at + width) // storage.fields), bn)
                    T.gemm(
                        widened(spec, words, bn), plane_tile[0:bm, at : at + width], total,
                        transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True,
                    )  # fmt: skip
                for number, total in enumerate(sums):
                    for j, i in T.Parallel(bn, rows):
                        unit = unit_tile[number, i]
                        if storage.group and storage.scale:
                            group = within * groups + number * width // storage.group
                            unit = unit * T.cast(scale_tiles[which][j, group], "float32")
                        value = T.cast(total[j, i], "float32")
                        if rows < bm:
                            value += T.cast(total[j, 2 * rows + i] * 256 + total[j, rows + i], "float32") * 256.0
                        product[j, i] += value * unit
    return products


def rows_of(columns: int) -> int:
    """Return the columns of the sums of a tile: its columns, or those of a plane if a thread adds up planes."""
    return columns if columns == 8 else columns // PLANES


def span_of(spec: Spec, config: Config) -> int:
    """Return the steps of a span: whose scales are 16 bytes of a row at least, which a bulk copy needs."""
    storage = spec.storage
    if storage.scale is None or not storage.group:
        return 1
    return max(1, BULK_BYTES // (storage.groups(config.block_k) * storage.scale.dtype.itemsize))


@T.macro
def widened(spec: Spec, words: Any, rows: int) -> Any:
    """Widen the fields of a run to bytes that are 16 times as large."""
    slots = column_order(spec)
    weights = T.alloc_fragment((rows, slots.width), "int8")
    fours = T.alloc_fragment((rows, slots.width // 4), "int32")  # four bytes each
    for j, four in T.Parallel(rows, slots.width // 4):
        fields = (words[j, slots.word(four * 4)] << (4 - 4 * slots.field(four * 4))) & UPPER_FIELDS
        fours[j, four] = fields if spec.storage.signed else fields ^ SIGNS  # 8 less
    for j, slot in T.Parallel(rows, slots.width):
        weights[j, slot] = T.cast(T.cast(fours[j, slot // 4] >> slot % 4 * 8, "uint8"), "int8")
    return weights


@jit
def plane_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` from planes of a. `splits` blocks of a cluster each sum up
    a part of K of one tile.
    """
    bm, bn, bk, count = config.block_m, config.block_n, config.block_k, config.splits
    whole = replace(spec, product=replace(spec.product, vector=column_order(spec).width))  # k is a multiple of a run
    m, n, k, _, types = whole.types()
    runs = T.dynamic("runs")
    own = -(-bn // count)  # rows of the weights

    @T.prim_func
    def plane_gemm(
        planes: T.Tensor((bm, k), torch.int8), units: T.Tensor((runs, bm), torch.float32),
        *operands: types, out: T.Tensor((m, n), spec.product.out_dtype),
    ):  # fmt: skip
        spans = T.ceildiv(k, bk * span_of(spec, config))
        with T.Kernel(T.ceildiv(n, bn) * count, threads=config.threads, cluster_dims=count) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            T.pdl_sync()
            split, bx = block % count, block // count
            share = T.ceildiv(spans, count)
            last = T.min(split * share + share, spans)
            products = multiply(config, spec, planes, units, operands, bx * bn, split * share, last)
            parts = left_for_cluster(products, count)
            for row, j in T.Parallel(bm // PLANES, own):
                place, col = T.min(split * own + j, bn - 1), bx * bn + split * own + j
                columns = [column_of(bm, row, plane) for plane in range(PLANES if rows_of(bm) == bm else 1)]
                sums = [sum(sum_in_cluster(part, (place, i), count) for i in columns) for part in parts]
                if split * own + j < bn:
                    values = [total * (1 / WIDENED) for total in sums]
                    out[row, col] = finish(spec, values, operands, row, col)
            if count > 1:
                T.cluster_sync()  # until then the other blocks read this block's part

    return plane_gemm


def planes_fit(storage: Storage, scales: Sequence[torch.Tensor], k: int) -> bool:
    """Return whether planes of a can be multiplied with such weights: numbers from -8 to 7 without zeros, in runs of
    columns, with scales that bulk copies can read.
    """
    group = storage.group
    scale = storage.scale
    if (
        storage.words != torch.int32
        or storage.zero
        or storage.format
        or storage.offset != (0 if storage.signed else 8)
        or any(storage.transposed)
        or k % (min(group, RUN) or RUN)
        or (group % RUN and group != RUN // 2)
    ):
        return False
    if scale is None or not group:
        return True
    known = scale.dtype in (torch.float16, torch.bfloat16, torch.float32) and not scale.transposed
    return known and vector_of(scales, [x.shape[-1] for x in scales]) > 1


def run(spec: Spec, tensors: list[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of `tensors`, a and the operands of `prepare`, into `out`."""
    a, *operands = tensors
    storage = spec.storage
    if storage.scale and storage.group:
        scale = replace(storage.scale, whole=BULK_BYTES // storage.scale.dtype.itemsize)
        spec = replace(spec, storage=replace(storage, scale=scale))
    slots, k = column_order(spec), a.shape[1]
    planes = a.new_empty((config.block_m, k), dtype=torch.int8)
    units = a.new_empty((k // slots.width, config.block_m), dtype=torch.float32)
    machine.kernel(split_rows)(a.dtype, slots, spec.product.vector, config.block_m)(a, planes, units)
    machine.kernel(plane_matmul)(config, spec)(planes, units, *operands, out)


# Tilings. They change the speed, never the result.

STEP = 512  # columns of a step
LEAST_SHARE = 2 * STEP  # columns that a block of a cluster sums up
MOST_STAGES = 3  # more are slower


def config_for(problem: Problem, machine: Machine) -> Config | None:
    """Choose the tiling of a problem that planes fit. None if there are too many rows or products."""
    columns, products = columns_for(problem.m), power_of_two(problem.products)
    if columns is None or products > 2:
        return None
    config = Config(columns, 128, STEP // products, 256, planes=True)
    if -(-problem.n // 128) * 5 < machine.num_sms * 3:
        count, splits = -(-problem.n // 64), 1
        while (
            splits < MOST_JOINED
            and 2 * splits * count <= 2 * machine.num_sms
            and problem.k // (2 * splits) >= LEAST_SHARE
        ):
            splits *= 2
        resident = 2 if splits * count > machine.num_sms else 1
        config = replace(config, block_n=64, threads=128, splits=splits, cluster=splits > 1, resident=resident)
    room, size = machine.target.shared_limit // config.resident, 4 if problem.group else 0
    for stages in range(MOST_STAGES, 1, -1):
        found = replace(config, stages=stages)
        if footprint(found, problem.products, problem.group, size).bytes <= room:
            return found
    return None


def footprint(config: Config, products: int, group: int, scale: int) -> Footprint:
    """Compute the shared memory of planes, units, words, scales of so many bytes each, and sums that leave."""
    bm, bn, bk, loop = config.block_m, config.block_n, config.block_k, (Part.LOOP,)
    groups = max(1, bk // group) if group else 0
    tiles = [
        Tile(bm, bk, 8, config.stages, loop),
        Tile(bk // (min(group, RUN) or RUN), bm, 32, config.stages, loop),
        *[Tile(bn, bk, 4, config.stages, loop)] * products,
        *[Tile(bn, max(BULK_BYTES, groups * scale), 8, 2, loop)] * products * bool(group),
        *[Tile(bn, rows_of(bm), 32, parts=(Part.LEAVING,))] * products,
    ]
    return Footprint(tuple(tiles), True)
