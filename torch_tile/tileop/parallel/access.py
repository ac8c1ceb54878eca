# SPDX-License-Identifier: Apache-2.0
"""Decide which elements the iterations of a nest touch: whether two accesses ever meet, and in which iterations.

Indices are polynomials (ir/polynomial) over the loop variables, quotients of them, and what all iterations see alike.
What is not shown is taken to meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from torch_tile.ir.expr import Const, Expr, Load, Var
from torch_tile.ir.node import find, symbols
from torch_tile.ir.polynomial import Atoms, Polynomial
from torch_tile.ir.scope_facts import values_for_names
from torch_tile.ir.stmt import Alloc, For, Store

Range = tuple[int, int]  # from and to, both included


class Places:
    """The indices of a nest's accesses as polynomials. Loop variables are known by the numbers of their atoms."""

    def __init__(self, loop: For):
        self.atoms: Atoms = Atoms()
        self.ranges: dict[int, Range | None] = {}
        for one in (loop, *find(loop.body, For)):
            for var, start, stop in zip(one.vars, one.starts, one.stops, strict=True):
                known = isinstance(start, Const) and isinstance(stop, Const)
                last = (int(start.value), int(stop.value) - 1) if known else None  # type: ignore[attr-defined]
                self.ranges[self.atoms.variable(var)] = last
        self.expand = values_for_names(loop.body)
        changed = {n.buffer for n in find(loop.body, Store, Alloc)}  # by the nest, or an iteration's own
        self.changed = frozenset(changed)
        self.bound: set[Var] = {v for one in (loop, *find(loop.body, For)) for v in one.vars}
        self.varying: dict[int, bool] = {}
        self.known: dict[Load | Store, list[Polynomial]] = {}

    def of(self, access: Load | Store) -> list[Polynomial]:
        """Return the access's indices as polynomials, and the index of its element in a row; remember them.

        The latter tells more of views, where a number was cut in parts, `x // 256` and `x * 2 % 512`.
        """
        if access not in self.known:
            indices = [self.atoms.of(self.expand(i)) for i in access.indices]
            shape = access.buffer.static_shape
            if shape is not None and len(indices) > 1:
                flat = Polynomial({})
                for index, size in zip(indices, shape, strict=True):
                    flat = flat.scaled(size) + index
                indices.append(flat)
            self.known[access] = indices
        return self.known[access]

    def disjoint(self, a: Load | Store, b: Load | Store) -> bool:
        """Return whether two accesses of a buffer never touch the same element, in any iterations."""
        return any(self._differ(p, q) for p, q in zip(self.of(a), self.of(b), strict=True))

    def meet_in_one_iteration(self, var: Var, a: Load | Store, b: Load | Store) -> bool:
        """Return whether two accesses of a buffer meet only in iterations that have the same value of a variable."""
        alike = [p for p, q in zip(self.of(a), self.of(b), strict=True) if p.key == q.key]
        return self.atoms.variable(var) in self._solved_atoms(alike)

    def _differ(self, p: Polynomial, q: Polynomial) -> bool:
        """Return whether `p` in one iteration never equals `q` in any iteration."""
        fixed, moving = (
            self._varying(p - q)[0],
            [self._varying(p)[1], self._varying(q)[1]],
        )
        # The sum of the terms is a multiple of their common factor.
        common = math.gcd(*(c for part in (fixed, *moving) for m, c in part.terms.items() if m))
        if common == 0 or fixed.constant % common:
            return fixed.constant != 0
        if not fixed.is_constant:
            return False
        first, second = map(self._range, moving)
        if first is None or second is None:
            return False
        return first[0] + fixed.constant > second[1] or first[1] + fixed.constant < second[0]

    def _varying(self, p: Polynomial) -> tuple[Polynomial, Polynomial]:
        """Split a polynomial into the terms that are equal in all iterations, and the rest."""
        moving = {m: c for m, c in p.terms.items() if any(map(self._varies, m))}
        return Polynomial({m: c for m, c in p.terms.items() if m not in moving}), Polynomial(moving)

    def _range(self, p: Polynomial) -> Range | None:
        """Return the range of a sum of loop variables; None if it is not known."""
        low = high = 0
        for m, c in p.terms.items():
            found = self.ranges.get(m[0]) if len(m) == 1 else None
            if found is None:
                return None
            ends = sorted((c * found[0], c * found[1]))
            low, high = low + ends[0], high + ends[1]
        return low, high

    def _varies(self, atom: int) -> bool:
        """Return whether an atom may have different values in different iterations."""
        if atom not in self.varying:
            found = self.atoms.table[atom]
            inside = found.op in ("//", "min", "max") and not any(map(self._varies, found.inner))
            self.varying[atom] = not (inside if found.expr is None else self._is_fixed(found.expr))
        return self.varying[atom]

    def _is_fixed(self, expr: Expr) -> bool:
        """Return whether an expression is the same in all iterations."""
        return self.bound.isdisjoint(symbols(expr)) and self.changed.isdisjoint(symbols(expr))

    def _solved_atoms(self, indices: Sequence[Polynomial]) -> set[int]:
        """Return the atoms whose values follow from these indices: known quotients help to solve for dividends."""
        told: set[int] = set()
        size = -1
        while size != len(told):
            size = len(told)
            for p in indices:
                told |= self._solved(p, told)
        return told

    def _solved(self, p: Polynomial, told: set[int]) -> set[int]:
        """Return the further atoms whose values follow from the value of `p` and the atoms in `told`."""
        factors: dict[int, int] = {}
        for m, c in p.terms.items():
            new = [a for a in m if a not in told and self._varies(a)]
            if not new:
                continue
            if len(new) > 1 or len(m) > 1 or self._reads_changed(new[0]):
                return set()
            factors[new[0]] = c
        if len(factors) == 1:
            return set(factors)
        # A number in mixed radix: each factor is larger than all that the smaller digits can add up to.
        reach: int | None = 0
        for factor, most in sorted(self._digits(factors), key=lambda digit: digit[0]):
            if reach is None or factor <= reach:
                return set()
            reach = None if most is None else reach + factor * most
        return set(factors)

    def _digits(self, factors: Mapping[int, int]) -> list[tuple[int, int | None]]:
        """Write a sum of multiples of atoms as one of digits: return each digit's factor, and its most if known.

        A loop variable is cut at its quotients: with `q = x // 8`, `x + 2040 * q` is `x % 8 + 2048 * q`.
        """
        parts = {atom: {1: factor} for atom, factor in factors.items()}
        for atom, factor in factors.items():
            if (found := self._quotient(atom)) is not None and found[0] in factors:
                del parts[atom]
                parts[found[0]][found[1]] = factor
        digits: list[tuple[int, int | None]] = []
        for atom, of in parts.items():
            within, sizes = self.ranges.get(atom), sorted(of)
            most = None if within is None else within[1] - within[0]
            for size, larger in itertools.zip_longest(sizes, sizes[1:]):
                if larger is not None and larger % size:
                    return [(0, None)]  # no digits of one number
                factor = sum(of[s] * (size // s) for s in sizes if s <= size)
                last = None if most is None else most // size
                digits.append((abs(factor), last if larger is None else larger // size - 1))
        return digits

    def _quotient(self, atom: int) -> tuple[int, int] | None:
        """Return `x` and `d` if an atom is `x // d` of a loop variable that counts from 0."""
        found = self.atoms.table[atom]
        if found.op != "//" or not found.args[1].is_constant or list(found.args[0].terms.values()) != [1]:
            return None
        (monomial,) = found.args[0].terms
        within = self.ranges.get(monomial[0]) if len(monomial) == 1 else None
        return None if within is None or within[0] != 0 else (monomial[0], found.args[1].constant)

    def _reads_changed(self, atom: int) -> bool:
        """Return whether two accesses may see different values of an atom in one iteration."""
        found = self.atoms.table[atom]
        if found.expr is None:
            return found.op == "select" or any(map(self._reads_changed, found.inner))
        return not self.changed.isdisjoint(symbols(found.expr))
