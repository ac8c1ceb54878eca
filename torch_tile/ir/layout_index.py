# SPDX-License-Identifier: Apache-2.0
"""Layouts applied to expressions: offsets of elements, and the elements of threads, in their smallest form.

Index expressions are taken apart into digits, so that what a loop variable adds stays a separate term (unrolled, a
constant), and what came from a thread's index through a layout goes back through the same layout without a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Expr, binary, const
from torch_tile.ir.layout import Digit, Layout, Swizzle
from torch_tile.ir.mixed_radix import Digits, MixedRadix

if TYPE_CHECKING:
    from torch_tile.ir.bounds import Ranges


def offset(layout: Layout, axis: str, indices: Sequence[Expr], ranges: Ranges | None) -> Expr:
    """See `Layout.offset`."""
    radix = MixedRadix(ranges)
    parts: list[tuple[Digit, Digits]] = []  # each digit along the axis and its value
    for index, digits, size in zip(indices, layout.dims, layout.shape, strict=True):
        value, weight = radix.below(radix.of(index), size), 1
        for place, digit in reversed(list(enumerate(digits))):
            if digit.axis == axis:
                part = radix.quotient(value, weight, None if place == 0 else digit.size)
                parts.append((digit, radix.below(part, digit.size)))
            weight *= digit.size
    if axis == "m" and layout.swizzle is not None:
        return _swizzled(layout.swizzle, parts, radix)
    return _total(parts).expr()


def _total(parts: Iterable[tuple[Digit, Digits]]) -> Digits:
    return sum((value.scaled(digit.stride) for digit, value in parts), Digits())


def _swizzled(swizzle: Swizzle, parts: Sequence[tuple[Digit, Digits]], radix: MixedRadix) -> Expr:
    """`high + (chunk ^ row) * width + low`."""
    width, chunks = 1 << swizzle.base, 1 << swizzle.bits
    if not _divides(parts, [1 << n for n in (swizzle.base, swizzle.base + swizzle.bits)], swizzle.shift):
        size = sum(d.stride * (d.size - 1) for d, _ in parts) + 1
        parts = [(Digit(size, 1, "m"), radix.below(_total(parts), size))]

    def field(low: int, count: int | None) -> Digits:
        """`(offset // low) % count`, digit by digit: they carry nothing over a boundary."""
        total = Digits()
        for digit, value in parts:
            reach = digit.stride * digit.size
            if reach > low and (count is None or digit.stride < low * count):
                cut = count if count is not None and reach > low * count else None
                total += radix.quotient(value.scaled(digit.stride), low, cut)
        return total

    chunk, row = field(width, chunks).expr(), field(width << swizzle.shift, chunks).expr()
    moved = radix.of(_xor(chunk, row)).scaled(width)
    rest = field(1, width) + field(width * chunks, None).scaled(width * chunks)
    return (Digits(moved.terms) + rest + Digits((), moved.constant)).expr()


def _divides(parts: Sequence[tuple[Digit, Digits]], boundaries: Sequence[int], shift: int) -> bool:
    """Whether digits are nested in one another and none straddles a boundary at a fraction of its steps."""
    ordered = sorted((digit for digit, _ in parts), key=lambda d: d.stride)
    nested = all(a.stride * a.size <= b.stride for a, b in itertools.pairwise(ordered))
    edges = [edge << k for edge in boundaries for k in (0, shift)]
    return nested and all(d.stride % e == 0 or e % d.stride == 0 for d in ordered for e in edges)


def _xor(a: Expr, b: Expr) -> Expr:
    zero = [getattr(e, "value", None) == 0 for e in (a, b)]
    return b if zero[0] else a if zero[1] else binary("^", a, b)


def invert(layout: Layout, thread: Expr, register: Expr, ranges: Ranges | None) -> tuple[Expr, ...]:
    """See `Layout.invert`."""
    radix = MixedRadix(ranges)
    extents = {axis: layout.extent(axis) for axis in ("t", "r")}
    source = {a: radix.below(radix.of(e), extents[a]) for a, e in (("t", thread), ("r", register))}
    found = []
    for digits in layout.dims:
        total, weight = Digits(), 1
        for digit in reversed(digits):
            top = digit.stride * digit.size >= extents[digit.axis]
            part = radix.quotient(source[digit.axis], digit.stride, None if top else digit.size)
            total += radix.below(part, digit.size).scaled(weight)
            weight *= digit.size
        found.append(total.expr())
    return tuple(found)


def owner(layout: Layout, thread: Expr) -> Expr | None:
    """See `Layout.owner`."""
    radix = MixedRadix()
    extent = layout.extent("t")
    source = radix.below(radix.of(thread), extent)
    condition: Expr | None = None
    for digit in layout.canonical.replicas:
        if digit.stride * digit.size >= extent:
            first: Expr = Binary("<", thread, const(digit.stride, thread.dtype))
        else:
            first = Binary("==", radix.quotient(source, digit.stride, digit.size).expr(), const(0, dt.int32))
        condition = first if condition is None else binary("and", condition, first)
    return condition
