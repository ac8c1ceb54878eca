# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose right operands are stored in few bits: `epilogue(a @ w0^T, a @ w1^T, ..., aux)`.

The weights are widened in registers, between memory and the product, so that memory sees them once and as they are
stored. The product is made transposed, `w @ a^T`: what was widened is its left operand, which tensor cores take from
registers, and few rows of a are few columns. Assumes that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.jit import jit
from torch_tile.kernels import gemm
from torch_tile.kernels.combine import sum_of_parts
from torch_tile.kernels.common import (
    compute_dtype,
    dense_last,
    dynamic,
    has_kernels,
    into,
    is_unit,
    machine_of,
    strided,
    vector_of,
)
from torch_tile.kernels.dequant_config import Config, Problem, config_for


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


@dataclass(frozen=True)
class Factor:
    """How scales or zeros `[N, G]` lie in memory; `turned`: as `[G, N]`."""

    dtype: torch.dtype
    turned: bool

    @staticmethod
    def of(factors: Sequence[torch.Tensor]) -> tuple[Factor | None, list[torch.Tensor]]:
        """What all of them are, in the widest of their dtypes, and they in memory's order."""
        if not factors:
            return None, []
        turned = all(is_unit(x.mT) and not is_unit(x) for x in factors)
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in factors))
        return Factor(dtype, turned), [(x.mT if turned else dense_last(x)).to(dtype) for x in factors]

    def place(self, n: Any, group: Any) -> tuple[Any, Any]:
        """Where the one of a row and a group lies."""
        return (group, n) if self.turned else (n, group)

    def type(self, name: str, n: Any, groups: Any) -> Any:
        """The parameter's type."""
        return strided(name, self.place(n, groups), self.dtype)


