# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose right operands are stored in few bits: `epilogue(a @ w0^T, a @ w1^T, ..., aux)`.

The weights are widened in registers, between memory and the product. So memory is read once and in few bits. The
product is made transposed, `w @ a^T`. The widened weights are its left operand, which tensor cores take from registers.
The few rows of a are few columns. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import (
    Machine,
    compute_dtype,
    dense_last,
    entry_function,
    machine_of,
    vector_of,
    view_as,
)
from torch_tile.kernels.gemm import cut_dequant, cut_rules, gemm, row_dequant, spec as gemm_spec
from torch_tile.kernels.gemm.args import DequantGemmArgs
from torch_tile.kernels.gemm.dequant_rules import SPAN_BYTES, config_for
from torch_tile.kernels.gemm.formats import FORMATS, pairs_of
from torch_tile.kernels.gemm.packed import (
    LARGEST_OFFSET,
    WORD,
    Factor,
    Norm,
    Parts,
    Piece,
    Problem,
    Spec,
    Storage,
    finish,
    read,
    weight,
)
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.library_jit import library_jit
from torch_tile.kernels.norm.norm import rms_norm
from torch_tile.kernels.split_k import share_with_cluster, sum_in_cluster, sum_of_parts

LONGEST_SPAN = 2048  # columns of a span, whose scales of a row come at once


def dequantize(
    b: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bits: int,
    high_first: bool,
    offset: int,
    dtype: torch.dtype,
    format: str = "",
) -> torch.Tensor:
    """Widen `b` `[..., N, words]` to the weights `[..., N, K]` in `dtype`: `(field - offset - zero) * scale`.

    With a `format` (see `FORMATS`) a field is an index, and the weight is the number there times the scale.

    A word holds `word bits / bits` fields of neighbouring columns, signed if the words are. The first field is in the
    lowest bits, or in the highest ones with `high_first`. scale and zero are `[..., N, K / group]`.
    """
    w = b
    if (size := 8 * b.element_size()) != bits:
        shifts = [*range(0, size, bits)][:: -1 if high_first else 1]
        w = torch.stack([(b << (size - bits - s)) >> (size - bits) for s in shifts], -1).flatten(-2)
    w = FORMATS[format].table(dtype, w.device)[w.long()] if format else w.to(dtype)
    groups = next((x.shape[-1] for x in (scale, zero) if x is not None), 1)
    grouped = w.reshape(*w.shape[:-1], groups, w.shape[-1] // groups) - offset
    if zero is not None:
        grouped = grouped - zero.to(dtype)[..., None]
    if scale is not None:
        grouped = grouped * scale.to(dtype)[..., None]
    return grouped.reshape(w.shape)


def reference(*given: Any, **named: Any) -> torch.Tensor:
    """Compute `tile.dequant_gemm` with w by `dequantize`, in float32 (float64 for float64 `a`)."""
    args: DequantGemmArgs[torch.Tensor] = DequantGemmArgs(*given, **named)
    weights = [w.mT for w in widened_matrices(args, compute_dtype(args.a.dtype))]
    return gemm.reference(normalised(args), weights, args.aux, args.kinds, args.epilogue, args.dtype)


def normalised(args: DequantGemmArgs[torch.Tensor]) -> torch.Tensor:
    """Return a, or its RMS norm in float32 (float64 for float64 `a`) if the product has one."""
    if args.norm_eps is None:
        return args.a
    a = args.a.to(compute_dtype(args.a.dtype))
    a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + args.norm_eps)
    return a if args.norm_weight is None else a * args.norm_weight.to(a.dtype)


def widened_matrices(
    args: DequantGemmArgs[torch.Tensor], dtype: torch.dtype, group: int | None = None
) -> list[torch.Tensor]:
    """Widen the right operands to `[N, K]`, of one group if there are several."""
    nothing: list[Any] = [None] * len(args.bs)
    found = [args.bs, args.scales or nothing, args.zeros or nothing]
    if group is not None:
        found = [[x if x is None else x[group] for x in xs] for xs in found]
    bs, scales, zeros = found
    return [dequantize(*each, *args.fields, dtype, args.format) for each in zip(bs, scales, zeros, strict=True)]


