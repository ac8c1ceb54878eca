# SPDX-License-Identifier: Apache-2.0
"""Express how the indices of an access follow a nest's loop variables, and carry layouts from one to the other.

An index is a sum of digits of variables, as `i`, `j // 4`, `j % 4` or `i * 8 + j`; other indices are opaque (None).
Assumes layouts whose thread digits are digits of one mixed-radix number, as those of instructions and spreads are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_tile.ir.expr import Const, Expr, Var
from torch_tile.ir.layout import Digit, Layout
from torch_tile.ir.mixed_radix import Digits, MixedRadix
from torch_tile.ir.node import symbols

Dim = tuple[Digit, ...]


@dataclass(frozen=True)
class Piece:
    """A piece `factor * ((var // divisor) % size)` of an index, of variable `var`; without a modulus `size` is None."""

    factor: int
    var: int
    divisor: int = 1
    size: int | None = None

    def at(self, value: int) -> int:
        """Return what the piece adds to an index for a value of the variable."""
        digit = value // self.divisor
        return self.factor * (digit if self.size is None else digit % self.size)


@dataclass(frozen=True)
class Index:
    """One index: its pieces by ascending factor, and the rest that does not depend on the variables (None is 0)."""

    pieces: tuple[Piece, ...]
    rest: Expr | None = None


def index_of(expr: Expr, numbers: Mapping[Var, int]) -> Index | None:
    """Express an index in the variables that `numbers` counts (by identity); None if it is opaque."""
    pieces, others = [], []
    found = MixedRadix().of(expr)
    for term in found.terms:
        number = numbers.get(term.atom) if isinstance(term.atom, Var) else None
        if number is not None and term.factor > 0:
            pieces.append(Piece(term.factor, number, term.divisor, term.modulus))
        elif not numbers.keys().isdisjoint(symbols(term.atom)) or number is not None:
            return None
        else:
            others.append(term)
    rest = Digits(tuple(others), found.constant)
    empty = not others and found.constant == 0
    return Index(tuple(sorted(pieces, key=lambda p: p.factor)), None if empty else rest.expr())


def moving(index: Index | None, extents: Sequence[int]) -> Index | None:
    """Drop pieces that are 0 for each value of their variable, as of variables with one value. Keep one if none moves.

    They have no part of a dimension: `i * 1 + s` of one s is `i`.
    """
    if index is None or len(index.pieces) < 2:
        return index
    kept = tuple(p for p in index.pieces if extents[p.var] > p.divisor)
    return replace(index, pieces=kept or index.pieces[:1])


def sliced(digits: Dim, low: int, high: int | None) -> Dim | None:
    """Return the digits at the places from `low` to below `high`; None if they do not fall on boundaries."""
    found: list[Digit] = []
    place = 1
    for d in reversed(digits):
        first, end = max(low, place), place * d.size if high is None else min(high, place * d.size)
        if first < end:
            if first % place or end % first or (place * d.size) % end:
                return None
            found.append(Digit(end // first, d.stride * (first // place), d.axis))
        place *= d.size
    return tuple(reversed(found))


def stacked(parts: Iterable[tuple[int, Dim]]) -> Dim | None:
    """Join digits and the places where they begin to one dimension; None if the places do not follow each other."""
    place = 1
    total: Dim = ()
    for factor, digits in sorted(parts, key=lambda part: part[0]):
        if factor != place:
            return None
        total = (*digits, *total)
        place *= math.prod(d.size for d in digits)
    return total


def threads_of(dims: Iterable[Dim], count: int) -> Dim | None:
    """Return the thread digits that `dims` do not use, of `count` threads; None if they use one twice."""
    free, next_ = [], 1
    for d in sorted((d for dim in dims for d in dim if d.axis == "t" and d.size > 1), key=lambda d: d.stride):
        if d.stride < next_:
            return None
        if d.stride > next_:
            free.append(Digit(d.stride // next_, next_, "t"))
        next_ = d.stride * d.size
    if next_ < count:
        free.append(Digit(count // next_, next_, "t"))
    return tuple(reversed(free))


def renumbered(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Renumber registers without holes, in the same order."""
    strides: dict[int, int] = {}
    total = 1
    for d in sorted((d for dim in dims for d in dim if d.axis == "r" and d.size > 1), key=lambda d: d.stride):
        strides[d.stride] = total
        total *= d.size
    kept = (tuple(d for d in dim if d.size > 1) for dim in dims)
    return tuple(tuple(replace(d, stride=strides[d.stride]) if d.axis == "r" else d for d in dim) for dim in kept)


def through(index: Index, dims: Sequence[Dim]) -> Dim | None:
    """Return the digits of an index, given those of the variables; None if they do not fit together."""
    parts = []
    for p in index.pieces:
        cut = sliced(dims[p.var], p.divisor, None if p.size is None else p.divisor * p.size)
        if cut is None:
            return None
        parts.append((p.factor, cut))
    return stacked(parts)


def layout_of_buffer(
    indices: Sequence[Index | None], dims: Sequence[Dim], shape: Sequence[int], count: int, grown: bool = False
) -> Layout | None:
    """Return the layout of a fragment whose accessed elements lie in the threads of a nest; None without such a layout.

    `dims` are the digits of the variables. Threads that differ only in variables that the indices lack hold replicas.
    With `grown`, the nest may access a slice: further registers of the threads hold the elements beside it.
    """
    found = []
    for index, size in zip(indices, shape, strict=True):
        digits = None if index is None or (index.rest is not None and not grown) else through(index, dims)
        if digits is not None and grown and index is not None:
            digits = _grown(index, digits, size)
        if digits is None or math.prod(d.size for d in digits) < size:
            return None
        found.append(digits)
    replicas = threads_of(found, count)
    return None if replicas is None else Layout(renumbered(found), replicas).canonical


