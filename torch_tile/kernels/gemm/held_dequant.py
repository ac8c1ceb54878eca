# SPDX-License-Identifier: Apache-2.0
"""Multiply up to 16 rows by weights of 4 bits: the warps of a block cut K, and hold their columns of a.

A warp keeps 256 columns of all rows in registers, in the order of fields (see row_dequant.py). Words go from memory to
registers. So no barrier stands in front of the first product. A longer K is cut over several blocks, too. A second
kernel joins their parts. A row has one power of two in a block. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.common import Machine, start_early, strided, typical
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.gemm import row_dequant
from torch_tile.kernels.gemm.cut_dequant import add_product, widen, with_runs_of_factors
from torch_tile.kernels.gemm.formats import TABLE, pairs_of
from torch_tile.kernels.gemm.packed import Problem, Spec, finish
from torch_tile.kernels.gemm.row_dequant import (
    FIELDS,
    IN_PLACE,
    excess,
    lifting_exponent,
    lowering_power,
    order_of,
    power_of_two as float_of,
)
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit

HALF, UNIT = 8, 16  # rows of the weights in half a unit, and in one, which is a product's
PADDING = 8  # numbers behind a row in shared memory: neighbours lie in other banks
SUMS = 4  # of a lane in a product of 16 rows of the weights by 8 of a


@dataclass(frozen=True)
class Form:
    """The parts of K and the rows of the weights that warps take.

    A unit are the rows of the weights in one product of tensor cores. Each warp has `chunks` groups of columns.
    """

    config: Config
    chunks: int

    @property
    def warps(self) -> int:
        """Number of warps that cut a block's part of K."""
        return self.config.threads // WARP

    @property
    def columns(self) -> int:
        """Number of products that the rows of a take."""
        return self.config.block_m // HALF

    @property
    def units(self) -> int:
        """Number of units of a tile."""
        return self.config.block_n // UNIT

    @property
    def groups(self) -> int:
        """Number of groups of a block's part of K."""
        return self.warps * self.chunks

    def row(self, block: Any, unit: Any) -> Any:
        """Return the first row of the weights of a block's unit. Neighbouring blocks have neighbouring units."""
        return (unit * self.config.blocks + block) * UNIT


@T.macro
def fetch(words: Any, bs: Sequence[Any], row: Any, begin: Any) -> None:
    """Begin to load a lane's words of a group, of two rows of each matrix. Each word is read once."""
    each = words.shape[0] // (2 * len(bs))
    for index, b in enumerate(bs):
        for side in [*range(2)]:
            at = (index * 2 + side) * each
            T.copy(b[row + side * HALF, begin : begin + each], words[at : at + each], eviction_policy="no_allocate")


@T.macro
def fetch_factors(kind: Any, given: Sequence[Any], held: Any, row: Any, group: Any, chunks: int) -> None:
    """Begin to load the scales or zeros of a warp's groups, of two rows of each matrix."""
    for index, source in enumerate(given):
        for side in [*range(2)]:
            at = (index * 2 + side) * chunks
            if kind.transposed:
                for c in [*range(chunks)]:
                    held[at + c] = source[group + c, row + side * HALF]
            else:
                T.copy(source[row + side * HALF, group : group + chunks], held[at : at + chunks])


