# SPDX-License-Identifier: Apache-2.0
"""Sum up products of few rows whose K the warps of a block cut (see cut_dequant.py): two forms with the same methods.

1, 2 and 4 rows have slices of K in a product. So a product is sums of groups, which meet their scales when a tile is
joined. Eight rows fill a product. There, a warp scales its sums in registers. May assume what `dequant.prepare`
describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch_tile.language as T
from torch_tile.hardware import WARP
from torch_tile.kernels.common import power_of_two, round_up
from torch_tile.kernels.gemm.fields_in_place import (
    FIELDS,
    IN_PLACE,
    Order,
    excess,
    float_of_exponent_bits,
    lifting_exponent,
    lowering_power,
    order_of,
    subtracts_offset,
)
from torch_tile.kernels.gemm.packed import Spec
from torch_tile.kernels.gemm.row_dequant import SLICES
from torch_tile.kernels.gemm.tiling import Config

RUN = 8  # groups of a row whose factors a lane reads at once
SUMS = 4  # of a lane in a product of 16 rows of the weights by 8 columns
PADDING = 8  # numbers behind a row in shared memory: neighbours lie in other banks

# Of a row of a, a row of the weights, the products there, and whether they are in the tile.
Store = Callable[[Any, Any, list[Any], Any], None]


class Place(NamedTuple):
    """Name a lane: its block among those of a part of K, the part, its warp, and its number there."""

    block: Any
    part: Any
    warp: Any
    lane: Any


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
    def unit(self) -> int:
        """Number of rows of the weights in a unit."""
        return 2 * self.half

    @property
    def warps(self) -> int:
        """Number of warps of a block."""
        return self.config.threads // WARP

    @property
    def cuts(self) -> int:
        """Number of warps that cut a block's part of K."""
        return min(self.config.splits, self.warps)

    @property
    def blocks_of_k(self) -> int:
        """Number of blocks that cut K."""
        return self.config.splits // self.cuts

    @property
    def groups(self) -> int:
        """Number of groups that the warps of a block cover."""
        return self.cuts * self.chunks * self.slices

    @property
    def units_at_once(self) -> int:
        """Number of units that the warps of a block take at once."""
        return self.warps // self.cuts

    @property
    def units_of_tile(self) -> int:
        """Number of units of a tile."""
        return self.config.block_n // self.unit

    @property
    def units_in_flight(self) -> int:
        """Number of units of a warp whose words are in flight."""
        return self.config.stages // self.chunks

    @property
    def rounds(self) -> int:
        """Number of times that a tile takes all steps in flight."""
        return self.units_of_tile // (self.units_at_once * self.units_in_flight)

    @property
    def fetches_late(self) -> bool:
        """Return whether words are fetched behind products, into the registers of words that these took.

        Else ptxas fetches them earlier, which takes more registers. That is faster in loops of several rounds, and
        where all warps cut K once. Elsewhere it is slower.
        """
        return self.rounds == 1 and (self.units_at_once > 1 or self.chunks > 1)

    @property
    def apart(self) -> int:
        """Number of groups from a lane's group of a chunk to that of the next one.

        Slices of all warps lie side by side. Without slices, a warp's groups do: one load takes their scales.
        """
        return 1 if self.slices == 1 else self.cuts * self.slices

    def group(self, at: Place, chunk: int) -> Any:
        """Return the group of a lane's slice in a chunk, in the block's part of K."""
        part = at.warp if self.units_at_once == 1 else at.warp % self.cuts
        first = part * self.chunks if self.slices == 1 else part * self.slices + at.lane // 4 % self.slices
        return first + chunk * self.apart

    def unit_of(self, at: Place, own_unit: Any) -> Any:
        """Return the number of a unit from that among a warp's own ones."""
        first = 0 if self.units_at_once == 1 else at.warp // self.cuts
        return own_unit * self.units_at_once + first

    def row(self, block: Any, unit: Any) -> Any:
        """Return the first row of the weights of a block's unit. Neighbouring blocks have neighbouring units."""
        return (unit * self.config.blocks + block) * 2 * self.half

    def of_row(self, value: Any, at: Place) -> Any:
        """Return a value of the lane that has loaded the numbers in a lane's column of a product."""
        if self.slices == SLICES:
            return value  # the lane itself
        row = at.lane % 4 * 2 // self.slices
        return T.shfl_sync(value, (row * self.slices + at.lane // 4 % self.slices) * 4)


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
def keep_columns(order: Order, numbers: Any, power: Any, columns: Any, chunk: int) -> None:
    """Keep a lane's numbers of a chunk times a power of two, in the order of fields."""
    count = numbers.shape[0]
    for pair in T.unroll(count // 2):
        for e in T.vectorized(2):
            columns[chunk * count + pair * 2 + e] = T.cast(
                T.cast(numbers[order.column(pair * 2 + e)], "float32") * (power * order.less(pair * 2 + e)), "float16"
            )


def sums_of(parts: Parts, spec: Spec, operands: Sequence[Any], at: Place) -> SumsOfGroups | SumsOfWarps:
    """Return the form of a kernel's sums."""
    return (SumsOfWarps if parts.slices == 1 else SumsOfGroups)(parts, spec, operands, at)


class SumsOfGroups:
    """Sums of groups in shared memory, for rows whose slices of K share a product.

    A power of two lifts a lane's columns of a chunk (see fields_in_place.py). The lane keeps what takes it back.
    A few lanes add up a row of the weights: sums of groups times scales.
    """

    powers: Any
    offsets: Any
    of_a: Any
    joined: list[Any]
    found: list[Any]
    less: list[Any]

    def __init__(self, parts: Parts, spec: Spec, operands: Sequence[Any], at: Place):
        """Take a lane's place, and the operands besides a."""
        self.parts, self.spec, self.at = parts, spec, at
        bs, self.scales, self.zeros, _ = spec.sort(operands)
        self.count = len(bs)

    def fetch(self, unit: Any) -> None:
        """Begin to load what products need, besides words: nothing."""

    def load(self, a: Any) -> Any:
        """Return a lane's columns of all chunks. Their powers, and what zeros and fields' excess take off, stay."""
        parts, spec = self.parts, self.spec
        columns = T.alloc_local((parts.chunks * order_of(spec).words * FIELDS,), "float16")
        self.of_a = T.alloc_shared((parts.config.block_m, parts.groups), "float32") if self.zeros else None
        self.powers, self.offsets = (
            T.alloc_local((parts.chunks,), "float32") if needed else None for needed in (True, excess(spec) != 0.0)
        )
        for chunk in range(parts.chunks):
            self._load_chunk(a, columns, chunk)
        return columns

    @T.macro
    def _load_chunk(self, a: Any, columns: Any, chunk: int) -> None:
        """Load a lane's numbers of a chunk, in the order of fields. Four lanes share a group."""
        parts, spec, at, order = self.parts, self.spec, self.at, order_of(self.spec)
        count, group = order.words * FIELDS, parts.group(at, chunk)
        row, begin = at.lane // 4 // parts.slices, at.lane % 4 * count
        loaded, wide = T.alloc_local((count,), a.dtype), T.alloc_local((count,), "float32")
        most, total = (T.alloc_local((1,), "float32") for _ in range(2))
        T.copy(a[row, group, begin : begin + count], loaded)
        most[0], total[0] = 0.0, 0.0
        for i in T.unroll(count):
            wide[i] = T.cast(loaded[i], "float32")
        for i in T.unroll(count):
            most[0] = T.max(most[0], T.abs(wide[i]))
            if subtracts_offset(spec):
                total[0] = total[0] + wide[i]
        for lanes in (1, 2):
            most[0] = T.max(most[0], T.shfl_xor(most[0], lanes))
            if subtracts_offset(spec):
                total[0] = total[0] + T.shfl_xor(total[0], lanes)
        exponent = lifting_exponent(most[0])
        if self.of_a is not None and at.lane % 4 == 0 and parts.unit_of(at, 0) == 0:
            self.of_a[row, group] = total[0]
        self.powers[chunk] = parts.of_row(lowering_power(order, exponent), at)
        if self.offsets is not None:
            self.offsets[chunk] = parts.of_row(total[0] * -excess(spec), at)
        power = float_of_exponent_bits(exponent)
        keep_columns(order, wide, power, columns, chunk)

    def begin(self, tile: Any) -> None:
        """Begin to load the scales and zeros of a tile, long before `reduce_and_store` takes them."""
        scale, zero = self.spec.storage.scale, self.spec.storage.zero
        self.found = [self._fetch_factors(scale, x, tile) for x in self.scales]
        self.less = [self._fetch_factors(zero, x, tile) for x in self.zeros] or [None] * self.count

    @T.macro
    def _fetch_factors(self, kind: Any, source: Any, tile: Any) -> Any:
        """Begin to load the scales or zeros of a matrix."""
        parts, shape = self.parts, shape_of_join(self.parts)
        found = T.alloc_fragment(shape, kind.dtype)
        T.annotate_layout({found: layout_of_join(parts)})
        for r, g in T.Parallel(*shape):
            if r < parts.config.block_n:
                found[r, g] = source[kind.place(self._row(tile, r), g)]
        return found

    def _row(self, tile: Any, r: Any) -> Any:
        """Return a row of the weights, from its number in a tile."""
        parts = self.parts
        return parts.row(self.at.block, tile * parts.units_of_tile + r // parts.unit) + r % parts.unit

    @T.macro
    def add(self, weights: Sequence[Any], columns: Any, chunk: int, tile: Any, own_unit: Any) -> None:
        """Multiply, and store the entries of a product where both slices are the same."""
        parts, at, slices, powers, offsets = self.parts, self.at, self.parts.slices, self.powers, self.offsets
        for matrix, sums in zip(weights, self.joined, strict=True):
            total = T.alloc_local((SUMS,), "float32")
            T.clear(total)
            add_product(matrix, columns, chunk, total)
            buffer, first, group = tile % 2, parts.unit_of(at, own_unit) * parts.unit, parts.group(at, chunk)
            own, column = at.lane // 4, at.lane % 4 * 2
            row, place = first + own // slices, place_in_line(parts, group)
            if column % slices == own % slices // 2 * 2:
                for side in [*range(2)]:
                    found = T.if_then_else(own % 2 == 1, total[side * 2 + 1], total[side * 2])
                    sums[buffer, row + side * parts.half, column // slices, place] = (
                        found * powers[chunk] if offsets is None else found * powers[chunk] + offsets[chunk]
                    )

    @T.macro
    def reduce_and_store(self, tile: Any, left: Any, store: Store) -> None:
        """Scale and reduce the sums of a tile, of which `left` units exist, and `store` the results."""
        parts = self.parts
        for i in [*range(parts.config.block_m)]:
            results = [self._sum_row(index, tile % 2, i, left * parts.unit) for index in [*range(self.count)]]
            for r in T.Parallel(shape_of_join(parts)[0]):
                store(i, self._row(tile, r), [result[r] for result in results], r < parts.config.block_n)

    @T.macro
    def _sum_row(self, index: int, buffer: Any, i: int, left: Any) -> Any:
        """Return the sums for one row of a and all rows of a tile, of which `left` exist."""
        parts, factor, sums = self.parts, self.spec.storage.scale, self.joined[index]
        scale, zero, shape = self.found[index], self.less[index], shape_of_join(self.parts)
        assert factor is not None
        scaled, result = T.alloc_fragment(shape, "float32"), T.alloc_fragment(shape[:1], "float32")
        T.annotate_layout({scaled: layout_of_join(parts)})
        T.clear(scaled)
        for r, g in T.Parallel(*shape):
            if g < parts.groups and r < left:
                found = sums[buffer, r, i, place_in_line(parts, g)]
                if zero is not None:
                    found = found - self.of_a[i, g] * T.cast(zero[r, g], "float32")
                scaled[r, g] = found * factor.value(scale[r, g], "float32")
        T.reduce_sum(scaled, result, dim=1)
        return result


def half_of_line(parts: Parts) -> int:
    """Return where the second half of a line of sums begins. Both have the same groups of each `RUN`."""
    return round_up(RUN // 2 * -(-parts.groups // RUN), RUN) + RUN // 2


def place_in_line(parts: Parts, group: Any) -> Any:
    """Return where a line of sums has a group.

    A lane that joins a row takes `RUN` groups by two loads. Halves keep those of neighbouring lanes side by side.
    """
    return group // (RUN // 2) % 2 * half_of_line(parts) + group // RUN * (RUN // 2) + group % (RUN // 2)


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


def shape_of_sums(parts: Parts) -> tuple[int, ...]:
    """Return the shape of two tiles of sums.

    Each warp has its own. With slices, lanes that store or load sums of groups side by side meet other banks.
    """
    rows = parts.config.block_m
    if parts.slices == 1:
        return 2, parts.warps, parts.units_of_tile * WARP * SUMS
    least, beside = 2 * half_of_line(parts), max(4, 4 * min(lanes_of_row(parts), 4) // rows)  # banks between lines
    return 2, parts.config.block_n, rows, least + (beside - least) % WARP


class SumsOfWarps:
    """Sums of a warp's groups in registers, for as many rows as a product has columns. A block joins its warps' sums.

    A row has one power of two in a block. The block loads rows side by side, and lanes take theirs from shared memory.
    Products begin with what is taken off fields.
    """

    less: Any
    back: Any
    joined: list[Any]
    sums: list[Any]

    def __init__(self, parts: Parts, spec: Spec, operands: Sequence[Any], at: Place):
        """Take a lane's place, and the operands besides a. The rule leaves zeros, and several units ahead, out."""
        assert spec.storage.scale is not None and spec.storage.zero is None
        assert parts.units_at_once == parts.units_in_flight == 1
        self.parts, self.spec, self.at, self.kind = parts, spec, at, spec.storage.scale
        _, self.sources, _, _ = spec.sort(operands)
        self.scales = T.alloc_local((len(self.sources) * 2 * parts.chunks,), self.kind.dtype)

    @T.macro
    def fetch(self, unit: Any) -> None:
        """Begin to load the scales of a unit and of a warp's groups, of two rows of each matrix."""
        parts, at, chunks = self.parts, self.at, self.parts.chunks
        row, group = parts.row(at.block, unit) + at.lane // 4, at.part * parts.groups + at.warp * chunks
        for index, source in enumerate(self.sources):
            for side in [*range(2)]:
                place = (index * 2 + side) * chunks
                if self.kind.transposed:
                    for c in [*range(chunks)]:
                        self.scales[place + c] = source[group + c, row + side * parts.half]
                else:
                    T.copy(source[row + side * parts.half, group : group + chunks], self.scales[place : place + chunks])

    @T.macro
    def load(self, a: Any) -> Any:
        """Return a lane's columns of all chunks, in the order of fields."""
        parts, at, order, group = self.parts, self.at, order_of(self.spec), self.spec.storage.group
        rows, width, count = parts.config.block_m, parts.groups * group, order.words * FIELDS
        columns = T.alloc_local((parts.chunks * count,), "float16")
        self.less = T.alloc_shared((parts.groups, rows), "float32")
        loaded, most = T.alloc_fragment((rows, width), a.dtype), T.alloc_fragment((rows,), a.dtype)
        tile = T.alloc_shared((rows, width + PADDING), a.dtype)
        powers, self.back = (T.alloc_shared((rows,), "float32") for _ in range(2))
        T.annotate_layout({x: T.make_linear_layout(x) for x in (self.less, tile)})
        for i, g, c in T.Parallel(rows, parts.groups, group):
            loaded[i, g * group + c] = a[i, at.part * parts.groups + g, c]
        T.copy(loaded, tile[0:rows, 0:width])
        T.reduce_absmax(loaded, most, dim=1)
        for i in T.Parallel(rows):
            exponent = lifting_exponent(T.cast(most[i], "float32"))
            powers[i] = float_of_exponent_bits(exponent)
            self.back[i] = lowering_power(order, exponent)
        row, power = at.lane // 4, powers[at.lane // 4]
        for chunk in [*range(parts.chunks)]:
            own = T.alloc_local((count,), a.dtype)
            begin = parts.group(at, chunk) * group + at.lane % 4 * count
            T.copy(tile[row, begin : begin + count], own)
            keep_columns(order, own, power, columns, chunk)
        self._take_off(columns)
        return columns

    @T.macro
    def _take_off(self, columns: Any) -> None:
        """Store the initial sums of each group: minus the offset of the fields times the group's columns of a.

        A product by equal fields computes it, with the rounding that the columns have. It also keeps ptxas from
        narrowing columns late, which would spill.
        """
        parts, at = self.parts, self.at
        fields, taken = T.alloc_local((16,), "float16"), -excess(self.spec)
        for i in [*range(16)]:
            fields[i] = taken * 2.0 ** (4 * (i // 8) - IN_PLACE)
        for chunk in [*range(parts.chunks)]:
            total = T.alloc_local((SUMS,), "float32")
            T.clear(total)
            products = 2 * order_of(self.spec).words
            for product in [*range(products)]:
                T.ptx_mma(
                    "float32", "m16n8k16", "row", "col", "fp16", "fp16", "fp32", fields, product % 2 * 8, columns,
                    (chunk * products + product) * 4, total, 0,
                )  # fmt: skip
            if at.lane < 4:
                T.copy(total[0:2], self.less[parts.group(at, chunk), at.lane * 2 : at.lane * 2 + 2])

    def begin(self, tile: Any) -> None:
        """Begin a tile: its scales come with units."""

    @T.macro
    def add(self, weights: Sequence[Any], columns: Any, chunk: int, tile: Any, own_unit: Any) -> None:
        """Add the scaled products of a chunk. Behind the last one of a unit, store its sums."""
        parts, at = self.parts, self.at
        if chunk == 0:
            self.sums = [T.alloc_local((SUMS,), "float32") for _ in weights]
        for index, matrix in enumerate(weights):
            total, own = T.alloc_local((SUMS,), "float32"), T.alloc_local((2,), "float32")
            T.copy(self.less[parts.group(at, chunk), at.lane % 4 * 2 : at.lane % 4 * 2 + 2], own)
            for s in [*range(SUMS)]:
                total[s] = own[s % 2]
            add_product(matrix, columns, chunk, total)
            for s in [*range(SUMS)]:
                scale = self.kind.value(self.scales[(index * 2 + s // 2) * parts.chunks + chunk], "float32")
                sums = self.sums[index]
                sums[s] = total[s] * scale if chunk == 0 else T.fma(total[s], scale, sums[s])
        if chunk == parts.chunks - 1:
            following = tile * parts.units_of_tile + own_unit + 1
            self.fetch(following)
            place = (own_unit * WARP + at.lane) * SUMS
            for tiles, sums in zip(self.joined, self.sums, strict=True):
                T.copy(sums, tiles[tile % 2, at.warp, place : place + SUMS])

    @T.macro
    def reduce_and_store(self, tile: Any, left: Any, store: Store) -> None:
        """Reduce the sums of all warps, and `store` those of a tile, of which `left` units exist.

        A thread joins two neighbouring sums of a lane.
        """
        parts, at, each = self.parts, self.at, WARP * SUMS // 2
        pairs, threads = parts.units_of_tile * each, parts.config.threads
        for number in [*range(-(-pairs // threads))]:
            pair = T.get_thread_binding() + number * threads
            if pair < pairs and pair // each < left:
                totals = [self._sum_pair(sums, tile % 2, pair) for sums in self.joined]
                lane, row = pair % each // 2, parts.row(at.block, tile * parts.units_of_tile + pair // each)
                for e in [*range(2)]:
                    i = lane % 4 * 2 + e
                    col = row + lane // 4 + pair % 2 * parts.half
                    store(i, col, [total[e] * self.back[i] for total in totals], True)

    @T.macro
    def _sum_pair(self, sums: Any, buffer: Any, pair: Any) -> Any:
        """Return two neighbouring sums of a lane, over all warps."""
        total, part = T.alloc_local((2,), "float32"), T.alloc_local((2,), "float32")
        T.clear(total)
        for warp in [*range(self.parts.warps)]:
            T.copy(sums[buffer, warp, pair * 2 : pair * 2 + 2], part)
            for e in [*range(2)]:
                total[e] = total[e] + part[e]
        return total
