# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits: how they lie in memory, in which pieces a step of K is widened, and what one widened weight is.

May assume that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, dense_last, dynamic, is_unit, strided
from torch_tile.kernels.gemm import spec as gemm_form
from torch_tile.kernels.gemm.dequant_tiling import Config

SIGNS = -0x77777778  # 0x88888888: the sign of each field of 4 bits of an int32
MOST_SUMS = 96  # of a thread
LEAST_PIECE = 16  # columns, of one product of tensor cores
LONG_PRODUCTS = 128  # columns of a product from which on it takes as long as widening its weights
BYTES = 0x4B000000  # 2^23, whose last bit is 1
LARGEST_OFFSET = 56  # of fields of 4 bits that are widened by twos: 64 (codegen/cuda_fields.py) less 8 for their sign


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
    `aligned`: rows in memory start at multiples of 16 bytes, and are whole runs of so many. `signed`: fields are. Words
    of int32 are four bytes of fields of 4 bits side by side, each with its own order of fields.
    """

    words: torch.dtype
    signed: bool
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

    def first_group(self, step: Any, block_k: int, column: int) -> Any:
        """The group of a column of a step."""
        if not self.group:
            return 0
        if block_k > self.group:
            return step * (block_k // self.group) + column // self.group
        return step // (self.group // block_k)

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

        Fields are put into the mantissa of a power of two, which converts them by a mask alone (GPUs have few units
        that convert integers); two in neighbouring columns of an int32 together, where they are widened to 16 bits.
        """
        sign = 1 << (self.bits - 1) if self.signed else 0  # turned over, it counts from 0 on
        if self.fields == 1 and (not self.aligned or self.words.is_floating_point):
            return T.cast(word, "float32"), self.offset
        if self.fields == 1:
            return T.float_from_bits(T.cast(word, "int32"), 255, BYTES + sign) - float(2**23 + sign), self.offset
        if self.words == torch.int32:
            upper = 1 - column % 2 if self.high_first else column % 2
            return T.nibble(word ^ SIGNS if self.signed else word, column % 8 // 2, upper), float(sign + self.offset)
        place = self.bits * (column % self.fields)
        place = 8 - self.bits - place if self.high_first else place
        mask, exponent = ((1 << self.bits) - 1) << (15 + place), (127 + 8 - place) << 23
        value = T.float_from_bits(T.cast(word, "int32") << 15, mask, exponent + (sign << (15 + place)))
        return value, T.cast(256 >> place, "float32") + float(sign + self.offset)


@dataclass(frozen=True)
class Piece:
    """`width` of a step's columns from `start` on, which are widened at a time.

    It lies in one run of `columns` columns, whose scales are fetched together.
    """

    start: int
    width: int
    columns: int

    @property
    def run(self) -> int:
        """Which run of columns of the step it lies in."""
        return self.start // self.columns

    def of(self, size: int, block_k: int) -> slice:
        """Where they lie in `size` words that stand for all columns of the step."""
        return slice(self.start * size // block_k, (self.start + self.width) * size // block_k)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its `Config`: the product's form, its right operands' storage, and the
    dtype that both operands are multiplied in.
    """

    product: gemm_form.Form
    storage: Storage
    operand: torch.dtype

    def scales_late(self, config: Config) -> bool:
        """Whether sums over a group are scaled, not weights: where there is room for a step's sums in registers."""
        sums = config.block_m * config.block_n // config.threads * len(self.storage.turned)
        few = sums * (1 + self.storage.groups(config.block_k)) <= MOST_SUMS
        return bool(self.storage.words == torch.int32 and self.storage.group and self.storage.scale and few)

    def pieces(self, config: Config) -> list[Piece]:
        """How a step is widened: group by group if scales come late; by quarters, each while the product of the one
        before is under way, where products take long; else at once.
        """
        block_k = config.block_k
        width = span = block_k // self.storage.groups(block_k)
        if not self.scales_late(config):
            width = max(LEAST_PIECE, block_k // 4) if self.takes_turns(config) else block_k
        return [Piece(at, width, max(span, width)) for at in range(0, block_k, width)]

    def taken(self, factor: Factor) -> torch.dtype:
        """What scales or zeros are converted to before weights are widened: bytes, which halves hold exactly."""
        exact = factor.dtype in (torch.int8, torch.uint8) and self.operand.itemsize == 2
        return self.operand if exact and self.storage.words == torch.int32 else factor.dtype

    def takes_turns(self, config: Config) -> bool:
        """Whether widening and products take turns."""
        return self.storage.aligned and self.operand.itemsize == 2 and config.block_m >= LONG_PRODUCTS

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


def weight(form: Form, word: Any, column: Any, row: Any, piece: Piece, scales: Any, zeros: Any) -> Any:
    """One widened weight of a piece, from its word and the scales and zeros of its run (None if there are none)."""
    storage, accum = form.storage, compute_dtype(form.product.dtype)
    several = storage.groups(piece.columns) > 1
    group = (column + piece.start % piece.columns) // storage.group if several else 0
    number, surplus = (T.cast(x, accum) for x in storage.number(word, column))
    scale, zero = (
        T.cast(x[kind.place(row, group)], accum) if kind and x is not None else None
        for kind, x in ((storage.scale, scales), (storage.zero, zeros))
    )
    if storage.words == torch.int32:  # in steps that two neighbours can take together
        number = number - surplus
        if zero is not None:
            number = T.cast(T.cast(number - zero, form.operand), accum)
        return number if scale is None else number * scale
    surplus = surplus if zero is None else zero + surplus
    if scale is None:
        return number - surplus
    # One multiply-add is off by 2^-15 of a scale at most, which is less than rounding to 16 bits is.
    return T.fma(number, scale, -(surplus * scale)) if form.operand.itemsize <= 2 else (number - surplus) * scale
