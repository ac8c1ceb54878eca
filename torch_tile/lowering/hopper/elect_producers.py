# SPDX-License-Identifier: Apache-2.0
"""Let one lane run a producer's part that only waits for stages and starts bulk copies by its first thread.

Otherwise all lanes poll barriers. The assembler also puts a loop over lanes around each copy. By `one_lane` it knows
that one lane is left. It expects the bytes of neighbouring copies at once. May assume that all barriers of the block
stand.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.hardware import WARP
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.memory import one_lane
from torch_tile.intrinsics.traits import Engine, Sync
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Call, Const, Expr, Load, Var, binary, const
from torch_tile.ir.node import Rewriter, equal, find, symbols, with_fields
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, Store

# On an H200 one lane made loops of several small copies 3 to 15 % faster. Larger copies took up to 8 % more time, and
# nobody knows why (docs/perf-log.md, "Float8 by blocks: one lane that copies").
LEAST_COPIES, MOST_BYTES = 4, 36 * 1024  # of an iteration; three copies were not timed


def elect_producers(program: Program, build: Build) -> Program:
    """Rewrite the warps that only copy; the copies, their order and the barriers stay."""
    elected: Program = _Elect()(program) if build.target.has_wgmma else program
    return elected


class _Elect(Rewriter):
    """Rewrite what warps of the compiler's roles run."""

    thread: Var

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Rewrite the roles of a kernel that ends with them.

        If the block went on, the warp would have to meet behind the lane. The assembler would then keep coordinates in
        registers of lanes, and move them to uniform ones for each copy.
        """
        assert kernel.thread is not None
        self.thread = kernel.thread
        if not kernel.body.stmts or not isinstance(kernel.body.stmts[-1], Role):
            return kernel
        new: Kernel = self.children(kernel)
        return new

    def visit_Role(self, role: Role) -> Role:
        """Rewrite a role of one warp, or each part of a role that one of its warps runs."""
        if role.by_hand:
            return role
        if role.count == WARP:
            return with_fields(role, body=self._elected(role.body, role.first))
        body = with_fields(role.body, stmts=tuple(self._part(one, role) for one in role.body.stmts))
        return with_fields(role, body=body)

    def _part(self, one: Stmt, role: Role) -> Stmt:
        """Rewrite a statement of a role if one warp runs it."""
        if not isinstance(one, If) or one.otherwise.stmts:
            return one
        runs = self._threads(one.condition, range(role.first, role.first + role.count))
        if len(runs) != WARP or runs[0] % WARP or runs[-1] != runs[0] + WARP - 1:
            return one
        return with_fields(one, then=self._elected(one.then, runs[0]))

    def _elected(self, body: Block, first: int) -> Block:
        """Return a warp's part as one lane runs it; the same one if other lanes have work."""
        alone = _Alone(self, first)
        new = alone.block(body)
        if not alone.ok or alone.copies < LEAST_COPIES or alone.bytes > MOST_BYTES:
            return body
        lane = one_lane(binary("==", self.thread, const(first, int32)))
        return Block((If(lane, _ExpectOnce()(new), Block(())),))

    def _threads(self, condition: Expr, among: range) -> list[int]:
        """Return for which threads a condition holds; none if it depends on more than the thread."""
        if symbols(condition) != {self.thread}:
            return []
        found = []
        for number in among:
            value = simplify(Substitute({self.thread: const(number, int32)})(condition))
            if not isinstance(value, Const):
                return []
            if value.value:
                found.append(number)
        return found


class _ExpectOnce(Rewriter):
    """Expect the bytes of several copies to one mbarrier at once, in front of the first of them."""

    def visit_Block(self, block: Block) -> Block:
        """Join what neighbours in a block expect. Between them nothing arrives, waits or is stored."""
        found: list[Stmt] = []
        first: int | None = None  # the place of the expectation to which others join
        for one in self.children(block).stmts:
            call = one.call if isinstance(one, Do) else None
            traits = intrinsic_of(one) if isinstance(one, Do) else None
            if isinstance(call, Call) and traits is not None and traits.sync is Sync.EXPECT:
                before = None if first is None else found[first]
                joined = None if before is None else _joined(before, one)
                if first is not None and joined is not None:
                    found[first] = joined
                    continue
                first = len(found)
            elif traits is None or not traits.starts:
                first = None
            found.append(one)
        return with_fields(block, stmts=tuple(found))


def _joined(first: Stmt, one: Stmt) -> Stmt | None:
    """Return one expectation for two; None if they name two mbarriers, or if a size is no number."""
    assert isinstance(first, Do) and isinstance(one, Do)
    a, b = first.call, one.call
    assert isinstance(a, Call) and isinstance(b, Call)
    sizes = a.args[1], b.args[1]
    if not equal(a.args[0], b.args[0]) or not all(isinstance(size, Const) for size in sizes):
        return None
    return replace(first, call=replace(a, args=(a.args[0], simplify(sizes[0] + sizes[1]))))


class _Alone:
    """Drop the conditions that choose a warp's first thread; `ok` turns false where other lanes have work."""

    def __init__(self, elect: _Elect, first: int):
        self.elect, self.first = elect, first
        self.ok = True
        self.copies = self.bytes = 0

    def block(self, block: Block) -> Block:
        """Return the statements of a block as the first thread runs them."""
        found: list[Stmt] = []
        for one in block.stmts:
            found += self.stmt(one)
        return Block(tuple(found))

    def stmt(self, one: Stmt) -> list[Stmt]:
        """Return the statements that replace one."""
        if isinstance(one, Block):
            return list(self.block(one).stmts)
        if isinstance(one, If):
            if not self._is_first(one):
                self._expect(self.elect.thread not in symbols(one.condition))
                return [replace(one, then=self.block(one.then), otherwise=self.block(one.otherwise))]
            return list(self.block(one.then).stmts)
        if isinstance(one, For):
            self._expect(
                one.kind is LoopKind.SERIAL and not any(self._is_held_by_lanes(x) for x in (*one.starts, *one.stops))
            )
            return [replace(one, body=self.block(one.body))]
        if isinstance(one, Do):
            found = intrinsic_of(one)
            copies = found is not None and found.starts and found.engine is Engine.BULK
            known = found is not None and found.sync in (Sync.WAIT, Sync.EXPECT, Sync.ARRIVE) and not found.convergent
            self.copies += copies
            if found is not None and found.sync is Sync.EXPECT:
                assert isinstance(one.call, Call)
                size = one.call.args[1]
                self.bytes += int(size.value) if isinstance(size, Const) else MOST_BYTES + 1
            self._expect((copies or known) and not self._is_held_by_lanes(one))
        elif isinstance(one, Store):
            self._expect(one.buffer.scope == "var" and not self._is_held_by_lanes(one))
        else:
            self._expect(isinstance(one, Let | Alloc) and not self._is_held_by_lanes(one))
        return [one]

    def _is_first(self, one: If) -> bool:
        """Return whether a branch runs for the warp's first thread only."""
        lanes = range(self.first, self.first + WARP)
        return not one.otherwise.stmts and self.elect._threads(one.condition, lanes) == [self.first]

    def _is_held_by_lanes(self, node: Stmt | Expr) -> bool:
        """Return whether a value stands in registers of lanes: it depends on the thread, or is loaded.

        Page numbers are loaded. One lane gains by uniform registers alone.
        """
        return self.elect.thread in symbols(node) or any(load.buffer.scope != "var" for load in find(node, Load))

    def _expect(self, so: bool) -> None:
        """Give up unless `so`."""
        self.ok = self.ok and so
