# SPDX-License-Identifier: Apache-2.0
"""Roles by conditions on the thread: `if tx < 128:` around operations of tiles gives them to these warps.

A branch becomes a role, as `with T.ws(...)` makes one, where whole warps in a row take it together. Warps that part
again inside a branch become roles of their own. They get copies of what each thread does by itself around the inner
branch. Branches without operations of all threads stay as they are. Roles in a row get a barrier between them, unless
the kernel has mbarriers, by which its author orders them. Without mbarriers branches in loops stay, and the check of
the kernel refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.intrinsics import lookup, memory
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Var
from torch_tile.ir.node import Node, Rewriter, find, rebuilt, walk, with_fields
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Let, LoopKind, Role, Stmt, While
from torch_tile.language.trace import with_span
from torch_tile.tileop.base import RegisteredOp, is_per_thread
from torch_tile.tileop.copy.tma import TmaCopy


def roles_by_threads(body: Block, thread: Var, threads: int) -> Block:
    """Replace branches of threads in the body of a kernel of so many `threads` by roles."""
    if not any(needs_all(n) for one in find(body, If) for n in find(one, RegisteredOp, For, Do)):
        return body
    ordered = any(n.buffer.scope == "barrier" for n in find(body, Alloc))
    return with_fields(body, stmts=tuple(_Branches(thread, threads, ordered).block(body, True)))


def needs_all(node: object) -> bool:
    """Return whether all threads that reach a statement run it together."""
    if isinstance(node, RegisteredOp) and not isinstance(node, TmaCopy):
        if node.check():
            return True
        reads, writes = node.accesses()
        return not is_per_thread((*reads, *writes))
    if isinstance(node, For):
        return node.kind is LoopKind.PARALLEL
    return registers_of(node) > 0


def registers_of(node: object) -> int:
    """Return the registers that a call sets, or 0 for other statements."""
    call = node.call if isinstance(node, Do) else None
    return memory.option(call) if isinstance(call, Call) and call.name == "set_registers" and call.options else 0


def is_of_a_thread(one: Stmt) -> bool:
    """Return whether each thread runs a statement by itself, so that each role may have a copy."""
    calls = [lookup(call.name) for call in find(one, Call)]
    return not any(needs_all(n) or isinstance(n, TmaCopy | Role) for n in walk(one)) and not any(
        call.sync is Sync.BARRIER or (call.sync is Sync.REGISTERS) for call in calls
    )


class Fresh(Rewriter):
    """Copy a statement with fresh symbols."""

    def __init__(self, node: Node):
        bound = [x for n in walk(node) for name in n.binders for x in _listed(getattr(n, name))]
        self.new = {x: replace(x) for x in bound}

    def visit_Var(self, var: Var) -> Var:
        """Return the new symbol."""
        return self.new.get(var, var)  # type: ignore[return-value]

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        """Return the new tile; a view of a new tile is new, too."""
        base = None if buffer.base is None else self.new.get(buffer.base)
        if buffer not in self.new and isinstance(base, Buffer):
            self.new[buffer] = replace(buffer, base=base)
        return self.new.get(buffer, buffer)  # type: ignore[return-value]

    def visit_Stmt(self, node: Stmt) -> Stmt:
        """Bind the new symbols."""
        new = self.children(node)
        return rebuilt(new, **{name: _renamed(getattr(node, name), self) for name in node.binders})


def _listed(value: object) -> tuple[Var | Buffer, ...]:
    return tuple(x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Var | Buffer))


def _renamed(value: object, names: Fresh) -> object:
    return tuple(map(names, value)) if isinstance(value, tuple) else names(value)


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
                found.append(self._rewrite_inside(one))
                after_role = after_role and isinstance(one, Let | Alloc)
                continue
            if after_role and not self.ordered:
                found.append(with_span(memory.barrier(), one.span))
            for part in parts:
                role = Role(part.those[0], len(part.those), part.body, part.registers, by_hand=True)
                found += part.body.stmts if len(part.those) == self.threads else [with_span(role, one.span)]
            after_role = True
        return found

    def _rewrite_inside(self, one: Stmt) -> Stmt:
        """Rewrite a loop, or a branch of all threads, with roles in it."""
        if isinstance(one, While) or (isinstance(one, For) and one.kind is not LoopKind.PARALLEL):
            return self._with_bodies(one, "body")
        return self._with_bodies(one, "then", "otherwise") if isinstance(one, If) else one

    def _with_bodies(self, one: Stmt, *names: str) -> Stmt:
        """Rewrite the bodies of a statement."""
        bodies: list[Block] = [getattr(one, name) for name in names]
        new = [with_fields(body, stmts=tuple(self.block(body, False))) for body in bodies]
        return with_fields(one, **dict(zip(names, new, strict=True)))

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

    def _parts(self, one: If) -> list[_Part] | None:
        """Return what each set of warps runs of a branch; None unless it splits into whole warps and must be split."""
        if not _must_split(one):
            return None
        found = self._by_threads(one, list(range(self.threads)))
        whole = found and all(_are_warps(part.those) for part in found)
        return found if whole else None

    def _by_threads(self, one: If, those: list[int]) -> list[_Part] | None:
        """Split a branch by the threads that take it."""
        values = self._values(one.condition, those)
        if values is None:
            return None
        found: list[_Part] = []
        for holds, block in ((True, one.then), (False, one.otherwise)):
            some = [n for n, value in zip(those, values, strict=True) if bool(value) is holds]
            if some and block.stmts:
                found += self._inner(block, some) or [_Part(some, block)]
        return found

    def _inner(self, block: Block, those: list[int]) -> list[_Part] | None:
        """Return what warps of a branch run that part again in it; None if they do not."""
        for let in block.stmts:
            if isinstance(let, Let):
                self._name(let)
        inner = {
            s: p for s in block.stmts if isinstance(s, If) and _must_split(s) and (p := self._by_threads(s, those))
        }
        rest = [s for s in block.stmts if s not in inner]
        asked = [registers_of(s) for s in rest if registers_of(s)]
        if not all(registers_of(s) or is_of_a_thread(s) for s in rest) or len(asked) > 1:
            return None
        if asked and (not _are_warps(those) or those[0] % WARPGROUP or len(those) % WARPGROUP):
            return None
        if len(inner) == len(block.stmts) == 1:  # `elif`: threads without a branch have nothing to do
            return next(iter(inner.values()))
        groups: dict[tuple[int, ...], list[int]] = {}
        for n in those:
            key = tuple(next((k for k, p in enumerate(parts) if n in p.those), -1) for parts in inner.values())
            groups.setdefault(key, []).append(n)
        if len(groups) < 2 or any(p.registers for parts in inner.values() for p in parts):
            return None
        if asked and any(
            len(some) % WARPGROUP and some[0] // WARPGROUP != some[-1] // WARPGROUP for some in groups.values()
        ):
            return None
        found: list[_Part] = []
        for key, some in groups.items():
            taken: dict[Stmt, tuple[Stmt, ...]] = {}
            for (s, parts), k in zip(inner.items(), key, strict=True):
                taken[s] = parts[k].body.stmts if k >= 0 else ()
            stmts = [new for s in block.stmts for new in taken.get(s, () if registers_of(s) else (s,))]
            body = Block(tuple(stmts))
            found.append(_Part(some, Fresh(body)(body) if found else body, *asked))
        return found


@dataclass(frozen=True)
class _Part:
    """What these threads run of a branch, and the registers that they ask for, 0 if they do not."""

    those: list[int]
    body: Block
    registers: int = 0


def _must_split(one: If) -> bool:
    """Return whether a branch has something that its threads do together."""
    return any(needs_all(n) for n in find(one, RegisteredOp, For, Do))


def _are_warps(those: Sequence[int]) -> bool:
    """Return whether threads are consecutive whole warps."""
    return those[0] % WARP == 0 and len(those) % WARP == 0 and those[-1] - those[0] == len(those) - 1