@T.macro
def multiply(
    config: Config,
    spec: Spec,
    a: Any,
    operands: Sequence[Any],
    row: Any,
    col: Any,
    first: Any,
    last: Any,
    matrix: tuple[Any, ...] = (),
) -> Any:
    """Compute the products `w @ a^T` of one tile, summed over the steps `first <= step < last` of K.

    If bulk copies bring scales and zeros, they are summed over spans of steps instead (`span_of`). `matrix` is the
    index of each w if there are several.
    """
    bm, bn, bk, storage = config.block_m, config.block_n, config.block_k, spec.storage
    bs, scales, zeros, _ = spec.sort(operands)
    wk, late, pieces = bk // storage.fields, spec.scales_late(config), spec.pieces(config)
    a_tile = T.alloc_shared((bm, bk), spec.operand)
    table = None
    if storage.coded:
        over = FORMATS[storage.format].unit if spec.scales_in_parts(config) else 1.0
        table = pairs_of(storage.format, storage.high_first, spec.operand, over)
    b_tiles, products, factors, peaks = [], [], [], []
    unit = span_of(spec, config)
    for number, transposed in enumerate(storage.transposed):
        product = T.alloc_fragment((bn, bm), compute_dtype(spec.product.dtype))
        T.clear(product)
        products.append(product)
        b_tiles.append(T.alloc_shared((wk, bn) if transposed else (bn, wk), storage.words))
        given = scales[number : number + 1], zeros[number : number + 1]
        columns = pieces[0].columns * (storage.scale.together if storage.scale else 1)
        tiles = [
            T.alloc_shared((bn, kind.columns(unit * bk, storage.group)), kind.dtype) if kind and unit else None
            for kind in (storage.scale, storage.zero)
        ]
        runs = [Factors(spec, *given, matrix, (col, bn), (at, bk, columns), tiles) for at in range(0, bk, columns)]
        factors.append(runs)
        if spec.scales_in_parts(config):
            peaks.append(take_parts(spec, runs))
        for run in runs:
            run.fetch(first)

    def add_step(step: Any, within: Any) -> None:
        """Add the products of one step, number `within` of its span."""
        T.copy(a[row, step * bk], a_tile)
        for b, b_tile, product, runs, transposed in zip(
            bs, b_tiles, products, factors, storage.transposed, strict=True
        ):
            T.copy(b[(*matrix, *((step * wk, col) if transposed else (col, step * wk)))], b_tile)
            # All read first, widened then: the tile may be filled again before the products begin. Where sums are
            # scaled, each piece is read and widened beside the products of the piece before.
            words = [] if late else [read(b_tile, transposed, piece.of(wk, bk), bn) for piece in pieces]
            taken = [found for run in runs for found in run.advance(step + 1, within)]
            sums = [T.alloc_fragment((bn, bm), product.dtype) if late else product for _ in pieces]
            ready = []
            for number, (piece, total) in enumerate(zip(pieces, sums, strict=True)):
                word = read(b_tile, transposed, piece.of(wk, bk), bn) if late else words[number]
                weights = widened(spec, word, transposed, taken[piece.run], (bn, piece), late, table)
                ready.append((piece, weights, total))
                if spec.alternates(config):
                    add_products(ready, a_tile, bk, late)
                    ready = []
            add_products(ready, a_tile, bk, late)
            if late and storage.scale:
                for partial, (scale, _) in zip(sums, taken, strict=True):
                    for j, i in T.Parallel(bn, bm):
                        product[j, i] += partial[j, i] * T.cast(scale[storage.scale.place(j, 0)], partial.dtype)

    if unit:
        for span in T.Pipelined(first, last, num_stages=2):
            for runs in factors:
                runs[0].load(span)
            for within in T.Pipelined(unit, num_stages=config.stages):
                add_step(span * unit + within, within)
    else:
        for step in T.Pipelined(first, last, num_stages=config.stages):
            add_step(step, 0)
    if spec.scales_in_parts(config):
        columns = bk * max(1, unit)
        within = first * columns, T.min(last * columns, a.shape[1])
        for b, scale, peak, product in zip(bs, scales, peaks, products, strict=True):
            if largest(peak) > torch.finfo(spec.operand).max:
                sum_exactly(spec, a, b, scale, matrix, (row, col), within, product)
    return products


