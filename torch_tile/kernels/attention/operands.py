# SPDX-License-Identifier: Apache-2.0
"""Operands of attention scores besides queries and keys: masks, and tensors that a text (score_mod.py) reads.

A block of rows loads what depends on the row once, and what depends on the key by tiles where memory allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import torch_tile.language as T
from torch_tile.kernels.common import is_unit, round_up, strided, vector_of

if TYPE_CHECKING:
    from torch_tile.language import TensorType

DIMS = "bhqk"
"""The dimensions of scores: batch, head, query, key."""


@dataclass(frozen=True)
class Operand:
    """What a kernel knows of an operand: those of `DIMS` that it has, its dtype, whether its last dimension is dense,
    and whether its rows begin at multiples of 16 bytes.
    """

    dims: str
    dtype: torch.dtype
    unit: bool = True
    aligned: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype in memory: bytes for bool, as compilers vectorise their comparison with 0."""
        return torch.uint8 if self.dtype == torch.bool else self.dtype

    @property
    def tiled(self) -> bool:
        """Whether it can be copied by tiles of queries, keys or both."""
        return self.aligned and self.dims[-1:] in ("q", "k")

    def tile(self, queries: int, keys: int) -> tuple[int, ...]:
        """The shape of such a tile; of one dimension in whole 128 bytes, where bulk copies of its versions begin."""
        if self.dims.endswith("qk"):
            return queries, keys
        return (round_up(keys if self.dims[-1] == "k" else queries, 128 // self.stored.itemsize),)

    def type(self, name: str, sizes: dict[str, tuple[Any, ...]]) -> TensorType:
        """The type of the parameter; `sizes` has heads as key heads and heads of a group."""
        shape = [size for d in self.dims for size in sizes[d]] or [1]
        size = self.stored.itemsize
        multiple, align = (16 // size, 16) if self.aligned else (1, size)
        return strided(name, shape, self.stored, self.unit, multiple, align)

    def number(self, element: Any, dtype: Any) -> Any:
        """An element as a number of `dtype`."""
        return T.cast(element != 0 if self.dtype == torch.bool else element, dtype)


def operand(x: torch.Tensor, kv_heads: int, on_gpu: bool) -> tuple[Operand, torch.Tensor]:
    """An operand that broadcasts to `[B, H, Sq, Skv]`, without the dimensions that it repeats along."""
    x = x[(None,) * (len(DIMS) - x.dim())]
    dims = ""
    for d, name in reversed(list(enumerate(DIMS))):
        if x.shape[d] == 1 or x.stride(d) == 0:
            x = x.select(d, 0)
        else:
            dims = name + dims
            x = x.unflatten(d, (kv_heads, -1)) if name == "h" else x
    x = x if x.dim() else x[None]
    unit = is_unit(x)
    spec = Operand(dims, x.dtype, unit, on_gpu and unit and vector_of((x,), ()) > 1)
    return spec, x.view(torch.uint8) if x.dtype == torch.bool else x


def operands_of(
    tensors: Sequence[torch.Tensor], kv_heads: int, on_gpu: bool
) -> tuple[tuple[Operand, ...], list[torch.Tensor]]:
    """What kernels know of several operands, and the operands as they take them."""
    found = [operand(x, kv_heads, on_gpu) for x in tensors]
    return tuple(spec for spec, _ in found), [x for _, x in found]


@dataclass(frozen=True)
class Rows:
    """The rows of a block, from row `first` of `length` on: queries of one of `members` heads of a group, or, `packed`,
    of all of them.
    """

    first: Any
    length: Any
    queries: Any
    packed: bool
    sequence: Any
    head: Any
    member: Any
    members: Any
    q_offset: Any = 0

    def place(self, i: Any, key: Any) -> dict[str, tuple[Any, ...]]:
        """Where in an operand the score of row i and a key stands, dimension by dimension."""
        row = T.min(self.first + i, self.length - 1)
        query, member = (row % self.queries, row // self.queries) if self.packed else (row, self.member)
        return {"b": (self.sequence,), "h": (self.head, member), "q": (query,), "k": (key,)}

    def corner(self, key: Any) -> dict[str, tuple[Any, ...]]:
        """Where the tile of all rows and the keys from `key` on begins."""
        return {"b": (self.sequence,), "h": (self.head, self.member), "q": (self.first,), "k": (key,)}

    def index(self, d: int, i: Any, key: Any) -> Any:
        """`i0..i3` of a text."""
        found = self.place(i, key)[DIMS[d]]
        if DIMS[d] == "h":
            return found[0] * (self.length // self.queries if self.packed else self.members) + found[1]
        return found[0] + self.q_offset if DIMS[d] == "q" else found[0]


@dataclass(frozen=True)
class Held:
    """An operand in a block of rows, of which either `rows` has a number for each row, or `tile` what belongs to the
    present rows and keys, or neither.
    """

    spec: Operand
    tensor: Any
    rows: Any = None
    tile: Any = None

    def element(self, here: Rows, i: Any, j: Any, first: Any) -> Any:
        """The element for row i and key j of those from `first` on, as it is stored."""
        if self.rows is not None:
            return self.rows[i]
        if self.tile is not None:
            return self.tile[tuple(n for name, n in (("q", i), ("k", j)) if name in self.spec.dims)]
        return self.tensor[_at(self.spec, here.place(i, first + j))]

    def number(self, here: Rows, i: Any, j: Any, first: Any, dtype: Any) -> Any:
        """The same as a number of `dtype`."""
        return self.spec.number(self.element(here, i, j, first), dtype)


def _at(spec: Operand, place: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(index for d in spec.dims for index in place[d]) or (0,)


@T.macro
def hold(
    specs: Sequence[Operand], tensors: Sequence[Any], shape: tuple[int, int], tiled: bool, here: Rows | None
) -> Any:
    """Operands as blocks of `shape` (rows, keys) read them: what is the same for all keys once, now, for the rows that
    stay `here`; with `tiled`, what can be by tiles, which `load` fills.
    """
    held = []
    for spec, x in zip(specs, tensors, strict=True):
        if here is not None and "k" not in spec.dims:
            operand_rows = T.alloc_fragment(shape[:1], spec.stored)
            for i in T.Parallel(shape[0]):
                operand_rows[i] = x[_at(spec, here.place(i, 0))]
            held.append(Held(spec, x, rows=operand_rows))
        elif tiled and spec.tiled:
            operand_tile = T.alloc_shared(spec.tile(*shape), spec.stored)
            held.append(Held(spec, x, tile=operand_tile))
        else:
            held.append(Held(spec, x))
    return held


@T.macro
def load(held: Sequence[Held], here: Rows, first: Any) -> None:
    """Fill the tiles with what stands at these rows and the keys from `first` on."""
    for x in held:
        if x.tile is not None:
            T.copy(x.tensor[_at(x.spec, here.corner(first))], x.tile)