@dataclass(frozen=True)
class Storage:
    """How weights `[N, K]` lie in memory, as `[N, words]`: see `dequantize`.

    `turned` says for each b that it is stored `[words, N]`. `group` columns share a scale and a zero; 0: all of a row.
    `aligned`: rows in memory start at multiples of 16 bytes, and are whole runs of so many.
    """

    words: torch.dtype
    bits: int
    high_first: bool
    offset: int
    turned: tuple[bool, ...]
    group: int
    scale: Factor | None
    zero: Factor | None
    aligned: bool

    @property
    def fields(self) -> int:
        """How many of a row's columns a word holds."""
        return 8 * self.words.itemsize // self.bits

    def groups(self, block_k: int) -> int:
        """Over how many groups a step of `block_k` columns goes."""
        return max(1, block_k // self.group) if self.group else 1

    def types(self, n: Any, k: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The types of the bs, the scales and the zeros."""
        multiple, align = (16 // self.words.itemsize, 16) if self.aligned else (1, None)
        words, groups = dynamic("words", 1 if all(self.turned) else multiple), T.dynamic("groups")
        bs = [
            strided(f"b{i}", (words, n) if turned else (n, words), self.words, multiple=multiple, align=align)
            for i, turned in enumerate(self.turned)
        ]
        count = len(bs)
        scales = [self.scale.type(f"s{i}", n, groups) for i in range(count)] if self.scale else []
        zeros = [self.zero.type(f"z{i}", n, groups) for i in range(count)] if self.zero else []
        return bs, scales, zeros

    def number(self, word: Any, column: Any) -> tuple[Any, Any]:
        """The field of a column of a row, from its word, as a float32 and what is too much in it, both exact.

        Fields of less than a byte are put into the mantissa of 2^(8 - place), which converts them by a mask alone.
        """
        if self.fields == 1:
            return T.cast(word, "float32"), self.offset
        place = self.bits * (column % self.fields)
        place = 8 - self.bits - place if self.high_first else place
        sign = 1 << (self.bits - 1) if self.words.is_signed else 0  # turned over, it counts from 0 on
        mask, exponent = ((1 << self.bits) - 1) << (15 + place), (127 + 8 - place) << 23
        value = T.float_from_bits(T.cast(word, "int32") << 15, mask, exponent + (sign << (15 + place)))
        return value, T.cast(256 >> place, "float32") + float(sign + self.offset)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its `Config`: the product's form, its right operands' storage, and the
    dtype that both operands are multiplied in.
    """

    product: gemm.Form
    storage: Storage
    operand: torch.dtype

    def types(self) -> tuple[Any, Any, Any, Any, list[Any]]:
        """m, n and k of a problem, the type of a, and those of all other operands."""
        storage = self.storage
        wide = 16 // storage.words.itemsize if storage.aligned and any(storage.turned) else 1
        m, n, k = T.dynamic("m"), dynamic("n", wide), dynamic("k", self.product.vector)
        a = strided("a", (m, k), self.product.dtype, multiple=self.product.vector)
        bs, scales, zeros = storage.types(n, k)
        return m, n, k, a, [*bs, *scales, *zeros, *self.product.operand_types(1, m, n, k)[2]]

    def sort(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The operands besides a, by what they are: bs, scales, zeros (empty if there are none), aux."""
        count, rest = len(self.storage.turned), list(operands)
        found = []
        for there in (True, self.storage.scale, self.storage.zero):
            found.append(rest[:count] if there else [])
            rest = rest[count:] if there else rest
        return found[0], found[1], found[2], rest


@T.macro
def multiply(
    config: Config, form: Form, a: Any, operands: Sequence[Any], row: Any, col: Any, first: Any, last: Any
) -> Any:
    """The products `w @ a^T` of one tile, summed over the steps `first <= step < last` of K."""
    bm, bn, bk, storage = config.block_m, config.block_n, config.block_k, form.storage
    bs, scales, zeros, _ = form.sort(operands)
    wk, groups, accum = bk // storage.fields, storage.groups(bk), compute_dtype(form.product.dtype)
    a_tile = T.alloc_shared((bm, bk), form.operand)
    b_tiles, products = [], []
    for turned in storage.turned:
        product = T.alloc_fragment((bn, bm), accum)
        T.clear(product)
        b_tiles.append(T.alloc_shared((wk, bn) if turned else (bn, wk), storage.words))
        products.append(product)
    for step in T.Pipelined(first, last, num_stages=config.stages):
        T.copy(a[row, step * bk], a_tile)
        for number, (b_tile, turned) in enumerate(zip(b_tiles, storage.turned, strict=True)):
            T.copy(bs[number][step * wk, col] if turned else bs[number][col, step * wk], b_tile)
            start = step * groups if groups > 1 else step // (storage.group // bk) if storage.group else 0
            factors = []
            for kind, parts in ((storage.scale, scales if storage.group else []), (storage.zero, zeros)):
                factor = None
                if kind and parts:
                    factor = T.alloc_fragment(kind.place(bn, groups), kind.dtype)
                    T.copy(parts[number][kind.place(col, start)], factor)
                factors.append(factor)
            # Read first, widened then: the tile may be filled again before the product begins.
            words = T.alloc_fragment((wk, bn) if turned else (bn, wk), storage.words)
            T.copy(b_tile, words)
            # Exact products of float32 have no tensor core and take their operands from shared memory.
            alloc = T.alloc_shared if form.operand == torch.float32 else T.alloc_fragment
            weights = alloc((bn, bk), form.operand)
            for j, c in T.Parallel(bn, bk):
                place = (c // storage.fields, j) if turned else (j, c // storage.fields)
                weights[j, c] = T.cast(weight(form, words[place], factors, j, c, bk), form.operand)
            T.gemm(weights, a_tile, products[number], transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
    return products


def weight(form: Form, word: Any, factors: Sequence[Any], row: Any, column: Any, block_k: int) -> Any:
    """One widened weight, from its word and the tile's scales and zeros (None if there are none)."""
    scale, zero = factors
    storage, accum = form.storage, compute_dtype(form.product.dtype)
    group = column // storage.group if storage.groups(block_k) > 1 else 0
    number, surplus = (T.cast(x, accum) for x in storage.number(word, column))
    if zero is not None and storage.zero:
        surplus = T.cast(zero[storage.zero.place(row, group)], accum) + surplus
    if scale is None or not storage.scale:
        return number - surplus
    factor = T.cast(scale[storage.scale.place(row, group)], accum)
    # One multiply-add is off by 2^-15 of a scale at most, which is less than rounding to 16 bits is.
    return T.fma(number, factor, -(surplus * factor)) if form.operand.itemsize <= 2 else (number - surplus) * factor


@T.macro
def finish(form: Form, values: Sequence[Any], operands: Sequence[Any], row: Any, col: Any) -> Any:
    """One element of the result from the elements of the products; the scale of a whole row of weights comes here."""
    _, scales, _, aux = form.sort(operands)
    scale = form.storage.scale
    if scale and not form.storage.group:
        values = [v * T.cast(s[scale.place(col, 0)], v.dtype) for v, s in zip(values, scales, strict=True)]
    return gemm.finish(form.product, values, aux, 0, row, col)


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
    machine, (m, n), k = machine_of(a), out.shape, a.shape[1]
    a = dense_last(a)
    matrices = [gemm.matrix(b) for b in bs]
    operands, turned = [b for b, _ in matrices], tuple(t for _, t in matrices)
    _, _, views, _ = gemm.as_batches(a, [], aux, kinds, out)
    forms = tuple(gemm.Aux(kind, x.dtype, is_unit(x)) for x, kind in zip(views, kinds, strict=True))
    groups = next((x.shape[1] for x in (*scales, *zeros)), 1)
    scale, scales = Factor.of(scales)
    zero, zeros = Factor.of(zeros)
    group = k // groups if groups > 1 else 0
    vector = vector_of((a,), (k,)) if machine.is_gpu else 1
    aligned = machine.is_gpu and vector_of(operands, [b.shape[1] for b in operands]) > 1
    storage = Storage(bs[0].dtype, *fields, turned, group, scale, zero, aligned)
    operand = a.dtype if machine.is_gpu else compute_dtype(a.dtype)
    form = Form(gemm.Form(a.dtype, out.dtype, False, turned, forms, epilogue, vector), storage, operand)
    config = config or config_for(
        Problem(a.dtype, m, n, k, len(bs), storage.bits, group, vector > 1 and aligned), machine
    )
    if config.splits == 1:
        machine.kernel(dequant_matmul)(config, form)(a, *operands, *scales, *zeros, *views, out)
        return
    parts = out.new_empty((config.splits, len(bs), m, n), dtype=compute_dtype(a.dtype))
    # How many blocks share a sum is known at run time only, so that one kernel serves all numbers.
    machine.kernel(split_dequant_matmul)(replace(config, splits=2), form)(
        a, *operands, *scales, *zeros, *views, parts, out
    )
