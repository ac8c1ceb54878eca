# SPDX-License-Identifier: Apache-2.0
"""Multiply up to eight rows by weights of 4 bits: the warps of a block cut K.

Fields are multiplied as they lie in their words. Slices of K take the places of missing rows (see row_dequant.py).
Block b of B and its warps read the weights from their beginning to their end:

    step 0    row 2 b      | warp 0: 8 groups | warp 1: 8 groups | ... |    each lane: 16 bytes of a group
              row 2 b + 1  | warp 0: 8 groups | warp 1: 8 groups | ... |
    step 1    row 2 (b + B) ...

    a lane        words of a step --> products with its columns of a --> sums --> shared memory.
                  Words of later steps are on their way into other registers.
    a tile        One round of the steps in flight, or several, and a barrier.
                  Then threads join the sums of a row of the weights, and store the result.

Columns of a stay in registers, in the order of fields. The first words are on their way before columns are loaded.
cut_sums.py says what sums are and how threads join them: that depends on the rows of a. For eight rows, several blocks
cut a long K, and a second kernel joins their parts. May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.common import Machine, start_early, strided, vector_of
from torch_tile.kernels.footprint import Footprint, Part, Tile
from torch_tile.kernels.gemm.cut_sums import Parts, Place, Store, shape_of_sums, sums_of
from torch_tile.kernels.gemm.fields_in_place import dequantize_field, order_of, table_of
from torch_tile.kernels.gemm.formats import TABLE
from torch_tile.kernels.gemm.packed import Factor, Spec, finish
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit

JOINED, JOINING = 32, 128  # rows of the weights that a block of the second kernel joins, and its threads


@T.macro
def fetch_words(parts: Parts, words: Any, bs: Sequence[Any], at: Place, own_unit: Any, chunk: int) -> None:
    """Begin to load the words of a chunk of one of a warp's own units. Each word is read once."""
    each = words.shape[0] // (2 * len(bs))  # of a lane; four share a row
    row = parts.row(at.block, parts.unit_of(at, own_unit)) + at.lane // 4 // parts.slices
    begin = (at.part * parts.groups + parts.group(at, 0)) * 4 * each + at.lane % 4 * each
    further = chunk * parts.apart * 4 * each
    for index, b in enumerate(bs):
        for side in [*range(2)]:
            place = (index * 2 + side) * each
            T.copy(
                b[row + side * parts.half, begin + further : begin + further + each], words[place : place + each],
                eviction_policy="no_allocate",
            )  # fmt: skip


