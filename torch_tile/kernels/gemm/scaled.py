# SPDX-License-Identifier: Apache-2.0
"""Products of float8 or int8 matrices with scales and a fused epilogue: `epilogue((a * scale_a) @ (b * scale_b), aux)`.

Sums are of two levels: a product of 128 columns of a is summed by tensor cores, scaled, and added to a float32 sum.
Tensor cores of Hopper sum float8 products in fewer bits than float32 has (DeepSeek-V3, arXiv:2412.19437, 3.3.2). Those
of int8 are exact: they are summed in int32.
Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    KEPT_CHOICES,
    Machine,
    compute_dtype,
    dense_last,
    dynamic,
    entry_function,
    is_unit,
    machine_of,
    power_of_two,
    round_up,
    strided,
    typical,
    vector_of,
)
from torch_tile.kernels.epilogue.program import evaluate
from torch_tile.kernels.footprint import Footprint, Part, Tile, most_stages
from torch_tile.kernels.gemm import gemm, int8_rows, spec as gemm_spec
from torch_tile.kernels.gemm.args import ScaledGemmArgs
from torch_tile.kernels.gemm.gemm import place_of, tile_of
from torch_tile.kernels.gemm.padded_rows import START as BULK_START, in_padded_rows
from torch_tile.kernels.gemm.tiling import MOST_TILES, Config, Panel, buffers_of, panels_of, powers_within
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.measured_rules import verdict

LAST = 2**31 - 1  # index of a row or column, which int32 holds
FEW_SCALES = 8  # of the columns of a tile: each thread loads them all
BULK_TILE = 32  # numbers of float32 at a multiple of which bulk copies begin in shared memory
GROUP = 128  # columns of a that share a scale, rows of a block of scales, and the step of the kernels


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Repeat `[1, M or M / 128, 1 or K / 128]` scales to `[M, K]`; divisions are rounded up."""
    for dim, size in enumerate((rows, columns)):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(GROUP, dim).narrow(dim, 0, size)
    return scale.expand(rows, columns)


