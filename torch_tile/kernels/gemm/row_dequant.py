# SPDX-License-Identifier: Apache-2.0
"""Multiply one row by weights of 4 bits: eight slices of the row's columns take the places of eight rows.

Tensor cores multiply tiles of 16 x 8 at least. For one row, seven of eight columns would be idle. Here K is cut into
slices of a group each. Row `j * 8 + s` of a tile is slice `s` of row `j` of the weights. Column `s` of the other
operand is slice `s` of a. A result is the sum of the product's entries where both slices are the same. So a block has
few rows of the weights. A warp reads eight groups of one row at once, which lie side by side in memory.
Fields are multiplied as they lie in their words: a masked half of a word is a float16 below the least normal one.
May assume what `dequant.prepare` describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, round_up, start_early, strided, typical
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.gemm.packed import SIGNS, Problem, Spec, finish
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.measured_rules import verdict

SLICES = 8  # columns of the smallest product of tensor cores
FIELDS = 8  # of a word
COLUMNS = 4 * FIELDS  # of a word of each lane that shares a row
LINE = SLICES * COLUMNS + 16  # numbers in a line of the row, padded: neighbours of a column lie in other banks
HELD = 32  # numbers of the row that a thread has in registers at once
# Sums of two exponents as float32 stores them: of a group's largest number and its factor, of the factor and what takes
# it back. Then the largest factor's exponent.
LIFTED, BACK, MOST = 268, 278, 253


@dataclass(frozen=True)
class Order:
    """The order in which lanes take the `width` columns of a slice that share a scale.

    Sums have no order. Four lanes share a row of an operand of mma.sync. Each takes a quarter of the columns, so that
    it takes whole words. Lane l holds slots 2 l, 2 l + 1, 2 l + 8 and 2 l + 9 of 16. Both of a pair are the same field
    of the halves of a word. A product takes the lower fields of a word's bytes, the next product the upper ones.
    """

    width: int
    high_first: bool

    @property
    def words(self) -> int:
        """Number of a lane's words."""
        return self.width // COLUMNS

    def field(self, slot: Any) -> tuple[Any, Any, Any]:
        """Return the word of a slot, its field there, and the half that has it."""
        return slot % 8 // 2 * self.words + slot // COLUMNS, slot // 8 % 2 * 2 + slot // 16 % 2, slot % 2

    def held(self, slot: Any) -> tuple[Any, Any]:
        """Return where `hold` puts the number of a slot: the word of its lane, and the place there."""
        return slot // COLUMNS, slot % 8 // 2 * FIELDS + slot // 16 % 2 * 4 + slot // 8 % 2 * 2 + slot % 2

    def place(self, group: Any, s: Any, place: Any) -> tuple[Any, Any]:
        """Return where the row has a place of a slice's group."""
        word = place // FIELDS
        line = group * self.words + word % self.words
        return line, s * COLUMNS + word // self.words * FIELDS + place % FIELDS

    def column(self, place: Any) -> Any:
        """Return the column whose number `hold` puts at a place of a word."""
        upper = place % FIELDS // 4
        return place // FIELDS * FIELDS + place % 2 * 4 + place // 2 % 2 * 2 + (1 - upper if self.high_first else upper)


def power_of_two(exponent: Any) -> Any:
    """Return the float32 with such an exponent in its bits, in a kernel."""
    return T.float_from_bits(exponent << 23, 0x7FFFFFFF, 0)


def excess(spec: Spec) -> float:
    """Return what is taken off each field as an unsigned number, besides its zero."""
    return float(spec.storage.offset + (8 if spec.storage.signed else 0))


