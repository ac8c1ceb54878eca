# SPDX-License-Identifier: Apache-2.0
"""How accesses of one iteration look from the next one, or from after the loop.

Loops are walked many times, and each turn moves accesses that are alike but not the same object. So answers are
remembered by what expressions say, not by what they are: one index is substituted and simplified once for a loop, and
alike accesses become one, which `Hazards` and `State` then know by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch_tile.ir.expr import Expr
from torch_tile.ir.node import symbols
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import For, While
from torch_tile.ir.substitute import Substitute
from torch_tile.lowering.sync.accesses import Access

ITERATIONS = 6  # after so many, an access may be of any earlier iteration

Shift = Callable[[Access], Access]


class Shifts:
    """The shifts of one kernel's loops. `forgotten` gives stand-ins for the variables of a loop of which nothing is
    known."""

    def __init__(self, forgotten: Callable[[For | While], Mapping[int, Expr]], simplify: Callable[[Expr], Expr]):
        self.forgotten, self.simplify = forgotten, simplify
        self.known: dict[tuple[int, bool], Shift] = {}
        self.alike: dict[Hashable, Access] = {}

    def of(self, loop: For | While, leave: bool) -> Shift:
        """To the next iteration, or with `leave` to what comes after the loop."""
        if (id(loop), leave) not in self.known:
            self.known[id(loop), leave] = self._made(loop, leave)
        return self.known[id(loop), leave]

    def _made(self, loop: For | While, leave: bool) -> Shift:
        forget = _Mover(self.forgotten(loop), self.simplify)
        step = forget
        if isinstance(loop, For) and not leave:
            step = _Mover({**forget.values, id(loop.vars[0]): loop.vars[0] - loop.step}, self.simplify)
        seen: dict[int, tuple[Access, Access]] = {}

        def shift(access: Access) -> Access:
            found = seen.get(id(access))
            if found is None:  # the access is kept, so that its id stays its own
                found = seen[id(access)] = access, self._shifted(access, step, forget)
            return found[1]

        return shift

    def _shifted(self, access: Access, step: _Mover, forget: _Mover) -> Access:
        """With the variables of the loop moved by `step`; after ITERATIONS, and after the loop, by `forget`."""
        if access.symbols.isdisjoint(step.values):
            return access
        move = step if access.age < ITERATIONS else forget
        turning = tuple(id(v) for loop in access.loops for v in loop.vars)  # in a loop inside, which has all its turns
        indices = tuple(move.index(i, turning) for i in access.indices)
        conditions = tuple(move.condition(c, turning) for c in access.conditions)
        new = replace(access, indices=indices, conditions=conditions, age=0 if step is forget else access.age + 1)
        says = new.key, structure(conditions), new.age, new.asynchronous, new.count, new.atomic, new.collective
        return self.alike.setdefault(says, new)


class _Mover:
    """Replaces variables by `values`, but for those `turning`; remembers expressions by what they say."""

    def __init__(self, values: Mapping[int, Expr], simplify: Callable[[Expr], Expr]):
        self.values, self.simplify = values, simplify
        self.swaps: dict[tuple[int, ...], _Swap] = {}
        self.indices: dict[Hashable, tuple[Expr, Expr]] = {}
        self.conditions: dict[Hashable, tuple[Expr, Expr]] = {}

    def index(self, e: Expr, turning: tuple[int, ...]) -> Expr:
        """An index, simplified."""
        key = structure(e), turning
        if key not in self.indices:  # the expression is kept, as its key is of symbols by identity
            self.indices[key] = e, self.simplify(self._swap(turning)(e))
        return self.indices[key][1]

    def condition(self, e: Expr, turning: tuple[int, ...]) -> Expr:
        """A condition; the same object if it uses none of the variables."""
        if self.values.keys().isdisjoint(symbols(e)):
            return e
        key = structure(e), turning
        if key not in self.conditions:
            self.conditions[key] = e, self._swap(turning)(e)
        return self.conditions[key][1]

    def _swap(self, turning: tuple[int, ...]) -> _Swap:
        if turning not in self.swaps:
            self.swaps[turning] = _Swap({i: v for i, v in self.values.items() if i not in turning})
        return self.swaps[turning]


class _Swap(Substitute):
    """A substitution that walks once over what expressions share: names stand for the same objects in all of them."""

    def __init__(self, known: Mapping[int, Expr]):
        super().__init__(known)
        self.done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, node: Any) -> Any:
        """What becomes of it."""
        found = self.done.get(id(node))
        if found is None:  # the node is kept, so that its id stays its own
            found = self.done[id(node)] = node, super().__call__(node)
        return found[1]
