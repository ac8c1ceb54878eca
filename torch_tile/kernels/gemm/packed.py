# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits: how they lie in memory, in which pieces a step of K is widened, and what one widened weight is.

Products of all forms take these. May assume that `ops` checked shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import compute_dtype, dense_last, dynamic, is_unit, strided
from torch_tile.kernels.gemm import spec as gemm_spec
from torch_tile.kernels.gemm.formats import E4M3, E8M0, power_of, value_of
from torch_tile.kernels.gemm.tiling import Config

FEW_ROWS = 64  # up to which reading the weights takes longer than multiplying
SIGNS = -0x77777778  # 0x88888888: the sign of each field of 4 bits of an int32
MOST_SUMS = 96  # of a thread
LEAST_LATE = 32  # columns of a group whose sum is scaled
LEAST_PIECE = 16  # columns, of one product of tensor cores
WORD = 4  # bytes of scales that are read at once
LONG_PRODUCTS = 128  # columns of a product from which on it takes as long as widening its weights
BYTES = 0x4B000000  # 2^23, whose last bit is 1
LARGEST_OFFSET = 56  # of fields of 4 bits that are widened by twos: 64 (codegen/cuda_text.py) less 8 for their sign


@dataclass(frozen=True)
class Problem:
    """One product: dtype of a, sizes, how many bs share a, bits of a weight, how many columns share a scale (0: all).

    Also whether rows in memory are runs of whole 16 bytes, and whether these hold codes of a format. `zeros` are
    subtracted from fields. `grouped` rows have a matrix for each group.
    """

    dtype: torch.dtype
    m: int
    n: int
    k: int
    products: int
    bits: int
    group: int
    aligned: bool
    coded: bool = False
    zeros: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Factor:
    """How scales or zeros `[N, G]` lie in memory: dtype, transposed or not, bytes of float8_e8m0fnu or not, and how
    many of these are read together, as one int32.
    Rows of factors are runs of `whole` of them, each at a multiple of as many bytes.
    """

    dtype: torch.dtype
    transposed: bool
    power: bool = False
    together: int = 1
    whole: int = 1

    @staticmethod
    def of(factors: Sequence[torch.Tensor]) -> tuple[Factor | None, list[torch.Tensor]]:
        """Describe several factors in the widest of their dtypes, and return the factors in memory order."""
        if not factors:
            return None, []
        transposed = all(is_unit(x.mT) and not is_unit(x) for x in factors)
        views = [x.mT if transposed else dense_last(x) for x in factors]
        if all(x.dtype == E8M0 for x in factors):
            return Factor(torch.uint8, transposed, power=True), [x.view(torch.uint8) for x in views]
        dtypes = {x.dtype for x in factors}
        if len(dtypes) > 1:  # float8 in a dtype that holds it exactly
            dtypes = {{E8M0: torch.bfloat16, E4M3: torch.float16}.get(dtype, dtype) for dtype in dtypes}
        dtype = functools.reduce(torch.promote_types, dtypes)
        return Factor(dtype, transposed), [x.to(dtype) for x in views]

    def columns_of(self, group: int) -> int:
        """Return the columns of weights that factors of a whole piece stand for."""
        return self.whole * self.together * group

    def columns(self, span: int, group: int) -> int:
        """Return the number of a row's factors for so many columns of weights."""
        return span // (self.together * group)

    def place(self, n: Any, group: Any) -> tuple[Any, Any]:
        """Return the indices of the factor of a row and a group."""
        return (group, n) if self.transposed else (n, group)

    def value(self, stored: Any, dtype: Any, number: int = 0) -> Any:
        """Convert a factor as it lies in memory to a number of a dtype; of several together that of a number."""
        return T.cast(power_of(stored, number) if self.power else stored, dtype)

    def type(self, name: str, n: Any, groups: Any, *matrices: Any) -> Any:
        """Return the parameter's type, with the sizes of dimensions in front."""
        align = self.whole * self.dtype.itemsize if self.whole > 1 else None
        return strided(name, (*matrices, *self.place(n, groups)), self.dtype, multiple=self.whole, align=align)