def words_of_threads(groups: int, width: int, threads: int) -> Any:
    """Return the layout in which a thread has all numbers that meet a word. Neighbouring words go to other threads."""
    lanes = lanes_of(width)
    rows, each = threads // lanes, width // (FIELDS * lanes)

    def place(i: Any, c: Any) -> tuple[Any, Any]:
        word = c // FIELDS
        return i % rows * lanes + word % lanes, (i // rows * each + word // lanes) * FIELDS + c % FIELDS

    return T.Fragment((groups, width), forward_fn=place)


def unsigned(spec: Spec, word: Any) -> Any:
    """Return a word whose fields are natural numbers: signed ones have their signs turned over."""
    return word ^ SIGNS if spec.storage.signed else word


@T.macro
def hold(
    a: Any, order: Order, row: Any, powers: Any, sums: Any, factor: float, threads: int, norm: tuple[Any, Any]
) -> None:
    """Keep the row in shared memory in the order of lanes. Each group has a power of two and a sum of its own.

    The power brings the group into the range of float16 without loss: its largest number is 2^14 at least. Fields in
    upper bits count 16 times, so the numbers that they meet are divided by 16. `powers` take both back. `sums` are
    those of a group times `factor`; None if nothing is taken off fields. Groups with numbers above 2^117 overflow.
    `norm` has the weight of a norm, which multiplies the row first, and the groups' sums of squares. Each may be None.
    """
    weight, squares = norm
    held, width = powers.shape[0] * SLICES, order.width
    groups = min(held, part_of(width, threads))
    for part in T.serial(held // groups):
        first = part * (groups // SLICES)  # of as many rounds of slices
        loaded, wide, ordered = (T.alloc_fragment((groups, width), dtype) for dtype in (a.dtype, "float32", "float16"))
        layout = words_of_threads(groups, width, threads)
        T.annotate_layout({wide: layout, ordered: layout})
        most, power = (T.alloc_fragment((groups,), "float32") for _ in range(2))
        T.copy(a[first * SLICES, 0], loaded)
        for i, c in T.Parallel(groups, width):
            wide[i, c] = loaded[i, c]
        if squares is not None:
            squared, of_group = T.alloc_fragment(wide.shape, "float32"), T.alloc_fragment((groups,), "float32")
            for i, c in T.Parallel(groups, width):
                squared[i, c] = wide[i, c] * wide[i, c]
            T.reduce_sum(squared, of_group, dim=1)
            for i in T.Parallel(groups):
                squares[first * SLICES + i] = of_group[i]
        if weight is not None:
            factors = T.alloc_fragment((groups, width), weight.dtype)
            T.copy(weight[first * SLICES, 0], factors)
            for i, c in T.Parallel(groups, width):
                wide[i, c] = wide[i, c] * T.cast(factors[i, c], "float32")
        T.reduce_absmax(wide, most, dim=1)
        if sums is not None:
            found = T.alloc_fragment((groups,), "float32")
            T.reduce_sum(wide, found, dim=1)
        for i, s in T.Parallel(groups // SLICES, SLICES):
            exponent = T.max(T.min(LIFTED - (T.reinterpret(most[i * SLICES + s], "int32") >> 23), MOST), BACK - 254)
            power[i * SLICES + s] = power_of_two(exponent)
            powers[first + i, s] = power_of_two(BACK - exponent)
            if sums is not None:
                sums[first + i, s] = found[i * SLICES + s] * factor
        for i, c in T.Parallel(groups, width):
            ordered[i, c] = wide[i, order.column(c)] * (power[i] * T.if_then_else(c % FIELDS < 4, 1.0, 1 / 16))
        for i, s, c in T.Parallel(groups // SLICES, SLICES, width):
            row[order.place(first + i, s, c)] = ordered[i * SLICES + s, c]


@T.macro
def root_of(squares: Any, columns: Any, eps: float) -> Any:
    """Return the reciprocal root of the mean of squares plus eps, from the sums of groups in shared memory."""
    of_groups, total = (T.alloc_fragment(shape, "float32") for shape in ((1, *squares.shape), (1,)))
    for i, g in T.Parallel(*of_groups.shape):
        of_groups[i, g] = squares[g]
    T.reduce_sum(of_groups, total, dim=1)
    return T.rsqrt(total[0] / T.cast(columns, "float32") + eps)


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
    config: Config, spec: Spec, row: Any, factors: tuple[Any, Any], matrices: Sequence[Any], cols: tuple[Any, Any],
    steps: Any,
) -> Any:  # fmt: skip
    """Compute the products of all pairs of slices of one tile. `cols` are the first rows of its weights, and of those
    of the next tile. The first step of that is loaded beside the last one of this tile.
    """
    products = list[Any]()
    for _ in matrices:
        product = T.alloc_fragment((config.block_n, SLICES), "float32")
        T.clear(product)
        products.append(product)
    for step in T.serial(steps - 1):
        add_step(config, spec, row, factors, matrices, products, step, (cols[0], step + 1))
    add_step(config, spec, row, factors, matrices, products, steps - 1, (cols[1], 0))
    return products


@T.macro
def add_step(
    config: Config, spec: Spec, row: Any, factors: tuple[Any, Any], matrices: Sequence[Any], products: Sequence[Any],
    step: Any, following: tuple[Any, Any],
) -> None:  # fmt: skip
    """Add the products of a step, and begin to load the `following` one: its weights' first row, and its number."""
    order = Order(spec.storage.group, spec.storage.high_first)
    powers, sums = factors
    for number, _ in enumerate(matrices[0].groups):
        group = step * config.stages + number
        loaded = T.alloc_fragment((order.words, SLICES, COLUMNS), row.dtype)
        columns = T.alloc_fragment((SLICES, order.width), row.dtype)
        for w, s, c in T.Parallel(*loaded.shape):
            loaded[w, s, c] = row[group * order.words + w, s * COLUMNS + c]
        for s, c in T.Parallel(*columns.shape):
            word, place = order.held(c)
            columns[s, c] = loaded[word, s, place]
        for matrix, product in zip(matrices, products, strict=True):
            words, scales, zeros = matrix.groups[number]
            scale, zero = kept(spec.storage.scale, scales), kept(spec.storage.zero, zeros)
            weights = T.alloc_fragment((config.block_n, order.width), row.dtype)
            for r, c in T.Parallel(*weights.shape):
                word, *place = order.field(c)
                weights[r, c] = T.cast(T.nibble_in_place(unsigned(spec, words[r, word]), *place), row.dtype)
            matrix.fetch(number, *following)
            total = T.alloc_fragment(product.shape, "float32")
            T.gemm(weights, columns, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for r, s in T.Parallel(*product.shape):
                found = total[r, s] * powers[group, s]
                if zero is not None:
                    found = found + sums[group, s] * (T.cast(zero[r, 0], "float32") + excess(spec))
                elif sums is not None:
                    found = found + sums[group, s]
                product[r, s] += found * T.cast(scale[r, 0], "float32")


@T.macro
def kept(kind: Any, stored: Any) -> Any:
    """Keep the scales or zeros of a group of each slice while the next ones are loaded. None if there are none."""
    if stored is None:
        return None
    found = T.alloc_fragment(stored.shape, "float32" if kind.power else stored.dtype)
    for r, i in T.Parallel(*stored.shape):
        found[r, i] = kind.value(stored[r, i], found.dtype)
    return found


@library_jit
def row_dequant_matmul(config: Config, spec: Spec, held: int) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for one row a, given as groups, of which a block holds
    `held`.

    `config.blocks` blocks take one tile of the weights after the other. A step has `config.stages` groups of a slice.
    """
    rows, storage = config.block_n // SLICES, spec.storage
    m, n, _, _, types = spec.types()
    groups, norm = T.dynamic("pieces"), spec.norm
    if norm and norm.weight:
        types = [*types, T.Tensor((groups, storage.group), norm.weight)]

    @T.prim_func
    def row_dequant_gemm(
        a: strided("a", (groups, storage.group), spec.product.dtype, multiple=spec.product.vector), *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):  # fmt: skip
        with T.Kernel(config.blocks, threads=config.threads) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            start_early()
            weight = operands[-1] if norm and norm.weight else None
            given = operands[:-1] if norm and norm.weight else operands
            bs, scales, zeros, _ = spec.sort(given)
            nothing = [None] * len(bs)
            stored = zip(bs, scales or nothing, zeros or nothing, strict=True)
            words, kinds = (storage.words, storage.group // storage.fields), (storage.scale, storage.zero)
            matrices = [Fetched(config, words, kinds, each) for each in stored]
            for matrix in matrices:
                for number, _ in enumerate(matrix.groups):
                    matrix.fetch(number, block * rows, 0)
            order = Order(storage.group, storage.high_first)
            row = T.alloc_shared((held // SLICES * order.words, LINE), "float16")
            T.annotate_layout({row: T.make_linear_layout(row)})
            less = bool(storage.zero) or excess(spec) != 0.0
            factors = [T.alloc_shared((held // SLICES, SLICES), "float32") if x else None for x in (True, less)]
            squares = T.alloc_shared((held,), "float32") if norm else None
            factor = -1.0 if storage.zero else -excess(spec)
            hold(a, order, row, *factors, factor, config.threads, (weight, squares))
            root = root_of(squares, groups * storage.group, norm.eps) if norm else None
            for iteration in T.serial(T.ceildiv(T.ceildiv(n, rows) - block, config.blocks)):
                col = (iteration * config.blocks + block) * rows
                cols = col, col + config.blocks * rows
                steps = T.ceildiv(groups, SLICES * config.stages)
                products = multiply(config, spec, row, factors, matrices, cols, steps)
                sums = [own_slices(product) for product in products]
                for j in T.Parallel(rows):
                    if col + j < n:
                        values = [sum_[j] * root if norm else sum_[j] for sum_ in sums]
                        out[0, col + j] = finish(spec, values, given, 0, col + j)

    return row_dequant_gemm


@T.macro
def own_slices(product: Any) -> Any:
    """Add up the entries of a product where both slices are the same."""
    rows = product.shape[0] // SLICES
    own, found, whole = (
        T.alloc_fragment(shape, "float32") for shape in ((rows, SLICES, SLICES), (rows, SLICES), (rows,))
    )
    for j, s, c in T.Parallel(*own.shape):
        own[j, s, c] = T.if_then_else(s == c, product[j * SLICES + s, c], 0.0)
    T.reduce_sum(own, found, dim=2)
    T.reduce_sum(found, whole, dim=1)
    return whole


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of one row by words of int32 whose groups have a scale each."""
    storage = spec.storage
    return (
        not isinstance(problem.m, torch.SymInt)  # another call may have more rows
        and not isinstance(problem.k, torch.SymInt)
        and problem.m == 1
        and machine.is_gpu
        and problem.aligned
        and storage.words == torch.int32
        and not storage.coded
        and LEAST_GROUP <= storage.group <= AHEAD
        and storage.group % COLUMNS == 0
        and bool(storage.scale)
        and problem.k % storage.group == 0
        and verdict("dequant.slices", machine.target, False)
    )


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of one row and the other operands of `dequant.prepare` into `out`.

    The weight of a norm comes last among these.
    """
    a, *operands = tensors
    groups = a.view(-1, spec.storage.group)
    if spec.norm and spec.norm.weight:
        operands[-1] = operands[-1].contiguous().view(groups.shape)
    machine.kernel(row_dequant_matmul)(config, spec, groups_ordered(config, len(groups)))(groups, *operands, out)


# Tilings. They change the speed, never the result.

ROWS, THREADS = 128, 256  # of a tile, and of a block
LEAST_GROUP = 64  # columns that share a scale: a product of tensor cores for each
AHEAD = 256  # columns of a slice in a step, of all matrices together
BLOCKS = (2, THREADS), (3, THREADS), (1, 2 * THREADS)  # of a multiprocessor: their number, and threads
LONG_ROW = 8192  # columns from which on several blocks of a multiprocessor put the row into order for too long


def groups_held(config: Config, groups: int) -> int:
    """Return how many groups of a row whole steps take."""
    return round_up(groups, SLICES * config.stages)


def lanes_of(width: int) -> int:
    """Return how many threads share a group of the row while they put it into order: lanes of one warp."""
    words = width // FIELDS
    return words & -words


def least_part(width: int, threads: int) -> int:
    """Return the fewest groups of which all threads of a block have as many numbers."""
    return max(SLICES, threads // lanes_of(width))


def part_of(width: int, threads: int) -> int:
    """Return how many groups a block puts into order at once: few enough for registers."""
    least = least_part(width, threads)
    return least * max(1, HELD * threads // (least * width))


def groups_ordered(config: Config, groups: int) -> int:
    """Return how many groups of a row a block holds in the order of lanes: those of whole steps, in whole parts."""
    width, threads = config.block_k, config.threads
    whole = round_up(groups, math.lcm(SLICES * config.stages, least_part(width, threads)))
    return round_up(whole, min(whole, part_of(width, threads)))


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None if no block can hold the row.

    Blocks share a multiprocessor by twos or threes, whichever leaves fewer rows to the fullest one. Several products
    take three, if each has rows. If the row is long, one block of twice the threads takes the place of two.
    """
    group, n, long = spec.storage.group, typical(problem).n, problem.k >= LONG_ROW
    stages = max(1, AHEAD // group // problem.products)
    configs = [
        Config(SLICES, threads // 2, group, threads, stages, blocks=count * machine.num_sms, resident=count)
        for count, threads in (reversed(BLOCKS) if long else BLOCKS)
    ]
    if problem.products > 1 and stages == 1 and not long and n * SLICES > 2 * machine.num_sms * ROWS:
        configs = [config for config in configs if config.resident == 3]
    fitting = [config for config in configs if blocks_fit(config, spec, problem.k // group, machine)]
    return min(fitting, key=lambda config: _rows_of_fullest(config, n), default=None)


def _rows_of_fullest(config: Config, n: int) -> int:
    """Return how many rows of weights the fullest multiprocessor has if its blocks take as many tiles."""
    rows = config.block_n // SLICES
    return -(-n // (rows * config.blocks)) * config.resident * rows


def blocks_fit(config: Config, spec: Spec, groups: int, machine: Machine) -> bool:
    """Return whether a multiprocessor has shared memory for all of its blocks, whose rows have so many groups."""
    one = footprint(config, spec, groups_ordered(config, groups)).bytes
    return config.resident * one <= machine.target.shared_limit


def footprint(config: Config, spec: Spec, held: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of the groups of a row, and of their powers, sums and squares."""
    factors = 1 + (1 if spec.storage.zero or excess(spec) else 0) + (1 if spec.norm else 0)
    return Footprint((Tile(held // SLICES * config.block_k // COLUMNS, LINE, 16), Tile(factors, held, 32)), bulk)
