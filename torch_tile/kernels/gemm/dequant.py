# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose right operands are stored in few bits: `epilogue(a @ w0^T, a @ w1^T, ..., aux)`.

The weights are widened in registers, between memory and the product, so that memory sees them once and as they are
stored. The product is made transposed, `w @ a^T`: what was widened is its left operand, which tensor cores take from
registers, and few rows of a are few columns. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels.common import (
    compute_dtype,
    dense_last,
    has_kernels,
    into,
    machine_of,
    vector_of,
)
from torch_tile.kernels.gemm import gemm, spec as gemm_form
from torch_tile.kernels.gemm.dequant_spec import (
    LARGEST_OFFSET,
    Factor,
    Form,
    Piece,
    Storage,
    weight,
)
from torch_tile.kernels.gemm.dequant_tiling import Config, Problem, config_for
from torch_tile.kernels.split_k import left_for_cluster, sum_in_cluster, sum_of_parts


def dequantize(
    b: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bits: int,
    high_first: bool,
    offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weights `[N, K]` that `b` `[N, words]` stands for, computed in `dtype`: `(field - offset - zero) * scale`.

    A word holds `word bits / bits` fields of neighbouring columns, the first in its lowest bits (its highest ones with
    `high_first`), signed if the words are. scale and zero are `[N, K / group]`.
    """
    w = b
    if (size := 8 * b.element_size()) != bits:
        shifts = [*range(0, size, bits)][:: -1 if high_first else 1]
        w = torch.stack([(b << (size - bits - s)) >> (size - bits) for s in shifts], -1).flatten(-2)
    w = w.to(dtype)
    groups = next((x.shape[1] for x in (scale, zero) if x is not None), 1)
    grouped = w.reshape(w.shape[0], groups, w.shape[1] // groups) - offset
    if zero is not None:
        grouped = grouped - zero.to(dtype)[..., None]
    if scale is not None:
        grouped = grouped * scale.to(dtype)[..., None]
    return grouped.reshape(w.shape)


def reference(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zeros: Sequence[torch.Tensor],
    bits: int,
    high_first: bool,
    offset: int,
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`epilogue(a @ w0^T, ..., aux)`, w as `dequantize` says, in float32 (float64 for float64 `a`), rounded to `dtype`.

    a `[M, K]`; each b `[N, K * bits / word bits]`; scales and zeros none or one for each b, `[N, G]`, all of one G that
    divides K; aux as for `gemm.reference`. Returns `[M, N]`.
    """
    compute = compute_dtype(a.dtype)
    nothing: list[Any] = [None] * len(bs)
    factors = [xs or nothing for xs in (scales, zeros)]
    weights = [dequantize(b, s, z, bits, high_first, offset, compute).mT for b, s, z in zip(bs, *factors, strict=True)]
    return gemm.reference(a, weights, aux, kinds, epilogue, dtype)


@T.macro
def multiply(
    config: Config, form: Form, a: Any, operands: Sequence[Any], row: Any, col: Any, first: Any, last: Any
) -> Any:
    """The products `w @ a^T` of one tile, summed over the steps `first <= step < last` of K."""
    bm, bn, bk, storage = config.block_m, config.block_n, config.block_k, form.storage
    bs, scales, zeros, _ = form.sort(operands)
    wk, late, pieces = bk // storage.fields, form.scales_late(config), form.pieces(config)
    a_tile = T.alloc_shared((bm, bk), form.operand)
    b_tiles, products, factors = [], [], []
    for number, turned in enumerate(storage.turned):
        product = T.alloc_fragment((bn, bm), compute_dtype(form.product.dtype))
        T.clear(product)
        products.append(product)
        b_tiles.append(T.alloc_shared((wk, bn) if turned else (bn, wk), storage.words))
        given = scales[number : number + 1], zeros[number : number + 1]
        columns = pieces[0].columns
        factors.append([Factors(form, *given, (col, bn), (at, bk, columns)) for at in range(0, bk, columns)])
        for run in factors[-1]:
            run.fetch(first)
    for step in T.Pipelined(first, last, num_stages=config.stages):
        T.copy(a[row, step * bk], a_tile)
        for b, b_tile, product, runs, turned in zip(bs, b_tiles, products, factors, storage.turned, strict=True):
            T.copy(b[step * wk, col] if turned else b[col, step * wk], b_tile)
            # All read first, widened then: the tile may be filled again before the products begin.
            words = [read(b_tile, turned, piece.of(wk, bk), bn) for piece in pieces]
            taken = [run.take(step + 1) for run in runs]
            sums = [T.alloc_fragment((bn, bm), product.dtype) for _ in taken] if late else [product] * len(taken)
            ready = []
            for piece, word in zip(pieces, words, strict=True):
                ready.append((piece, widened(form, word, turned, taken[piece.run], (bn, piece), late)))
                if form.takes_turns(config):
                    add_products(ready, a_tile, sums, bk, late)
                    ready = []
            add_products(ready, a_tile, sums, bk, late)
            if late and storage.scale:
                for partial, (scale, _) in zip(sums, taken, strict=True):
                    for j, i in T.Parallel(bn, bm):
                        product[j, i] += partial[j, i] * T.cast(scale[storage.scale.place(j, 0)], partial.dtype)
    return products


def read(tile: Any, turned: bool, words: slice, rows: int) -> Any:
    """Some words of each row of a tile, in registers."""
    count = words.stop - words.start
    found = T.alloc_fragment((count, rows) if turned else (rows, count), tile.dtype)
    T.copy(tile[words.start, 0] if turned else tile[0, words.start], found)
    return found


@T.macro
def widened(form: Form, words: Any, turned: bool, factors: Sequence[Any], shape: tuple[int, Piece], late: bool) -> Any:
    """The weights of a piece, but for their scales if these come late."""
    (rows, piece), (scale, zero), fields = shape, factors, form.storage.fields
    # Exact products of float32 have no tensor core and take their operands from shared memory.
    alloc = T.alloc_shared if form.operand == torch.float32 else T.alloc_fragment
    weights = alloc((rows, piece.width), form.operand)
    for j, c in T.Parallel(rows, piece.width):
        place = (c // fields, j) if turned else (j, c // fields)
        weights[j, c] = T.cast(weight(form, words[place], c, j, piece, None if late else scale, zero), form.operand)
    return weights


def add_products(
    pieces: Sequence[tuple[Piece, Any]], a_tile: Any, sums: Sequence[Any], block_k: int, late: bool
) -> None:
    """Multiply widened pieces, one right after the other so that all are under way together."""
    for piece, weights in pieces:
        columns = a_tile[0 : a_tile.shape[0], piece.of(block_k, block_k)]
        T.gemm(weights, columns, sums[piece.run], transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=late)


class Factors:
    """The scales and zeros of a run of a step's columns, fetched a step before they are taken."""

    def __init__(
        self, form: Form, scales: Sequence[Any], zeros: Sequence[Any], rows: tuple[Any, int],
        columns: tuple[int, int, int],
    ):  # fmt: skip
        """Of `rows` = (first, count), and `columns` = (first in the step, step, count)."""
        storage, (self.row, count), (self.start, self.step, width) = form.storage, rows, columns
        self.storage, self.found = storage, list[Any]()
        for kind, given in ((storage.scale, scales if storage.group else []), (storage.zero, zeros)):
            if kind and given:
                shape = kind.place(count, storage.groups(width))
                ahead, now = (T.alloc_fragment(shape, dtype) for dtype in (kind.dtype, form.taken(kind)))
                self.found.append((kind, given[0], ahead, now))
            else:
                self.found.append(None)

    def fetch(self, step: Any) -> None:
        """Begin to load those of a step."""
        group = self.storage.first_group(step, self.step, self.start)
        for kind, given, ahead, _ in filter(None, self.found):
            T.copy(given[kind.place(self.row, group)], ahead)

    def take(self, next_step: Any) -> list[Any]:
        """Scales and zeros as they were fetched, None for what there is none of; the next step's are fetched."""
        for _, _, ahead, now in filter(None, self.found):
            T.copy(ahead, now)
        self.fetch(next_step)
        return [found and found[-1] for found in self.found]


@T.macro
def finish(form: Form, values: Sequence[Any], operands: Sequence[Any], row: Any, col: Any) -> Any:
    """One element of the result from the elements of the products; the scale of a whole row of weights comes here."""
    _, scales, _, aux = form.sort(operands)
    scale = form.storage.scale
    if scale and not form.storage.group:
        values = [v * T.cast(s[scale.place(col, 0)], v.dtype) for v, s in zip(values, scales, strict=True)]
    return gemm_form.finish(form.product, values, aux, 0, row, col)


@jit
def dequant_matmul(config: Config, form: Form) -> Any:
    """`out = epilogue(a @ w0^T, ..., aux)`; each block makes one tile, those of the same weights in a row."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    m, n, k, a_type, types = form.types()

    @T.prim_func
    def dequant_gemm(a: a_type, *operands: types, out: T.Tensor((m, n), form.product.out_dtype)):
        with T.Kernel(T.ceildiv(m, bm), T.ceildiv(n, bn), threads=config.threads) as (by, bx):
            products = multiply(config, form, a, operands, by * bm, bx * bn, 0, T.ceildiv(k, bk))
            for i, j in T.Parallel(bm, bn):
                row = by * bm + i
                col = bx * bn + j
                out[row, col] = finish(form, [p[j, i] for p in products], operands, row, col)

    return dequant_gemm


@jit
def split_dequant_matmul(config: Config, form: Form) -> Any:
    """The same for few tiles and a long K: `splits` blocks share a tile's sum; parts first, then their sums."""
    bm, bn, bk = config.block_m, config.block_n, config.block_k
    splits = T.dynamic("splits")
    m, n, k, a_type, types = form.types()
    accum, count = compute_dtype(form.product.dtype), len(form.storage.turned)

    @T.prim_func
    def split_dequant_gemm(
        a: a_type, *operands: types, parts: T.Tensor((splits, count, m, n), accum),
        out: T.Tensor((m, n), form.product.out_dtype),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(m, bm), T.ceildiv(n, bn), splits, threads=config.threads) as (by, bx, split):
            share = T.ceildiv(T.ceildiv(k, bk), splits)
            last = T.min(split * share + share, T.ceildiv(k, bk))
            products = multiply(config, form, a, operands, by * bm, bx * bn, split * share, last)
            for number, product in enumerate(products):
                for i, j in T.Parallel(bm, bn):
                    parts[split, number, by * bm + i, bx * bn + j] = product[j, i]
        with T.Kernel(T.ceildiv(n, bn), m, threads=config.threads) as (bx, row):
            sums = [sum_of_parts(parts, (number, row), bx * bn, bn) for number, _ in enumerate(form.storage.turned)]
            for j in T.Parallel(bn):
                col = bx * bn + j
                out[row, col] = finish(form, [total[j] for total in sums], operands, row, col)

    return split_dequant_gemm


@jit
def cluster_dequant_matmul(config: Config, form: Form) -> Any:
    """The same for few tiles and a long K: the blocks of a cluster share a tile's sum, and add up some of it each."""
    bm, bn, bk, count = config.block_m, config.block_n, config.block_k, config.splits
    m, n, k, a_type, types = form.types()
    own = -(-bn // count)  # rows of the weights

    @T.prim_func
    def cluster_dequant_gemm(a: a_type, *operands: types, out: T.Tensor((m, n), form.product.out_dtype)):
        rows, columns, steps = T.ceildiv(m, bm), T.ceildiv(n, bn), T.ceildiv(k, bk)
        with T.Kernel(rows * columns * count, threads=config.threads, cluster_dims=count) as block:
            split, by, bx = block % count, block // count % rows, block // count // rows
            share = T.ceildiv(steps, count)
            last = T.min(split * share + share, steps)
            products = multiply(config, form, a, operands, by * bm, bx * bn, split * share, last)
            parts = left_for_cluster(products)
            for i, j in T.Parallel(bm, own):
                row, col = by * bm + i, bx * bn + split * own + j
                sums = [sum_in_cluster(part, (T.min(split * own + j, bn - 1), i), count) for part in parts]
                if split * own + j < bn:
                    out[row, col] = finish(form, sums, operands, row, col)
            T.cluster_sync()  # until then others read this block's part

    return cluster_dequant_gemm


def dequant_gemm(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zeros: Sequence[torch.Tensor],
    bits: int,
    high_first: bool,
    offset: int,
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    dtype: torch.dtype,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference`; `config` overrides the choice of `config_for`. `out` may be given, contiguous."""
    if not has_kernels(a) or not a.shape[1]:  # tensor maps cannot describe tensors without elements
        return into(out, reference(a, bs, scales, zeros, bits, high_first, offset, aux, kinds, epilogue, dtype))
    if out is None:
        out = a.new_empty((a.shape[0], bs[0].shape[0]), dtype=dtype)
    if not out.numel():
        return out
    run(a, bs, scales, zeros, (bits, high_first, offset), aux, kinds, epilogue, out, config)
    return out


def run(
    a: torch.Tensor,
    bs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zeros: Sequence[torch.Tensor],
    fields: tuple[int, bool, int],
    aux: Sequence[torch.Tensor],
    kinds: str,
    epilogue: str,
    out: torch.Tensor,
    config: Config | None,
) -> None:
    """`dequant_gemm` into `out`, which must be contiguous and not empty."""
    given = (a, bs, scales, zeros, *fields, aux, kinds, epilogue, out.dtype)
    machine, (m, n), k = machine_of(a), out.shape, a.shape[1]
    a = dense_last(a)
    matrices = [gemm.matrix(b) for b in bs]
    operands, turned = [b for b, _ in matrices], tuple(t for _, t in matrices)
    views, forms = gemm_form.parameters(aux, kinds, pieces=False)  # neighbouring sums of a thread are of one column
    groups = next((x.shape[1] for x in (*scales, *zeros)), 1)
    scale, scales = Factor.of(scales)
    zero, zeros = Factor.of(zeros)
    group = k // groups if groups > 1 else 0
    vector = vector_of((a,), (k,)) if machine.is_gpu else 1
    aligned = machine.is_gpu and vector_of(operands, [b.shape[1] for b in operands]) > 1
    operand = a.dtype if machine.is_gpu else compute_dtype(a.dtype)
    words, signed = bs[0].dtype, bs[0].dtype.is_signed and not bs[0].dtype.is_floating_point
    if aligned and not any(turned) and operand.itemsize == 2 and fields[0] == 4 and 0 <= fields[2] <= LARGEST_OFFSET:
        words = torch.int32
    elif aligned and words == torch.int8:
        words = torch.uint8
    if words != bs[0].dtype:
        operands = [b.view(words) for b in operands]
    storage = Storage(words, signed, *fields, turned, group, scale, zero, aligned)
    form = Form(gemm_form.Form(a.dtype, out.dtype, False, turned, forms, epilogue, vector), storage, operand)
    config = config or config_for(
        Problem(a.dtype, m, n, k, len(bs), storage.bits, group, vector > 1 and aligned), machine
    )
    if config is None:
        out.copy_(reference(*given))
        return
    if config.splits == 1:
        machine.kernel(dequant_matmul)(config, form)(a, *operands, *scales, *zeros, *views, out)
        return
    if config.cluster:
        machine.kernel(cluster_dequant_matmul)(config, form)(a, *operands, *scales, *zeros, *views, out)
        return
    parts = out.new_empty((config.splits, len(bs), m, n), dtype=compute_dtype(a.dtype))
    # How many blocks share a sum is known at run time only, so that one kernel serves all numbers.
    machine.kernel(split_dequant_matmul)(replace(config, splits=2), form)(
        a, *operands, *scales, *zeros, *views, parts, out
    )
