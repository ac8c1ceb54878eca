# SPDX-License-Identifier: Apache-2.0
"""Operands of attention scores besides queries and keys: masks, and tensors of a score function (score_mod.py).

A block of rows loads values that depend on the row once. It loads values that depend on the key by tiles, where memory
allows it.
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
    """Compile-time facts of a mask or score operand: dtype, broadcast dimensions and alignment.

    Its dimensions of `DIMS`, its dtype, and whether its last dimension is dense. Also whether its rows begin at
    multiples of 16 bytes.
    """

    dims: str
    dtype: torch.dtype
    unit: bool = True
    aligned: bool = False

    @property
    def stored(self) -> torch.dtype:
        """Return the dtype in memory: bytes for bool, as compilers vectorise their comparison with 0."""
        return torch.uint8 if self.dtype == torch.bool else self.dtype

    @property
    def tiled(self) -> bool:
        """Return whether copies by tiles of queries, keys or both can load the operand."""
        return self.aligned and self.dims[-1:] in ("q", "k")

    def tile(self, queries: int, keys: int) -> tuple[int, ...]:
        """Return the shape of an operand's tile. One of one dimension has whole 128 bytes, as bulk copies want."""
        if self.dims.endswith("qk"):
            return queries, keys
        return (round_up(keys if self.dims[-1] == "k" else queries, 128 // self.stored.itemsize),)

    def type(self, name: str, sizes: dict[str, tuple[Any, ...]]) -> TensorType:
        """Return the operand's parameter type. `sizes` gives the heads as key heads and heads of a group."""
        shape = [size for d in self.dims for size in sizes[d]] or [1]
        size = self.stored.itemsize
        multiple, align = (16 // size, 16) if self.aligned else (1, size)
        return strided(name, shape, self.stored, self.unit, multiple, align)

    def number(self, element: Any, dtype: Any) -> Any:
        """Convert a loaded element to a number of `dtype`; bools become 0 and 1."""
        return T.cast(element != 0 if self.dtype == torch.bool else element, dtype)


def operand(x: torch.Tensor, kv_heads: int, on_gpu: bool) -> tuple[Operand, torch.Tensor]:
    """Describe an operand that broadcasts to `[B, H, Sq, Skv]`, without the dimensions along which it repeats."""
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
    """Describe several operands, and return them in the form that kernels take."""
    found = [operand(x, kv_heads, on_gpu) for x in tensors]
    return tuple(spec for spec, _ in found), [x for _, x in found]


@dataclass(frozen=True)
class Rows:
    """The query rows of a block, and how rows map to queries and heads of a group. They are queries of one of `members`
    heads of a group, or of all these heads if `packed`.
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

    def query(self, i: Any) -> Any:
        """Return the query of row i."""
        row = T.min(self.first + i, self.length - 1)
        return row % self.queries if self.packed else row

    def place(self, i: Any, key: Any) -> dict[str, tuple[Any, ...]]:
        """Return an operand's indices for the score of row i and a key, dimension by dimension."""
        row = T.min(self.first + i, self.length - 1)
        member = row // self.queries if self.packed else self.member
        return {"b": (self.sequence,), "h": (self.head, member), "q": (self.query(i),), "k": (key,)}

    def corner(self, key: Any) -> dict[str, tuple[Any, ...]]:
        """Return the indices of an operand's tile for this block's rows and the keys from `key` on."""
        return {"b": (self.sequence,), "h": (self.head, self.member), "q": (self.first,), "k": (key,)}

    def index(self, d: int, i: Any, key: Any) -> Any:
        """Return the value of `i0..i3` in a text for row i and a key."""
        found = self.place(i, key)[DIMS[d]]
        if DIMS[d] == "h":
            return found[0] * (self.length // self.queries if self.packed else self.members) + found[1]
        return found[0] + self.q_offset if DIMS[d] == "q" else found[0]


@dataclass(frozen=True)
class Held:
    """A mask or score operand as a block holds it: one number a row, a tile, or in global memory. `rows` has a number
    for each row, or `tile` the elements of the present rows and keys; with neither, elements are read from memory.
    """

    spec: Operand
    tensor: Any
    rows: Any = None
    tile: Any = None

    def element(self, here: Rows, i: Any, j: Any, first: Any) -> Any:
        """Read the element for row i and key j as it is stored. Keys count from `first`."""
        if self.rows is not None:
            return self.rows[i]
        if self.tile is not None:
            return self.tile[tuple(n for name, n in (("q", i), ("k", j)) if name in self.spec.dims)]
        return self.tensor[_at(self.spec, here.place(i, first + j))]

    def number(self, here: Rows, i: Any, j: Any, first: Any, dtype: Any) -> Any:
        """Read the element for row i and key j as a number of `dtype`."""
        return self.spec.number(self.element(here, i, j, first), dtype)


def _at(spec: Operand, place: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the indices of an operand's element, without dimensions along which it repeats."""
    return tuple(index for d in spec.dims for index in place[d]) or (0,)


@T.macro
def prepare_operands(
    specs: Sequence[Operand], tensors: Sequence[Any], shape: tuple[int, int], tiled: bool, here: Rows | None
) -> Any:
    """Prepare operands of scores for blocks of `shape` (rows, keys): load those of rows, allocate tiles for others.

    Values that are the same for all keys are loaded now, for the rows `here`. With `tiled`, tiles that `load` fills are
    allocated where they are possible.
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
    """Load the elements of these rows and the keys from `first` on into the tiles."""
    for x in held:
        if x.tile is not None:
            T.copy(x.tensor[_at(x.spec, here.corner(first))], x.tile)
