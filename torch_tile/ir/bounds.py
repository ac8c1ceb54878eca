# SPDX-License-Identifier: Apache-2.0
"""Bounds of integer expressions: numeric intervals, and proofs of inequalities with symbolic sizes.

Assumes that int32 and int64 arithmetic does not wrap, as in indices and comparisons; `Ranges.is_exact` tells where that
holds of a value that is stored. Assumes that dimensions are not negative, and not 0 if something
is divided by them. Every claim is true. A fact that needs more than a small budget of steps is not claimed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import (
    COMPARISONS,
    LOGICAL,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    const,
    to_expr,
)
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.polynomial import EXACT, Atom, Atoms, Polynomial, number
from torch_tile.ir.stmt import Kernel, Program
from torch_tile.ir.widths import IndexValues, is_compared_exactly, leaves_64, may_wrap

# Intervals of integers, and operators on them. Every result contains all possible values.

Limit = int | float  # an integer, or infinity


@dataclass(slots=True)
class Interval:
    """The integers from `low` to `high`, both included; either may be infinite. Never changed."""

    low: Limit = -math.inf
    high: Limit = math.inf

    @property
    def is_point(self) -> bool:
        """Return whether the interval holds exactly one integer."""
        return self.low == self.high

    def within(self, other: Interval) -> bool:
        """Return whether the whole interval lies in `other`."""
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
def dtype_interval(dtype: dt.DType) -> Interval:
    """Return the interval of all values of an integer or bool type."""
    if dtype.kind == "bool":
        return Interval(0, 1)
    return Interval(*dt.limits(dtype))


def load_interval(load: Load) -> Interval:
    """Return the interval of the values that an element of an integer or bool buffer may hold."""
    below = load.buffer.below
    return Interval(0, below - 1) if below else dtype_interval(load.dtype)


def _times(a: Limit, b: Limit) -> Limit:
    """Multiply bounds, where 0 times infinity is 0."""
    return 0 if a == 0 or b == 0 else a * b


def _floor(a: Limit, b: Limit) -> Limit:
    """Compute `a // b` for a non-zero b, infinities included."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, float):
        return (0 if (a >= 0) == (b > 0) or a == 0 else -1) if isinstance(a, int) else a * math.copysign(1, b)
    return a if b > 0 else -a


def binary_interval(op: str, a: Interval, b: Interval) -> Interval:
    """Bound `x op y` for an arithmetic or bitwise operator, x in `a`, y in `b`, in numbers that do not wrap."""
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
    if op == "//":  # by either sign, and by 0 as by 1
        return _hull([_floor(x, y) for x in (a.low, a.high) for y in {b.low or 1, b.high or 1, *_units(b)}])
    if op == "%" and b.low <= 0:
        return Interval(min(b.low + 1, 0), max(min(b.high - 1, a.high) if a.low >= 0 else b.high - 1, 0))
    if op == "%":
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


def _units(b: Interval) -> tuple[int, ...]:
    """Return those of 1 and -1 that an interval with 0 holds, and 1 for 0: quotients by these are largest."""
    return (1, -1) if b.low < 0 else (1,)


def _hull(values: Sequence[Limit]) -> Interval:
    """Return the smallest interval with all values."""
    return Interval(min(values), max(values))


BUDGET = 200  # polynomials looked at in one proof
ONE, ZERO = number(1), const(0, dt.int32)
UNBOUNDED, NATURAL = Interval(), Interval(low=0)
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