def fields_of(b: torch.Tensor, bits: int, offset: int) -> torch.Tensor:
    """Unpack `[K * bits / 8, N]` bytes to int8 `[K, N]`, less `offset`, lowest bits first; 8 bits stay as they are."""
    if bits == 8:
        return b
    shifted = torch.stack([(b << (8 - bits - at)) >> (8 - bits) for at in range(0, 8, bits)], -2)
    return (shifted.flatten(-3, -2).to(torch.int16) - offset).to(torch.int8)


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.scaled_gemm` in float32 (float64 for float64 `a`), rounded once, b by `fields_of`."""
    args: ScaledGemmArgs[torch.Tensor] = ScaledGemmArgs(*given, **named)
    compute, (m, k), n = compute_dtype(args.a.dtype), args.a.shape, args.b.shape[1]
    wide = args.a.to(compute) * spread(args.scale_a.to(compute), m, k)
    b = fields_of(args.b, args.bits, args.offset)
    product = wide @ (b.to(compute) * spread(args.scale_b.to(compute), k, n))
    out = evaluate(args.epilogue, [product], [x.to(compute) for x in gemm.aux_views(args.aux, args.kinds)])
    return out.to(args.dtype).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Scale:
    """How the scales `[..., rows, groups]` of an operand lie in memory.

    shared: rows that share one (0: all). grouped: runs of 128 columns have their own. transposed: `[groups, rows]`.
    bulk: transposed, for each row, and bulk copies can read them. along: not transposed, and bulk copies can read those
    of neighbouring runs.
    """

    shared: int
    grouped: bool
    transposed: bool
    bulk: bool = False
    along: bool = False

    @staticmethod
    def of(scale: torch.Tensor, rows: int, columns: int, bulk: bool = False) -> Scale:
        """Describe scales of `rows x columns` numbers. `bulk`: for bulk copies, which need rows of whole 16 bytes."""
        transposed = is_unit(scale.mT) and not is_unit(scale)
        shared = 0 if scale.shape[-2] == 1 else 1 if scale.shape[-2] == rows else GROUP
        grouped = columns > GROUP and scale.shape[-1] > 1
        lines = scale.mT if transposed else scale
        able = bulk and grouped and is_unit(lines) and vector_of((lines,), ()) > 1
        bulk = able and transposed and shared == 1
        along = able and not transposed
        return Scale(shared, grouped, transposed, bulk, along)

    @property
    def wanted(self) -> Scale:
        """Return how bulk copies want these scales to lie: rows with scales of their own along memory, else runs."""
        own = self.shared == 1
        return replace(self, transposed=own, bulk=own, along=not own) if self.grouped else self

    def in_order(self, scale: torch.Tensor) -> torch.Tensor:
        """Return scales with the dimension last that this says is dense."""
        return scale.mT if self.transposed else scale

    def place(self, row: Any, group: Any) -> tuple[Any, Any]:
        """Return the indices of the scale of a row and a group."""
        row = row // self.shared if self.shared else 0
        group = group if self.grouped else 0
        return (group, row) if self.transposed else (row, group)

    def each(self, rows: int) -> int:
        """Return how many rows of a tile of `rows` rows surely have one scale; a tile starts at a multiple of them."""
        return math.gcd(self.shared, rows)  # all rows if all share one

    def loaded(self, rows: int, anywhere: bool) -> int:
        """Count the scales that are loaded for a tile of `rows` rows. The tile starts at a multiple of them, or
        `anywhere`.

        Bulk copies begin at a multiple of `BULK_START`. So they bring scales before and behind such a tile, too.
        """
        if self.runs(rows):
            return BULK_TILE
        count = rows // self.each(rows)
        return round_up(count, BULK_TILE) + (BULK_TILE if anywhere else 0) if self.bulk else count

    def runs(self, rows: int) -> bool:
        """Return whether a bulk copy brings a tile's only scale, with those of neighbouring runs."""
        return self.along and self.each(rows) == rows

    def type(self, name: str, *matrices: Any) -> Any:
        """Return the parameter's type, with the sizes of dimensions in front."""
        vector = BULK_START if self.bulk or self.along else 1
        sizes = T.dynamic(f"{name}_rows"), T.dynamic(f"{name}_groups")
        shape = (*matrices, *(sizes[::-1] if self.transposed else sizes))
        return strided(name, shape, torch.float32, multiple=vector)


class Piece(NamedTuple):
    """Columns of a tile that lie side by side in the result: their first place in the tile, how many, and the column of
    the first.
    """

    start: int
    width: int
    col: Any = None


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of the kernel besides its `Config`: dtypes, the product's form, both operands' scales, and how
    b's bytes hold fields of `bits`, from which `offset` is subtracted. Whether a kernel in front writes scales
    (`copied`), for which products of one matrix wait.
    """

    product: gemm_spec.Spec
    stored: tuple[torch.dtype, torch.dtype]
    operands: tuple[torch.dtype, torch.dtype]
    scales: tuple[Scale, Scale]
    bits: int = 8
    offset: int = 0
    pieces: int = 1  # elements in 16 bytes of the result, whose rows are runs of them
    copied: bool = False

    @property
    def fields(self) -> int:
        """Return how many columns a byte of b holds."""
        return 8 // self.bits

    @property
    def sums(self) -> torch.dtype:
        """Return the dtype in which runs of 128 columns are summed."""
        return torch.float32 if self.operands[0].is_floating_point else torch.int32

    def split(self, config: Config) -> list[Piece]:
        """Split a tile's columns where it would cross a border between blocks of scales of b.

        A tile that is made as its transpose has one piece: its warpgroups hold 64 columns each, of one scale. The
        widths of pieces are powers of two that divide a block. So each piece has one scale in a step. No element asks
        on which side of a border it is.
        """
        kind, columns = self.scales[1], config.block_n
        whole = config.transposed or not kind.grouped or kind.shared == 1
        if whole or kind.each(columns) == columns:
            return [Piece(0, columns)]
        return [Piece(*each) for each in powers_within(columns, GROUP)]

    def columns(self, config: Config, tile: Any, tiles: Any) -> list[Piece]:
        """Return the pieces of one of `tiles` tiles. The first pieces of all tiles are neighbours, and so on.

        So pieces of a width begin at multiples of it, as a tile's pieces become narrower.
        """
        return [Piece(start, width, tiles * start + tile * width) for start, width, _ in self.split(config)]

    def types(self, *matrices: Any) -> tuple[Any, Any, Any, list[Any]]:
        """Return m, n and k of a problem, and the types of all operands, with `matrices` of b or one."""
        vector = self.product.vector
        m, n, k = T.dynamic("m"), dynamic("n", self.pieces), dynamic("k", vector)
        a = strided("a", (m, k), self.stored[0], multiple=vector)
        columns = dynamic("words", vector) if self.fields > 1 else k
        b = strided("b", (*matrices, n, columns), self.stored[1], multiple=vector)
        scales = self.scales[0].type("scale_a"), self.scales[1].type("scale_b", *matrices)
        return m, n, k, [a, b, *scales, *self.product.operand_types(1, m, n, k, *matrices)[2]]


class GroupScales:
    """The scales of a tile's rows for one step. They come with the tiles of their step by bulk copies; or they are
    fetched a step before they are taken, so the first level cache should have them.
    """

    def __init__(
        self, kind: Scale, scales: Any, row: Any, rows: int, matrix: tuple[Any, ...], across: bool, anywhere: bool,
        others: Sequence[GroupScales] = (),
    ):  # fmt: skip
        """Allocate the scales of `rows` rows from `row` on, of a matrix if there are several. `across`: they are
        columns of the result, of which each thread has many. `anywhere`: `row` is no multiple of a tile's rows, so bulk
        copies begin some rows before it.

        The only scale of each of `others` becomes a factor of these, if all come by bulk copies. So all tiles are
        waited for and released at once.
        """
        self.kind, self.scales, self.row, self.matrix = kind, scales, row, matrix
        self.each = kind.each(rows)
        self.count = rows // self.each
        many = across and self.count > FEW_SCALES
        early = kind.bulk and anywhere
        # In this form the compiler proves that bulk copies may begin here.
        self.first = row // BULK_START * BULK_START if early else row
        self.skipped = row % BULK_START if early else 0
        self.along = kind.runs(rows)
        self.copied = kind.bulk or self.along
        self.ahead = (T.alloc_shared if self.copied else T.alloc_fragment)((kind.loaded(rows, anywhere),), "float32")
        self.others = others if self.copied and all(other.along for other in others) else ()
        allocate = T.alloc_shared if many and not self.copied else T.alloc_fragment
        self.now = [allocate((self.count,), "float32") for _ in self.others or (None,)]

    def load(self, step: Any) -> None:
        """Load the scales of a step, with its tiles."""
        if self.copied:
            first = step // BULK_TILE * BULK_TILE if self.along else step
            T.copy(self.scales[(*self.matrix, *self.kind.place(self.first, first))], self.ahead)

    def fetch(self, step: Any) -> None:
        """Begin to load the scales of a step, if they do not come with its tiles."""
        if not self.copied:
            for i in T.Parallel(self.count):
                self.ahead[i] = self.scales[(*self.matrix, *self.kind.place(self.row + i * self.each, step))]

    def advance(self, step: Any) -> None:
        """Make the scales of `step` current, and begin to load those of the next step."""
        first = step % BULK_TILE if self.along else self.skipped
        for i in T.Parallel(self.count):
            for now, other in zip(self.now, self.others or (None,), strict=True):
                factor = self.ahead[i + first]
                now[i] = factor if other is None else factor * other.ahead[step % BULK_TILE]
        self.fetch(step + 1)

    def of(self, row: Any, other: int = 0) -> Any:
        """Return the scale of a row of the tile, multiplied by that of number `other` of `others`."""
        return self.now[other if self.others else 0][row // self.each]


class WholeScales:
    """The scales of a tile's rows for all columns. Their loads begin before the products, and end behind them."""

    def __init__(self, kind: Scale, scales: Any, row: Any, rows: int, matrix: tuple[Any, ...], across: bool):
        """Begin to load the scales of `rows` rows from `row` on. `across`: they are columns of the result.

        Each thread has many columns: so it loads some, and finds all in shared memory.
        """
        self.each = kind.each(rows)
        self.count = rows // self.each
        self.loaded = T.alloc_fragment((self.count,), "float32")
        self.all = T.alloc_shared((self.count,), "float32") if across and self.count > FEW_SCALES else self.loaded
        for i in T.Parallel(self.count):
            self.loaded[i] = scales[(*matrix, *kind.place(row + i * self.each, 0))]

    def share(self) -> None:
        """Let all threads see what each of them loaded."""
        if self.all is not self.loaded:
            T.copy(self.loaded, self.all)

    def of(self, row: Any) -> Any:
        """Return the scale of a row of the tile."""
        return self.all[row // self.each if self.count > 1 else 0]


@dataclass(frozen=True)
class Ends:
    """The scales of the rows of a tile, and of its columns, if they do not change along K."""

    of_a: WholeScales | None
    of_b: WholeScales | None

    def share(self) -> None:
        """Let all threads see what each of them loaded."""
        for scales in filter(None, (self.of_a, self.of_b)):
            scales.share()

    def scaled(self, value: Any, i: Any, j: Any) -> Any:
        """Multiply by the scales of row i and column j of the tile, first with each other: so float32 holds more."""
        factors = [scales.of(place) for scales, place in ((self.of_a, i), (self.of_b, j)) if scales is not None]
        return value * math.prod(factors[1:], start=factors[0]) if factors else value


def fetch_whole_scales(
    config: Config, spec: Spec, operands: Sequence[Any], row: Any, pieces: Sequence[Piece], matrix: tuple[Any, ...] = ()
) -> Ends:
    """Begin to load the scales of a tile that do not change along K. A tile of several pieces has none of columns."""
    (kind_a, kind_b), (scale_a, scale_b) = spec.scales, operands[1:3]
    transposed, col = config.transposed, pieces[0].col
    of_a = None if kind_a.grouped else WholeScales(kind_a, scale_a, row, config.block_m, (), transposed)
    of_b = None if kind_b.grouped else WholeScales(kind_b, scale_b, col, config.block_n, matrix, not transposed)
    return Ends(of_a, of_b)


@T.macro
def multiply(
    config: Config,
    spec: Spec,
    a: Any,
    operands: Sequence[Any],
    row: Any,
    pieces: Sequence[Piece],
    last: Any,
    matrix: tuple[Any, ...] = (),
    start: Any = 0,
) -> Any:
    """Compute one tile of the product, with the scales of groups applied, summed over the steps before `last`.

    `matrix` is the index of b if there are several: rows of each then begin anywhere. `start` is the first column of
    a, where a run of 128 begins if runs have scales; fields of b begin at 0.
    """
    bm, bn = config.block_m, config.block_n
    b, *scales = operands[:3]
    a_tile, b_tile = (T.alloc_shared((rows, GROUP), dtype) for rows, dtype in zip((bm, bn), spec.operands, strict=True))
    packed = GROUP // spec.fields
    words = T.alloc_shared((bn, packed), spec.stored[1]) if spec.fields > 1 else b_tile
    product = T.alloc_fragment(place_of(config, bm, bn), "float32")
    T.clear(product)
    part = T.alloc_fragment(place_of(config, bm, bn), spec.sums)
    (kind_a, kind_b), (scale_a, scale_b) = spec.scales, scales
    transposed = config.transposed
    of_b = [
        GroupScales(kind_b, scale_b, piece.col, piece.width, matrix, not transposed, False)
        for piece in (pieces if kind_b.grouped else ())
    ]
    of_a = [GroupScales(kind_a, scale_a, row, bm, (), transposed, bool(matrix), of_b)] if kind_a.grouped else []
    joined = any(each.others for each in of_a)
    first = start // GROUP
    for each in (*of_a, *of_b):
        each.fetch(first)
    for step in T.Pipelined(last, num_stages=config.stages):
        T.copy(a[row, start + step * GROUP], a_tile)
        for piece in pieces:
            place = (*matrix, piece.col, start + step * packed)
            T.copy(b[place], words if len(pieces) == 1 else words[piece.start : piece.start + piece.width, :])
        for each in (*of_a, *of_b):
            each.load(first + step)
        if spec.fields > 1:
            for j, c in T.Parallel(bn, GROUP):
                b_tile[j, c] = T.cast(field(spec, words[j, c // spec.fields], c % spec.fields), spec.operands[1])
        for each in of_a if joined else (*of_a, *of_b):
            each.advance(first + step)
        T.gemm(*((b_tile, a_tile) if transposed else (a_tile, b_tile)), part, transpose_B=True, clear_accum=True)
        for number, piece in enumerate(pieces):
            own = [] if joined else of_b[number : number + 1]
            for i, j in T.Parallel(bm, piece.width):
                at = place_of(config, i, piece.start + j)
                value = T.cast(part[at], "float32")
                factors = [*(each.of(i, number) for each in of_a), *(each.of(j) for each in own)]
                if factors:  # the product of both is the same for many elements of a thread
                    value = value * math.prod(factors[1:], start=factors[0])
                product[at] += value
    return product


def field(spec: Spec, word: Any, place: Any) -> Any:
    """Unpack field number `place` of a byte of narrow integers and subtract the offset."""
    sign = 1 << (spec.bits - 1) if spec.stored[1] == torch.int8 else 0
    code = (T.cast(word, "int32") >> (place * spec.bits)) & ((1 << spec.bits) - 1)
    return (code ^ sign) - (sign + spec.offset)


@T.macro
def finish(
    spec: Spec,
    value: Any,
    ends: Ends,
    i: Any,
    j: Any,
    operands: Sequence[Any],
    row: Any,
    col: Any,
    matrix: tuple[Any, ...] = (),
) -> Any:
    """Compute one element of the result, with row i and column j in its tile. Scales of whole rows are applied here."""
    return gemm_spec.finish(spec.product, [ends.scaled(value, i, j)], operands[3:], 0, row, col, *matrix)


@T.macro
def leave(
    config: Config,
    spec: Spec,
    product: Any,
    ends: Ends,
    operands: Sequence[Any],
    buffers: Sequence[Any],
    out: Any,
    row: Any,
    pieces: Sequence[Piece],
    end: Any = None,
    matrix: tuple[Any, ...] = (),
) -> None:
    """Store a tile of the result, rows before `end` if given: through shared memory if there are `buffers`."""
    rows = config.block_m
    ends.share()
    if buffers:
        for start, width, number in panels_of_pieces(config, spec):
            piece = next(piece for piece in reversed(pieces) if piece.start <= start)
            col = piece.col + (start - piece.start)
            result = T.alloc_fragment((rows, width), spec.product.out_dtype)
            for i, j in T.Parallel(rows, width):
                at = place_of(config, i, start + j)
                result[i, j] = finish(spec, product[at], ends, i, start + j, operands, row + i, col + j, matrix)
            T.copy(result, buffers[number])
            if end is None:
                T.copy(buffers[number], out[row, col])
            else:
                for i, j in T.Parallel(rows, width):
                    if row + i < end:
                        out[row + i, col + j] = buffers[number][i, j]
    else:
        for start, width, col in pieces:
            for i, j in T.Parallel(rows, width):
                if end is None or row + i < end:
                    at = place_of(config, i, start + j)
                    value = finish(spec, product[at], ends, i, start + j, operands, row + i, col + j, matrix)
                    out[row + i, col + j] = value


def panels_of_pieces(config: Config, spec: Spec) -> list[Panel]:
    """Split the pieces of a tile into panels for staged stores."""
    pieces = [(piece.start, piece.width) for piece in spec.split(config)]
    return panels_of(config, spec.product.out_dtype.itemsize, pieces)


def staging_of(config: Config, panels: Sequence[Panel], dtype: torch.dtype) -> list[Any]:
    """Allocate the tiles through which results leave, if they are staged."""
    widths = buffers_of(panels) if config.staged else []
    return [T.alloc_shared((config.block_m, width), dtype) for width in widths]


@library_jit
def scaled_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue((a * scale_a) @ (b * scale_b), ..., aux)`; b is stored `[N, K]`."""
    bm, bn = config.block_m, config.block_n
    m, n, k, types = spec.types()

    @T.prim_func
    def scaled_gemm(a: types[0], *operands: types[1:], out: T.Tensor((m, n), spec.product.out_dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=config.threads) as (bx, by):
            if spec.copied:
                T.pdl_sync()
            if config.panel:
                T.use_swizzle(config.panel)
            buffers = staging_of(config, panels_of_pieces(config, spec), spec.product.out_dtype)
            pieces = spec.columns(config, bx, T.ceildiv(n, bn))
            ends = fetch_whole_scales(config, spec, operands, by * bm, pieces)
            product = multiply(config, spec, a, operands, by * bm, pieces, T.ceildiv(k, GROUP))
            leave(config, spec, product, ends, operands, buffers, out, by * bm, pieces)

    return scaled_gemm


@library_jit
def persistent_scaled_matmul(config: Config, spec: Spec) -> Any:
    """Build the persistent kernel: `config.blocks` blocks take tile after tile."""
    bm, bn, blocks = config.block_m, config.block_n, config.blocks
    m, n, k, types = spec.types()

    @T.prim_func
    def scaled_gemm(a: types[0], *operands: types[1:], out: T.Tensor((m, n), spec.product.out_dtype)):
        with T.Kernel(blocks, threads=config.threads) as block:
            if spec.copied:
                T.pdl_sync()
            rows, columns = T.ceildiv(m, bm), T.ceildiv(n, bn)
            buffers = staging_of(config, panels_of_pieces(config, spec), spec.product.out_dtype)
            for iteration in T.serial(T.ceildiv(T.min(rows * columns, MOST_TILES) - block, blocks)):
                _, by, bx = tile_of(block + iteration * blocks, rows, columns, config.panel)
                row = T.min(by, LAST // bm) * bm
                pieces = spec.columns(config, T.min(bx, LAST // bn), columns)
                ends = fetch_whole_scales(config, spec, operands, row, pieces)
                product = multiply(config, spec, a, operands, row, pieces, T.ceildiv(k, GROUP))
                leave(config, spec, product, ends, operands, buffers, out, row, pieces)

    return scaled_gemm


@entry_function(
    ScaledGemmArgs, reference, lambda args: args.a.new_empty((args.a.shape[0], args.b.shape[1]), dtype=args.dtype)
)
def scaled_gemm(args: ScaledGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `config_for`."""
    if not args.a.shape[1]:  # tensor maps cannot describe tensors without elements
        return False
    if not out.numel():
        return True
    machine = machine_of(args.a)
    spec, problem, tensors = prepare(args, machine, out)
    if config is None and int8_rows.fits(spec, problem.k, machine):
        config = int8_rows.config_for(problem.m, problem.n, problem.k, spec, machine)
    config = config or with_more_stages(config_for(problem, machine), spec, problem, machine)
    if config.transposed and spec.bits < 8:
        int8_rows.run(spec, tensors, out, config, machine)
    else:
        machine.kernel(persistent_scaled_matmul if config.blocks else scaled_matmul)(config, spec)(*tensors, out)
    return True


