# SPDX-License-Identifier: Apache-2.0
"""What the CUDA generator hands on: text, and how it is launched. Text found on disk needs this and no generator."""

from __future__ import annotations

from typing import NamedTuple

from ..diagnostics import Span
from ..ir.expr import Expr, Var


class Entry(NamedTuple):
    """One function of the text and how it is launched.

    `args` are its parameters: a number is a position among the tensors (buffer parameters, outputs, workspaces), a
    variable is a dimension or a scalar parameter, in which `grid` is given, too. `kinds` are their C types as the
    module `struct` writes them ("P" a pointer, "i", "q", "f", ...); small floats are their bits ("H", "B"). One that
    `folds` may be launched with all its blocks in x, where the grid has too many of them in y or z.
    """

    name: str
    args: tuple[int | Var, ...]
    grid: tuple[Expr, ...]
    threads: int
    shared_bytes: int
    span: Span | None = None
    kinds: str = ""
    folds: bool = False


class CudaSource(NamedTuple):
    """Generated text, its entries in the order of their launches, and the alignment in bytes each tensor must have."""

    text: str
    entries: tuple[Entry, ...]
    alignment: tuple[int, ...]
