# SPDX-License-Identifier: Apache-2.0
"""What the generators give: text, entries, how they are launched. Text found on disk needs this and no generator."""

from __future__ import annotations

from typing import NamedTuple

from torch_tile.diagnostics.errors import Span
from torch_tile.ir.expr import Expr, Var

ENTRY = "tile_main"
"""The function of the text that is called."""


class CpuSource(NamedTuple):
    """Generated text, and the assertions that a nonzero result of the entry names (1-based)."""

    text: str
    asserts: tuple[tuple[str, Span | None], ...]


# What the CUDA generator hands on: text, and how it is launched. Text found on disk needs this and no generator.


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
    """One function of the text and how it is launched.

    `args` are its parameters: a number is a position among the tensors (buffer parameters, outputs, workspaces), a
    variable is a dimension or a scalar parameter, in which `grid` is given, too. `kinds` are their C types as the
    module `struct` writes them ("P" a pointer, "i", "q", "f", ...); small floats are their bits ("H", "B"), and maps
    are "M". One that `folds` may be launched with all its blocks in x, where the grid has too many of them in y or z.
    Blocks run in groups of `cluster`, and if `early`, before the kernel ahead of them in the stream has ended.
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

    Of the tensors at each pair of positions in `apart`, a kernel takes one for constant and writes the other.
    """

    text: str
    entries: tuple[Entry, ...]
    alignment: tuple[int, ...]
    apart: tuple[tuple[int, int], ...] = ()