def prepare(
    args: ScaledGemmArgs[torch.Tensor],
    machine: Machine,
    out: torch.Tensor,
    share: Callable[[Problem], Problem] = lambda problem: problem,
) -> tuple[Spec, Problem, list[torch.Tensor]]:
    """Describe a product for the compiler and for tilings, and return its operands as kernels take them.

    b and its scales may have a dimension of matrices in front. `share` turns a problem of groups, of known sizes, into
    one product that takes as long. By that scales are copied for bulk copies, or left to threads where they lie.
    """
    (m, k), n = args.a.shape, args.b.shape[-1]
    a, b = dense_last(args.a), dense_last(args.b.mT)
    views, specs = gemm_spec.parameters(args.aux, args.kinds, pieces=machine.is_gpu)
    vector = vector_of((a, b), (k, b.shape[-1])) if machine.is_gpu else 1
    bulk = vector > 1 and machine.target.has_wgmma
    scales = args.scale_a.to(torch.float32), args.scale_b.to(torch.float32).mT
    kind_a, kind_b = (Scale.of(scale, rows, k, bulk) for scale, rows in zip(scales, (m, n), strict=True))
    product = gemm_spec.Spec(a.dtype, args.dtype, False, (True,), specs, args.epilogue, vector)
    operands = operand_of(a.dtype, machine), operand_of(b.dtype if args.bits == 8 else torch.int8, machine)
    pieces = vector_of((out,), (n,)) if machine.is_gpu else 1
    runs, blocks = kind_a.grouped or kind_b.grouped, kind_b.grouped and kind_b.shared != 1
    able = [kind == kind.wanted for kind in (kind_a, kind_b)]
    fetched = any(not fits and kind.shared == 1 for kind, fits in zip((kind_a, kind_b), able, strict=True))
    problem = Problem(
        operands[0], m, n, k, vector > 1, args.bits, pieces > 1, runs, blocks, bulk=all(able), fetched=fetched
    )
    copied = bulk and not all(able) and copies_pay(share(typical(problem)), machine)
    if copied:
        kind_a, kind_b, problem = kind_a.wanted, kind_b.wanted, replace(problem, bulk=True, fetched=False)
    lines = [kind.in_order(scale) for kind, scale in zip((kind_a, kind_b), scales, strict=True)]
    if copied:
        moved = iter(in_padded_rows([x for x, fits in zip(lines, able, strict=True) if not fits], machine))
        lines = [x if fits else next(moved) for x, fits in zip(lines, able, strict=True)]
    spec = Spec(product, (a.dtype, b.dtype), operands, (kind_a, kind_b), args.bits, args.offset, pieces, copied)
    return spec, problem, [a, b, *map(dense_last, lines), *views]


