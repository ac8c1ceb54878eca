# SPDX-License-Identifier: Apache-2.0
"""Results of the generators: text, entries, launches. Text found on disk needs this and no generator."""

from __future__ import annotations

from typing import NamedTuple

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.expr import Expr, Var

ENTRY = "tile_main"
"""The function of the text that is called."""


class CpuSource(NamedTuple):
    """Generated text, and the assertions that a nonzero result of the entry names (1-based).

    `disjoint` are pairs of tensors, as those of a CudaSource.
    """

    text: str
    asserts: tuple[tuple[str, Span | None], ...]
    disjoint: tuple[tuple[int, int], ...] = ()


# Result of the CUDA generator: text, and how it is launched.


class MapArg(NamedTuple):
    """A parameter that is a tensor map (ir/buffer.py), of the tensor at `position`.

    `sizes` and `strides`, in elements, are expressions in dimensions, outermost first as in `box`; boxes lie in shared
    memory swizzled over `swizzle` bytes.
    """

    position: int
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    swizzle: int
    dtype: str
    itemsize: int


class Entry(NamedTuple):
    """An entry function of the generated text, and how to launch it.

    `args` are its parameters. A number is a position among the tensors (buffer parameters, outputs, workspaces). A
    variable is a dimension or a scalar parameter; `grid` is in terms of these, too. `kinds` are their C types as the
    module `struct` writes them ("P" a pointer, "i", "q", "f", ...). Small floats are their bits ("H", "B"), and maps
    are "M". An entry that `folds` may be launched with all its blocks in x. The launcher does so if y or z has too
    many. Blocks run in groups of `cluster`. With `early`, they start before the preceding kernel of the stream has
    ended.
    """

    name: str
    args: tuple[int | Var | MapArg, ...]
    grid: tuple[Expr, ...]
    threads: int
    shared_bytes: int
    span: Span | None = None
    kinds: str = ""
    folds: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)
    early: bool = False


class CudaSource(NamedTuple):
    """Generated text, its entries in the order of their launches, and the alignment in bytes each tensor must have.

    Of the tensors at each pair of positions in `disjoint`, a kernel takes one for constant and writes the other.
    """

    text: str
    entries: tuple[Entry, ...]
    alignment: tuple[int, ...]
    disjoint: tuple[tuple[int, int], ...] = ()
