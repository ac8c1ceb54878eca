# SPDX-License-Identifier: Apache-2.0
"""Numbers for variables that keep to all that is known and make a polynomial negative: then no proof need be tried.

Most questions whether an inequality holds have the answer no, and a proof ends there only after all ways are tried. One
try of numbers costs less than a proof: each atom takes the end of its range at which the polynomial is least, given
those chosen before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch_tile.ir.expr import Expr, Var
from torch_tile.ir.interval import Interval
from torch_tile.ir.polynomial import Atom, Atoms, Polynomial

FAR = 1 << 20  # instead of no limit
Bounds = Mapping[int, tuple[tuple[int, Polynomial], ...]]


class Counterexample:
    """One choice of numbers. `lower` and `upper` are as in `Ranges`, `interval` says where an expression lies."""

    def __init__(self, atoms: Atoms, lower: Bounds, upper: Bounds, interval: Callable[[Expr], Interval]):
        self.table, self.lower, self.upper, self.interval = atoms.table, lower, upper, interval
        self.values: dict[int, int] = {}
        self.open: set[int] = set()

    def refutes(self, p: Polynomial) -> bool:
        """Whether `p` is negative for these numbers, so that `p >= 0` does not follow from what is known."""
        try:
            return self._of(p, False) < 0
        except _Unknown:
            return False

    def _of(self, p: Polynomial, high: bool) -> int:
        """The value of a polynomial, which shall be large or small."""
        total = 0
        for monomial, factor in p.terms.items():
            for atom in monomial:
                factor *= self._atom(atom, high == (factor > 0))
            total += factor
        return total

    def _atom(self, atom: int, high: bool) -> int:
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
        low = max([low, *(-(-self._of(p, False) // k) for k, p in self.lower.get(atom, ()))])
        top = min([top, *(self._of(p, True) // k for k, p in self.upper.get(atom, ()))])
        value = self._chosen(described, low, top, high) if described.expr is not None else self._made(described, high)
        if not low <= value <= top:
            raise _Unknown
        self.values[atom] = value
        return value

    def _chosen(self, described: Atom, low: float, top: float, high: bool) -> int:
        """One end of a range. Dimensions are at least 1, as something may be divided by them."""
        if isinstance(described.expr, Var) and described.expr.role == "dim":
            low = max(low, 1)
        if high:
            return int(top if math.isfinite(top) and (top < FAR or low > FAR) else max(low, FAR))
        return int(low if math.isfinite(low) and (low > -FAR or top < -FAR) else min(top, -FAR))

    def _made(self, described: Atom, high: bool) -> int:
        """The value of a compound atom."""
        if described.op == "//":
            x, d = (self._of(p, high) for p in described.args)
            if d > 0:
                return x // d
        elif described.op in ("min", "max"):
            pick = min if described.op == "min" else max
            return pick(self._of(p, high) for p in described.args)
        raise _Unknown


class _Unknown(Exception):
    """No numbers were found that keep to what is known."""
