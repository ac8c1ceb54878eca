# SPDX-License-Identifier: Apache-2.0
"""What happens to a score of attention between the product and the softmax, as a text of the epilogue language.

`acc0` is the scaled product of a query and a key; `x0..` are auxiliary operands that broadcast to `[B, H, Sq, Skv]`,
read as the dtype of sums; `i0..i3` say where the score stands: batch, head, query + q_offset, key. The mask, the causal
rule and the window come after it. Indices are numbers of the dtype of sums, float32 exact up to 2 ** 24.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import torch_tile.language as T
from torch_tile.kernels import epilogue_tile
from torch_tile.kernels.common import is_unit, strided
from torch_tile.kernels.epilogue import Epilogue, Values, parse
from torch_tile.kernels.epilogue_rewrite import canonical

if TYPE_CHECKING:
    from torch_tile.language import TensorType

DIMS = "bhqk"
"""The dimensions of scores: batch, head, query, key. `i0..i3` count them."""
LARGE = 2.0**16
"""Of float32 up to here, products are rounded by less than 2 ** -7."""


def inputs(s: torch.Tensor, aux: Sequence[torch.Tensor], q_offset: int) -> dict[str, torch.Tensor]:
    """What a text reads, for scores `[B, H, Sq, Skv]` of the dtype of sums."""
    named = {"acc0": s} | {f"x{n}": x.to(s.dtype) for n, x in enumerate(aux)}
    for d, size in enumerate(s.shape):
        index = torch.arange(size, device=s.device, dtype=s.dtype).view(-1, *[1] * (3 - d))
        named[f"i{d}"] = index + q_offset if DIMS[d] == "q" else index
    return named


def modified(text: str, s: torch.Tensor, aux: Sequence[torch.Tensor], q_offset: int) -> torch.Tensor:
    """Scores `[B, H, Sq, Skv]` as `text` changes them."""
    if not text:
        return s
    program = parse(text, 1, len(aux), len(DIMS))
    return Values(program, inputs(s, aux, q_offset), s)(program.result).expand_as(s)


@functools.lru_cache(maxsize=256)
def split_gain(text: str) -> tuple[Epilogue, float]:
    """A text as a program and a positive number that its result is to be multiplied by: the end of a soft cap."""
    program = parse(canonical(text))
    *rest, last = program.statements or (None,)
    if last is not None and last.name == program.result and last.function == "mul":
        value, number = last.operands
        if isinstance(value, str) and isinstance(number, float) and 0 < number < float("inf"):
            return Epilogue(tuple(s for s in rest if s is not None), value), number
    return program, 1.0


@dataclass(frozen=True)
class Aux:
    """An auxiliary operand: those of `DIMS` that it has, its dtype, and whether its last dimension is dense."""

    dims: str
    dtype: torch.dtype
    unit: bool

    def type(self, name: str, sizes: dict[str, tuple[Any, ...]]) -> TensorType:
        """The type of the parameter; `sizes` has heads as key heads and heads of a group."""
        shape = [size for d in self.dims for size in sizes[d]] or [1]
        return strided(name, shape, torch.uint8 if self.dtype == torch.bool else self.dtype, self.unit)

    def read(self, x: Any, place: dict[str, tuple[Any, ...]], dtype: Any) -> Any:
        """The element for a score at `place`, as `dtype`."""
        value = x[tuple(index for d in self.dims for index in place[d]) or (0,)]
        return T.cast(value != 0, dtype) if self.dtype == torch.bool else T.cast(value, dtype)


def has_lows(text: str, aux: Sequence[Aux]) -> bool:
    """Whether a text may make of scores numbers of which a product with a factor overflows or loses all digits.

    It may if it adds or chooses large ones, or reads numbers that differ between keys or queries: masks.
    """
    numbers = [abs(x) for s in parse(text).statements for x in s.operands if isinstance(x, float)] if text else []
    masks = [x for x in aux if x.dtype != torch.bool and {"q", "k"} & set(x.dims)]
    return bool(masks) or any(LARGE < x < float("inf") for x in numbers)


def operand(x: torch.Tensor, kv_heads: int) -> tuple[Aux, torch.Tensor]:
    """An auxiliary operand that broadcasts to `[B, H, Sq, Skv]` without the dimensions that it repeats along."""
    x = x[(None,) * (len(DIMS) - x.dim())]
    dims = ""
    for d, name in reversed(list(enumerate(DIMS))):
        if x.shape[d] == 1 or x.stride(d) == 0:
            x = x.select(d, 0)
        else:
            dims = name + dims
            x = x.unflatten(d, (kv_heads, -1)) if name == "h" else x
    x = x if x.dim() else x[None]
    return Aux(dims, x.dtype, is_unit(x)), x.view(torch.uint8) if x.dtype == torch.bool else x


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
    q_offset: Any

    def place(self, i: Any, key: Any) -> dict[str, tuple[Any, ...]]:
        """Where in an operand the score of row i and a key stands, dimension by dimension."""
        row = T.min(self.first + i, self.length - 1)
        query, member = (row % self.queries, row // self.queries) if self.packed else (row, self.member)
        return {"b": (self.sequence,), "h": (self.head, member), "q": (query,), "k": (key,)}

    def index(self, d: int, i: Any, key: Any) -> Any:
        """`i0..i3`."""
        found = self.place(i, key)[DIMS[d]]
        if DIMS[d] == "h":
            return found[0] * (self.length // self.queries if self.packed else self.members) + found[1]
        return found[0] + self.q_offset if DIMS[d] == "q" else found[0]


@T.macro
def held_rows(aux: Sequence[Aux], tensors: Sequence[Any], rows: int, here: Rows, dtype: Any) -> Any:
    """Operands that are the same for all keys, each read once into `[rows]`; the others as they are."""
    held = []
    for form, x in zip(aux, tensors, strict=True):
        if "k" in form.dims:
            held.append(x)
        else:
            values = T.alloc_fragment((rows,), dtype)
            for i in T.Parallel(rows):
                values[i] = form.read(x, here.place(i, 0), dtype)
            held.append(values)
    return held


@T.macro
def value(
    program: Epilogue, product: Any, aux: Sequence[Aux], held: Sequence[Any], here: Rows, i: Any, key: Any
) -> Any:
    """The score of row i and a key from the scaled product; `held` as `held_rows` made it."""
    dtype = product.dtype
    named = {"acc0": product} | {f"i{d}": T.cast(here.index(d, i, key), dtype) for d in program.inputs("i")}
    for n in program.inputs("x"):
        named[f"x{n}"] = aux[n].read(held[n], here.place(i, key), dtype) if "k" in aux[n].dims else held[n][i]
    return epilogue_tile.apply(program, named, dtype, quick=True)


@T.macro
def modify(
    program: Epilogue, scores: Any, scale: Any, aux: Sequence[Aux], held: Sequence[Any], here: Rows, first: Any
) -> None:
    """Replace products `[rows, keys]` by scores; the keys are those from `first` on."""
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = value(program, scores[i, j] * scale, aux, held, here, i, first + j)
