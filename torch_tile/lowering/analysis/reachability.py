# SPDX-License-Identifier: Apache-2.0
"""Find index values that a kernel certainly reaches, by trying numbers in the loops, names and branches around.

The search claims nothing if a value depends on memory, a run-time size or an intrinsic. Nor does it behind a statement
that leaves a loop. If a loop or grid ends at a run-time size, it tries the first iteration only. The size is taken to
allow one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Call, Expr, Load, Scalar, Var, to_expr
from torch_tile.ir.node import Node, children, contents, find, symbols
from torch_tile.ir.stmt import Assert, Break, Continue, For, Kernel, Stmt, While

BUDGET = 512  # numbers given to variables in one search
SIZE = Var("size", role="dim")  # stands for every size known only at run time
Roots = frozenset[Var]
NONE: Roots = frozenset()


@dataclass(frozen=True, eq=False)
class Turns:
    """The iterations of `var`: from `start` while below `stop`; with `stop` None, only `start`."""

    var: Var
    start: Expr
    stop: Expr | None
    step: int


@dataclass(frozen=True, eq=False)
class Named:
    """A name and its value."""

    var: Var
    value: Expr


@dataclass(frozen=True, eq=False)
class Passed:
    """A condition that holds, or does not hold."""

    condition: Expr
    holds: bool


Step = Turns | Named | Passed


@dataclass(frozen=True, eq=False)
class Path:
    """The loops, names and conditions on which reaching a place depends, outermost first; never changed.

    `steps` is None if the place depends on something unknown. `roots` maps each variable to the loop, block and thread
    variables that decide its value.
    """

    steps: tuple[Step, ...] | None = ()
    roots: Mapping[Var, Roots] = field(default_factory=dict)

    def kernel(self, kernel: Kernel) -> Path:
        """Return the path inside a kernel."""
        new = self
        for var, extent in zip(kernel.blocks, kernel.grid, strict=True):
            new = new.iterations(var, 0, extent)
        return new if kernel.thread is None else new.iterations(kernel.thread, 0, math.prod(kernel.threads))

    def loop(self, loop: For) -> Path:
        """Return the path inside a loop."""
        if _may_skip_later(loop.body, True):
            return LOST
        new = self
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            new = new.iterations(var, start, stop, loop.step)
        return new

    def iterations(self, var: Var, start: Expr | int, stop: Expr | int, step: int = 1) -> Path:
        """Return the path on which a variable takes each value of a range."""
        first, last = to_expr(start), to_expr(stop)
        low, high = self._roots(first), self._roots(last)
        if self.steps is None or low is None or high is None:
            return LOST
        if SIZE in low | high and (low or high != {SIZE}):
            return LOST
        taken = Turns(var, first, None if SIZE in high else last, step)
        return Path((*self.steps, taken), {**self.roots, var: frozenset((var,))})

    def assume(self, condition: Expr, holds: bool = True) -> Path:
        """Return the path where a condition holds, or does not hold."""
        roots = self._roots(condition)
        if self.steps is None or roots is None or SIZE in roots:
            return LOST
        return replace(self, steps=(*self.steps, Passed(condition, holds)))

    def after(self, one: Stmt) -> Path:
        """Return the path behind a statement of the same block."""
        if self.steps is None:
            return self
        if isinstance(one, Assert):
            return self.assume(one.condition)
        return LOST if _may_skip_later(one, False) else self

    def define(self, var: Var, value: Expr) -> Path:
        """Return the path behind `var = value`."""
        roots = self._roots(value)
        if self.steps is None or roots is None:
            return self
        steps = self.steps if SIZE in roots else (*self.steps, Named(var, value))
        return Path(steps, {**self.roots, var: roots})

    def where(self, fails: Expr, shown: Sequence[Expr], ranges: Ranges) -> tuple[list[int], dict[str, int]] | None:
        """Find numbers, of `shown` and what decides them, with which this place is reached and `fails`; else None."""
        roots = [self._roots(e) for e in (fails, *shown)]
        if self.steps is None or any(r is None or SIZE in r for r in roots):
            return None
        found = _Search(self.steps, (fails, *shown), ranges).run()
        if found is None:
            return None
        behind = NONE.union(*(r for r in roots if r is not None))
        made = {s.var.name: int(found[s.var]) for s in self.steps if isinstance(s, Turns) and s.var in behind}
        return [int(evaluate(e, found)) for e in shown], made

    def _roots(self, expr: Expr) -> Roots | None:
        """Return the variables that decide a value; None if anything else decides it, too."""
        if contents(expr) & (Load.bit | Call.bit) and any(
            not (isinstance(n, Call) and n.name == "abs") for n in find(expr, Load, Call)
        ):
            return None
        found = NONE
        for var in find(expr, Var):
            roots = frozenset((SIZE,)) if var.role in ("dim", "param") else self.roots.get(var)
            if roots is None:
                return None
            found |= roots
        return found


LOST = Path(None)


class _Search:
    """Try numbers for the variables of a path, the outermost first, until a condition holds with them."""

    def __init__(self, steps: Sequence[Step], asked: Sequence[Expr], ranges: Ranges):
        self.fails, self.ranges, self.left = asked[0], ranges, BUDGET
        needed = set(NONE.union(*map(symbols, asked)))
        kept: list[Step] = []
        for step in reversed(steps):
            if isinstance(step, Named) and step.var not in needed:
                continue
            kept.append(step)
            for e in _expressions(step):
                needed |= symbols(e)
        self.steps = kept[::-1]
        self.idle = {s.var for s in self.steps if isinstance(s, Turns) and s.var not in needed}
        self.whole = self._whole()

    def _whole(self) -> set[Var]:
        """Return the variables whose every value is tried: those with the fewest values, within the budget."""
        widths = []
        for step in self.steps:
            if isinstance(step, Turns) and step.stop is not None and step.var not in self.idle:
                known = self.ranges.interval(step.var)
                widths.append((known.high - known.low + 1, step.var))
        found, total = set[Var](), 1.0
        for n, (width, var) in enumerate(sorted(widths, key=operator.itemgetter(0))):
            total *= max(width, 1)
            if total * 4 ** (len(widths) - n - 1) > BUDGET:
                break
            found.add(var)
        return found

    def run(self) -> dict[Var, Scalar] | None:
        """Find values of all variables with which the path is taken; None if the budget ends before."""
        return self._from(0, {})

    def _from(self, n: int, values: dict[Var, Scalar]) -> dict[Var, Scalar] | None:
        """Continue the search from step `n`, with the values of the steps before it."""
        try:
            while n < len(self.steps) and not isinstance(step := self.steps[n], Turns):
                if isinstance(step, Named):
                    values = {**values, step.var: evaluate(step.value, values)}
                elif bool(evaluate(step.condition, values)) is not step.holds:
                    return None
                n += 1
            if n == len(self.steps):
                return values if evaluate(self.fails, values) else None
            step = self.steps[n]
            assert isinstance(step, Turns)
            start = int(evaluate(step.start, values))
            stop = start + 1 if step.stop is None else int(evaluate(step.stop, values))
        except (KeyError, ValueError, ArithmeticError):  # an expression has no value
            return None
        for number in self._numbers(step, start, stop):
            self.left -= 1
            if self.left < 0:
                return None
            found = self._from(n + 1, {**values, step.var: number})
            if found is not None:
                return found
        return None

    def _numbers(self, step: Turns, start: int, stop: int) -> Iterator[int]:
        """Yield values of a variable to try: all, or the ends of its range in the loop and conditions around."""
        iterations = range(start, stop, step.step)
        if not iterations or step.var in self.idle:
            yield from iterations[:1]
        elif step.var in self.whole:
            yield from iterations
        else:
            known = self.ranges.interval(step.var)
            low, high = max(known.low, iterations[0]), min(known.high, iterations[-1])
            ends = [iterations[-1], iterations[0]]
            if low <= high:
                ends += [iterations[(int(high) - start) // step.step], iterations[-(-(int(low) - start) // step.step)]]
            yield from dict.fromkeys(ends)


def _expressions(step: Step) -> tuple[Expr, ...]:
    """Return the expressions of a step of a path."""
    if isinstance(step, Turns):
        return (step.start,) if step.stop is None else (step.start, step.stop)
    return (step.value if isinstance(step, Named) else step.condition,)


def _may_skip_later(one: Node, iterations: bool) -> bool:
    """Return whether a statement may keep later ones of its block, or `iterations` of the loop, from running."""
    if not contents(one) & (Assert.bit | Break.bit | Continue.bit | While.bit):
        return False
    if isinstance(one, Assert | Break | While):
        return True
    if isinstance(one, Continue):
        return not iterations
    if isinstance(one, For):
        return any(True for _ in find(one, Assert, While))
    return any(_may_skip_later(child, iterations) for child in children(one))
