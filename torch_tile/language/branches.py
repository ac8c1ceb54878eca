# SPDX-License-Identifier: Apache-2.0
"""Names that are bound in the branches of a device `if`: what they stand for in the other branch, and after it.

Python runs both branches, one after the other. So that each branch sees what held before the `if`, names are put back
between them. After it, a name that the branches leave different becomes a variable, which each branch sets at its end;
where that cannot be (one branch leaves the name unbound, or binds it to no number) the name is unbound, and reading it
is an `out_of_scope` of its author's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Load, is_number, pair
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Break, Continue, Store
from torch_tile.language.trace import Scope, Tracer

UNBOUND = object()


class Branches:
    """One device `if` and the names bound in it: `live` says which may be read after it, `before` and `homes` what they
    are bound to and in which scopes."""

    def __init__(
        self, tracer: Tracer, condition: Expr, names: Sequence[str], live: Sequence[bool], before: Sequence[Any],
        homes: Mapping[str, Scope | None],
    ):  # fmt: skip
        self.tracer, self.condition = tracer, condition
        self.names, self.live, self.before, self.homes = names, live, before, homes
        self.scopes: list[Scope] = []  # of the branches
        self.ends: list[list[Any]] = []  # by branch and name; UNBOUND also for what can no longer be read
        self.left: Sequence[Any] = ()  # by the first branch
        self.variables: list[Buffer] = []

    def end(self, values: Sequence[Any]) -> list[Any]:
        """At the end of a branch, where the names are bound to `values`: what they are bound to from there on."""
        self.ends.append([value if self._is_alive(value) else UNBOUND for value in values])
        if len(self.ends) == 1:
            self.left = values
            return [self._again(b, value) for b, value in zip(self.before, values, strict=True)]
        return [self._joined(position, value) for position, value in enumerate(values)]

    @property
    def is_over(self) -> bool:
        """Whether both branches have ended."""
        return len(self.ends) == 2

    def declare(self) -> None:
        """Record the variables, which live where the `if` stands."""
        for buffer in self.variables:
            self.tracer.emit(Alloc(buffer))
            self.tracer.own(buffer)

    def _is_alive(self, value: Any) -> bool:
        return not isinstance(value, Expr) or not any(n.is_symbol and self.tracer.has_ended(n) for n in walk(value))

    @staticmethod
    def _again(before: Any, value: Any) -> Any:
        """For the second branch. What the first has made on the device cannot be read there anyway."""
        return value if before is UNBOUND and isinstance(value, Expr) else before

    def _joined(self, position: int, value: Any) -> Any:
        name, ends = self.names[position], [(s, e[position]) for s, e in zip(self.scopes, self.ends, strict=True)]
        if not self.live[position]:
            return self.left[position] if value is UNBOUND else value
        if value is self.left[position]:
            return value
        ends = [(scope, end) for scope, end in ends if not _is_left(scope)] or ends
        first, last = ends[0][1], ends[-1][1]
        if is_same(first, last) and (len(ends) == 2 or not isinstance(first, Expr) or first is self.before[position]):
            return first
        if not (is_scalar(first) and is_scalar(last)):
            self.tracer.lost[name] = "if"
            return UNBOUND
        made = pair(first, last, f"`{name}`")
        variable = Buffer(name, (), made[0].dtype, "var")
        for (scope, _), end in zip(ends, made, strict=False):
            scope.stmts.append(Store(variable, (), end))
        self.variables.append(variable)
        return Load(variable, ())


def is_scalar(value: Any) -> bool:
    """A number, or an expression of one."""
    return isinstance(value, Expr) or is_number(value)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are one, or equal numbers, strings or tuples of such."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(is_same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b))


def _is_left(scope: Scope) -> bool:
    """Whether a branch ends by leaving the loop around, so that nothing after the `if` follows it."""
    return bool(scope.stmts) and isinstance(scope.stmts[-1], Break | Continue)
