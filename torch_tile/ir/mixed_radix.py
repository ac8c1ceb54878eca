# SPDX-License-Identifier: Apache-2.0
"""Integer expressions as sums of digits, `factor * ((atom // divisor) % modulus)`, taken apart and put together again.

Layouts ask for a digit of an index (`quotient`); what the index is built from decides what is left of it: a digit of
a thread, a loop variable, a constant. Assumes, as bounds.py does, that index arithmetic does not wrap.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Interval, Limit
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Binary, Cast, Const, Expr, Unary, Var, cast, const
from torch_tile.ir.polynomial import EXACT, structure, widens
from torch_tile.ir.widths import WORD, leaves_64

if TYPE_CHECKING:
    from torch_tile.ir.bounds import Ranges

UNBOUNDED = Interval()
NATURAL = {"thread", "block", "dim"}  # roles of variables that are never negative


@dataclass(frozen=True, eq=False)
class Term:
    """A term `factor * ((atom // divisor) % modulus)`; no modulus is None. The digit is known to be in `[0, limit)`."""

    factor: int
    atom: Expr
    divisor: int = 1
    modulus: int | None = None
    limit: int | None = None

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for terms of the same digit."""
        return structure(self.atom), self.divisor, self.modulus

    @property
    def is_wide(self) -> bool:
        """Return whether the atom, its divisor or its modulus needs more than an int32."""
        return not widens(self.atom.dtype, dt.int32) or not _is_short(self.divisor) or not _is_short(self.modulus or 1)

    def times(self, factor: int) -> Term:
        """Return the same digit with another factor."""
        return Term(factor, self.atom, self.divisor, self.modulus, self.limit)

    def below(self, limit: int | None) -> Term:
        """Return the term with the added fact that the digit is in `[0, limit)`; None adds nothing."""
        return Term(self.factor, self.atom, self.divisor, self.modulus, _least(self.limit, limit))


@dataclass(frozen=True, eq=False)
class Digits:
    """A sum of terms and a constant."""

    terms: tuple[Term, ...] = ()
    constant: int = 0

    def __add__(self, other: Digits) -> Digits:
        return Digits(_collected((*self.terms, *other.terms)), self.constant + other.constant)

    def scaled(self, factor: int) -> Digits:
        """Multiply this sum by an integer."""
        if factor in (0, 1):
            return self if factor else Digits()
        return Digits(tuple(t.times(t.factor * factor) for t in self.terms), self.constant * factor)

    def expr(self) -> Expr:
        """Return the sum as an int32 expression, the constant last: an index of a tile."""
        return cast(self.exact(), dt.int32)

    def exact(self) -> Expr:
        """Return the sum in the type that holds its parts: an int32, or an int64 where one of them needs it."""
        numbers = (self.constant, *(t.factor for t in self.terms))
        dtype = dt.int32 if all(map(_is_short, numbers)) and not any(t.is_wide for t in self.terms) else dt.int64
        total: Expr | None = None
        for term in sorted(self.terms, key=lambda t: t.factor < 0):
            digit = _digit(term, dtype)
            size = abs(term.factor)
            product = digit if size == 1 else Binary("*", digit, const(size, dtype))
            if total is None:
                total = product if term.factor > 0 else Unary("-", product)
            else:
                total = Binary("+" if term.factor > 0 else "-", total, product)
        if total is None:
            return const(self.constant, dtype)
        return total if self.constant == 0 else Binary("+", total, const(self.constant, dtype))


