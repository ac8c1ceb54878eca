# SPDX-License-Identifier: Apache-2.0
"""Roles by conditions on the thread: `if tx < 128:` around operations of tiles gives them to these warps.

A branch becomes a role, as `with T.ws(...)` makes one, where whole warps in a row take it together. Branches without
operations of all threads stay as they are. Roles in a row get a barrier between them, unless the kernel has mbarriers,
by which its author orders them. Without mbarriers branches in loops stay, and the check of the kernel refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tile.hardware import WARP
from torch_tile.intrinsics import lookup, memory
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Call, Expr, Var
from torch_tile.ir.node import find, rebuilt
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Let, LoopKind, Role, Stmt, While
from torch_tile.language.trace import with_span
from torch_tile.tileop.base import RegisteredOp, is_of_each
from torch_tile.tileop.copy.tma import TmaCopy


def roles_by_threads(body: Block, thread: Var, threads: int) -> Block:
    """Replace branches of threads in the body of a kernel of so many `threads` by roles."""
    if not any(needs_all(n) for one in find(body, If) for n in find(one, RegisteredOp, For, Do)):
        return body
    ordered = any(n.buffer.scope == "barrier" for n in find(body, Alloc))
    stmts = _Branches(thread, threads, ordered).block(body, True)
    return body if len(stmts) == len(body.stmts) and all(map(_is, stmts, body.stmts)) else Block(tuple(stmts))


def _is(a: Stmt, b: Stmt) -> bool:
    """Return whether two objects are the same."""
    return a is b


def needs_all(node: object) -> bool:
    """Return whether all threads that reach a statement run it together."""
    if isinstance(node, RegisteredOp) and not isinstance(node, TmaCopy):
        if node.check():
            return True
        reads, writes = node.accesses()
        return not is_of_each((*reads, *writes))
    if isinstance(node, For):
        return node.kind is LoopKind.PARALLEL
    return isinstance(node, Do) and isinstance(node.call, Call) and lookup(node.call.name).name == "set_registers"


class _Branches:
    """Find branches that become roles, and the names whose values depend on the thread."""

    def __init__(self, thread: Var, threads: int, ordered: bool):
        self.thread, self.threads, self.ordered = thread, threads, ordered
        self.names: list[dict[Var, object]] = [{thread: n} for n in range(threads)]  # by thread

    def block(self, body: Block, outermost: bool) -> list[Stmt]:
        """Return the statements of a block with roles in it."""
        found: list[Stmt] = []
        after_role = False
        for one in body.stmts:
            if isinstance(one, Let):
                self._name(one)
            parts = self._parts(one) if isinstance(one, If) and (outermost or self.ordered) else None
            if parts is None:
                found.append(self._inside(one))
                after_role = after_role and isinstance(one, Let | Alloc)
                continue
            if after_role and not self.ordered:
                found.append(with_span(memory.barrier(), one.span))
            for those, part in parts:
                role = Role(those[0], len(those), part, by_hand=True)
                found += part.stmts if len(those) == self.threads else [with_span(role, one.span)]
            after_role = True
        return found

    def _inside(self, one: Stmt) -> Stmt:
        """Rewrite a loop, or a branch of all threads, with roles in it."""
        if isinstance(one, While) or (isinstance(one, For) and one.kind is not LoopKind.PARALLEL):
            return self._with_bodies(one, "body")
        return self._with_bodies(one, "then", "otherwise") if isinstance(one, If) else one

    def _with_bodies(self, one: Stmt, *names: str) -> Stmt:
        """Rewrite the bodies of a statement."""
        changed = {}
        for name in names:
            body: Block = getattr(one, name)
            stmts = self.block(body, False)
            if len(stmts) != len(body.stmts) or not all(map(_is, stmts, body.stmts)):
                changed[name] = Block(tuple(stmts))
        return rebuilt(one, **changed) if changed else one

    def _name(self, one: Let) -> None:
        """Record a name's value in each thread."""
        values = self._values(one.value, range(self.threads))
        for thread, value in zip(self.names, values or (), strict=False):
            thread[one.var] = value

    def _values(self, expr: Expr, those: Sequence[int]) -> list[object] | None:
        """Evaluate an expression for each of these threads. Return None if something else decides it."""
        if not any(each is self.thread or each in self.names[0] for each in find(expr, Var)):
            return None
        try:
            return [evaluate(expr, self.names[n]) for n in those]  # type: ignore[arg-type]
        except (KeyError, ValueError, ArithmeticError):
            return None

    def _parts(self, one: If) -> list[tuple[list[int], Block]] | None:
        """Return what each set of warps runs of a branch. Return None unless the branch splits into whole warps and
        must be split.
        """
        if not any(needs_all(n) for n in find(one, RegisteredOp, For, Do)):
            return None
        found = self._split(one, list(range(self.threads)))
        whole = found and all(_are_warps(those) for those, _ in found)
        return found if whole else None

    def _split(self, one: If, those: list[int]) -> list[tuple[list[int], Block]] | None:
        """Split a branch by the threads that take it."""
        values = self._values(one.condition, those)
        if values is None:
            return None
        found: list[tuple[list[int], Block]] = []
        for holds, block in ((True, one.then), (False, one.otherwise)):
            some = [n for n, value in zip(those, values, strict=True) if bool(value) is holds]
            if not some or not block.stmts:
                continue
            only = block.stmts[0] if len(block.stmts) == 1 else None
            deeper = self._split(only, some) if isinstance(only, If) else None  # `elif`
            found += [(some, block)] if deeper is None else deeper
        return found


def _are_warps(those: Sequence[int]) -> bool:
    """Return whether threads are consecutive whole warps."""
    return those[0] % WARP == 0 and len(those) % WARP == 0 and those[-1] - those[0] == len(those) - 1
