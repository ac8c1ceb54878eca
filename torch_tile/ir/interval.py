# SPDX-License-Identifier: Apache-2.0
"""Intervals of integers, and what operators make of them. Every result holds all values that are possible."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_tile.ir import dtype as dt

Limit = int | float  # an integer, or infinity


@dataclass(slots=True)
class Interval:
    """The integers from `low` to `high`, both included; either may be infinite. Never changed."""

    low: Limit = -math.inf
    high: Limit = math.inf

    @property
    def is_point(self) -> bool:
        """Whether it holds exactly one integer."""
        return self.low == self.high

    def within(self, other: Interval) -> bool:
        """Whether all of it lies in `other`."""
        return other.low <= self.low and self.high <= other.high

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        if other.low == other.high and other.low > 0:
            return Interval(_times(self.low, other.low), _times(self.high, other.low))
        corners = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __or__(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))


@functools.cache
def range_of(dtype: dt.DType) -> Interval:
    """All values of an integer or bool type."""
    if dtype.kind == "bool":
        return Interval(0, 1)
    half = 1 << (dtype.bits - 1)
    return Interval(0, 2 * half - 1) if dtype.kind == "uint" else Interval(-half, half - 1)


def _times(a: Limit, b: Limit) -> Limit:
    return 0 if a == 0 or b == 0 else a * b


def _floor(a: Limit, b: Limit) -> Limit:
    """`a // b` for a non-zero b, infinities included."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, float):
        return (0 if (a >= 0) == (b > 0) or a == 0 else -1) if isinstance(a, int) else a * math.copysign(1, b)
    return a if b > 0 else -a


def of_binary(op: str, a: Interval, b: Interval) -> Interval:
    """Where `x op y` lies for an arithmetic or bitwise operator, x in `a`, y in `b`, in numbers that do not wrap."""
    if op == "+":
        return a + b
    if op == "-":
        return a + -b
    if op == "*":
        return a * b
    if op in ("min", "max"):
        pick = min if op == "min" else max
        return Interval(pick(a.low, b.low), pick(a.high, b.high))
    if op == "//" and (min(b.low, b.high) > 0 or max(b.low, b.high) < 0):  # low > high where nothing is reached
        return _hull([_floor(x, y) for x in (a.low, a.high) for y in (b.low, b.high)])
    if op == "%" and b.low > 0:
        if a.low >= 0 and a.high < b.low:
            return a
        if isinstance(a.low, int) and isinstance(a.high, int) and isinstance(b.low, int) and b.is_point:
            modulus = b.low
            if a.low // modulus == a.high // modulus:
                return Interval(a.low % modulus, a.high % modulus)
        return Interval(0, min(b.high - 1, a.high) if a.low >= 0 else b.high - 1)
    if op == "&" and (a.low >= 0 or b.low >= 0):
        return Interval(0, min(x.high for x in (a, b) if x.low >= 0))
    if op in ("|", "^") and a.low >= 0 and b.low >= 0 and isinstance(top := max(a.high, b.high), int):
        return Interval(0, (1 << top.bit_length()) - 1)
    if op in ("<<", ">>") and isinstance(b.low, int) and isinstance(b.high, int) and 0 <= b.low <= b.high < 64:
        if op == "<<":
            return a * Interval(1 << b.low, 1 << b.high)
        return _hull([_floor(x, 1 << y) for x in (a.low, a.high) for y in (b.low, b.high)])
    return Interval()


def _hull(values: Sequence[Limit]) -> Interval:
    return Interval(min(values), max(values))
