# SPDX-License-Identifier: Apache-2.0
"""Layouts applied to expressions: offsets of elements, and the elements of threads, in their smallest form.

Index expressions are taken apart into digits, so that what a loop variable adds stays a separate term (unrolled, a
constant), and what came from a thread's index through a layout goes back through the same layout without a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import dtype as dt
from .expr import Binary, Expr, binary, const
from .layout import Layout, Swizzle
from .mixed_radix import Digits, MixedRadix

if TYPE_CHECKING:
    from .bounds import Ranges


def offset(layout: Layout, axis: str, indices: Sequence[Expr], ranges: Ranges | None) -> Expr:
    """See `Layout.offset`."""
    radix = MixedRadix(ranges)
    total = Digits()
    for index, digits, size in zip(indices, layout.dims, layout.shape, strict=True):
        value, weight = radix.below(radix.of(index), size), 1
        for place, digit in reversed(list(enumerate(digits))):
            if digit.axis == axis:
                top = place == 0
                part = radix.quotient(value, weight, None if top else digit.size)
                total += radix.below(part, digit.size).scaled(digit.stride)
            weight *= digit.size
    return _swizzled(layout.swizzle, total, radix) if axis == "m" and layout.swizzle else total.expr()


def _swizzled(swizzle: Swizzle, x: Digits, radix: MixedRadix) -> Expr:
    """`high + (chunk ^ row) * width + low`."""
    width, chunks = 1 << swizzle.base, 1 << swizzle.bits
    chunk = radix.quotient(x, width, chunks).expr()
    row = radix.quotient(x, width << swizzle.shift, chunks).expr()
    rest = radix.quotient(x, 1, width) + radix.quotient(x, width * chunks).scaled(width * chunks)
    moved = radix.of(_xor(chunk, row)).scaled(width)
    return (Digits(moved.terms) + rest + Digits((), moved.constant)).expr()


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