def operand_of(dtype: torch.dtype, machine: Machine) -> torch.dtype:
    """Return the dtype in which a product takes operands: their own if the target multiplies it, else float16, which
    holds all numbers of float8; float32 on the CPU, in which sums of 128 products of int8 are exact.
    """
    if not machine.is_gpu:
        return torch.float32
    return dtype if machine.target.has_fp8 or dtype == torch.int8 else torch.float16


# Tilings of a scaled product. They change the speed, never the result.


@dataclass(frozen=True)
class Problem:
    """One product: dtype of the operands in tiles, sizes, and the bits of b's numbers.

    Whether rows of the operands are runs of whole 16 bytes (`aligned`), and rows of the result (`staged`). Whether runs
    of 128 columns of a have scales of their own (`runs`). Whether 128 columns of the result share them (`blocks`), and
    bulk copies bring all scales of runs (`bulk`); or each thread loads scales of its rows or columns (`fetched`).
    """

    operand: torch.dtype
    m: int
    n: int
    k: int
    aligned: bool
    bits: int = 8
    staged: bool = False
    runs: bool = True
    blocks: bool = True
    bulk: bool = True
    fetched: bool = False


def _tiles_to_time() -> Iterator[Config]:
    """Yield tiles of 64, 128 and 192 rows, and some of 64 columns that are made as their transposes."""
    yield Config(64, 64, GROUP, 128, 4)
    for columns in range(64, 193, 8):
        yield Config(128, columns, GROUP, 256, 4)
    for columns in (112, 128, 144):
        yield Config(192, columns, GROUP, 384, 4)
    for rows in range(72, 129, 8):
        yield Config(rows, 64, GROUP, 128, 4, transposed=True)


