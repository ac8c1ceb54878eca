# SPDX-License-Identifier: Apache-2.0
"""Read the memory that addresses of copies depend on, such as a page table, one iteration before the copies.

A copy that runs ahead would wait for such a read at the start of each step. A variable holds the number instead: the
step before has read it, beside its own work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Call, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter, contains, equal
from torch_tile.ir.stmt import Alloc, Let, Stmt, Store
from torch_tile.lowering.pipelining.copy_plan import Branch, Path

MOST = 16  # variables of a loop, which are registers


class AddressPrefetch:
    """Variables that hold, one iteration ahead, the numbers in memory that the addresses of copies depend on.

    `paths` have the names that stand before each copy. A number is an expression of the loop's variable.
    """

    def __init__(self, paths: Sequence[Path]):
        self.values: IdMap[Var, Expr] = IdMap()  # names as expressions of the loop's variable
        self.held: list[tuple[Load, Buffer]] = []
        for path in paths:
            for item in path:
                if isinstance(item, Branch):  # what stands under a condition may not exist without it
                    break
                if item.var not in self.values:
                    self.values[item.var] = Substitute(self.values)(item.value)
                    _Outermost(self._record_load)(self.values[item.var])
        if len(self.held) > MOST:
            self.held = []

    def _record_load(self, load: Load) -> Load:
        """Record a load of an int32 number from global memory, which gets a variable."""
        plain = load.buffer.scope == "global" and load.dtype == int32 and not contains(load, Call)
        if plain and self.variable(load) is None:
            self.held.append((load, Buffer("early", (), int32, "var")))
        return load

    def variable(self, load: Load) -> Buffer | None:
        """Return the variable that holds a number, if one does."""
        return next((held for read, held in self.held if equal(read, load)), None)

    def allocs(self) -> list[Stmt]:
        """Allocate the variables."""
        return [Alloc(held, const(0, int32)) for _, held in self.held]

    def reads(self, iteration: Var, value: Expr) -> list[Stmt]:
        """Read the numbers of the iteration `value`."""
        there = Substitute({iteration: value})
        return [Store(held, (), there(read)) for read, held in self.held]

    def named(self, path: Path) -> Path:
        """Return a path whose names take what variables hold from there."""
        return tuple(self._with_held_values(path))

    def _with_held_values(self, path: Path) -> Iterator[Let | Branch]:
        """Yield the items of a path, with expressions replaced by the variables that hold their values."""
        take = _Outermost(self._held)
        for item in path:
            value = self.values.get(item.var) if isinstance(item, Let) else None
            if value is None or (new := take(value)) is value:
                yield item
            else:
                assert isinstance(item, Let)
                yield Let(item.var, new, span=item.span)

    def _held(self, load: Load) -> Load:
        """Return the read of a variable in place of a read of memory."""
        held = self.variable(load)
        return load if held is None else Load(held, (), span=load.span)


class _Outermost(Rewriter):
    """Replace reads that are in no other read's index."""

    def __init__(self, replaced: object):
        self.replaced = replaced

    def visit_Load(self, load: Load) -> Load:
        return self.replaced(load)  # type: ignore[operator,no-any-return]
