# SPDX-License-Identifier: Apache-2.0
"""Multiply few rows by weights of 4 bits: slices of the columns take places of rows.

Tensor cores multiply tiles of 16 x 8 at least. For one row, seven of eight columns would be idle. Here K is cut into
slices of a group each. Row `j * S + s` of a tile is slice `s` of row `j` of the weights, for S slices. Column
`i * S + s` of the other operand is slice `s` of row `i` of a. A result is the sum of the product's entries where both
slices are the same. So a block has few rows of the weights. A warp reads S groups of one row at once, which lie side by
side in memory. Fields are multiplied as they lie in their words: see fields_in_place.py. May assume what
`dequant.prepare` describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import Machine, power_of_two as next_power, round_up, start_early, strided, typical
from torch_tile.kernels.footprint import Footprint, Tile
from torch_tile.kernels.gemm.fields_in_place import (
    COLUMNS,
    FIELDS,
    Order,
    dequantize_field,
    excess,
    float_of_exponent_bits,
    has_whole_groups,
    lifting_exponent,
    lowering_power,
    order_of,
    subtracts_offset,
    table_of,
)
from torch_tile.kernels.gemm.formats import TABLE
from torch_tile.kernels.gemm.packed import Problem, Spec, finish
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit

SLICES = 8  # columns of the smallest product of tensor cores
PADDING = 16  # numbers behind a line of the rows: neighbours of a column lie in other banks
HELD = 32  # numbers of the row that a thread has in registers at once


def words_of_threads(groups: int, width: int, threads: int) -> Any:
    """Return the layout in which a thread has all numbers that meet a word. Neighbouring words go to other threads."""
    lanes = lanes_of(width)
    rows, each = threads // lanes, width // (FIELDS * lanes)

    def place(i: Any, c: Any) -> tuple[Any, Any]:
        word = c // FIELDS
        return i % rows * lanes + word % lanes, (i // rows * each + word // lanes) * FIELDS + c % FIELDS

    return T.Fragment((groups, width), forward_fn=place)


@T.macro
def hold(
    a: Any, order: Order, shape: tuple[int, int, int], part: Any, rows: Any, powers: Any, sums: Any, factor: float,
    threads: int, norm: tuple[Any, Any],
) -> None:  # fmt: skip
    """Keep a part of each row in shared memory in the order of lanes. Each group has a power of two and a sum.

    The power brings the group into the range of float16 without loss: its largest number is 2^14 at least. Fields in
    upper bits count 16 times, so the numbers that they meet are divided by 16. `powers` take both back. `sums` are
    those of a group times `factor`; None if nothing is taken off fields. Groups with numbers above 2^117 overflow.
    `shape` is the number of rows, of a part's groups of each, and of slices. `norm` has the weight of a norm, which
    multiplies rows first, and the groups' sums of squares. Each may be None.
    """
    (count, groups, slices), width, (weight, squares) = shape, order.width, norm
    first, every = part * (groups // slices), count * groups  # of as many rounds of slices
    loaded, wide, ordered = (T.alloc_fragment((every, width), dtype) for dtype in (a.dtype, "float32", "float16"))
    layout = words_of_threads(every, width, threads)
    T.annotate_layout({wide: layout, ordered: layout})
    most, power = (T.alloc_fragment((every,), "float32") for _ in range(2))
    for i, g, c in T.Parallel(count, groups, width):
        loaded[i * groups + g, c] = a[i, first * slices + g, c]
    for i, c in T.Parallel(every, width):
        wide[i, c] = loaded[i, c]
    if squares is not None:
        squared, of_group = T.alloc_fragment(wide.shape, "float32"), T.alloc_fragment((every,), "float32")
        for i, c in T.Parallel(every, width):
            squared[i, c] = wide[i, c] * wide[i, c]
        T.reduce_sum(squared, of_group, dim=1)
    if weight is not None:
        factors = T.alloc_fragment((every, width), weight.dtype)
        for i, g, c in T.Parallel(count, groups, width):
            factors[i * groups + g, c] = weight[first * slices + g, c]
        for i, c in T.Parallel(every, width):
            wide[i, c] = wide[i, c] * T.cast(factors[i, c], "float32")
    T.reduce_absmax(wide, most, dim=1)
    if sums is not None:
        found = T.alloc_fragment((every,), "float32")
        T.reduce_sum(wide, found, dim=1)
    for i, g, s in T.Parallel(count, groups // slices, slices):
        own = i * groups + g * slices + s
        exponent = lifting_exponent(most[own])
        power[own] = float_of_exponent_bits(exponent)
        powers[first + g, i * slices + s] = lowering_power(order, exponent)
        if squares is not None:
            squares[first + g, i * slices + s] = of_group[own]
        if sums is not None:
            sums[first + g, i * slices + s] = found[own] * factor
    for i, c in T.Parallel(every, width):
        ordered[i, c] = wide[i, order.column(c)] * (power[i] * order.less(c))
    for i, g, s, c in T.Parallel(count, groups // slices, slices, width):
        rows[order.place(first + g, i * slices + s, c)] = ordered[i * groups + g * slices + s, c]


@T.macro
def root_of(squares: Any, columns: Any, eps: float) -> Any:
    """Return the reciprocal root of one row's mean of squares plus eps, from the sums of groups in shared memory."""
    of_groups, total = (T.alloc_fragment(shape, "float32") for shape in ((1, math.prod(squares.shape)), (1,)))
    for i, g, s in T.Parallel(1, *squares.shape):
        of_groups[i, g * squares.shape[1] + s] = squares[g, s]
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
        self.slices = config.splits
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
        slices = self.slices
        first = (step * len(self.groups) + number) * slices
        for r, i in T.Parallel(*words.shape, eviction_policy="no_allocate"):  # each is read once
            words[r, i] = self.given[0][col + r // slices, (first + r % slices) * self.words + i]
        for kind, source, found in zip(self.kinds, self.given[1:], factors, strict=True):
            if kind:
                for r, i in T.Parallel(*found.shape):
                    found[r, i] = source[kind.place(col + r // slices, first + r % slices + i)]


@T.macro
def multiply(
    config: Config, spec: Spec, rows: Any, factors: tuple[Any, Any], table: Any, matrices: Sequence[Any],
    cols: tuple[Any, Any], steps: Any,
) -> Any:  # fmt: skip
    """Compute the products of all pairs of slices of one tile. `cols` are the first rows of its weights, and of those
    of the next tile. The first step of that is loaded beside the last one of this tile.
    """
    products = list[Any]()
    for _ in matrices:
        product = T.alloc_fragment((config.block_n, columns_of(config)), "float32")
        T.clear(product)
        products.append(product)
    for step in T.serial(steps - 1):
        add_step(config, spec, rows, factors, table, matrices, products, step, (cols[0], step + 1))
    add_step(config, spec, rows, factors, table, matrices, products, steps - 1, (cols[1], 0))
    return products


@T.macro
def add_step(
    config: Config, spec: Spec, rows: Any, factors: tuple[Any, Any], table: Any, matrices: Sequence[Any],
    products: Sequence[Any], step: Any, following: tuple[Any, Any],
) -> None:  # fmt: skip
    """Add the products of a step, and begin to load the `following` one: its weights' first row, and its number."""
    order = order_of(spec)
    powers, sums = factors
    for number, _ in enumerate(matrices[0].groups):
        group = step * config.stages + number
        loaded = T.alloc_fragment((order.words, columns_of(config), COLUMNS), rows.dtype)
        columns = T.alloc_fragment((columns_of(config), order.width), rows.dtype)
        for w, s, c in T.Parallel(*loaded.shape):
            loaded[w, s, c] = rows[group * order.words + w, s * COLUMNS + c]
        for s, c in T.Parallel(*columns.shape):
            word, place = order.held(c)
            columns[s, c] = loaded[word, s, place]
        for matrix, product in zip(matrices, products, strict=True):
            words, scales, zeros = matrix.groups[number]
            scale, zero = kept(spec.storage.scale, scales), kept(spec.storage.zero, zeros)
            weights = T.alloc_fragment((config.block_n, order.width), rows.dtype)
            for r, c in T.Parallel(*weights.shape):
                word, place, half = order.field(c)
                lane = r % 8 * 4 + c % 8 // 2
                weights[r, c] = dequantize_field(spec, words[r, word], place, half, table, lane)
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
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)` for few rows a, which are given as groups.

    A block holds `held` groups of each row. A product has `config.splits` slices of K. `config.blocks` blocks take one
    tile of the weights after the other. A step has `config.stages` groups of a slice.
    """
    slices, storage, columns = config.splits, spec.storage, columns_of(config)
    rows, order = config.block_n // slices, order_of(spec)
    m, n, _, _, types = spec.types()
    groups, norm = T.dynamic("pieces"), spec.norm
    if norm and norm.weight:
        types = [*types, T.Tensor((groups, storage.group), norm.weight)]

    @T.prim_func
    def row_dequant_gemm(
        a: strided("a", (m, groups, storage.group), spec.product.dtype, multiple=spec.product.vector),
        *operands: types,
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
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
            table = table_of(spec)
            ordered = T.alloc_shared((held // slices * order.words, columns * COLUMNS + PADDING), "float16")
            T.annotate_layout({ordered: T.make_linear_layout(ordered)})
            powers, less, squares = (
                T.alloc_shared((held // slices, columns), "float32") if x else None
                for x in (True, subtracts_offset(spec), norm)
            )
            shape = config.block_m, min(held, part_of(config)), slices
            factor = -1.0 if storage.zero else -excess(spec)
            for part in T.serial(held // shape[1]):
                hold(a, order, shape, part, ordered, powers, less, factor, config.threads, (weight, squares))
            root = root_of(squares, groups * storage.group, norm.eps) if norm else None
            for iteration in T.serial(T.ceildiv(T.ceildiv(n, rows) - block, config.blocks)):
                col = (iteration * config.blocks + block) * rows
                cols = col, col + config.blocks * rows
                steps = T.ceildiv(groups, slices * config.stages)
                products = multiply(config, spec, ordered, (powers, less), table, matrices, cols, steps)
                sums = [own_slices(product, slices) for product in products]
                for row, j in T.Parallel(config.block_m, rows):
                    if row < m and col + j < n:
                        values = [total[j, row] * root if norm else total[j, row] for total in sums]
                        out[row, col + j] = finish(spec, values, given, row, col + j)

    return row_dequant_gemm


@T.macro
def own_slices(product: Any, slices: int) -> Any:
    """Add up the entries of a product where both slices are the same, for each row of a."""
    rows, count = product.shape[0] // slices, product.shape[1] // slices
    shapes = (rows, slices, count, slices), (rows, slices, count), (rows, count)
    own, found, whole = (T.alloc_fragment(shape, "float32") for shape in shapes)
    for j, s, i, c in T.Parallel(*own.shape):
        own[j, s, i, c] = T.if_then_else(s == c, product[j * slices + s, i * slices + c], 0.0)
    T.reduce_sum(own, found, dim=3)
    T.reduce_sum(found, whole, dim=1)
    return whole


def fits(spec: Spec, problem: Problem, machine: Machine) -> bool:
    """Return whether this kernel can compute a product: of few rows by int32 words whose groups have a scale each."""
    most = 1 if spec.norm else 2 if spec.storage.coded else max(SLICES_OF)
    return has_whole_groups(spec, problem, machine) and problem.m <= most


def run(spec: Spec, tensors: Sequence[torch.Tensor], out: torch.Tensor, config: Config, machine: Machine) -> None:
    """Launch the product of few rows and the other operands of `dequant.prepare` into `out`.

    The weight of a norm comes last among these.
    """
    a, *operands = tensors
    groups = a.unflatten(1, (-1, spec.storage.group))
    if spec.norm and spec.norm.weight:
        operands[-1] = operands[-1].contiguous().view(groups.shape[1:])
    held = groups_ordered(config, groups.shape[1])
    machine.kernel(row_dequant_matmul)(config, spec, held)(groups, *operands, out)


def columns_of(config: Config) -> int:
    """Return the columns of a product: slices of all rows."""
    return config.block_m * config.splits


# Tilings. They change the speed, never the result.

ROWS, THREADS = 128, 256  # of a tile, and of a block
AHEAD = 256  # columns of a slice in a step, of all matrices together
BLOCKS = (1, 2 * THREADS), (3, THREADS), (2, THREADS)  # of a multiprocessor: their number, and threads
SLICES_OF = {2: (4, 8), 4: (2, 4, 8), 8: (2,)}  # of K, by rows of a
MOST_AHEAD = 16  # columns of a product for which registers have room beside two groups ahead
LEAST_BUSY = {2: 0.7, 4: 0.7, 8: 0.84}  # share of multiprocessors' time in which tiles keep them busy, by rows of a
SMALL = 1 << 25  # weights: fewer are multiplied by codes in any case
LARGE, LEAST_BUSY_LARGE = 1 << 27, 0.95  # weights whose memory bounds the time, and that share for more
LONG_ROW = 8192  # columns from which on several blocks of a multiprocessor put the row into order for too long


def lanes_of(width: int) -> int:
    """Return how many threads share a group of the row while they put it into order: lanes of one warp."""
    words = width // FIELDS
    return words & -words


def least_part(config: Config) -> int:
    """Return the fewest groups of a row that split evenly among the threads of a block."""
    return max(config.splits, -(-config.threads // (lanes_of(config.block_k) * config.block_m)))


def part_of(config: Config) -> int:
    """Return how many groups of each row a block puts into order at once: few enough for registers."""
    least = least_part(config)
    return least * max(1, HELD * config.threads // (least * config.block_k * config.block_m))


def groups_ordered(config: Config, groups: int) -> int:
    """Return how many groups of a row a block holds in the order of lanes: those of whole steps, in whole parts."""
    whole = round_up(groups, math.lcm(config.splits * config.stages, least_part(config)))
    return round_up(whole, min(whole, part_of(config)))


def config_for(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of a product that `fits`. None if no block can hold the rows. Also if tiles of several rows or
    of codes would leave multiprocessors idle.

    A multiprocessor has one block of all warps, or two or three. The choice leaves few rows to the fullest one.
    """
    if problem.m > 1:
        return _config_of_rows(problem, spec, machine)
    group, n, long, coded = spec.storage.group, typical(problem).n, problem.k >= LONG_ROW, spec.storage.coded
    ahead = max(1, AHEAD // group // problem.products)
    if coded and spec.norm:
        ahead = max(1, ahead // problem.products)  # else ptxas spills
    shapes: tuple[tuple[int, int], ...] = BLOCKS[:2] if coded else BLOCKS
    configs = [
        Config(
            1, threads // 2, group, threads, max(1, ahead // 2) if coded and count == 3 else ahead, SLICES,
            blocks=count * machine.num_sms, resident=count,
        )
        for count, threads in shapes
    ]  # fmt: skip
    groups = problem.k // group
    fitting = [config for config in configs if blocks_fit(config, spec, groups, machine)]
    if not coded:
        alone = problem.products == 1 and not long

        def rows(config: Config) -> tuple[int, int]:
            """Return the rows of weights of the fullest multiprocessor, by tiles in turn and by blocks."""
            return _rows_of_tiles(config, n, machine.num_sms) if alone else 0, _rows_of_fullest(config, n)

        return min(fitting, key=rows, default=None)
    least = 0.5 if long else 0.75 if n * problem.k * problem.products > SMALL else 0.0
    busy = {config: _busy(config, n, groups, machine) for config in fitting}
    return max((config for config in fitting if busy[config] >= least), key=lambda config: busy[config], default=None)


def _busy(config: Config, n: int, groups: int, machine: Machine) -> float:
    """Estimate the share of the fullest multiprocessor's time in which all of them have rows and groups."""
    steps = round_up(groups, config.splits * config.stages)
    return n * groups / (_rows_of_fullest(config, n) * machine.num_sms * steps)


def _config_of_rows(problem: Problem, spec: Spec, machine: Machine) -> Config | None:
    """Choose the tiling of several rows. Its slices leave few rows of weights to the fullest multiprocessor. Each row
    costs more if the product has more columns.
    """
    group, n, rows = spec.storage.group, typical(problem).n, next_power(problem.m)
    ahead, threads = min(2, max(1, AHEAD // group // problem.products)), 2 * THREADS
    configs = [
        Config(
            rows, threads // 2, group, threads, 1 if rows * slices > MOST_AHEAD else ahead, slices,
            blocks=machine.num_sms,
        )
        for slices in SLICES_OF[rows]
        if rows * slices <= MOST_AHEAD or problem.k < LONG_ROW
    ]  # fmt: skip
    large = n * problem.k * problem.products > LARGE
    if large and spec.storage.coded:
        return None

    def least(config: Config) -> float:
        return LEAST_BUSY_LARGE if large or columns_of(config) > MOST_AHEAD else LEAST_BUSY[rows]

    fitting = [
        config for config in configs
        if n >= least(config) * _rows_of_fullest(config, n) * machine.num_sms
        and blocks_fit(config, spec, problem.k // group, machine)
    ]  # fmt: skip
    return min(fitting, key=lambda c: _rows_of_fullest(c, n) * (SLICES + columns_of(c)), default=None)


def _rows_of_tiles(config: Config, n: int, multiprocessors: int) -> int:
    """Return how many rows of weights the fullest multiprocessor has if tiles go to one after the other."""
    rows = config.block_n // config.splits
    return -(-n // (rows * multiprocessors)) * rows


def _rows_of_fullest(config: Config, n: int) -> int:
    """Return how many rows of weights the fullest multiprocessor has if its blocks take as many tiles."""
    rows = config.block_n // config.splits
    return -(-n // (rows * config.blocks)) * config.resident * rows


def blocks_fit(config: Config, spec: Spec, groups: int, machine: Machine) -> bool:
    """Return whether a multiprocessor has shared memory for all of its blocks, whose rows have so many groups."""
    one = footprint(config, spec, groups_ordered(config, groups)).bytes
    return config.resident * one <= machine.target.shared_limit


def footprint(config: Config, spec: Spec, held: int, bulk: bool = False) -> Footprint:
    """Compute the shared memory of the groups of the rows, and of their powers, sums and squares."""
    factors = 1 + subtracts_offset(spec) + bool(spec.norm)
    columns, rounds = columns_of(config), held // config.splits
    lines = Tile(rounds * config.block_k // COLUMNS, columns * COLUMNS + PADDING, 16)
    table = (Tile(1, TABLE, 16),) if spec.storage.coded else ()
    return Footprint((lines, Tile(factors * rounds, columns, 32), *table), bulk)