TILES = tuple(_tiles_to_time())
ONE_PIECE = ((128, 128), (192, 128), (128, 96), (64, 64))  # of them, those timed with scales of columns


class Costs(NamedTuple):
    """What a tile costs, in microseconds of a multiprocessor.

    copied: 1024 bytes of both operands in a step. multiplied: 1024 elements in a step; single: the same, if sums have
    no second accumulator. piece: each piece of a step but the first. stored: 1024 elements that leave. started: a block
    for one more tile. far: the factor of a step of two warpgroups whose operands exceed the second-level cache.
    """

    copied: float
    multiplied: float
    single: float
    piece: float
    stored: float
    started: float
    far: float


COPY = 2.0  # microseconds of a copy of scales in front of a product, as predicted
FETCHED = 1.15  # factor of a step in which each thread loads scales (h200_float8_steps_2026-11-30.txt)
TWICE = 72  # most sums of a thread that get a second accumulator, in one or two warpgroups
MOST_STAGES = 12  # of tiles that are alone on their multiprocessors
FEW_ROWS_STAGES = 8  # of those of up to 64 rows
PERSISTENT_STAGES = {True: 5, False: 6}  # most of persistent blocks, with scales of runs and without
LEAST_PERSISTENT = 128 * 128  # elements of a tile that persistent blocks take
PANEL = 8  # tiles below each other that run together