class MixedRadix:
    """Read expressions as `Digits` and take digits of them, given what is known about variables."""

    def __init__(self, ranges: Ranges | None = None):
        self.ranges = ranges

    def of(self, e: Expr) -> Digits:
        """Read the expression as a sum of digits; what may leave 64 bits, and so wraps, is one digit."""
        if leaves_64(e):
            return Digits((Term(1, e),))
        if isinstance(e, Const) and not e.dtype.is_float:
            return Digits((), int(e.value))
        if isinstance(e, Cast) and widens(e.a.dtype, e.type):
            return self.of(e.a)
        if isinstance(e, Unary) and e.op == "-" and e.dtype in EXACT:
            return self.of(e.a).scaled(-1)
        if isinstance(e, Binary) and e.dtype in EXACT and (found := self._binary(e)) is not None:
            return found
        known = self.ranges.interval(e) if self.ranges is not None else UNBOUNDED
        return Digits((), int(known.low)) if known.is_point else Digits((Term(1, e),))

    def _binary(self, e: Binary) -> Digits | None:
        """Write a binary expression in mixed-radix form."""
        if e.op in ("+", "-"):
            return self.of(e.a) + self.of(e.b).scaled(1 if e.op == "+" else -1)
        a, b = (e.b, e.a) if e.op == "*" and isinstance(e.a, Const) else (e.a, e.b)
        if not isinstance(b, Const) or (n := int(b.value)) < 0:
            return None
        if e.op == "*":
            return self.of(a).scaled(n)
        if e.op == "<<" and n < 31:
            return self.of(a).scaled(1 << n)
        if e.op == ">>" and n < WORD - 1:
            return self.quotient(self.of(a), 1 << n)
        if e.op == "//" and n > 0:
            return self.quotient(self.of(a), n)
        if e.op == "%" and n > 0:
            return self.quotient(self.of(a), 1, n)
        if e.op == "&" and n & (n + 1) == 0 and n.bit_length() < WORD:
            return self.quotient(self.of(a), 1, n + 1)
        return None

    def interval(self, sum_: Digits) -> Interval:
        """Return numbers between which the sum lies."""
        low: Limit = sum_.constant
        high: Limit = sum_.constant
        for term in sum_.terms:
            digit = self._of_digit(term)
            ends = term.factor * digit.low, term.factor * digit.high
            low, high = low + min(ends), high + max(ends)
        return Interval(low, high)

    def _of_digit(self, term: Term) -> Interval:
        """Return the interval of a term's digit."""
        atom = term.atom
        found = self.ranges.interval(atom) if self.ranges is not None else UNBOUNDED
        low, high = found.low, found.high
        if low < 0 and isinstance(atom, Var) and atom.role in NATURAL:
            low = 0
        if term.divisor != 1:
            low, high = (x if math.isinf(x) else x // term.divisor for x in (low, high))
        if term.modulus is not None and not (low >= 0 and high < term.modulus):
            low, high = 0, term.modulus - 1
        if term.limit is not None:
            low, high = max(low, 0), min(high, term.limit - 1)
        return Interval(low, high)

    def below(self, sum_: Digits, size: int) -> Digits:
        """Return the sum with the fact `0 <= sum < size`: each digit that is never negative has its limit."""
        alone = len(sum_.terms) == 1 and sum_.constant == 0
        natural = all(t.factor > 0 and (alone or self._of_digit(t).low >= 0) for t in sum_.terms)
        if not natural or sum_.constant < 0:
            return sum_
        room = size - 1 - sum_.constant
        terms = tuple(t.below(room // t.factor + 1) for t in sum_.terms)
        return Digits(terms, sum_.constant)

    def quotient(self, sum_: Digits, divisor: int, modulus: int | None = None) -> Digits:
        """Compute `(sum // divisor) % modulus`."""
        if modulus == 1:
            return Digits()
        if modulus is not None:
            whole = divisor * modulus
            terms = tuple(t for t in sum_.terms if t.factor % whole)
            sum_ = Digits(terms, sum_.constant % whole)
        found = self._divided(sum_, divisor)
        return found if modulus is None else self._remainder(found, modulus)

    def _divided(self, sum_: Digits, d: int) -> Digits:
        """Divide a sum by `d`, taking out the terms that are multiples of `d`."""
        if d == 1:
            return sum_
        terms = [part for term in sum_.terms for part in self._split_digit(term, d)]
        high, low = _parted(terms, d)
        carry = Digits(low, sum_.constant % d)
        if self.interval(carry).within(Interval(0, d - 1)):
            return Digits(high, sum_.constant // d)
        high, low = _parted(sum_.terms, d)  # splitting gained nothing
        return Digits(high, sum_.constant // d) + self._opaque_quotient(Digits(low, sum_.constant % d), d)

    def _opaque_quotient(self, low: Digits, d: int) -> Digits:
        """Return `low // d` as a digit of its own, where the division does not split over the terms."""
        if len(low.terms) == 1 and low.constant == 0 and low.terms[0].factor == 1:
            (t,) = low.terms
            if t.modulus is None or t.modulus % d == 0:
                modulus = None if t.modulus is None else t.modulus // d
                return Digits((Term(1, t.atom, t.divisor * d, modulus, _ceil(t.limit, d)),))
        return Digits((Term(1, low.exact(), d, None),))

    def _remainder(self, sum_: Digits, m: int) -> Digits:
        """Compute a sum modulo `m`."""
        terms = [t for t in sum_.terms if t.factor % m]
        terms = [part for term in terms for part in self._split_digit(term, m) if part.factor % m]
        sum_ = Digits(_collected(terms), sum_.constant % m)
        if self.interval(sum_).within(Interval(0, m - 1)):
            return sum_
        for g in sorted({math.gcd(t.factor, m) for t in terms} - {1}, reverse=True):
            low = Digits(tuple(t for t in sum_.terms if t.factor % g), sum_.constant % g)
            if self.interval(low).within(Interval(0, g - 1)):
                high = tuple(t.times(t.factor // g) for t in sum_.terms if t.factor % g == 0)
                return self._remainder(Digits(high, sum_.constant // g), m // g).scaled(g) + low
        return Digits((Term(1, sum_.exact(), 1, m),))

    def _split_digit(self, t: Term, boundary: int) -> tuple[Term, ...]:
        """Split a digit at `boundary` into a multiple of it and a lower digit; or return the digit as it is."""
        if t.factor <= 0 or boundary % t.factor or t.factor == boundary:
            return (t,)
        radix = boundary // t.factor
        uneven = t.modulus is not None and t.modulus % radix != 0
        if uneven or self._of_digit(t).within(Interval(0, radix - 1)):
            return (t,)
        modulus = None if t.modulus is None else t.modulus // radix
        high = Term(boundary, t.atom, t.divisor * radix, modulus, _ceil(t.limit, radix))
        return high, Term(t.factor, t.atom, t.divisor, radix)


def _is_short(number: int) -> bool:
    """Return whether an int32 holds a number, and its opposite."""
    return abs(number) < 1 << 31


def _digit(t: Term, dtype: DType) -> Expr:
    """Return `atom // divisor % modulus` as an expression of `dtype`, which must hold its parts."""
    if isinstance(t.atom, Const):
        value = int(t.atom.value) // t.divisor
        return const(value if t.modulus is None else value % t.modulus, dtype)
    e = cast(t.atom, dtype)
    if t.divisor > 1:
        e = Binary("//", e, const(t.divisor, dtype))
    return e if t.modulus is None else Binary("%", e, const(t.modulus, dtype))


def _collected(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Merge terms of a sum: add up equal digits and join neighbouring digits of one atom."""
    found: dict[Hashable, Term] = {}
    for t in terms:
        key = t.key
        known = found.get(key)
        found[key] = t if known is None else known.times(known.factor + t.factor).below(t.limit)
    kept = [t for t in found.values() if t.factor]
    while (pair := _neighbours(kept)) is not None:
        low, high = pair
        size = high.divisor // low.divisor
        modulus = None if high.modulus is None else size * high.modulus
        limit = None if high.limit is None else size * high.limit
        kept[kept.index(low)] = Term(low.factor, low.atom, low.divisor, modulus, limit)
        kept.remove(high)
    return tuple(kept)


def _parted(terms: Iterable[Term], d: int) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return the multiples of `d`, divided by it, and the other terms."""
    terms = tuple(terms)
    high = (t.times(t.factor // d) for t in terms if t.factor % d == 0)
    return _collected(high), _collected(t for t in terms if t.factor % d)


def _neighbours(terms: list[Term]) -> tuple[Term, Term] | None:
    """Find two digits of one atom of which the second continues the first."""
    for low in terms:
        if low.modulus is None:
            continue
        for high in terms:
            if (
                high.divisor == low.divisor * low.modulus
                and high.factor == low.factor * low.modulus
                and structure(high.atom) == structure(low.atom)
            ):
                return low, high
    return None


def _least(a: int | None, b: int | None) -> int | None:
    """Return the smaller limit, where None is no limit."""
    return b if a is None else a if b is None else min(a, b)


def _ceil(limit: int | None, radix: int) -> int | None:
    """Divide a limit by a radix, rounded up; None stays None."""
    return None if limit is None else -(-limit // radix)
