# SPDX-License-Identifier: Apache-2.0
"""Layouts as functions of indices: what T.Layout, T.Fragment and T.PartialFragment return, with TileLang's methods.

A layout that digits express is an IR layout, which knows its function too. Another is kept as a hint. A function that
puts two elements at one place can be asked and compared, but no tile can have it: its `fault` says why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Const, Expr, Var, cast, const, to_expr
from torch_tile.ir.layout import Layout as IRLayout
from torch_tile.ir.layout_ops import fit_memory, inverted, largest_places, same_places, shares_places
from torch_tile.ir.node import equal
from torch_tile.ir.simplify import simplify
from torch_tile.language.values import shape_of
from torch_tile.tileop.base import describe

MOST_ELEMENTS = 1 << 20  # of tiles on a chip; functions over larger shapes are for tensors, and are not evaluated


@functools.cache
def _index(dim: int) -> Var:
    """Return the name of an index of all layouts, so that their functions can be compared as expressions."""
    return Var(f"i{dim}", dt.int32)


class LayoutFunction:
    """The methods of a layout whose function the author gave."""

    shape: Any
    function: Callable[..., Any]

    def get_input_shape(self) -> list[int]:
        """Return the sizes of the indices that the layout takes."""
        return [int(n.value) if isinstance(n, Const) else n for n in self.shape]

    def get_output_shape(self) -> list[int]:
        """Return for each result of the function its largest value plus 1."""
        return [n + 1 for n in largest_places(self.function, self.get_input_shape())]

    @property
    def index(self) -> list[Expr]:
        """Return the results of the function, as expressions of indices `i0`, `i1`, ..."""
        found = self.function(*map(_index, range(len(self.shape))))
        return [cast(to_expr(part), dt.int32) for part in _parts(found)]

    def get_forward_index(self) -> list[Expr]:
        """Return `index`."""
        return self.index

    def map_forward_index(self, indices: Sequence[Any]) -> list[Any]:
        """Return the results of the function at `indices`, numbers or expressions."""
        return list(_parts(self.function(*indices)))

    def get_linearized_forward_index(self) -> Expr:
        """Return the row-major number of the place, as an expression of indices `i0`, `i1`, ..."""
        sizes = self.get_output_shape()
        total: Expr = const(0, dt.int32)
        for part, size in zip(self.index, sizes, strict=True):
            total = total * size + part
        ranges = Ranges()
        for dim, size in enumerate(self.get_input_shape()):
            ranges = ranges.loop(_index(dim), 0, size)
        return simplify(total, ranges)

    def expand(self, leading_shape: int | Sequence[int]) -> Any:
        """Return the layout with more indices in front, which go to the result unchanged."""
        if isinstance(leading_shape, str) or not isinstance(leading_shape, int | list | tuple):
            raise TypeError(f"leading_shape is {leading_shape!r}: give an int or a list of ints")
        leading = [leading_shape] if isinstance(leading_shape, int) else list(leading_shape)
        if any(isinstance(n, int) and n <= 0 for n in leading):
            raise ValueError(f"leading_shape is {leading}: give positive sizes")
        count = len(leading)
        if not count:
            return self
        return memory_layout((*leading, *self.shape), lambda *i: (*i[:count], *_parts(self.function(*i[count:]))))

    def repeat(self, dim: int, factor: int) -> Any:
        """Return the layout with dimension `dim` repeated `factor` times; the number of the copy leads the result."""
        rank = len(self.shape)
        if not isinstance(dim, int) or not isinstance(factor, int):
            raise TypeError(f"dim and factor are {dim!r} and {factor!r}: give ints")
        if factor < 1 or not -rank <= dim < rank:
            raise ValueError(f"dim {dim} of {rank} by factor {factor}: give a dimension that there is, from 1 copy on")
        dim, size = dim % rank, self.get_input_shape()[dim]
        if factor == 1:
            return self
        sizes = [n * factor if d == dim else n for d, n in enumerate(self.get_input_shape())]

        def place(*i: Any) -> tuple[Any, ...]:
            inner = (*i[:dim], i[dim] % size, *i[dim + 1 :])
            return (i[dim] // size, *_parts(self.function(*inner)))

        return memory_layout(sizes, place)

    def inverse(self) -> Any:
        """Return the layout from places to indices. Raises TileError (bad_layout) unless each place has an element."""
        sizes, found = self.get_output_shape(), self.get_input_shape()
        return memory_layout(sizes, inverted(self.function, found, sizes))


class MemoryLayout(LayoutFunction, IRLayout):
    """A layout of digits that an author gave by a function."""

    def __init__(self, found: IRLayout, function: Callable[..., Any]):
        IRLayout.__init__(self, found.dims, found.replicas, found.swizzle)
        object.__setattr__(self, "function", function)

    @property
    def plain(self) -> IRLayout:
        """Return the layout without its function."""
        return IRLayout(self.dims, self.replicas, self.swizzle)

    def __reduce__(self) -> Any:
        return IRLayout, (self.dims, self.replicas, self.swizzle)  # functions of authors are not pickled


@dataclass(frozen=True)
class FreeLayout(LayoutFunction):
    """A layout that this compiler cannot express, or one for a tensor: it is kept as a hint only.

    The compiler places the elements of the tile itself. Results do not depend on it.
    """

    shape: tuple[Expr, ...]
    function: Callable[..., Any]
    register: Callable[..., Any] | None = None  # of a fragment whose `function` gives threads
    replicate: int = 1
    fault: str = ""  # why no tile can have it

    def is_equal(self, other: Any) -> bool:
        """Return whether another layout has this shape and places every element alike."""
        if not isinstance(other, FreeLayout) or len(self.shape) != len(other.shape):
            return False
        if self.replicate != other.replicate or not all(map(equal, self.shape, other.shape)):
            return False
        sizes = [int(n.value) for n in self.shape if isinstance(n, Const)]
        if len(sizes) < len(self.shape) or math.prod(sizes) > MOST_ELEMENTS:
            return (self.function, self.register) == (other.function, other.register)
        replicas = (self.replicate,) if self.replicate > 1 else ()
        return same_places(self.function, other.function, (*sizes, *replicas)) and (
            self.register is other.register
            or (None not in (self.register, other.register) and same_places(self.register, other.register, sizes))
        )

    def __repr__(self) -> str:
        return f"T.Layout({describe(self.shape)}, a function without digits)"


@dataclass(frozen=True)
class PartialLayout(FreeLayout):
    """Where the partial sums of a reducer lie: of `replicate` copies of an element, `combine_size` are added up."""

    combine_size: int = 1

    def __repr__(self) -> str:
        ways = f"(combine {self.combine_size} x copy {self.replicate // self.combine_size})"
        return f"T.PartialFragment({describe(self.shape)}) {ways}"


def memory_layout(shape: Any, function: Callable[..., Any]) -> MemoryLayout | FreeLayout:
    """Make the layout of memory that places element `(i, j)` at `function(i, j)`: digits where they express it."""
    given = shape_of(shape, "a layout's shape")
    if not all(isinstance(n, Const) for n in given) or math.prod(sizes := constant_sizes(shape)) > MOST_ELEMENTS:
        return FreeLayout(given, function)
    if shares_places(sizes, function):
        return FreeLayout(given, function, fault="puts two elements at one place")
    found = fit_memory(sizes, function)
    return FreeLayout(given, function) if found is None else MemoryLayout(found, function)


def constant_sizes(shape: Any) -> tuple[int, ...]:
    """Check a shape and return its constant sizes."""
    given = shape_of(shape, "a layout's shape")
    sizes = tuple(int(s.value) for s in given if isinstance(s, Const) and s.value > 0)
    if len(sizes) < len(given):
        raise error("bad_shape", None, what="a layout's shape", want="positive integers", got=repr(shape)[:60])
    return sizes


def _parts(found: Any) -> tuple[Any, ...]:
    """Return the results of a layout's function as a tuple."""
    return tuple(found) if isinstance(found, tuple | list) else (found,)


__all__ = ["FreeLayout", "LayoutFunction", "MemoryLayout", "PartialLayout", "constant_sizes", "memory_layout"]