class Ranges:
    """The facts that hold at one point of a kernel. Immutable: entering a loop or a branch gives a new object.

    For an atom `x`, `_lower` holds pairs `(k, p)` that mean `k * x >= p`, `_upper` pairs that mean `k * x <= p`, newest
    first. Factors `k` are positive: numbers, or products of sizes.
    """

    def __init__(self) -> None:
        self._atoms = Atoms()
        self._lower: dict[int, tuple[tuple[Polynomial, Polynomial], ...]] = {}
        self._upper: dict[int, tuple[tuple[Polynomial, Polynomial], ...]] = {}
        self._numeric: dict[Var, Interval] = {}
        self._depth: dict[int, int] = {}
        self._verdicts: dict[Hashable, bool] = {}
        self._intervals: dict[Expr, Interval] = {}
        self._values: dict[Var, Expr] = {}
        self._elements: IdSet[Var] = IdSet()  # names of values that are computed from elements alone
        self._is_from_indices = IndexValues(elements=self._elements)

    # Entering scopes.

    def loop(self, var: Var, start: Expr | int, stop: Expr | int, step: int = 1) -> Ranges:
        """Return the facts inside a loop: `start <= var < stop` in steps of `step` (at least 1)."""
        first, last = to_expr(start), to_expr(stop)
        if step > 1:
            iteration = Var(f"{var.name}_turn", var.type, "loop")
            inner = self.loop(iteration, 0, (last - first + (step - 1)) // step)
            return inner.define(var, first + iteration * step)
        new = self.assume(first < last)._copy()
        atom = new._enter(var)
        low, high = self.interval(first), self.interval(last)
        new._numeric[var] = Interval(low.low, high.high - 1) & self._of_var(var)
        return new._bound(atom, self._atoms.of(first), self._atoms.of(last) - number(1))

    def launched(self, program: Program) -> Ranges:
        """Return the facts inside a program's kernels: what launches check holds of sizes and scalar parameters."""
        return functools.reduce(Ranges.assume, program.assumed, self)

    def kernel(self, kernel: Kernel) -> Ranges:
        """Return the facts inside a kernel: each block index is below its grid extent."""
        new = self
        for var, extent in zip(kernel.blocks, kernel.grid, strict=True):
            new = new.loop(var, 0, extent)
        return new

    def within(self, var: Var, low: Expr | int, high: Expr | int) -> Ranges:
        """Return the facts where `low <= var <= high` is known."""
        return self.loop(var, low, to_expr(high) + 1)

    def define(self, var: Var, value: Expr) -> Ranges:
        """Return the facts after `var = value`."""
        new = self._copy()
        new._verdicts, new._intervals = dict(self._verdicts), dict(self._intervals)  # nothing new of what was there
        if isinstance(value, Const | Var):
            new._values[var] = value
        if not var.dtype.is_integer:
            return new
        if not self._is_from_indices(value):
            self._elements.add(var)
        beyond = not self.interval(value).within(dtype_interval(dt.int64)) and leaves_64(value)
        if beyond or self.may_wrap(value):
            new._numeric[var] = dtype_interval(var.dtype)
            new._enter(var)
            return new
        new._numeric[var] = self.interval(value)
        polynomial = self._atoms.of(value)
        if self._atoms.is_mutable(polynomial):
            new._enter(var)
        else:
            self._atoms.define(var, polynomial)
        return new

    def assume(self, condition: Expr) -> Ranges:
        """Return the facts where `condition` holds. Facts about memory are not kept, since memory changes; nor are
        those about numbers that may have wrapped.
        """
        new = self
        for op, a, b in _comparisons(condition, True):
            if not is_compared_exactly(Binary(op, a, b)):
                continue
            p = self._atoms.of(b) - self._atoms.of(a)
            if op in ("<", "<="):
                new = new._fact(p - number(1) if op == "<" else p)
            elif op in (">", ">="):
                new = new._fact(p.scaled(-1) - number(1) if op == ">" else p.scaled(-1))
            elif op == "==":
                new = new._fact(p)._fact(p.scaled(-1))
        return new

    def _copy(self) -> Ranges:
        """Copy the ranges, so that facts can be added."""
        new = object.__new__(Ranges)
        new.__dict__.update(self.__dict__)
        new._lower, new._upper = dict(self._lower), dict(self._upper)
        new._numeric, new._depth = dict(self._numeric), dict(self._depth)
        new._verdicts, new._intervals = {}, {}
        new._values = dict(self._values)
        return new

    def _enter(self, var: Var) -> int:
        """Note a variable's nesting depth; return its atom."""
        atom = self._atoms.variable(var)
        self._depth[atom] = len(self._depth) + 1
        return atom

    def _bound(self, atom: int, low: Polynomial | None, high: Polynomial | None, factor: Polynomial = ONE) -> Ranges:
        """Add symbolic bounds of `factor * atom`."""
        for table, p in ((self._lower, low), (self._upper, high)):
            if p is not None and not self._atoms.is_mutable(p):
                table[atom] = ((factor, p), *table.get(atom, ()))
        return self

    def _fact(self, p: Polynomial) -> Ranges:
        """Add the fact `p >= 0` as a bound of the innermost atom of `p`."""
        p = p.tightened()
        parts = None if p.is_constant or self._atoms.is_mutable(p) else p.split(atom := self._innermost(p))
        if parts is None:
            return self
        factor, rest = parts
        if not factor.is_constant:
            return self._fact_of_product(atom, factor, rest)
        count = factor.constant
        new = self._copy()
        described = self._atoms.table[atom]
        if count > 0:
            new._bound(atom, rest.scaled(-1), None, factor)
        else:
            new._bound(atom, None, rest, factor.scaled(-1))
        if rest.is_constant and isinstance(described.expr, Var):
            limit = -rest.constant // count if count < 0 else -(rest.constant // count)
            known = self._of_var(described.expr)
            new._numeric[described.expr] = known & (Interval(low=limit) if count > 0 else Interval(high=limit))
        elif rest.is_constant and count > 0:
            new = new._fact_inside(described, -(rest.constant // count))
        return new

    def _fact_of_product(self, atom: int, factor: Polynomial, rest: Polynomial) -> Ranges:
        """Add the fact `factor * atom + rest >= 0` where the factor is one product of sizes, not 0."""
        negative = len(factor.terms) == 1 and min(factor.terms.values()) < 0
        size = factor.scaled(-1) if negative else factor
        if len(size.terms) > 1 or not self._shown(size - ONE):
            return self
        low, high = (None, rest) if negative else (rest.scaled(-1), None)
        return self._copy()._bound(atom, low, high, size)

    def _fact_inside(self, described: Atom, least: int) -> Ranges:
        """Add what follows for operands where a compound atom is at least a number."""
        if described.op == "//":
            x, d = described.args
            return self._fact(x - d.scaled(least))
        if described.op == "max":
            above = [x for x in described.args if not (x.is_constant and x.constant < least)]
            return self._fact(above[0] - number(least)) if len(above) == 1 else self
        return self

    def value_of(self, var: Var) -> Expr | None:
        """Return the literal or the variable that `var` is known to equal."""
        if var not in self._values and var.dtype.is_integer and (found := self._of_var(var)).is_point:
            return const(int(found.low), var.type)
        return self._values.get(var)

    # Intervals.

    def interval(self, expr: Expr) -> Interval:
        """Return bounds of an integer or bool expression."""
        if isinstance(expr, Var) and expr.type is dt.int32:  # asked for often
            return self._of_var(expr)
        known = self._intervals.get(expr)
        if known is not None:
            return known
        dtype = expr.dtype
        found = UNBOUNDED if dtype.is_float else self._interval(expr)
        if dtype not in EXACT and not dtype.is_float and not found.within(dtype_interval(dtype)):
            found = dtype_interval(dtype)
        self._intervals[expr] = found
        return found

    def may_wrap(self, expr: Expr) -> bool:
        """Return whether an integer of elements may wrap on the way to its value, where it makes no index."""
        return may_wrap(expr, self._is_from_indices, lambda e: self.interval(e).within(dtype_interval(e.dtype)))

    def is_exact(self, expr: Binary) -> bool:
        """Return whether an operator's operands do not wrap, so that `interval` and `prove` hold for them."""
        if self._is_from_indices(expr):
            return is_compared_exactly(expr)
        return not (self.may_wrap(expr.a) or self.may_wrap(expr.b))

    def _of_var(self, var: Var) -> Interval:
        """Return the interval of a variable."""
        known = self._numeric.get(var)
        if known is not None:
            return known
        if var.role == "dim":
            return NATURAL
        return dtype_interval(var.type) if var.role == "param" or var.type not in EXACT else UNBOUNDED

    def _interval(self, expr: Expr) -> Interval:
        """Compute the interval of an expression by its operands' intervals."""
        if isinstance(expr, Const):
            return Interval(int(expr.value), int(expr.value))
        if isinstance(expr, Var):
            return self._of_var(expr)
        if isinstance(expr, Binary) and expr.op not in COMPARISONS and expr.op not in LOGICAL:
            return binary_interval(expr.op, self.interval(expr.a), self.interval(expr.b))
        if isinstance(expr, Select):
            return self.interval(expr.a) | self.interval(expr.b)
        if isinstance(expr, Unary) and expr.op == "-":
            return -self.interval(expr.a)
        if isinstance(expr, Cast) and not expr.a.dtype.is_float and expr.type.is_integer:
            if expr.type not in EXACT and (self.may_wrap(expr.a) or leaves_64(expr.a)):
                return dtype_interval(expr.type)  # `is_exact` looks into no cast
            inner = self.interval(expr.a)
            widening = expr.type in EXACT and expr.a.dtype == dt.int32
            return inner if widening or inner.within(dtype_interval(expr.type)) else dtype_interval(expr.type)
        if isinstance(expr, Call) and expr.name == "abs":
            inner = self.interval(expr.args[0])
            found = Interval(max(inner.low, -inner.high, 0), max(-inner.low, inner.high))
            whole = dtype_interval(expr.dtype)
            return found if found.within(whole) else whole  # -(2**31) keeps its sign
        if isinstance(expr, Load):
            return load_interval(expr)
        known = isinstance(expr, Cast) or expr.dtype not in EXACT
        return dtype_interval(expr.dtype) if known else UNBOUNDED

    # Proofs.

    def prove(self, condition: Expr) -> bool:
        """Return whether a bool expression is certainly true here. False proves nothing."""
        return self._is(condition, True)

    def refute(self, condition: Expr) -> bool:
        """Return whether a bool expression is certainly false here."""
        return self._is(condition, False)

    def _is(self, condition: Expr, truth: bool) -> bool:
        """Return whether a bool expression certainly has a truth value here."""
        if isinstance(condition, Const):
            return bool(condition.value) is truth
        if isinstance(condition, Unary) and condition.op == "not":
            return self._is(condition.a, not truth)
        if not isinstance(condition, Binary):
            return False
        if condition.op in LOGICAL:
            needed = all if (condition.op == "and") is truth else any
            return needed(self._is(x, truth) for x in (condition.a, condition.b))
        op = condition.op if truth else NEGATED.get(condition.op)
        return op is not None and self._compare(op, condition.a, condition.b)

    def inside(self, index: Expr, size: Expr) -> bool:
        """Return whether `0 <= index < size`, so that an access needs no guard."""
        return self._compare(">=", index, ZERO) and self._compare("<", index, size)

    def may_be_negative(self, expr: Expr) -> bool:
        """Return whether an integer may be negative, quotients by zero apart: the signs of operands decide."""
        if self._compare(">=", expr, const(0, expr.dtype)):
            return False
        if not isinstance(expr, Binary) or expr.op not in ("+", "*", "//", "%", "min", "max"):
            return True
        a, b = (expr.op != "%" and self.may_be_negative(expr.a)), self.may_be_negative(expr.b)
        return a and b if expr.op == "max" else a or b

    def _compare(self, op: str, a: Expr, b: Expr) -> bool:
        """Return whether `a op b` is certainly true, by intervals or by polynomials."""
        if op not in COMPARISONS or a.dtype.is_float or b.dtype.is_float:
            return False
        x, y = self.interval(a), self.interval(b)
        if _always_holds(op, x, y):
            return True
        p = self._atoms.of(b) - self._atoms.of(a)
        if op in ("<", "<="):
            return self._shown(p - ONE if op == "<" else p)
        if op in (">", ">="):
            return self._shown(p.scaled(-1) - ONE if op == ">" else p.scaled(-1))
        if op == "==":
            return self._shown(p) and self._shown(p.scaled(-1))
        return self._shown(p - ONE) or self._shown(p.scaled(-1) - ONE)

    def _shown(self, p: Polynomial) -> bool:
        """Return whether a polynomial is provably non-negative, from the cache if known."""
        key = p.key
        if key not in self._verdicts:
            self._verdicts[key] = not self._is_refuted(p) and self._non_negative(p, {})
        return self._verdicts[key]

    def _is_refuted(self, p: Polynomial) -> bool:
        """Return whether a counterexample exists: numbers that satisfy all facts here and make `p` negative."""
        return Counterexample(self._atoms, self._lower, self._upper, self.interval).refutes(p)

    def _non_negative(self, p: Polynomial, tried: dict[Hashable, bool]) -> bool:
        """Return whether `p >= 0`, by replacing innermost atoms by their bounds until a number is left."""
        p = p.tightened()
        if p.is_constant:
            return p.constant >= 0
        key = p.key
        if key not in tried:
            tried[key] = False
            if len(tried) < BUDGET:
                tried[key] = self._reduced(p, tried)
        return tried[key]

    def _reduced(self, p: Polynomial, tried: dict[Hashable, bool]) -> bool:
        """Prove a polynomial non-negative by replacing its innermost atom by the atom's bounds."""
        atom = self._innermost(p)
        parts = p.split(atom)
        return parts is not None and any(
            all(self._non_negative(q, tried) for q in together)
            for together in self._bounds(atom, *parts, self._sign(parts[0], tried))
        )

    def _sign(self, p: Polynomial, tried: dict[Hashable, bool]) -> int:
        """Return 1 if `p >= 0` is known, -1 if `p <= 0` is, else 0."""
        if p.is_constant:
            return 1 if p.constant >= 0 else -1
        if self._non_negative(p, tried):
            return 1
        return -1 if self._non_negative(p.scaled(-1), tried) else 0

    def _bounds(self, atom: int, a: Polynomial, b: Polynomial, sign: int) -> Iterator[list[Polynomial]]:
        """Return lists of polynomials without `atom`; if all of one list are non-negative, so is `a * atom + b`."""
        described = self._atoms.table[atom]
        if described.op in ("min", "max", "select"):
            cases = [a * x + b for x in described.args]
            one_is_enough = described.op != "select" and sign == (-1 if described.op == "min" else 1)
            if one_is_enough:
                yield from ([case] for case in cases)
            yield cases
        if sign == 0:
            return
        for factor, limit in self._limits(atom, described, sign):
            times = None if factor.is_constant else self._atoms.quotient(a, factor)
            yield [a * limit + b * factor if times is None else times * limit + b]
        if described.op == "//":
            x, d = described.args
            end, times = x - d + number(1) if sign > 0 else x, self._atoms.quotient(a, d)
            yield [a * end + b * d if times is None else times * end + b]
            for relaxed in self._relaxed(x, sign):
                yield [a * self._atoms.divide(relaxed, d) + b]

    def _limits(self, atom: int, described: Atom, sign: int) -> Iterator[tuple[Polynomial, Polynomial]]:
        """Return `(k, p)` with `k * atom >= p` (sign 1) or `<= p` (sign -1)."""
        yield from (self._lower if sign > 0 else self._upper).get(atom, ())
        if described.expr is not None:
            interval = self.interval(described.expr)
            limit = interval.low if sign > 0 else interval.high
            if isinstance(limit, int):
                yield ONE, number(limit)

    def _relaxed(self, x: Polynomial, sign: int) -> Iterator[Polynomial]:
        """Return polynomials without the innermost atom of `x`, at most `x` (sign 1) or at least `x` (-1)."""
        if x.is_constant:
            return
        atom = self._innermost(x)
        parts = x.split(atom)
        if parts is None or not parts[0].is_constant:
            return
        a, b = parts
        direction = sign if a.constant > 0 else -sign
        described = self._atoms.table[atom]
        for factor, limit in self._limits(atom, described, direction):
            if factor.is_constant and factor.constant == 1:
                yield a * limit + b
        if described.op == "//":
            for relaxed in self._relaxed(described.args[0], direction):
                yield a * self._atoms.divide(relaxed, described.args[1]) + b
        elif described.op == ("max" if direction > 0 else "min"):
            yield from (a * argument + b for argument in described.args)

    def _innermost(self, p: Polynomial) -> int:
        """Return the atom of the innermost variable, which is eliminated first."""
        return max(p.atoms(), key=lambda atom: (self._rank(atom), atom))

    def _rank(self, atom: int) -> float:
        """Return the depth at which an atom's innermost variable was bound; compound atoms rank after inner ones."""
        inner = self._atoms.table[atom].inner
        return max(map(self._rank, inner)) + 0.25 if inner else self._depth.get(atom, 0)


def _always_holds(op: str, x: Interval, y: Interval) -> bool:
    """Return whether `op` holds between all numbers of two intervals."""
    if op in ("<", "<="):
        return x.high < y.low if op == "<" else x.high <= y.low
    if op in (">", ">="):
        return x.low > y.high if op == ">" else x.low >= y.high
    return False


def interval(expr: Expr, ranges: Ranges) -> Interval:
    """Return bounds of an integer or bool expression."""
    return ranges.interval(expr)


def prove(condition: Expr, ranges: Ranges) -> bool:
    """Return whether a bool expression is certainly true. False says nothing."""
    return ranges.prove(condition)


def _comparisons(condition: Expr, holds: bool) -> Iterator[tuple[str, Expr, Expr]]:
    """Return the integer comparisons that follow if `condition` has the truth value `holds`."""
    if isinstance(condition, Unary) and condition.op == "not":
        yield from _comparisons(condition.a, not holds)
    elif isinstance(condition, Binary) and condition.op == ("and" if holds else "or"):
        yield from _comparisons(condition.a, holds)
        yield from _comparisons(condition.b, holds)
    elif isinstance(condition, Binary) and condition.op in NEGATED and not condition.a.dtype.is_float:
        yield (condition.op if holds else NEGATED[condition.op]), condition.a, condition.b


# Counterexamples: numbers for variables that satisfy all facts and make a polynomial negative. Then no proof need be
# tried. Most inequalities that passes ask for do not hold, and a failing proof tries all ways. One set of numbers costs
# less than a proof. Each atom takes the end of its range at which the polynomial is least, given the atoms chosen
# before it.

FAR = 1 << 20  # instead of no limit
Bounds = Mapping[int, tuple[tuple[Polynomial, Polynomial], ...]]


class Counterexample:
    """A choice of a number for each atom. `lower` and `upper` are as in `Ranges`, `interval` bounds an expression."""

    table: list[Atom]
    lower: Bounds
    upper: Bounds
    interval: Callable[[Expr], Interval]

    def __init__(self, atoms: Atoms, lower: Bounds, upper: Bounds, interval: Callable[[Expr], Interval]):
        self.table, self.lower, self.upper, self.interval = atoms.table, lower, upper, interval
        self.values: dict[int, int] = {}
        self.open: set[int] = set()

    def refutes(self, p: Polynomial) -> bool:
        """Return whether `p` is negative for these numbers, so that `p >= 0` does not follow from the facts."""
        try:
            return self._limit_of(p, False) < 0
        except _Unknown:
            return False

    def _limit_of(self, p: Polynomial, high: bool) -> int:
        """Compute the value of a polynomial, made large or small as asked."""
        total = 0
        for monomial, factor in p.terms.items():
            for atom in monomial:
                factor *= self._atom(atom, high == (factor > 0))
            total += factor
        return total

    def _atom(self, atom: int, high: bool) -> int:
        """Choose the value of an atom within its known bounds."""
        if atom in self.values:
            return self.values[atom]
        if atom in self.open:
            raise _Unknown
        self.open.add(atom)
        described = self.table[atom]
        low, top = -float("inf"), float("inf")
        if described.expr is not None:
            known = self.interval(described.expr)
            low, top = known.low, known.high
        low = max([low, *(-(-self._limit_of(p, False) // self._factor(k)) for k, p in self.lower.get(atom, ()))])
        top = min([top, *(self._limit_of(p, True) // self._factor(k) for k, p in self.upper.get(atom, ()))])
        value = (
            self._chosen(described, low, top, high)
            if described.expr is not None
            else self._compound_value(described, high)
        )
        if not low <= value <= top:
            raise _Unknown
        self.values[atom] = value
        return value

    def _factor(self, k: Polynomial) -> int:
        """Return the value of a bound's factor, which is positive."""
        value = k.constant if k.is_constant else self._limit_of(k, False)
        if value <= 0:
            raise _Unknown
        return value

    def _chosen(self, described: Atom, low: float, top: float, high: bool) -> int:
        """Choose one end of a range. Dimensions are at least 1, as an expression may divide by them."""
        if isinstance(described.expr, Var) and described.expr.role == "dim":
            low = max(low, 1)
        if high:
            return int(top if math.isfinite(top) and (top < FAR or low > FAR) else max(low, FAR))
        return int(low if math.isfinite(low) and (low > -FAR or top < -FAR) else min(top, -FAR))

    def _compound_value(self, described: Atom, high: bool) -> int:
        """Compute the value of a compound atom."""
        if described.op == "//":
            x, d = (self._limit_of(p, high) for p in described.args)
            if d > 0:
                return x // d
        elif described.op in ("min", "max"):
            pick = min if described.op == "min" else max
            return pick(self._limit_of(p, high) for p in described.args)
        raise _Unknown


class _Unknown(Exception):
    """Raised if no numbers satisfy the known facts."""
