# SPDX-License-Identifier: Apache-2.0
"""Represent integer expressions as polynomials over atoms, so that equal values have one form.

Assumes that int32 and int64 arithmetic does not wrap. Arithmetic in other integer types wraps, and is an opaque atom.
An atom is a variable, a floor division, a minimum, a maximum or a select. Any other expression that is not taken apart
is one, too. `x % d` becomes `x - d * (x // d)`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Call, Cast, Const, Expr, Load, Select, Unary, Var
from torch_tile.ir.node import Node, contains, field_names, find

Monomial = tuple[int, ...]  # atom numbers in ascending order, repeated for powers; () is the constant
EXACT = (dt.int32, dt.int64)
MAX_TERMS = 32


def structure(value: object) -> Hashable:
    """Return a key shared by all values that are `equal`; each symbol enters the key by its own object."""
    if isinstance(value, Node):
        known: Hashable = value.__dict__.get("_structure")
        if known is None:
            if value.is_symbol:  # not by itself: `==` on it builds a comparison, and it would keep itself alive
                known = object()
            else:
                known = (type(value).__name__, *[structure(getattr(value, name)) for name in field_names(value)])
            value.__dict__["_structure"] = known
        return known
    if isinstance(value, tuple):
        return tuple([structure(item) for item in value])
    if isinstance(value, dt.DType):
        return value.name  # keys are hashed often, and this much faster
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


class Polynomial:
    """A sum of integer multiples of monomials; never changed."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, int]):
        """Keep `terms` without factors of 0."""
        self.terms: Mapping[Monomial, int] = terms

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for equal polynomials."""
        return frozenset(self.terms.items())

    @property
    def constant(self) -> int:
        """Return the constant term."""
        return self.terms.get((), 0)

    @property
    def is_constant(self) -> bool:
        """Return whether the polynomial has no term but the constant."""
        return not self.terms or (len(self.terms) == 1 and () in self.terms)

    def __add__(self, other: Polynomial) -> Polynomial:
        return self._merge(other, 1)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self._merge(other, -1)

    def _merge(self, other: Polynomial, sign: int) -> Polynomial:
        """Add `sign` times another polynomial."""
        terms = dict(self.terms)
        for m, c in other.terms.items():
            if both := terms.get(m, 0) + sign * c:
                terms[m] = both
            else:
                del terms[m]
        return Polynomial(terms)

    def __mul__(self, other: Polynomial) -> Polynomial:
        if self.is_constant:
            return other.scaled(self.constant)
        if other.is_constant:
            return self.scaled(other.constant)
        terms: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                both = tuple(sorted(m + n)) if m and n else m or n
                terms[both] = terms.get(both, 0) + c * d
        return Polynomial({m: c for m, c in terms.items() if c})

    def scaled(self, factor: int) -> Polynomial:
        """Multiply this polynomial by an integer."""
        if factor == 1:
            return self
        return Polynomial({m: c * factor for m, c in self.terms.items()} if factor else {})

    def atoms(self) -> set[int]:
        """Return the numbers of the atoms that occur."""
        return {number for m in self.terms for number in m}

    def split(self, atom: int) -> tuple[Polynomial, Polynomial] | None:
        """Return `(a, b)` with `self = a * atom + b` and no `atom` in either; None if it occurs in a power."""
        inside: dict[Monomial, int] = {}
        outside: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            count = m.count(atom)
            if count > 1:
                return None
            if count:
                inside[tuple(n for n in m if n != atom)] = c
            else:
                outside[m] = c
        return Polynomial(inside), Polynomial(outside)

    def tightened(self) -> Polynomial:
        """Divide out the common factor; the result is non-negative exactly where this polynomial is."""
        common = math.gcd(*(c for m, c in self.terms.items() if m))
        if common <= 1:
            return self
        return Polynomial({m: c // common for m, c in self.terms.items() if m or c >= common or c < 0})


def _without(m: Monomial, factors: Monomial) -> Monomial | None:
    """Divide a monomial by another one; None if it is no multiple."""
    if not factors:
        return m
    left = list(m)
    for factor in factors:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def number(value: int) -> Polynomial:
    """Return a constant polynomial."""
    return Polynomial({(): value} if value else {})


@dataclass(frozen=True, eq=False)
class Atom:
    """`op` is "var", "opaque" (both described by `expr`), "//", "min", "max" or "select" (of `args`).

    `mutable` says that the value may differ at another point of the kernel, because memory is read.
    """

    op: str
    expr: Expr | None
    args: tuple[Polynomial, ...] = ()
    mutable: bool = False

    @functools.cached_property
    def inner(self) -> frozenset[int]:
        """Return the atoms inside a compound atom."""
        return frozenset(number for argument in self.args for number in argument.atoms())


class Atoms:
    """The numbering of atoms, and the conversion of expressions to polynomials; shared by all scopes of one kernel."""

    def __init__(self) -> None:
        self.table: list[Atom] = []
        self._numbers: dict[Hashable, int] = {}
        self._cache: dict[Expr, Polynomial] = {}

    def define(self, var: Var, value: Polynomial) -> None:
        """Read `var` as `value` from now on; `var` must not have been used before."""
        self._cache[var] = value

    def of(self, expr: Expr) -> Polynomial:
        """Return the polynomial that has the value of an integer or bool expression."""
        known = self._cache.get(expr)
        if known is None:
            known = self._cache[expr] = self._convert(expr)
        return known

    def variable(self, var: Var) -> int:
        """Return the number of a variable's atom."""
        return self._intern(structure(var), Atom("var", var))

    def is_mutable(self, p: Polynomial) -> bool:
        """Return whether the polynomial reads memory."""
        return any(self.table[n].mutable for n in p.atoms())

    def divide(self, x: Polynomial, d: Polynomial) -> Polynomial:
        """Compute `x // d` for a divisor known to be positive, multiples of `d` taken out of `x`."""
        quotient, rest = self._split_multiples(x, d)
        if rest.is_constant and (rest.constant == 0 or d.is_constant):
            return quotient
        if rest.is_constant and rest.constant == -1:
            return quotient + number(-1)
        common = math.gcd(d.constant, *(c for m, c in rest.terms.items() if m)) if d.is_constant else 1
        if common > 1:  # (2 * x + 1) // 512 is x // 256
            less = Polynomial({m: c // common for m, c in rest.terms.items() if c // common})
            return quotient + self.divide(less, number(d.constant // common))
        if d.is_constant and len(rest.terms) == 1:
            ((monomial, factor),) = rest.terms.items()
            inner = self.table[monomial[0]] if len(monomial) == 1 and factor == 1 else None
            if inner and inner.op == "//" and inner.args[1].is_constant:
                return quotient + self.divide(inner.args[0], d * inner.args[1])
        return quotient + self._compound("//", rest, d)

    def quotient(self, x: Polynomial, d: Polynomial) -> Polynomial | None:
        """Divide a polynomial by a product of sizes; return None where a rest is left."""
        quotient, rest = self._split_multiples(x, d)
        return None if rest.terms else quotient

    def _split_multiples(self, x: Polynomial, d: Polynomial) -> tuple[Polynomial, Polynomial]:
        """Split `x` into the quotient of its multiples of the monomial `d`, and the rest."""
        quotient: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        ((factors, scale),) = d.terms.items()
        for m, c in x.terms.items():
            whole = _without(m, factors)
            if whole is not None and c % scale == 0:
                quotient[whole] = c // scale
            elif not m and not factors:
                rest[()] = c % scale
                if c // scale:
                    quotient[()] = c // scale
            else:
                rest[m] = c
        return Polynomial(quotient), Polynomial(rest)

    def _intern(self, key: Hashable, atom: Atom) -> int:
        """Return the number of the atom with this key; make one at the first call."""
        found = self._numbers.setdefault(key, len(self.table))
        if found == len(self.table):
            self.table.append(atom)
        return found

    def _compound(self, op: str, *args: Polynomial, key: Hashable = None) -> Polynomial:
        """Make the atom of an operation on polynomials."""
        atom = Atom(op, None, args, any(self.is_mutable(a) for a in args))
        return Polynomial({(self._intern((op, key, *(a.key for a in args)), atom),): 1})

    def _opaque(self, expr: Expr) -> Polynomial:
        """Make the atom of an expression that is not analysed."""
        mutable = contains(expr, Load) or any(call.options for call in find(expr, Call))
        return Polynomial({(self._intern(structure(expr), Atom("opaque", expr, mutable=mutable)),): 1})

    def _convert(self, expr: Expr) -> Polynomial:
        """Convert an expression to a polynomial; an expression that is not taken apart becomes an opaque atom."""
        if isinstance(expr, Const) and not expr.dtype.is_float:
            return number(int(expr.value))
        if isinstance(expr, Var):
            return Polynomial({(self.variable(expr),): 1})
        if isinstance(expr, Cast) and widens(expr.a.dtype, expr.type):
            return self.of(expr.a)
        found = None
        if expr.dtype in EXACT:
            if isinstance(expr, Unary) and expr.op == "-":
                found = self.of(expr.a).scaled(-1)
            elif isinstance(expr, Select):
                a, b = self.of(expr.a), self.of(expr.b)
                found = self._compound("select", a, b, key=structure(expr.condition))
            elif isinstance(expr, Binary):
                found = self._binary(expr.op, self.of(expr.a), self.of(expr.b))
        return self._opaque(expr) if found is None else found

    def _binary(self, op: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
        """Build the polynomial of an operation on two polynomials."""
        if op == "+":
            return a + b
        if op == "-":
            return a - b
        if op == "*" and len(a.terms) * len(b.terms) <= MAX_TERMS:
            return a * b
        if op in ("min", "max"):
            return a if a.key == b.key else self._compound(op, *sorted((a, b), key=lambda p: repr(p.terms)))
        if op in ("//", "%") and self._is_positive(b):
            return self.divide(a, b) if op == "//" else a - b * self.divide(a, b)
        if op in ("<<", ">>", "&") and b.is_constant:
            c = b.constant
            if op == "&" and c >= 0 and c & (c + 1) == 0:
                return a - self.divide(a, number(c + 1)).scaled(c + 1)
            if op != "&" and 0 <= c < 63:
                return a.scaled(1 << c) if op == "<<" else self.divide(a, number(1 << c))
        return None

    def _is_positive(self, p: Polynomial) -> bool:
        """Return whether `p` is a positive number times dimensions, since dimensions in a divisor are not 0."""
        return len(p.terms) == 1 and all(
            c > 0 and all(self._is_dim(n) for n in m) for m, c in p.terms.items()
        )  # fmt: skip

    def _is_dim(self, atom: int) -> bool:
        """Return whether an atom is a run-time size."""
        expr = self.table[atom].expr
        return isinstance(expr, Var) and expr.role == "dim"


def widens(source: dt.DType, to: dt.DType) -> bool:
    """Return whether the integer type `to` has every value of the integer or bool type `source`."""
    if not to.is_integer or source.is_float:
        return False
    if source.kind == "bool" or source == to:
        return True
    if source.kind == to.kind:
        return source.bits <= to.bits
    return source.kind == "uint" and source.bits < to.bits
