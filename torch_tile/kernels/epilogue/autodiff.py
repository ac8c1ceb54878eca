# SPDX-License-Identifier: Apache-2.0
"""Derivatives of epilogues, in the language of epilogues: reverse mode over the statements of a program.

Every function acts on single elements, so the derivative in an input is one number for each element, its *slope*. Where
no slope reads it, a value is not computed; what several read is computed once, with the program's own result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_tile.kernels.epilogue.functions import FUNCTIONS
from torch_tile.kernels.epilogue.program import Epilogue, Operand, Statement, Values, parse

if TYPE_CHECKING:
    import torch

_TRUTHS = frozenset(name for name, row in FUNCTIONS.items() if row.truth)
_BOUNDED = frozenset(name for name, row in FUNCTIONS.items() if row.bounded)
_UNBOUNDED = frozenset(name for name, row in FUNCTIONS.items() if row.singular)


@dataclass(frozen=True)
class Sloped:
    """A program together with the derivatives (slopes) of its result in its inputs; absent ones are 0."""

    program: Epilogue
    slopes: Mapping[str, Operand]

    def only(self, result: str, *inputs: str) -> Sloped:
        """Keep only the slopes of these inputs, `result`, and the statements that they need."""
        slopes = {name: self.slopes[name] for name in inputs if name in self.slopes}
        needed = {result, *slopes.values()}
        statements: list[Statement] = []
        for statement in reversed(self.program.statements):
            if statement.name in needed:
                statements.append(statement)
                needed.update(statement.operands)
        return Sloped(Epilogue(tuple(reversed(statements)), result), slopes)

    def may_be_infinite(self, slope: Operand) -> bool:
        """Return whether a slope may be NaN or infinite somewhere when products and indices are finite."""
        read = {slope}
        for statement in reversed(self.program.statements):
            if statement.name in read and statement.function not in _BOUNDED:
                divides = statement.function == "div" and not isinstance(statement.operands[1], float)
                if divides or statement.function in _UNBOUNDED:
                    return True
                read.update(statement.operands)
        return any(f"x{n}" in read for n in self.program.inputs("x"))


@functools.lru_cache(maxsize=1024)
def slopes(text: str, hides: bool = False) -> Sloped:
    """Differentiate an epilogue's result in all its inputs.

    With `hides`, a result of -inf stands for one that nobody sees, of which the slope is any finite number.

    Raises:
        ValueError: as `epilogue.parse`.
    """
    epilogue = parse(text)
    tape = _Tape(epilogue)
    grads: dict[str, _Value] = {epilogue.result: _Value(tape, 1.0)}
    seen = epilogue.result
    for statement in reversed(epilogue.statements):
        upstream = grads.pop(statement.name, None)
        if upstream is None:
            continue
        kept = _visible(statement) if hides and statement.name == seen else None
        if kept is not None:  # the other one is -inf
            seen, derivatives = kept, (None, *(_same if o == kept else None for o in statement.operands[1:]))
        else:
            derivatives = FUNCTIONS[statement.function].gradient
        values = [tape.value(o) for o in (*statement.operands, statement.name)]
        for operand, derivative in zip(statement.operands, derivatives, strict=False):
            if isinstance(operand, str) and derivative is not None:
                term = derivative(upstream, *values)
                grads[operand] = grads[operand] + term if operand in grads else term
    found = {name: value.operand() for name, value in grads.items()}
    return Sloped(Epilogue(tuple(tape.statements), epilogue.result), found)


def vjp(
    text: str, inputs: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Compute gradients of the inputs that the result depends on. Each gradient broadcasts to `grad`'s shape.

    `inputs` is as for `Values`: an input given as a function is made only if some derivative reads it. The bias of a
    linear layer needs no recomputed product. The arithmetic is plain torch, so it can be differentiated again.
    """
    found = slopes(text)
    value = Values(found.program, inputs, grad)
    return {name: grad if slope == 1.0 else grad * value(slope) for name, slope in found.slopes.items()}


def _visible(statement: Statement) -> str | None:
    """Return the operand `a` of `where(c, a, -inf)`, or None for other statements."""
    if statement.function == "where" and -math.inf in statement.operands[1:]:
        _, a, b = statement.operands
        return next((x for x in (a, b) if isinstance(x, str)), None)
    return None


