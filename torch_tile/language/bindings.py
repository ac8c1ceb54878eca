# SPDX-License-Identifier: Apache-2.0
"""The launch of a function without T.Kernel, in TIR's form: T.thread_binding and T.launch_thread give its sizes.

The function is recorded twice: what stands before a binding of threads sees their number the second time.
"""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Var, is_number
from torch_tile.ir.stmt import Alloc, Let
from torch_tile.language.scopes import Kernel, grid_of
from torch_tile.language.trace import tracer


class BoundKernel(Kernel):
    """One block of one thread, which grows by each index that is bound to blocks or threads."""

    def __init__(self, threads: tuple[int, ...] = (1,)):
        super().__init__(threads=threads)
        self.bound: list[tuple[bool, int]] = []  # of blocks or not, and the dimension; outermost first
        self.is_bound = False  # whether the function binds any

    def bind(self, of_block: bool, dim: int, size: Any) -> None:
        """Take the extent of dimension `dim`. Raises TileError for what would be a second launch."""
        self.is_bound = True
        at, key = tracer(), (of_block, dim)
        if key in self.bound[:1] or (of_block and key in self.bound):
            _refuse("thread", "is bound before: this would be a second launch")
        if of_block or not self.bound:
            if len(at.scopes) > 1:
                _refuse("thread", "is bound inside a loop or condition, which would launch more than once")
            if not self.bound and any(not isinstance(stmt, Alloc | Let) for stmt in at.scopes[0].stmts):
                _refuse("thread", "is bound after other statements, which no thread runs")
        if key in self.bound:
            return
        self.bound.append(key)
        if of_block:
            self._bind_blocks(dim, grid_of((size,))[0])
        elif not is_number(size) or isinstance(size, float) or size < 1:
            _refuse("stop", f"is {size!r}, and the threads of a block are a positive integer")
        else:
            known = (*self.threads, *(1 for _ in range(dim + 1 - len(self.threads))))
            self.threads = (*known[:dim], int(size), *known[dim + 1 :])

    def _bind_blocks(self, dim: int, size: Expr) -> None:
        """Set the grid's size along one dimension."""
        more = range(len(self.grid), dim + 1)
        known = (*self.grid, *(grid_of((1,) * len(more)) if more else ()))
        self.grid = (*known[:dim], size, *known[dim + 1 :])
        made = tuple(Var(self.names[n] or "b", dt.int32, "block") for n in more)
        for var in made:
            tracer().own(var)
        self.blocks += made


def _refuse(name: str, why: str) -> None:
    """Raise the error for a binding that no single launch has."""
    fix = "write `with T.Kernel(blocks, threads=...)` for each launch"
    raise error("bad_argument", None, op="T.thread_binding", name=name, why=why, fix=fix)