def config_for(problem: Problem, machine: Machine) -> Config:
    """Choose the tiling of a problem on a machine, in steps of 128 columns."""
    return _config_for(typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _config_for(problem: Problem, machine: Machine) -> Config:
    """Choose the tiling of a problem of known sizes."""
    if not machine.is_gpu:
        return Config(min(max(8, power_of_two(problem.m)), 64), 64, GROUP, stages=0)
    if problem.operand.itemsize > 1:  # widened between memory and tiles, by copies that no stage can hold
        return Config(64, 64 if problem.n <= 64 else 128, GROUP, 128, 1)
    hopper = machine.target.has_wgmma
    best = min(_candidates(problem, machine), key=lambda config: _relative_time(config, problem, machine))
    alone, tile = _tiles(best, problem) <= machine.num_sms, (best.block_m, best.block_n)
    whole = hopper and problem.bits == 8 and problem.aligned
    persistent = whole and problem.staged and not alone and _is_persistent(best, problem)
    high = problem.m > PANEL * best.block_m
    if whole and alone and tile == (64, 64):  # no second block needs the room
        best = replace(best, stages=FEW_ROWS_STAGES)
    panel, blocks = PANEL if persistent or high else 0, machine.num_sms if persistent else 0
    return replace(best, panel=panel, staged=hopper and problem.staged, blocks=blocks)


def copies_pay(problem: Problem, machine: Machine) -> bool:
    """Return whether bulk copies of scales save more time than it takes to copy the scales for them first.

    Products whose tiles were not measured keep their loads by threads.
    """
    return _copies_pay(typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _copies_pay(problem: Problem, machine: Machine) -> bool:
    """Compare the least times of a problem of known sizes."""
    if not _is_timed(problem, machine):
        return False

    def least(problem: Problem) -> float:
        """Return the time of the fastest tiling."""
        return min(_relative_time(config, problem, machine)[0] for config in _candidates(problem, machine))

    return least(replace(problem, bulk=True, fetched=False)) + COPY < least(problem)


def with_more_stages(config: Config, spec: Spec, problem: Problem, machine: Machine) -> Config:
    """Give tiles that are alone on their multiprocessors as many stages as fit, as their copies have to begin early.

    Those of persistent blocks get up to PERSISTENT_STAGES.
    """
    return _with_more_stages(config, spec, typical(problem), machine)


@lru_cache(KEPT_CHOICES)
def _with_more_stages(config: Config, spec: Spec, problem: Problem, machine: Machine) -> Config:
    """Give tiles of a problem of known sizes more stages."""
    alone = not config.blocks and _tiles(config, problem) <= machine.num_sms
    if not (alone or config.blocks) or not _is_timed(problem, machine):
        return config

    def of(stages: int) -> Footprint:
        """Return the footprint with so many stages."""
        return footprint(replace(config, stages=stages), spec, True)

    most = MOST_STAGES if alone else PERSISTENT_STAGES[problem.runs]
    stages = most_stages(of, range(most, config.stages, -1), machine.target)
    return replace(config, stages=stages or config.stages)


def can_be_timed(problem: Problem, machine: Machine) -> bool:
    """Return whether `TILES` were measured for operands like a problem's, of float8."""
    form = problem.operand.is_floating_point and problem.bits == 8 and problem.aligned and problem.staged
    return form and machine.target.has_wgmma


def _is_timed(problem: Problem, machine: Machine) -> bool:
    """Return whether `TILES` were measured for such a problem: products of many rows of float8."""
    return problem.m > 64 and can_be_timed(problem, machine)


def _candidates(problem: Problem, machine: Machine) -> Sequence[Config]:
    """List the tilings from which `config_for` chooses by their time, for operands of 8 bits on a GPU.

    Tiles of few elements have no persistent blocks, so they are for a single wave.
    """
    if _is_timed(problem, machine):
        own = problem.runs and not problem.blocks
        tiles = [c for c in TILES if (c.block_m, c.block_n) in ONE_PIECE or not own]
        tiles = [c for c in tiles if problem.bulk or not c.transposed]
        return [c for c in tiles if c.block_m * c.block_n >= LEAST_PERSISTENT or _tiles(c, problem) <= machine.num_sms]
    hopper = machine.target.has_wgmma
    least = 64 if hopper and problem.aligned else 32
    if problem.m <= least:
        tilings = [(least, 128, 128), (least, 64, 128)]
    elif hopper:
        tilings = [(128, 128, 256), (64, 128, 128), (64, 64, 128)]
    else:  # fragments of operands leave fewer registers for sums
        tilings = [(128, 64, 256), (64, 64, 128)]
    return [Config(rows, columns, GROUP, threads, 4 if hopper else 2) for rows, columns, threads in tilings]


def _relative_time(config: Config, problem: Problem, machine: Machine) -> tuple[float, int]:
    """Estimate the time of all waves, for comparison: by measured costs, else by products and reads.

    Of equal times that of fewer tiles is less. Copies and products of a step run side by side.
    """
    bm, bn, tiles = config.block_m, config.block_n, _tiles(config, problem)
    waves, steps = -(-tiles // machine.num_sms), -(-problem.k // GROUP)
    if not _is_timed(problem, machine):
        return waves * (bm * bn + 32 * (bm + bn)), tiles
    costs = Costs(**verdict("scaled.costs", machine.target, None, runs=problem.runs, bulk=problem.bulk))
    large = problem.m > PANEL * 128 and (problem.m + problem.n) * problem.k > machine.target.l2_bytes
    far = large and config.threads <= 256
    elements = bm * bn / 1024
    single = bm * bn > TWICE * config.threads or config.threads > 256
    pieces = len(powers_within(bn, GROUP)) if problem.runs and not config.transposed else 1
    products = (costs.single if single else costs.multiplied) * elements + costs.piece * (pieces - 1)
    step = max(costs.copied * (bm + bn) * GROUP / 1024, products)
    step *= (costs.far if far else 1) * (FETCHED if problem.fetched else 1)
    edges = costs.stored * elements + (0 if waves == 1 or _is_persistent(config, problem) else costs.started)
    return round(waves * (steps * step + edges), 3), tiles


def _is_persistent(config: Config, problem: Problem) -> bool:
    """Return whether blocks are persistent where tiles exceed a wave: those of 192 rows only within one panel."""
    large = config.block_m * config.block_n >= LEAST_PERSISTENT
    return large and (config.block_m == 128 or problem.m <= PANEL * config.block_m)


def _tiles(config: Config, problem: Problem) -> int:
    """Count the tiles of the result."""
    return -(-problem.m // config.block_m) * -(-problem.n // config.block_n)


def footprint(config: Config, spec: Spec, bulk: bool, groups: bool = False) -> Footprint:
    """Compute the shared memory of a block. With `groups` of rows, tiles of a begin at any row.

    It holds tiles of both operands and of their scales, and results that leave. If b's numbers have fewer bits it holds
    their bytes, too.
    """
    bm, bn, bits = config.block_m, config.block_n, spec.bits
    of_a, of_b = (8 * x.itemsize for x in spec.operands)
    tiles = [Tile(bm, GROUP, of_a, config.stages, (Part.LOOP,))]
    if bits < 8:
        tiles.append(Tile(bn, GROUP, bits, config.stages, (Part.LOOP,)))
    tiles.append(Tile(bn, GROUP, of_b, config.stages if bits == 8 else 1, (Part.LOOP,)))
    pieces = spec.split(config)
    scales = [(spec.scales[0], bm, False), *((spec.scales[1], piece.width, True) for piece in pieces)]
    for kind, rows, across in scales:
        if kind.bulk or kind.runs(rows):
            tiles.append(Tile(1, kind.loaded(rows, groups and not across), 32, config.stages, (Part.LOOP,)))
        elif across and rows // kind.each(rows) > FEW_SCALES:
            tiles.append(Tile(1, rows, 32, parts=(Part.LOOP if kind.grouped else Part.LEAVING,)))
    if config.staged:
        size = spec.product.out_dtype.itemsize
        tiles += [Tile(bm, width, 8 * size) for width in buffers_of(panels_of_pieces(config, spec))]
    return Footprint(tuple(tiles), bulk)
