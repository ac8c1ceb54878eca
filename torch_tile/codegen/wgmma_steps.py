# SPDX-License-Identifier: Apache-2.0
"""Which loops along K are one product of a warpgroup: their instructions become one `asm` of the generated C++.

To the C++ compiler each `asm` reads and writes every accumulator, so that it takes longer the more there are of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_tile.codegen.unrolling import turns_of
from torch_tile.intrinsics.wgmma import Descriptor, a_registers, product_name, walks_of
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.expr import Address, Call, Const, Expr, Var, const
from torch_tile.ir.node import rebuilt, symbols
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Do, For
from torch_tile.ir.substitute import Substitute
from torch_tile.ir.terms import terms_of


@dataclass(frozen=True)
class Steps:
    """Where steps along K begin in an operand: step i `i % run * near + i // run * far` bytes after the first one."""

    near: int = 0
    run: int = 1
    far: int = 0

    @staticmethod
    def of(starts: Sequence[int]) -> Steps | None:
        """The steps that begin at `starts`, two or more of which the first is 0; None if they are no such steps."""
        run = next((i for i, start in enumerate(starts) if start != i * starts[1]), len(starts))
        steps = Steps(starts[1], run, starts[run] if run < len(starts) else 0)
        return steps if all(start == steps.start(i) for i, start in enumerate(starts)) else None

    def start(self, i: int) -> int:
        """Of step i."""
        return i % self.run * self.near + i // self.run * self.far


@dataclass(frozen=True)
class Product:
    """`count` instructions along K, of which `call` is the first, and the steps of A and B in shared memory."""

    call: Call
    count: int = 1
    steps: tuple[Steps, Steps] = (Steps(), Steps())

    @property
    def name(self) -> str:
        """Its function."""
        return product_name(self.call) + (f"_x{self.count}" if self.count > 1 else "")

    @property
    def spelling(self) -> str:
        """Its function, with its walks."""
        operands = zip(walks_of(self.call), self.steps, strict=True)
        return f"{self.name}<{', '.join(self._walk(walk, steps) for walk, steps in operands if walk is not None)}>"

    def _walk(self, walk: Descriptor, steps: Steps) -> str:
        numbers = [walk.swizzle, walk.leading, walk.stride, str(walk.across).lower()]
        if self.count > 1:
            numbers += [steps.near, steps.run, steps.far]
        return f"tile::Walk<{', '.join(map(str, numbers))}>"


def joined(loop: For) -> Product | None:
    """The product whose steps along K are the iterations of a loop; None if the loop is something else."""
    count, stmts = turns_of(loop), loop.body.stmts
    call = stmts[0].call if len(stmts) == 1 and isinstance(stmts[0], Do) else None
    if not isinstance(call, Call) or call.name != "wgmma" or count is None or count < 2 or loop.step != 1:
        return None
    k, start, (d, a, b, a_step, b_step, keep) = loop.vars[0], loop.starts[0], call.args
    assert isinstance(a, Address)
    each = a_registers(call) if walks_of(call)[0] is None else 0
    starts = [_starts(x, k, count) for x in (a_step, b_step)]
    steps = [Steps.of(found) for found in starts if found is not None]
    if len(steps) < 2 or steps[0] is None or steps[1] is None or id(k) in symbols(d) | symbols(b):
        return None
    if _starts(a.indices[0], k, count) != [i * each for i in range(count)]:
        return None
    keeps = (is_literal(_at(i, k, keep), True) for i in range(1, count))
    if not (isinstance(start, Const) and start.value == 0 and all(keeps)):
        return None
    first = rebuilt(a, indices=tuple(_at(0, k, i) for i in a.indices))
    args = d, first, b, *(_at(0, k, x) for x in (a_step, b_step, keep))
    return Product(rebuilt(call, args=args), count, (steps[0], steps[1]))


def _at(turn: int, k: Var, expr: Expr) -> Expr:
    """An operand in one iteration."""
    found: Expr = Substitute({id(k): const(turn, k.type)})(expr)
    return expr if found is expr else simplify(found)


def _starts(expr: Expr, k: Var, count: int) -> list[int] | None:
    """By how much the value is above the first one in each iteration; None if that is not known here."""
    terms = [term for term in terms_of("+", expr) if id(k) in symbols(term)]
    try:
        values = [sum(int(evaluate(term, {k: i})) for term in terms) for i in range(count)]
    except (KeyError, ValueError):
        return None
    return [value - values[0] for value in values]