@dataclass(frozen=True)
class Storage:
    """How packed weights `[N, K]` lie in memory as words `[N, words]` (see `dequantize`).

    `transposed` says for each b that it is stored `[words, N]`. `group` columns share a scale and a zero; 0: all of a
    row. `aligned`: rows in memory start at multiples of 16 bytes, and are whole runs of so many. `signed`: fields are.
    Words of int32 are four bytes of fields of 4 bits side by side. Each byte has its own order of fields. `format`: of
    fields that are indices of a table (see `FORMATS`), or the empty string.
    """

    words: torch.dtype
    signed: bool
    bits: int
    high_first: bool
    offset: int
    format: str
    transposed: tuple[bool, ...]
    group: int
    scale: Factor | None
    zero: Factor | None
    aligned: bool

    @property
    def fields(self) -> int:
        """Number of a row's columns that a word holds."""
        return 8 * self.words.itemsize // self.bits

    @property
    def coded(self) -> bool:
        """Return whether words of int32 hold indices of a format's numbers, which a table of shared memory gives."""
        return bool(self.format) and self.words == torch.int32

    def groups(self, block_k: int) -> int:
        """Return the number of groups that a step of `block_k` columns covers."""
        return max(1, block_k // self.group) if self.group else 1

    def first_group(self, step: Any, block_k: int, column: int) -> Any:
        """Return the group of a column of a step."""
        if not self.group:
            return 0
        if block_k > self.group:
            return step * (block_k // self.group) + column // self.group
        return step // (self.group // block_k)

    def types(self, n: Any, *matrices: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the types of the bs, the scales and the zeros, maybe of several matrices."""
        multiple, align = (16 // self.words.itemsize, 16) if self.aligned else (1, None)
        words = dynamic("words", 1 if all(self.transposed) else multiple)
        groups = dynamic("groups", self.scale.whole if self.scale else 1)
        bs = [
            strided(f"b{i}", (*matrices, *order), self.words, multiple=multiple, align=align)
            for i, order in enumerate((words, n) if transposed else (n, words) for transposed in self.transposed)
        ]
        count = len(bs)
        scales = [self.scale.type(f"s{i}", n, groups, *matrices) for i in range(count)] if self.scale else []
        zeros = [self.zero.type(f"z{i}", n, groups, *matrices) for i in range(count)] if self.zero else []
        return bs, scales, zeros

    def looked_up(self, word: Any, column: Any, row: Any, table: Any) -> Any:
        """Look up the number of the field of a row's column, in the `table` of `pairs_of` that `coded` words have."""
        if table is not None:  # lanes of tensor cores' fragments: 4 pairs of columns of 8 rows
            return table[T.table_place(word, column % 8 // 2, row % 8 * 4 + column % 8 // 2, column % 2)]
        upper = 1 - column % 2 if self.high_first else column % 2
        return value_of(self.format, T.cast(word, "int32"), column % self.fields // 2, upper)

    def number(self, word: Any, column: Any) -> tuple[Any, Any]:
        """Unpack one column's field from its word as a float32, with a constant excess that the caller subtracts. Both
        are exact.

        A mask puts the field into the mantissa of a power of two. GPUs have few units that convert integers. Two fields
        in neighbouring columns of an int32 are extracted together if they are widened to 16 bits.
        """
        sign = 1 << (self.bits - 1) if self.signed else 0  # turned over, it counts from 0 on
        if self.fields == 1 and (not self.aligned or self.words.is_floating_point):
            return T.cast(word, "float32") - float(self.offset), 0.0
        if self.fields == 1:
            return T.float_from_bits(T.cast(word, "int32"), 255, BYTES + sign) - float(2**23 + sign + self.offset), 0.0
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
    """A range of `width` columns from `start` on, unpacked at once, within one run of `columns` columns."""

    start: int
    width: int
    columns: int

    @property
    def run(self) -> int:
        """Return the run of columns of the step that holds the piece."""
        return self.start // self.columns

    def of(self, size: int, block_k: int) -> slice:
        """Return the piece's range among `size` words that stand for all columns of the step."""
        return slice(self.start * size // block_k, (self.start + self.width) * size // block_k)


@dataclass(frozen=True)
class Parts:
    """Fragments of scales times a `unit` in two parts of the operand's dtype: rounded, and what that leaves.

    Powers of two have no second part, `low`. `peak` holds the largest magnitude at each place so far.
    """

    high: Any
    low: Any
    peak: Any
    unit: float


@dataclass(frozen=True)
class Norm:
    """The RMS norm that a kernel applies to its row first: the dtype of its weight, None without one, and eps."""

    weight: torch.dtype | None
    eps: float


@dataclass(frozen=True)
class Spec:
    """Compile-time facts of a dequantising product: its form, right operands' storage, and operands' dtype.

    With a `norm` the row of a is normalised first.
    """

    product: gemm_spec.Spec
    storage: Storage
    operand: torch.dtype
    norm: Norm | None = None

    def scales_late(self, config: Config) -> bool:
        """Return whether group sums are scaled instead of weights, where registers have room for a step's sums.

        Sums of groups of 16 are one instruction each, and ptxas makes their wgmmas wait for each other (C7518).
        """
        sums = config.block_m * config.block_n // config.threads * len(self.storage.transposed)
        few = sums * (1 + self.storage.groups(config.block_k)) <= MOST_SUMS
        long = self.storage.group >= LEAST_LATE
        return bool(self.storage.words == torch.int32 and long and self.storage.scale and few)

    def pieces(self, config: Config) -> list[Piece]:
        """Return the pieces in which a step is widened.

        These are groups if scales come late. They are quarters, each beside the previous quarter's product, if products
        take long. Else the step is one piece.
        """
        block_k = config.block_k
        width = span = block_k // self.storage.groups(block_k)
        if not self.scales_late(config):
            width = max(LEAST_PIECE, block_k // 4) if self.alternates(config) else block_k
        return [Piece(at, width, max(span, width)) for at in range(0, block_k, width)]

    def taken(self, factor: Factor) -> torch.dtype:
        """Return the dtype to which the kernel converts scales or zeros before it scales weights. Halves hold bytes
        and float8_e4m3fn exactly, and bfloat16 powers of two.
        """
        if factor.power:
            return torch.bfloat16 if self.operand == torch.bfloat16 else torch.float32
        exact = factor.dtype in (torch.int8, torch.uint8, E4M3) and self.operand.itemsize == 2
        return self.operand if exact and self.storage.words == torch.int32 else factor.dtype

    def scales_in_parts(self, config: Config) -> bool:
        """Return whether numbers of a table are multiplied by two parts of a scale, each of the operand's dtype.

        Parts take two instructions for a pair of weights, and a float32 scale takes five.
        """
        storage, scale = self.storage, self.storage.scale
        if not storage.coded or not storage.group or scale is None or self.scales_late(config):
            return False
        return self.taken(scale) != self.operand

    def alternates(self, config: Config) -> bool:
        """Return whether the unpacking of a piece alternates with the products of the piece before."""
        long = config.block_m >= LONG_PRODUCTS or self.scales_late(config)
        return self.storage.aligned and self.operand.itemsize == 2 and long

    def types(self, *matrices: Any, pieces: int = 1) -> tuple[Any, Any, Any, Any, list[Any]]:
        """Return m, n and k of a problem, the type of a, and those of all other operands. `pieces` divide n."""
        storage = self.storage
        wide = max(16 // storage.words.itemsize if storage.aligned and any(storage.transposed) else 1, pieces)
        m, n, k = T.dynamic("m"), dynamic("n", wide), dynamic("k", self.product.vector)
        a = strided("a", (m, k), self.product.dtype, multiple=self.product.vector)
        bs, scales, zeros = storage.types(n, *matrices)
        return m, n, k, a, [*bs, *scales, *zeros, *self.product.operand_types(1, m, n, k, *matrices)[2]]

    def sort(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Sort the operands besides a by kind: bs, scales, zeros (empty if there are none), aux."""
        count, rest = len(self.storage.transposed), list(operands)
        found = []
        for there in (True, self.storage.scale, self.storage.zero):
            found.append(rest[:count] if there else [])
            rest = rest[count:] if there else rest
        return found[0], found[1], found[2], rest


def weight(spec: Spec, word: Any, column: Any, row: Any, piece: Piece, scales: Any, zeros: Any, table: Any) -> Any:
    """Unpack and scale one weight."""
    storage, accum = spec.storage, compute_dtype(spec.product.dtype)
    several = storage.groups(piece.columns) > 1
    group = (column + piece.start % piece.columns) // storage.group if several else 0
    if isinstance(scales, Parts) and storage.scale is not None:
        number = T.cast(T.cast(storage.looked_up(word, column, row, table), spec.operand), accum)
        place = storage.scale.place(row, group)
        high = T.cast(scales.high[place], accum)
        if scales.low is None:
            return number * high
        low = T.cast(scales.low[place], accum)
        return T.fma(number, high, T.cast(T.cast(number * low, spec.operand), accum))
    scale, zero = (
        T.cast(x[kind.place(row, group)], accum) if kind and x is not None else None
        for kind, x in ((storage.scale, scales), (storage.zero, zeros))
    )
    if storage.format:
        value = T.cast(T.cast(storage.looked_up(word, column, row, table), spec.operand), accum)
        return value if scale is None else value * scale
    number, surplus = (T.cast(x, accum) for x in storage.number(word, column))
    if storage.words == torch.int32:  # in steps that two neighbours can take together
        number = number - surplus
        if zero is not None:
            number = T.cast(T.cast(number - zero, spec.operand), accum)
        return number if scale is None else number * scale
    bare = storage.fields == 1 and zero is None
    surplus = surplus if zero is None else zero + surplus
    if scale is None or bare or spec.operand.itemsize > 2:
        number = number if bare else number - surplus
        return number if scale is None else number * scale
    # One multiply-add is off by 2^-15 of a scale at most, which is less than rounding to 16 bits is. It overflows for
    # scales from 2^118 on. float16, which has no such weight but 0, overflows for scales from 2^31 on.
    return T.fma(number, scale, -(surplus * scale))


def read(tile: Any, transposed: bool, words: slice, rows: int) -> Any:
    """Load the packed words of a tile's rows into registers."""
    count = words.stop - words.start
    found = T.alloc_fragment((count, rows) if transposed else (rows, count), tile.dtype)
    T.copy(tile[words.start, 0] if transposed else tile[0, words.start], found)
    return found


@T.macro
def finish(
    spec: Spec, values: Sequence[Any], operands: Sequence[Any], row: Any, col: Any, matrix: tuple[Any, ...] = ()
) -> Any:
    """Compute one element of the result from the elements of the products. A scale of a whole row of weights is applied
    here.
    """
    _, scales, _, aux = spec.sort(operands)
    scale = spec.storage.scale
    if scale and not spec.storage.group:
        place = *matrix, *scale.place(col, 0)
        values = [v * scale.value(s[place], v.dtype) for v, s in zip(values, scales, strict=True)]
    return gemm_spec.finish(spec.product, values, aux, 0, row, col, *matrix)
