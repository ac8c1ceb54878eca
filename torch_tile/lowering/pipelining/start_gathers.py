# SPDX-License-Identifier: Apache-2.0
"""Gather rows by cp.async in loops that nothing pipelines.

A loop may fill a shared tile with rows that a table names. It holds what it loads in registers, beside accumulators.
By cp.async nothing passes through registers, so that all rows of a thread are under way at once. Gathers begin together
if no statement between them touches their tiles. A statement waits for the rows that it reads.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.memory import cp_async_commit, cp_async_wait
from torch_tile.intrinsics.traits import Engine
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load
from torch_tile.ir.idmap import mentions
from torch_tile.ir.node import Rewriter, contains, find, symbols
from torch_tile.ir.stmt import Block, Break, Continue, Do, For, Kernel, Let, Program, Role, Stmt, While
from torch_tile.tileop.copy.cp_async import AsyncCopy, AsyncLoop, Gather, gather_of
from torch_tile.tileop.uses import reads_of, writes_of


def start_gathers(program: Program, build: Build) -> Program:
    """Turn gathers in loops into asynchronous ones, each waited for where its tile is used; values do not change."""
    return program if build.options.measured else _Gathers()(program)


class _Gathers(Rewriter):
    """Rewrite the loops of kernels that have no asynchronous copies yet, whose groups a wait would count."""

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Rewrite a kernel in which all threads do the same, and that counts no groups of copies."""
        counts = contains(kernel, AsyncCopy, AsyncLoop, Role) or any(_is_of_copies(s) for s in find(kernel, Do))
        return kernel if counts else self.children(kernel)

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite what a loop repeats, after the loops inside it."""
        return _repeated(self.children(loop))

    def visit_While(self, loop: While) -> Stmt:
        """Rewrite what a loop repeats, after the loops inside it."""
        return _repeated(self.children(loop))


def _repeated(loop: For | While) -> Stmt:
    """Return a loop whose body starts its gathers, and waits for each in front of what touches its tile."""
    placed: list[Stmt] = []
    for one in loop.body.stmts:
        placed.insert(_place(one, placed) if _gather(one) else len(placed), one)
    new: list[Stmt] = []
    pending: list[Buffer] = []  # tiles under way, oldest first
    for one in placed:
        found = _gather(one)
        if found is not None and isinstance(one, For):
            new += [AsyncLoop(one, span=one.span), cp_async_commit()]
            pending.append(found.dst[0])
            continue
        touched = [n for n, tile in enumerate(pending) if _is_opaque(one) or mentions(one, tile)]
        if touched:
            new.append(cp_async_wait(len(pending) - 1 - touched[-1]))
            del pending[: touched[-1] + 1]
        new.append(one)
    if pending:
        new.append(cp_async_wait(0))
    return replace(loop, body=Block(tuple(new), span=loop.body.span)) if len(new) != len(placed) else loop


def _gather(one: Stmt) -> Gather | None:
    """Return the gather of a statement that fills a shared tile with rows of global memory that a table names."""
    found = gather_of(one) if isinstance(one, For) else None
    return found if found is not None and any(contains(index, Load) for index in found.src.indices) else None


def _place(one: Stmt, before: list[Stmt]) -> int:
    """Return where among the statements before it a gather may begin: behind another gather, or at the end."""
    read, tile = reads_of(one), _gather(one).dst[0]  # type: ignore[union-attr]
    for n in reversed(range(len(before))):
        other = before[n]
        if _gather(other) is not None:
            return n + 1
        named = isinstance(other, Let) and other.var in symbols(one)
        if named or _is_opaque(other) or mentions(other, tile) or read & writes_of(other):
            break
    return len(before)


def _is_of_copies(one: Do) -> bool:
    """Return whether a statement starts asynchronous copies of threads, or counts groups of them."""
    called = intrinsic_of(one)
    return called is not None and called.engine is Engine.COPY


def _is_opaque(one: Stmt) -> bool:
    """Return whether a statement may leave the loop, order threads, or start copies itself."""
    return contains(one, AsyncLoop, Break, Continue, Do)