@T.macro
def hold(form: Form, spec: Spec, a: Any, columns: Any, less: Any, part: Any, thread: Any) -> Any:
    """Keep a lane's numbers of the rows in registers, in the order of fields, times powers of two.

    The block loads its part of the rows side by side. Lanes take their own from shared memory. `less` is what products
    begin with. Returns what takes the powers back.
    """
    order, rows, width = order_of(spec), form.config.block_m, form.groups * spec.storage.group
    warp, lane = thread // WARP, thread % WARP
    count, group = order.words * FIELDS, spec.storage.group
    loaded, most = T.alloc_fragment((rows, width), a.dtype), T.alloc_fragment((rows,), a.dtype)
    tile = T.alloc_shared((rows, width + PADDING), a.dtype)
    powers, back = (T.alloc_shared((rows,), "float32") for _ in range(2))
    T.annotate_layout({tile: T.make_linear_layout(tile)})
    for i, g, c in T.Parallel(rows, form.groups, group):
        loaded[i, g * group + c] = a[i, part * form.groups + g, c]
    T.copy(loaded, tile[0:rows, 0:width])
    T.reduce_absmax(loaded, most, dim=1)
    for i in T.Parallel(rows):
        exponent = lifting_exponent(T.cast(most[i], "float32"))
        powers[i] = float_of(exponent)
        back[i] = lowering_power(order, exponent)
    for j in [*range(form.columns)]:
        row = j * HALF + lane // 4
        power = powers[row]
        for chunk in [*range(form.chunks)]:
            own, at = T.alloc_local((count,), a.dtype), (chunk * form.columns + j) * count
            begin = (warp * form.chunks + chunk) * group + lane % 4 * count
            T.copy(tile[row, begin : begin + count], own)
            for pair in T.unroll(count // 2):
                for e in T.vectorized(2):
                    number = T.cast(own[order.column(pair * 2 + e)], "float32")
                    columns[at + pair * 2 + e] = T.cast(number * (power * order.less(pair * 2 + e)), "float16")
    begin_sums(form, spec, columns, less, warp * form.chunks, lane)
    return back


@T.macro
def begin_sums(form: Form, spec: Spec, columns: Any, less: Any, group: Any, lane: Any) -> None:
    """Store what the product of each group begins with: its columns times what is taken off fields, or their sums.

    A product by equal fields computes it, with the rounding that the columns have. It also keeps ptxas from narrowing
    columns late, which would spill.
    """
    taken = 1.0 if spec.storage.zero else -excess(spec)
    fields = T.alloc_local((16,), "float16")
    for i in [*range(16)]:
        fields[i] = taken * 2.0 ** (4 * (i // 8) - IN_PLACE)
    for chunk in [*range(form.chunks)]:
        for j in [*range(form.columns)]:
            total = T.alloc_local((SUMS,), "float32")
            T.clear(total)
            products = 2 * order_of(spec).words
            for product in [*range(products)]:
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", fields, product % 2 * 8, columns,
                    ((chunk * form.columns + j) * products + product) * 4, total, 0,
                )  # fmt: skip
            if lane < 4:
                at = j * HALF + lane * 2
                T.copy(total[0:2], less[group + chunk, at : at + 2])


@T.macro
def add_group(
    form: Form, spec: Spec, matrix: tuple[Any, Any, Any], columns: Any, less: Any, chunk: int, place: tuple[Any, Any],
    sums: Any,
) -> None:  # fmt: skip
    """Add a group of a unit to a lane's sums. `matrix` are the weights, scales and zeros of two rows.

    `place` are the group in the block's part and the lane. The product begins with what is taken off fields.
    """
    (weights, scales, zeros), (group, lane), off = matrix, place, excess(spec)
    scale, zero = spec.storage.scale, spec.storage.zero
    assert scale is not None
    for j in [*range(form.columns)]:
        total, own = T.alloc_local((SUMS,), "float32"), T.alloc_local((2,), "float32")
        at = j * HALF + lane % 4 * 2
        T.copy(less[group, at : at + 2], own)
        for s in [*range(SUMS)]:
            if zeros is None or zero is None:
                total[s] = own[s % 2]
            else:
                total[s] = own[s % 2] * -(T.cast(zero.value(zeros[s // 2], zeros.dtype), "float32") + off)
        add_product(weights, columns, chunk * form.columns + j, total)
        for s in [*range(SUMS)]:
            factor = scale.value(scales[s // 2], "float32")
            sums[j * SUMS + s] = total[s] * factor if chunk == 0 else T.fma(total[s], factor, sums[j * SUMS + s])


@T.macro
def joined_pair(form: Form, sums: Any, buffer: Any, pair: Any) -> Any:
    """Return two neighbouring sums of a lane, over all warps."""
    total, part = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
    T.clear(total)
    for warp in [*range(form.warps)]:
        T.copy(sums[buffer, warp, pair * 2 : pair * 2 + 2], part)
        for e in [*range(2)]:
            total[e] = total[e] + part[e]
    return total


@T.macro
def store_tile(
    form: Form, joined: Sequence[Any], buffer: Any, back: Any, place: tuple[Any, Any, Any], thread: Any,
    store: Callable[[Any, Any, list[Any]], None],
) -> None:  # fmt: skip
    """Add up the sums of all warps, and `store(row of a, row of the weights, values)` those of a tile.

    `place` are the block, the tile and its units. A thread joins two neighbouring sums of a lane.
    """
    each = form.columns * WARP * SUMS // 2
    pairs, (block, tile, left) = form.units * each, place
    for number in [*range(-(-pairs // form.config.threads))]:
        pair = thread + number * form.config.threads
        if pair < pairs and pair // each < left:
            totals = [joined_pair(form, sums, buffer, pair) for sums in joined]
            piece, lane = pair // (WARP * SUMS // 2), pair % (WARP * SUMS // 2) // 2
            unit = tile * form.units + piece // form.columns
            col = form.row(block, unit) + lane // 4 + pair % 2 * HALF
            for e in [*range(2)]:
                row = piece % form.columns * HALF + lane % 4 * 2 + e
                store(row, col, [total[e] * back[row] for total in totals])


@T.macro
def store_result(spec: Spec, operands: Sequence[Any], out: Any, row: Any, col: Any, values: Sequence[Any]) -> None:
    """Store an element of the result, if there is one, from those of products."""
    if row < out.shape[0] and col < out.shape[1]:
        out[row, col] = finish(spec, values, operands, row, col)


@T.macro
def store_part(parts: Any, part: Any, row: Any, col: Any, values: Sequence[Any]) -> None:
    """Store the elements of products as sums over a part of K."""
    if col < parts.shape[2]:
        for number, value in enumerate(values):
            parts[part, number, col, row] = value


@T.macro
def multiply_part(
    form: Form, spec: Spec, a: Any, operands: Sequence[Any], n: Any, place: tuple[Any, Any],
    store: Callable[[Any, Any, list[Any]], None],
) -> None:  # fmt: skip
    """Multiply a block's rows of the weights by its part of K, and `store` the sums. `place` are the block and the
    number of the part.
    """
    config, storage, order, chunks = form.config, spec.storage, order_of(spec), form.chunks
    (block, part), thread = place, T.get_thread_binding()
    bs, scales, zeros, _ = spec.sort(operands)
    count, ahead_units = len(bs), config.stages // chunks
    warp, lane = thread // WARP, thread % WARP
    own, each = warp * chunks, 4 * order.words
    first = part * form.groups + own
    begin = first * each + lane % 4 * order.words
    ahead = [T.alloc_local((count * 2 * order.words,), storage.words) for _ in range(config.stages)]
    kinds = [(kind, given) for kind, given in ((storage.scale, scales), (storage.zero, zeros)) if kind]
    factors = [[T.alloc_local((count * 2 * chunks,), kind.dtype) for kind, _ in kinds] for _ in range(ahead_units)]
    for step in [*range(config.stages)]:
        fetch(ahead[step], bs, form.row(block, step // chunks) + lane // 4, begin + step % chunks * each)
    for early in [*range(ahead_units)]:
        for (kind, given), stored in zip(kinds, factors[early], strict=True):
            fetch_factors(kind, given, stored, form.row(block, early) + lane // 4, first, chunks)
    columns = T.alloc_local((chunks * form.columns * order.words * FIELDS,), "float16")
    less = T.alloc_shared((form.groups, config.block_m), "float32")
    T.annotate_layout({less: T.make_linear_layout(less)})
    table = pairs_of(storage.format, storage.high_first, torch.float16) if storage.coded else None
    back = hold(form, spec, a, columns, less, part, thread)
    joined = [T.alloc_shared(tiles_of(form), "float32") for _ in bs]
    T.annotate_layout({tiles: T.make_linear_layout(tiles) for tiles in joined})
    rounds = form.units // ahead_units
    units = T.ceildiv(T.ceildiv(n, UNIT) - block, config.blocks)
    for tile in T.serial(T.ceildiv(units, form.units)):
        left = T.min(units - tile * form.units, form.units)
        for one in T.serial(T.min(rounds, T.ceildiv(left, ahead_units))):
            for number, held in enumerate(factors):
                unit = one * ahead_units + number
                sums = [T.alloc_local((form.columns * SUMS,), "float32") for _ in bs]
                following = form.row(block, tile * form.units + unit + ahead_units) + lane // 4
                for chunk in [*range(chunks)]:
                    words = ahead[number * chunks + chunk]
                    weights = [widen(spec, words, table, index) for index in [*range(count)]]
                    fetch(words, bs, following, begin + chunk * each)
                    for index in [*range(count)]:
                        found = [T.alloc_local((2,), x.dtype) for x in held]
                        for of, x in zip(found, held, strict=True):
                            for side in [*range(2)]:
                                of[side] = x[(index * 2 + side) * chunks + chunk]
                        matrix = weights[index], found[0], found[1] if zeros else None
                        add_group(form, spec, matrix, columns, less, chunk, (own + chunk, lane), sums[index])
                for (kind, given), stored in zip(kinds, held, strict=True):
                    fetch_factors(kind, given, stored, following, first, chunks)
                for tiles, total in zip(joined, sums, strict=True):
                    for j in [*range(form.columns)]:
                        at = ((unit * form.columns + j) * WARP + lane) * SUMS
                        T.copy(total[j * SUMS : j * SUMS + SUMS], tiles[tile % 2, warp, at : at + SUMS])
        store_tile(form, joined, tile % 2, back, (block, tile, left), thread, store)


@library_jit
def held_dequant_matmul(config: Config, spec: Spec, chunks: int) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for few rows a, which are given as groups.

    The warps of a block cut all of K. `config.stages` groups of a warp are in flight, and `config.block_n` rows of the
    weights are joined at a time.
    """
    form, (m, n, _, _, types) = Form(config, chunks), spec.types()
    pieces = T.dynamic("pieces")

    @T.prim_func
    def held_dequant_gemm(
        a: strided("a", (m, pieces, spec.storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            multiply_part(form, spec, a, operands, n, (block, 0), partial(store_result, spec, operands, out))

    return held_dequant_gemm


@library_jit
def split_held_dequant_matmul(config: Config, spec: Spec, chunks: int) -> Any:
    """Build the kernel for a longer K, which `config.splits` blocks cut. A second kernel joins their parts."""
    form, (m, n, _, _, types) = Form(config, chunks), spec.types()
    pieces, rows, count = T.dynamic("pieces"), config.block_m, len(spec.storage.transposed)

    @T.prim_func
    def split_held_dequant_gemm(
        a: strided("a", (m, pieces, spec.storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        parts: T.Tensor((config.splits, count, n, rows), "float32"),
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(config.blocks, config.splits, threads=config.threads) as (block, part):
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            multiply_part(form, spec, a, operands, n, (block, part), partial(store_part, parts, part))
        with T.Kernel(T.ceildiv(n, JOINED), threads=JOINING) as block:
            start_early()
            for j, i in T.Parallel(JOINED, rows):
                col = block * JOINED + j
                if i < m and col < n:
                    values = [sum(parts[s, number, col, i] for s in range(config.splits)) for number in range(count)]
                    out[i, col] = finish(spec, values, operands, i, col)

    return split_held_dequant_gemm


def tiles_of(form: Form) -> tuple[int, ...]:
    """Return the shape of two tiles of sums, of which each warp has its own."""
    return 2, form.warps, form.units * form.columns * WARP * SUMS


def chunks_of(config: Config, groups: int) -> int:
    """Return how many groups of columns a warp has."""
    return -(-groups // (config.splits * (config.threads // WARP)))


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of few rows and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    groups = a.unflatten(1, (-1, spec.storage.group))
    spec, chunks = with_runs_of_factors(spec, operands), chunks_of(config, groups.shape[1])
    if config.splits == 1:
        machine.kernel(held_dequant_matmul)(config, spec, chunks)(groups, *operands, out)
        return
    count = len(spec.storage.transposed)
    parts = out.new_empty((config.splits, count, out.shape[1], config.block_m), dtype=torch.float32)
    machine.kernel(split_held_dequant_matmul)(config, spec, chunks)(groups, *operands, parts, out)


# Tilings. They change the speed, never the result.

JOINED, JOINING = 32, 128  # rows of the weights that a block of the second kernel joins, and its threads
ROWS = 8  # of a, at most: 16 take as long as by wgmma, or longer
SLICED_ROWS = 4  # up to which slices of K are as fast where they fill the multiprocessors
HELD = 256  # columns of a warp
LEAST_GROUP = 128  # columns that share a scale
LEAST_WARPS, WARPS = 8, 16  # of a block
MOST_PARTS = 4  # of K
LEAST_WEIGHTS = 1 << 24
TILE = 64  # rows of the weights that a block joins


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of one matrix of numbers, whose columns warps share evenly.

    Fields of which nothing is taken off are left out, as ptxas spills.
    """
    return (
        row_dequant.has_whole_groups(spec, problem, machine)
        and 1 < problem.m <= ROWS
        and problem.products == 1
        and spec.norm is None
        and not problem.zeros
        and not problem.coded
        and excess(spec) != 0.0
        and problem.group >= LEAST_GROUP
        and HELD % problem.group == 0
        and problem.k % HELD == 0
        and parts_of(problem.k // HELD) is not None
    )


def parts_of(pieces: int) -> tuple[int, int] | None:
    """Return how many blocks cut K, and how many warps of each: as few blocks as can hold it. None for odd numbers."""
    for blocks in range(-(-pieces // WARPS), min(MOST_PARTS, pieces // LEAST_WARPS) + 1):
        if pieces % blocks == 0:
            return blocks, pieces // blocks
    return None


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None where another kernel is as fast or faster."""
    parts = parts_of(problem.k // HELD)
    if parts is None or typical(problem).n * problem.k < LEAST_WEIGHTS:
        return None
    if problem.m <= SLICED_ROWS and row_dequant.config_for(problem, spec, machine) is not None:
        return None
    splits, warps = parts
    chunks = HELD // problem.group
    config = Config(HALF, TILE, problem.group, WARP * warps, chunks, splits, blocks=machine.num_sms // splits)
    return config if footprint(config, spec, chunks).fits(machine.target) else None


def footprint(config: Config, spec: Spec, chunks: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of two tiles of sums for each matrix, and of the rows' powers and sums."""
    form = Form(config, chunks)
    table = (Tile(1, TABLE, 16),) if spec.storage.coded else ()
    buffers, warps, sums = tiles_of(form)
    before, leaving = (Part.BEFORE,), (Part.LOOP, Part.LEAVING)
    rows = Tile(config.block_m, form.groups * config.block_k, 16, parts=before)
    tiles = (Tile(buffers * warps, sums, 32, parts=leaving),) * len(spec.storage.transposed)
    return Footprint((rows, *tiles, Tile(form.groups + 2 + form.warps, config.block_m, 32), *table), bulk)