class _Tape:
    """Statements of a program and of its derivatives. Equal statements are recorded once."""

    def __init__(self, epilogue: Epilogue) -> None:
        self.statements = list(epilogue.statements)
        self._names = {(s.function, s.operands): s.name for s in self.statements}
        self._functions = {s.name: s.function for s in self.statements}

    def value(self, operand: Operand) -> _Value:
        """Wrap an operand as a value of the tape."""
        return _Value(self, operand) if isinstance(operand, float) else _Value(self, 1.0, operand)

    def is_truth(self, name: str | None) -> bool:
        """Return whether a value is always 0 or 1."""
        return name is not None and self._functions.get(name) in _TRUTHS

    def call(self, function: str, *operands: Operand) -> _Value:
        """Record a function call, with no trivial operand, and return its value."""
        if function in ("add", "mul") and (function, operands[::-1]) in self._names:
            operands = operands[::-1]
        if (function, operands) not in self._names:
            name = f"d{len(self.statements)}"
            while name in self._functions:
                name += "_"
            self.statements.append(Statement(name, function, operands))
            self._names[function, operands] = name
            self._functions[name] = function
        return _Value(self, 1.0, self._names[function, operands])


@dataclass(frozen=True)
class _Value:
    """A derivative as `number * name`, or only the number. So constants along a chain of derivatives meet, and many are
    1.

    With a `mask`, the name of a truth value, the derivative is 0 where the mask is 0. The choice comes after all
    products. 0 times an infinite derivative of the branch that is not taken would be NaN.
    """

    tape: _Tape
    number: float
    name: str | None = None
    mask: str | None = None

    def operand(self) -> Operand:
        """Return the value as an operand, and record the statements that it needs."""
        if self.mask is not None:
            return self.settled().operand()
        if self.name is None or self.number == 1.0:
            return self.number if self.name is None else self.name
        if self.number == -1.0:
            return self.tape.call("neg", self.name).operand()
        return self.tape.call("mul", self.name, self.number).operand()

    def bare(self) -> _Value:
        """Return the value without its mask."""
        return replace(self, mask=None)

    def settled(self) -> _Value:
        """Return the value with its mask applied."""
        if self.mask is None:
            return self
        if self.name is None:
            return _Value(self.tape, self.number, self.mask)
        return self.tape.call("where", self.mask, self.name, 0.0) * self.number

    def call(self, function: str, *others: float) -> _Value:
        """Record a call of a table function on this value."""
        return self.tape.call(function, self.operand(), *others)

    def __neg__(self) -> _Value:
        return replace(self, number=-self.number)

    def __mul__(self, other: _Value | float) -> _Value:
        """Multiply two values; the mask stays outside the product."""
        if isinstance(other, float):
            return replace(self, number=self.number * other)
        if self.mask is not None:
            inner = other if self.mask != other.mask else other.bare()
            return replace(self.bare() * inner.settled(), mask=self.mask)
        if other.mask is not None:
            return other * self
        if self.name is None or other.name is None:
            return _Value(self.tape, self.number * other.number, self.name or other.name)
        function, names = ("square", (self.name,)) if self.name == other.name else ("mul", (self.name, other.name))
        return self.tape.call(function, *names) * (self.number * other.number)

    def __truediv__(self, other: _Value) -> _Value:
        """Divide two values; the mask of the dividend stays outside the quotient."""
        other = other.settled()
        if self.mask is not None:
            return replace(self.bare() / other, mask=self.mask)
        if other.name is None:
            return _Value(self.tape, self.number * (1 / other.number if other.number else math.inf), self.name)
        if other.number != 1.0:
            return self / _Value(self.tape, other.number) / _Value(self.tape, 1.0, other.name)
        return self.tape.call("div", self.operand(), other.name)

    def __add__(self, other: _Value | float) -> _Value:
        """Add two values; keep the mask if both have the same."""
        other = _Value(self.tape, other) if isinstance(other, float) else other
        if self.mask is not None or other.mask is not None:
            if self.mask == other.mask:
                return replace(self.bare() + other.bare(), mask=self.mask)
            return self.settled() + other.settled()
        if self.name == other.name:
            return _Value(self.tape, self.number + other.number, self.name)
        if 0.0 in (self.number, other.number):
            return other if self.number == 0.0 else self
        if other.number < 0:
            return self.tape.call("sub", self.operand(), (-other).operand())
        if self.number < 0:
            return self.tape.call("sub", other.operand(), (-self).operand())
        return self.tape.call("add", self.operand(), other.operand())

    def chosen(self, truth: _Value) -> _Value:
        """Return the value where `truth` (0 or 1) is 1, and 0 elsewhere, even for infinite values."""
        assert truth.name is not None
        return replace(self.settled() if self.mask not in (None, truth.name) else self, mask=truth.name)

    def is_true(self) -> _Value:
        """Return 1 where the value is not 0, else 0."""
        return self if self.tape.is_truth(self.name) else self.call("ne", 0.0)

    def is_false(self) -> _Value:
        """Return 1 where the value is 0, else 0."""
        return self.call("eq", 0.0)


def _same(g: _Value, *_: _Value) -> _Value:
    """Return the gradient unchanged."""
    return g