def _grown(index: Index, digits: Dim, size: int) -> Dim | None:
    """Return the digits of `size` places of which an index accesses some; None if other threads would hold the rest."""
    count = math.prod(d.size for d in digits)
    if index.rest is None and count >= size:
        return digits
    if not digits or digits[0].axis != "r" or not isinstance(index.rest, Const | None):
        return None
    place = count // digits[0].size
    if size % place or (index.rest is not None and index.rest.value % place):
        return None
    return replace(digits[0], size=max(size // place, digits[0].size)), *digits[1:]


def dims_of_nest(indices: Sequence[Index | None], layout: Layout, extents: Sequence[int]) -> list[Dim | None] | None:
    """Compute digits of variables such that each thread accesses only fragment elements that it holds.

    A variable has None if the indices lack it, and no digits if it has one value. The result is None if no layout of
    the nest does it.
    """
    parts: list[list[tuple[int, Dim]]] = [[] for _ in extents]
    for index, digits in zip(indices, layout.dims, strict=True):
        if index is None:
            return None
        top = _top(index, digits, extents)
        if not _is_slice(index, digits, top):
            return None
        digits = (None if top is None else below(digits, top)) or digits
        covered = 1
        for number, p in enumerate(index.pieces, 1):
            following = index.pieces[number] if number < len(index.pieces) else None
            high = top if following is None else following.factor
            cut = sliced(digits, p.factor, high)
            size = None if cut is None else math.prod(d.size for d in cut)
            if cut is None or p.factor != covered or (p.size is not None and size is not None and p.size < size):
                return None
            covered = high or covered
            parts[p.var].append((p.divisor, cut))
        if not index.pieces and any(d.axis == "t" and d.size > 1 for d in digits):
            return None
    found: list[Dim | None] = []
    step = layout.extent("r")
    for part, extent in zip(parts, extents, strict=True):
        dim = stacked(part) if part else () if extent == 1 else None
        if part and dim is None:
            return None
        if dim is not None and (times := -(-extent // math.prod(d.size for d in dim))) > 1:
            dim, step = _repeated(dim, times, step), step * times
        found.append(dim)
    return found


def _repeated(dim: Dim, times: int, step: int) -> Dim:
    """Repeat a dimension's digits: each further time takes registers from `step` on."""
    return Digit(times, step, "r"), *dim


def _top(index: Index, digits: Dim, extents: Sequence[int]) -> int | None:
    """Return how much of a dimension an index covers, if only registers lie above; None if it covers all."""
    if not index.pieces:
        return 1
    last = index.pieces[-1]
    iterations = -(-extents[last.var] // last.divisor)
    top = last.factor * (iterations if last.size is None else min(iterations, last.size))
    if below(digits, top) is not None:
        return top
    above = sliced(digits, top, None)
    return top if above and all(d.axis == "r" for d in above) else None


def below(digits: Dim, top: int) -> Dim | None:
    """Return the digits of places below `top`, which cuts the uppermost digit, of registers; None if it does not."""
    if not digits or digits[0].axis != "r":
        return None
    place = math.prod(d.size for d in digits[1:])
    if top % place or not place <= top < place * digits[0].size:
        return None
    return replace(digits[0], size=top // place), *digits[1:]


def _is_slice(index: Index, digits: Dim, top: int | None) -> bool:
    """Return whether an index covers a part at a constant place, so that it chooses registers.

    The place is a multiple of the part's size, or of one register of the uppermost digit.
    """
    if index.rest is None:
        return True
    if top is None or not isinstance(index.rest, Const):
        return False
    step = top if below(digits, top) is None else math.prod(d.size for d in digits[1:])
    return bool(index.rest.value % step == 0)


def fits(indices: Sequence[Index | None], dims: Sequence[Dim], layout: Layout) -> bool:
    """Return whether each thread of a nest holds all elements that it accesses of a fragment, in known registers."""
    extents = [math.prod(d.size for d in dim) for dim in dims]
    for index, digits in zip(indices, layout.dims, strict=True):
        top = None if index is None else _top(index, digits, extents)
        if index is None or not _is_slice(index, digits, top):
            return False
        if not index.pieces:
            if any(d.axis == "t" and d.size > 1 for d in digits):
                return False
            continue
        wanted = through(index, dims)
        held = None if top is None else below(digits, top)
        if wanted is None or not _alike(wanted, held or digits):
            return False
    return True


def _alike(a: Dim, b: Dim) -> bool:
    """Return whether the thread digits of two dimensions are the same, as far as both reach."""
    size = min(math.prod(d.size for d in dim) for dim in (a, b))
    bounds = sorted(_digit_strides(a) | _digit_strides(b))
    for low, high in itertools.pairwise(bounds):
        x, y = sliced(a, low, high), sliced(b, low, high)
        if x is None or y is None:
            return False
        if low >= size:
            if any(d.axis == "t" for d in y):
                return False
            continue
        if [(d.axis, d.stride) for d in x if d.axis == "t"] != [(d.axis, d.stride) for d in y if d.axis == "t"]:
            return False
    return True


def _digit_strides(dim: Dim) -> set[int]:
    """Return the products of a dimension's last digits, at which it can be split into two numbers."""
    found, place = {1}, 1
    for d in reversed(dim):
        place *= d.size
        found.add(place)
    return found