def weight_of(spec: Spec, words: Any, table: Any, index: int, product: Any, pair: Any, e: Any) -> Any:
    """Return a weight as a lane's register of a product takes it, from the words of matrix `index`."""
    order = order_of(spec)
    word = words[(index * 2 + pair % 2) * order.words + product // 2]
    _, place, half = order.field(product % 2 * 16 + pair // 2 * 8 + e)
    return dequantize_field(spec, word, place, half, table, T.get_thread_binding() % WARP)


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
def multiply_part(
    parts: Parts, spec: Spec, a: Any, operands: Sequence[Any], n: Any, place: tuple[Any, Any], store: Store
) -> None:
    """Multiply a block's rows of the weights by its part of K, and `store` the products.

    `place` are the block and the number of the part.
    """
    (block, part), storage, config, thread = place, spec.storage, parts.config, T.get_thread_binding()
    (bs, *_), words_of_lane = spec.sort(operands), order_of(spec).words
    at = Place(block, part, thread // WARP, thread % WARP)
    if parts.slices == 1:  # registers have room for both in the loop, which else computes them anew
        warp, lane = at.warp, at.lane
        at = Place(block, part, warp, lane)
    ahead = [T.alloc_local((len(bs) * 2 * words_of_lane,), storage.words) for _ in range(config.stages)]
    sums = sums_of(parts, spec, operands, at)
    for number, words in enumerate(ahead):
        fetch_words(parts, words, bs, at, number // parts.chunks, number % parts.chunks)
    sums.fetch(0)
    table = table_of(spec)
    columns = sums.load(a)
    sums.joined = [T.alloc_shared(shape_of_sums(parts), "float32") for _ in bs]
    T.annotate_layout({tiles: T.make_linear_layout(tiles) for tiles in sums.joined})
    units = T.ceildiv(T.ceildiv(n, parts.unit) - block, config.blocks)
    for tile in T.serial(T.ceildiv(units, parts.units_of_tile)):
        sums.begin(tile)
        left = T.min(units - tile * parts.units_of_tile, parts.units_of_tile)
        rounds = T.min(parts.rounds, T.ceildiv(left, parts.units_at_once * parts.units_in_flight))
        for one in [*range(1)] if parts.rounds == 1 else T.serial(rounds):
            for number, words in enumerate(ahead):
                own_unit, chunk = one * parts.units_in_flight + number // parts.chunks, number % parts.chunks
                weights = [widen(spec, words, table, index) for index in [*range(len(bs))]]
                following = tile * parts.rounds * parts.units_in_flight + own_unit + parts.units_in_flight
                if not parts.fetches_late:
                    fetch_words(parts, words, bs, at, following, chunk)
                sums.add(weights, columns, chunk, tile, own_unit)
                if parts.fetches_late:
                    T.sync_warp()  # ptxas moves no load over it
                    fetch_words(parts, words, bs, at, following, chunk)
        sums.reduce_and_store(tile, left, store)


@T.macro
def store_result(
    spec: Spec, operands: Sequence[Any], out: Any, row: Any, col: Any, values: Sequence[Any], inside: Any
) -> None:
    """Store an element of the result from those of products, if it is `inside` of the tile and there."""
    if inside and row < out.shape[0] and col < out.shape[1]:
        out[row, col] = finish(spec, values, operands, row, col)


@T.macro
def store_part(sums: Any, part: Any, row: Any, col: Any, values: Sequence[Any], inside: Any) -> None:
    """Store the elements of products as sums over a part of K, as `store_result` does."""
    if inside and col < sums.shape[2]:
        for number, value in enumerate(values):
            sums[part, number, col, row] = value


@library_jit
def cut_dequant_matmul(config: Config, spec: Spec, chunks: int) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for few rows a, which are given as groups.

    `config.splits` warps of a block cut K, and each has `chunks` chunks. Other warps take other rows of the weights. A
    block joins the sums of `config.block_n` rows at a time. `config.stages` steps are in flight.
    """
    parts, (m, n, _, _, types), pieces = Parts(config, chunks), spec.types(), T.dynamic("pieces")

    @T.prim_func
    def cut_dequant_gemm(
        a: strided("a", (m, pieces, spec.storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            multiply_part(parts, spec, a, operands, n, (block, 0), partial(store_result, spec, operands, out))

    return cut_dequant_gemm


@library_jit
def split_cut_dequant_matmul(config: Config, spec: Spec, chunks: int) -> Any:
    """Build `cut_dequant_matmul` with K split over blocks. A second kernel reduces their partial sums."""
    parts, (m, n, _, _, types), pieces = Parts(config, chunks), spec.types(), T.dynamic("pieces")
    splits, rows, count = parts.blocks_of_k, config.block_m, len(spec.storage.transposed)

    @T.prim_func
    def split_cut_dequant_gemm(
        a: strided("a", (m, pieces, spec.storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        sums: T.Tensor((splits, count, n, rows), "float32"),
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(config.blocks, splits, threads=config.threads) as (block, part):
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            multiply_part(parts, spec, a, operands, n, (block, part), partial(store_part, sums, part))
        with T.Kernel(T.ceildiv(n, JOINED), threads=JOINING) as block:
            start_early()
            for j, i in T.Parallel(JOINED, rows):
                col = block * JOINED + j
                if i < m and col < n:
                    values = [sum(sums[s, number, col, i] for s in range(splits)) for number in range(count)]
                    out[i, col] = finish(spec, values, operands, i, col)

    return split_cut_dequant_gemm


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of few rows and the other operands of `dequant.prepare` into `out`."""
    a, *operands = tensors
    groups = a.unflatten(1, (-1, spec.storage.group))
    choice = config, with_runs_of_factors(spec, operands), chunks_of_warp(config, groups.shape[1])
    if (splits := Parts(config, choice[2]).blocks_of_k) == 1:
        machine.kernel(cut_dequant_matmul)(*choice)(groups, *operands, out)
        return
    shape = splits, len(spec.storage.transposed), out.shape[1], config.block_m
    sums = out.new_empty(shape, dtype=torch.float32)
    machine.kernel(split_cut_dequant_matmul)(*choice)(groups, *operands, sums, out)


def chunks_of_warp(config: Config, groups: int) -> int:
    """Return how many chunks of K a warp has."""
    return -(-groups // (config.splits * Parts(config, 1).slices))


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


def footprint(config: Config, spec: Spec, chunks: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of two tiles of sums for each matrix. Also of what lanes share of the rows of a."""
    parts, rows = Parts(config, chunks), config.block_m
    buffers, lines, *line = shape_of_sums(parts)
    sums = Tile(buffers * lines, math.prod(line), 32, parts=(Part.LOOP, Part.LEAVING))
    tiles = [sums] * len(spec.storage.transposed)
    if parts.slices == 1:  # the rows, what is taken off each group, and the rows' powers
        tiles.append(Tile(rows, parts.groups * config.block_k, 16, parts=(Part.BEFORE,)))
        tiles.append(Tile(parts.groups + 2 + parts.warps, rows, 32))
    elif spec.storage.zero:
        tiles.append(Tile(rows, parts.groups, 32))
    if spec.storage.coded:
        tiles.append(Tile(1, TABLE, 16))
    return Footprint(tuple(tiles), bulk)