@T.macro
def largest(tile: Any) -> Any:
    """Return the largest number of a fragment."""
    rows, most = T.alloc_fragment((tile.shape[0],), tile.dtype), T.alloc_fragment((1,), tile.dtype)
    T.reduce_max(tile, rows, dim=1)
    T.reduce_max(rows, most, dim=0)
    return most[0]


@T.macro
def sum_exactly(
    spec: Spec, a: Any, b: Any, scale: Any, matrix: tuple[Any, ...], place: Any, columns: Any, product: Any
) -> None:
    """Compute the product of a tile anew, column by column, with float32 scales.

    It is slow, and serves scales beyond the operand's dtype. Only few codes times such a scale are in its range.
    """
    (row, col), (first, last), storage, kind = place, columns, spec.storage, spec.storage.scale
    (bn, bm), accum = product.shape, product.dtype
    assert kind is not None
    weights, entries = T.alloc_fragment((bn,), accum), T.alloc_fragment((bm,), accum)
    T.clear(product)
    for column in T.serial(last - first):
        at = first + column
        for j in T.Parallel(bn):
            word = b[(*matrix, col + j, at // storage.fields)]
            number = T.cast(T.cast(storage.looked_up(word, at, j, None), spec.operand), accum)
            found = kind.value(scale[(*matrix, *kind.place(col + j, at // storage.group))], accum)
            weights[j] = T.cast(T.cast(number * found, spec.operand), accum)
        for i in T.Parallel(bm):
            entries[i] = T.cast(a[row + i, at], accum)
        for j, i in T.Parallel(bn, bm):
            product[j, i] += weights[j] * entries[i]


@T.macro
def widened(
    spec: Spec, words: Any, transposed: bool, factors: Sequence[Any], shape: tuple[int, Piece], late: bool, table: Any
) -> Any:
    """Unpack and scale the weights of a piece, into registers or shared memory; unscaled if sums are scaled."""
    (rows, piece), (scale, zero), fields = shape, factors, spec.storage.fields
    # Exact products of float32 have no tensor core and take their operands from shared memory.
    alloc = T.alloc_shared if spec.operand == torch.float32 else T.alloc_fragment
    weights = alloc((rows, piece.width), spec.operand)
    for j, c in T.Parallel(rows, piece.width):
        place = (c // fields, j) if transposed else (j, c // fields)
        weights[j, c] = T.cast(
            weight(spec, words[place], c, j, piece, None if late else scale, zero, table), spec.operand
        )
    return weights


def add_products(pieces: Sequence[tuple[Piece, Any, Any]], a_tile: Any, block_k: int, late: bool) -> None:
    """Multiply widened pieces into a sum each, one right after the other so that all are in flight together."""
    for piece, weights, total in pieces:
        columns = a_tile[0 : a_tile.shape[0], piece.of(block_k, block_k)]
        T.gemm(weights, columns, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=late)


class Factors:
    """The scales and zeros of a run of a step's columns, or of several.

    Bulk copies bring those of a span of steps to tiles. Else they are fetched a step before they are taken. Then a
    warp that releases a tile waits for them, too.
    """

    row: Any
    start: int
    step: int
    storage: Storage
    found: list[Any]

    def __init__(
        self,
        spec: Spec,
        scales: Sequence[Any],
        zeros: Sequence[Any],
        matrix: tuple[Any, ...],
        rows: tuple[Any, int],
        columns: tuple[int, int, int],
        tiles: Sequence[Any],
    ):
        """Allocate the factors of `rows` = (first, count) and `columns` = (first in the step, step, count). Several
        matrices have factors of their own. `tiles` of scales and zeros are shared by all runs of a step; None if they
        are fetched.
        """
        storage, (self.row, count), (self.start, self.step, width) = spec.storage, rows, columns
        self.matrix = matrix
        self.storage, self.found = storage, list[Any]()
        found = scales if storage.group else [], zeros  # a scale of a whole row is applied at the end
        for kind, given, tile in zip((storage.scale, storage.zero), found, tiles, strict=True):
            if kind and given:
                shape = kind.place(count, storage.groups(width) // kind.together)
                now = [T.alloc_fragment(shape, spec.taken(kind)) for _ in range(kind.together)]
                ahead = T.alloc_fragment(shape, kind.dtype) if tile is None else tile
                self.found.append((kind, given[0], ahead, now, tile is not None))
            else:
                self.found.append(None)
        self.parts: Parts | None = None

    def load(self, span: Any) -> None:
        """Load the factors of a span, of all runs of its steps."""
        for kind, given, tile, _, copied in filter(None, self.found):
            if copied:
                T.copy(given[(*self.matrix, *kind.place(self.row, span * tile.shape[1]))], tile)

    def fetch(self, step: Any) -> None:
        """Begin to load the factors of a step, if they do not come with its span."""
        group = self.storage.first_group(step, self.step, self.start)
        for kind, given, ahead, _, copied in filter(None, self.found):
            if not copied:
                T.copy(given[(*self.matrix, *kind.place(self.row, group // kind.together))], ahead)

    def advance(self, next_step: Any, within: Any) -> list[list[Any]]:
        """Return the scales and zeros (or None) of a span's step `within` by runs, and load the next step's."""
        group = self.storage.first_group(within, self.step, self.start)
        for kind, _, ahead, runs, copied in filter(None, self.found):
            for number, now in enumerate(runs):
                first = kind.place(0, group // kind.together) if copied else (0, 0)
                for i, j in T.Parallel(*now.shape):
                    stored = ahead[first[0] + i, first[1] + j]
                    now[i, j] = kind.value(stored, now.dtype, number) if kind.power else T.cast(stored, now.dtype)
        self.fetch(next_step)
        count = max((kind.together for kind, *_ in filter(None, self.found)), default=1)
        taken = [[found and found[3][number] for found in self.found] for number in range(count)]
        if (parts := self.parts) is None:
            return taken
        [(now, zero)] = taken
        for i, j in T.Parallel(*now.shape):
            scale = T.cast(now[i, j], parts.peak.dtype) * parts.unit
            parts.peak[i, j] = T.max(parts.peak[i, j], T.abs(scale))
        for i, j in T.Parallel(*now.shape):
            parts.high[i, j] = T.cast(T.cast(now[i, j], parts.peak.dtype) * parts.unit, parts.high.dtype)
        if parts.low is not None:
            for i, j in T.Parallel(*now.shape):
                rest = T.cast(now[i, j], parts.peak.dtype) * parts.unit - T.cast(parts.high[i, j], parts.peak.dtype)
                parts.low[i, j] = T.cast(rest, parts.low.dtype)
        return [[parts, zero]]


@T.macro
def take_parts(spec: Spec, runs: Sequence[Factors]) -> Any:
    """Let the factors of a product take their scales in parts. Return their `peak`, which all runs have in common."""
    kind, _, _, (now, *_), _ = runs[0].found[0]
    shape = now.shape
    peak = T.alloc_fragment(shape, compute_dtype(spec.product.dtype))
    T.clear(peak)
    for run in runs:
        high = T.alloc_fragment(shape, spec.operand)
        low = None if kind.power else T.alloc_fragment(shape, spec.operand)
        run.parts = Parts(high, low, peak, FORMATS[spec.storage.format].unit)
    return peak


def span_of(spec: Spec, config: Config) -> int:
    """Return the steps of a span, whose scales and zeros of a row are at least 16 bytes. 0 if they are fetched."""
    kinds = [kind for kind in (spec.storage.scale, spec.storage.zero) if kind]
    if not spec.storage.group or not kinds or any(kind.whole == 1 for kind in kinds):
        return 0
    return max(1, *(kind.columns_of(spec.storage.group) // config.block_k for kind in kinds))


def spans_of(config: Config, spec: Spec, k: Any) -> Any:
    """Return the number of spans of K, or of steps if scales and zeros are fetched."""
    return T.ceildiv(k, config.block_k * max(1, span_of(spec, config)))


@library_jit
def dequant_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel `out = epilogue(a @ w0^T, ..., aux)`. Each block makes one tile, those of a weight in a row."""
    bm, bn, dtype = config.block_m, config.block_n, spec.product.out_dtype
    m, n, k, a_type, types = spec.types(pieces=16 // dtype.itemsize if config.staged else 1)

    @T.prim_func
    def dequant_gemm(a: a_type, *operands: types, out: T.Tensor((m, n), dtype)):
        columns = T.ceildiv(n, bn * config.shared) * config.shared
        with T.Kernel(T.ceildiv(m, bm), columns, threads=config.threads, cluster_dims=(1, config.shared)) as (by, bx):
            T.annotate_min_blocks_per_sm(config.resident)
            products = multiply(config, spec, a, operands, by * bm, bx * bn, 0, spans_of(config, spec, k))
            result = T.alloc_fragment((bm, bn), dtype) if config.staged else None
            for i, j in T.Parallel(bm, bn):
                row = by * bm + i
                col = bx * bn + j
                value = finish(spec, [p[j, i] for p in products], operands, row, col)
                if config.staged:
                    result[i, j] = value
                else:
                    out[row, col] = value
            if config.staged:
                staged = T.alloc_shared((bm, bn), dtype)
                T.copy(result, staged)
                T.copy(staged, out[by * bm, bx * bn])

    return dequant_gemm


@library_jit
def split_dequant_matmul(config: Config, spec: Spec) -> Any:
    """Build the split-K kernel for few tiles and a long K: `splits` blocks store partial sums of each tile."""
    bm, bn = config.block_m, config.block_n
    splits = T.dynamic("splits")
    m, n, k, a_type, types = spec.types()
    accum, count = compute_dtype(spec.product.dtype), len(spec.storage.transposed)

    @T.prim_func
    def split_dequant_gemm(
        a: a_type,
        *operands: types,
        parts: T.Tensor((splits, count, m, n), accum),
        out: T.Tensor((m, n), spec.product.out_dtype),
    ):
        with T.Kernel(T.ceildiv(m, bm), T.ceildiv(n, bn), splits, threads=config.threads) as (by, bx, split):
            spans = spans_of(config, spec, k)
            share = T.ceildiv(spans, splits)
            last = T.min(split * share + share, spans)
            products = multiply(config, spec, a, operands, by * bm, bx * bn, split * share, last)
            for number, product in enumerate(products):
                for i, j in T.Parallel(bm, bn):
                    parts[split, number, by * bm + i, bx * bn + j] = product[j, i]
        with T.Kernel(T.ceildiv(n, bn), m, threads=config.threads) as (bx, row):
            sums = [sum_of_parts(parts, (number, row), bx * bn, bn) for number, _ in enumerate(spec.storage.transposed)]
            for j in T.Parallel(bn):
                col = bx * bn + j
                out[row, col] = finish(spec, [total[j] for total in sums], operands, row, col)

    return split_dequant_gemm


@library_jit
def cluster_dequant_matmul(config: Config, spec: Spec) -> Any:
    """Build the kernel for few tiles and a long K: the blocks of a cluster each sum up a part of K of one tile."""
    bm, bn, count = config.block_m, config.block_n, config.splits
    m, n, k, a_type, types = spec.types()
    own = -(-bn // count)  # rows of the weights

    @T.prim_func
    def cluster_dequant_gemm(a: a_type, *operands: types, out: T.Tensor((m, n), spec.product.out_dtype)):
        rows, columns, spans = T.ceildiv(m, bm), T.ceildiv(n, bn), spans_of(config, spec, k)
        with T.Kernel(rows * columns * count, threads=config.threads, cluster_dims=count) as block:
            T.annotate_min_blocks_per_sm(config.resident)
            split, by, bx = block % count, block // count % rows, block // count // rows
            share = T.ceildiv(spans, count)
            last = T.min(split * share + share, spans)
            products = multiply(config, spec, a, operands, by * bm, bx * bn, split * share, last)
            parts = share_with_cluster(products)
            for i, j in T.Parallel(bm, own):
                row, col = by * bm + i, bx * bn + split * own + j
                sums = [sum_in_cluster(part, (T.min(split * own + j, bn - 1), i), count) for part in parts]
                if split * own + j < bn:
                    out[row, col] = finish(spec, sums, operands, row, col)
            T.cluster_sync()  # until then others read this block's part

    return cluster_dequant_gemm


@entry_function(
    DequantGemmArgs, reference, lambda args: args.a.new_empty((args.a.shape[0], args.bs[0].shape[0]), dtype=args.dtype)
)
def dequant_gemm(args: DequantGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None = None) -> bool:
    """Compute the product as `reference` does. `config` overrides the choice of `config_for`."""
    if not args.a.shape[1]:  # tensor maps cannot describe tensors without elements
        return False
    if out.numel():
        run(args, out, config)
    return True


def run(args: DequantGemmArgs[torch.Tensor], out: torch.Tensor, config: Config | None) -> None:
    """Launch `dequant_gemm` into `out`, which must be contiguous and not empty."""
    machine = machine_of(args.a)
    spec, problem, tensors = prepare(args, machine)
    for rules, launch in ((cut_rules, cut_dequant.run), (row_dequant, row_dequant.run)) if config is None else ():
        found = rules.config_for(problem, spec, machine) if rules.fits(spec, problem, machine) else None
        if found is not None:
            launch(spec, tensors, out, found, machine)
            return
    if args.norm_eps is not None:  # other kernels take no norm: it is a kernel of its own
        a = rms_norm(args.a, args.norm_weight, args.norm_eps, "none", 0.0, False)
        run(args._replace(a=a, norm_weight=None, norm_eps=None), out, config)
        return
    config = config or config_for(problem, machine)
    if config is None:
        out.copy_(reference(*args))
        return
    if config.staged and vector_of((out,), out.shape[1:]) == 1:
        config = replace(config, staged=False)
    spec, tensors = together(spec, tensors, config)
    spec = with_copied_factors(spec, tensors, config, machine)
    if config.splits == 1:
        machine.kernel(dequant_matmul)(config, spec)(*tensors, out)
        return
    if config.cluster:
        machine.kernel(cluster_dequant_matmul)(config, spec)(*tensors, out)
        return
    parts = out.new_empty((config.splits, len(args.bs), *out.shape), dtype=compute_dtype(args.a.dtype))
    # The number of blocks that share a sum is a run-time value, so that one kernel serves all numbers.
    machine.kernel(split_dequant_matmul)(replace(config, splits=2), spec)(*tensors, parts, out)


def prepare(args: DequantGemmArgs[torch.Tensor], machine: Machine) -> tuple[Spec, Problem, list[torch.Tensor]]:
    """Describe a product for the compiler and for tilings, and return its operands as kernels take them."""
    a, bs, scales, zeros, fields = args.a, args.bs, args.scales, args.zeros, args.fields
    (m, k), n = a.shape, bs[0].shape[-2]
    a = dense_last(a)
    matrices = [gemm.matrix(b) for b in bs]
    operands, transposed = [b for b, _ in matrices], tuple(t for _, t in matrices)
    # Neighbouring sums of a thread are of one column.
    views, specs = gemm_spec.parameters(args.aux, args.kinds, pieces=False)
    groups = next((x.shape[-1] for x in (*scales, *zeros)), 1)
    scale, scales = Factor.of(scales)
    zero, zeros = Factor.of(zeros)
    group = k // groups if groups > 1 else 0
    vector = vector_of((a,), (k,)) if machine.is_gpu else 1
    aligned = machine.is_gpu and vector_of(operands, [b.shape[-1] for b in operands]) > 1
    operand = a.dtype if machine.is_gpu else compute_dtype(a.dtype)
    words, signed = bs[0].dtype, bs[0].dtype.is_signed and not bs[0].dtype.is_floating_point
    if (
        aligned
        and not any(transposed)
        and operand.itemsize == 2
        and fields[0] == 4
        and 0 <= fields[2] <= LARGEST_OFFSET
    ):
        words = torch.int32
    elif aligned and words == torch.int8:
        words = torch.uint8
    if words != bs[0].dtype:
        operands = [view_as(b, words) for b in operands]
    storage = Storage(words, signed, *fields, args.format, transposed, group, scale, zero, aligned)
    product = gemm_spec.Spec(a.dtype, args.dtype, False, transposed, specs, args.epilogue, vector)
    weight = args.norm_weight
    norm = None if args.norm_eps is None else Norm(None if weight is None else weight.dtype, args.norm_eps)
    spec = Spec(product, storage, operand, norm)
    whole = vector > 1 and aligned
    problem = Problem(a.dtype, m, n, k, len(bs), storage.bits, group, whole, storage.coded, bool(zeros))
    return spec, problem, [a, *operands, *scales, *zeros, *views, *([] if weight is None else [weight])]


def together(spec: Spec, tensors: list[torch.Tensor], config: Config) -> tuple[Spec, list[torch.Tensor]]:
    """Let the kernel read four bytes of scales at once. A step must have so many groups, and each row whole pieces."""
    storage, (bs, scales, zeros, aux) = spec.storage, spec.sort(tensors[1:])
    if (
        storage.scale != Factor(torch.uint8, False, power=True)
        or storage.zero
        or not storage.aligned
        or not spec.scales_late(config)
        or storage.groups(config.block_k) % WORD
        or vector_of(scales, [x.shape[-1] for x in scales]) == 1
    ):
        return spec, tensors
    scale = Factor(torch.int32, False, True, WORD)
    words = [view_as(x, torch.int32) for x in scales]
    return replace(spec, storage=replace(storage, scale=scale)), [tensors[0], *bs, *words, *zeros, *aux]


def with_copied_factors(spec: Spec, tensors: Sequence[torch.Tensor], config: Config, machine: Machine) -> Spec:
    """Let bulk copies bring scales and zeros. Each of their rows must be whole pieces of 16 bytes; blocks that share a
    sum over K must have whole spans.
    """
    storage, k = spec.storage, tensors[0].shape[1]
    bulk = machine.is_gpu and machine.target.has_wgmma and storage.words == torch.int32 and not any(storage.transposed)
    if not bulk or not storage.group:
        return spec
    changes: dict[str, Any] = {}
    _, scales, zeros, _ = spec.sort(tensors[1:])
    for name, kind, factors in (("scale", storage.scale, scales), ("zero", storage.zero, zeros)):
        if kind:
            if kind.transposed or vector_of(factors, [x.shape[-1] for x in factors]) == 1:
                return spec
            changes[name] = replace(kind, whole=SPAN_BYTES // kind.dtype.itemsize)
    found = replace(spec, storage=replace(storage, **changes))
    columns = span_of(found, config) * config.block_k
    whole = all(columns % kind.columns_of(storage.group) == 0 for kind in changes.values())
    shared = config.splits == 1 or k % (config.splits * columns) == 0
    return found if columns <= LONGEST_SPAN and whole and shared else spec
