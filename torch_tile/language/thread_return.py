# SPDX-License-Identifier: Apache-2.0
"""T.thread_return: a thread has nothing more to do in the kernel.

No statement leaves a kernel. What follows a branch that returns becomes the other branch. Where only some of a branch
returns, it stands under a flag. Loops that return are left, and so is what is around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Load, Unary, const
from torch_tile.ir.node import contains, rebuilt
from torch_tile.ir.stmt import Alloc, Block, Break, For, If, LoopKind, Role, Stmt, Store, While
from torch_tile.language.trace import tracer


class ThreadReturn(Stmt):
    """The thread ends here. Only recorded: T.Kernel's end rewrites the body without it."""


def thread_return() -> None:
    """End the threads that come here: they skip the rest of the kernel.

    What threads do together afterwards must not need those that ended. Inside T.Parallel it is a TileError.
    """
    at = tracer("T.thread_return")
    if not at.scopes:
        raise error("not_in_kernel", None, what="T.thread_return")
    at.emit(ThreadReturn())


def without_returns(body: Block) -> Block:
    """Rewrite a kernel's body so that no statement ends a thread."""
    if not contains(body, ThreadReturn):
        return body
    done = Buffer("done", (), dt.bool_, "var")
    rewrite = _Returns(done)
    stmts = rewrite.block(body.stmts, False)
    return Block((Alloc(done, const(False, dt.bool_)), *stmts) if rewrite.flagged else tuple(stmts))


class _Returns:
    """Rewrites statements; `done` says that the thread has ended, if branches and loops cannot."""

    def __init__(self, done: Buffer):
        self.done, self.flagged = done, False

    def block(self, stmts: Sequence[Stmt], looped: bool) -> list[Stmt]:
        """Return the statements without returns. In a loop a return sets the flag and leaves the loop."""
        found: list[Stmt] = []
        for place, one in enumerate(stmts):
            rest = stmts[place + 1 :]
            if isinstance(one, ThreadReturn):
                return [*found, *(self._end(one) if looped else ())]
            if not contains(one, ThreadReturn):
                found.append(one)
            elif looped or not isinstance(one, If) or not (_returns(one.then) or _returns(one.otherwise)):
                found += [self._rewrite_inside(one, looped), *self._guarded(rest, one, looped)]
                return found
            else:  # the rest is for the threads of the other branch
                sides = [side.stmts if _returns(side) else (*side.stmts, *rest) for side in (one.then, one.otherwise)]
                then, otherwise = (Block(tuple(self.block(side, False))) for side in sides)
                return [*found, rebuilt(one, then=then, otherwise=otherwise)]
        return found

    def _rewrite_inside(self, one: Stmt, looped: bool) -> Stmt:
        """Rewrite a branch or loop in which threads return: they set the flag, and what follows tests it."""
        if isinstance(one, If):
            sides = [Block(tuple(self._flag(side.stmts, looped))) for side in (one.then, one.otherwise)]
            return rebuilt(one, then=sides[0], otherwise=sides[1])
        if isinstance(one, While) or (isinstance(one, For) and one.kind is not LoopKind.PARALLEL):
            return rebuilt(one, body=Block(tuple(self.block(one.body.stmts, True))))
        if isinstance(one, Role):
            return rebuilt(one, body=Block(tuple(self._flag(one.body.stmts, False))))
        raise error("not_outermost", one.span, what="T.thread_return", region="T.Parallel")

    def _flag(self, stmts: Sequence[Stmt], looped: bool) -> list[Stmt]:
        """Rewrite the statements of a branch whose threads return, while others go on behind it."""
        if looped:
            return self.block(stmts, True)
        for place, one in enumerate(stmts):
            if isinstance(one, ThreadReturn):
                return [*stmts[:place], self._end(one)[0]]
            if contains(one, ThreadReturn):
                behind = self._guarded(stmts[place + 1 :], one, False)
                return [*stmts[:place], self._rewrite_inside(one, False), *behind]
        return list(stmts)

    def _end(self, one: Stmt) -> list[Stmt]:
        self.flagged = True
        return [Store(self.done, (), const(True, dt.bool_), span=one.span), Break()]

    def _guarded(self, rest: Sequence[Stmt], one: Stmt, looped: bool) -> list[Stmt]:
        """Guard what follows a statement that ended some threads, for the threads that are left."""
        self.flagged = True
        ended: Expr = Load(self.done, ())
        if looped:
            leave = [] if isinstance(one, If) else [If(ended, Block((Break(),)), Block(()))]
            return [*leave, *self.block(rest, True)]
        left = self.block(rest, False)
        return [If(Unary("not", ended), Block(tuple(left)), Block(()), span=one.span)] if left else []


def _returns(side: Block) -> bool:
    """Return whether all threads that come to a branch end in it."""
    return any(
        isinstance(one, ThreadReturn) or (isinstance(one, If) and _returns(one.then) and _returns(one.otherwise))
        for one in side.stmts
    )


__all__ = ["thread_return", "without_returns"]
