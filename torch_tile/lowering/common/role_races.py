# SPDX-License-Identifier: Apache-2.0
"""Find shared tiles that one role of an author writes and another one reads, where neither waits for the other.

Only certain ones count. Both accesses are made whatever data say, in boxes that surely meet, and neither role waits
before its own. So none comes before the other. Waits that end too early are those of `stuck_waits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby, pairwise, product, starmap
from typing import NamedTuple

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.intrinsics import foreign
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.traits import Sync
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Call, Expr, Load, Scalar, Select, Var, const, is_zero
from torch_tile.ir.node import Node, contains, find
from torch_tile.ir.stmt import Block, Break, Continue, For, Let, LoopKind, Program, Role, Store, While
from torch_tile.tileop.atomic import Atomic
from torch_tile.tileop.base import RegisteredOp

# What a thread passes without a wait for another thread.
PASSED = frozenset({None, *Sync} - {Sync.WAIT, Sync.BARRIER, Sync.TURN, Sync.INIT})
ONE = const(1, dt.int32)


class Access(NamedTuple):
    """A read or write of a box of a shared tile, where loops around it have these first indices."""

    region: Region
    names: Mapping[Var, Scalar]
    writes: bool
    span: Span | None


def role_races(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each two roles that touch a tile in no order."""
    found: list[Diagnostic] = []
    for kernel in program.kernels:
        for block in find(kernel.body, Block) if kernel.cluster == (1, 1, 1) else ():
            for is_role, run in groupby(block.stmts, lambda each: isinstance(each, Role)):
                roles = [each for each in run if isinstance(each, Role)] if is_role else []
                if not _share_threads(roles):
                    found += filter(None, starmap(_of_two, combinations(roles, 2)))
    return found


def _share_threads(roles: Sequence[Role]) -> bool:
    """Return whether a thread has two of the roles, one after the other."""
    ends = sorted((each.first, each.first + each.count) for each in roles)
    return any(end > start for (_, end), (start, _) in pairwise(ends))


def _of_two(one: Role, other: Role) -> Diagnostic | None:
    """Return the diagnostic for the first tile that one of two roles writes and the other one reads."""
    for a, b in product(*(list(_accesses(role.body, {})) for role in (one, other))):
        if a.writes != b.writes and _meet(a, b):
            read, written = (b, a) if a.writes else (a, b)
            notes = [(written.span, "another role writes it here")]
            return diagnose("role_race", read.span, notes, buffer=read.region.buffer.name)
    return None


def _accesses(body: Block, names: Mapping[Var, Scalar]) -> Iterator[Access]:
    """Yield the certain accesses of a body to shared tiles before its first wait, in first iterations of loops."""
    for stmt in body.stmts:
        if isinstance(stmt, RegisteredOp) and not isinstance(stmt, Atomic):
            for regions, writes in zip(stmt.accesses(), (False, True), strict=True):
                yield from (Access(r, names, writes, stmt.span) for r in regions if _is_tile(r.buffer))
        elif isinstance(stmt, For) and stmt.kind in (LoopKind.SERIAL, LoopKind.UNROLLED):
            start, stop = (_number(each[0], names) for each in (stmt.starts, stmt.stops))
            if start is not None and stop is not None and start < stop:
                yield from _accesses(stmt.body, {**names, stmt.vars[0]: start})
        elif isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL:
            yield from (Access(r, names, writes, span) for r, writes, span in _boxes_of_nest(stmt))
        elif isinstance(stmt, Let) and (value := _number(stmt.value, names)) is not None:
            names = {**names, stmt.var: value}
        if _may_wait(stmt) or contains(stmt, Break, Continue):
            return


def _is_tile(buffer: Buffer) -> bool:
    """Return whether a buffer is a shared tile with memory of its own."""
    return buffer.scope == "shared" and buffer.base is None


def _boxes_of_nest(nest: For) -> Iterator[tuple[Region, bool, Span | None]]:
    """Yield the boxes of shared tiles that a T.Parallel without conditions reads or writes."""
    steps = {var: Range(a, b) for var, a, b in zip(nest.vars, nest.starts, nest.stops, strict=True) if is_zero(a)}
    if contains(nest, Select) or not all(isinstance(each, Store) for each in nest.body.stmts):
        return
    for stmt in nest.body.stmts:
        for node in find(stmt, Store, Load):
            named = [each for each in node.indices if isinstance(each, Var) and each in steps]
            if _is_tile(node.buffer) and len(set(named)) == len(named):
                ranges = [steps[n] if isinstance(n, Var) and n in steps else Range(n, ONE) for n in node.indices]
                yield Region(node.buffer, tuple(ranges)), isinstance(node, Store), stmt.span


def _number(value: Expr, names: Mapping[Var, Scalar]) -> int | None:
    """Return the number that an expression has, None if it is not known."""
    try:
        return int(evaluate(value, names))
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def _meet(a: Access, b: Access) -> bool:
    """Return whether two boxes are of one tile and surely have an element in common."""
    if a.region.buffer is not b.region.buffer:
        return False
    for size, one, other in zip(a.region.buffer.shape, a.region.ranges, b.region.ranges, strict=True):
        found = [(_number(r.start, x.names), _number(r.extent, x.names)) for x, r in ((a, one), (b, other))]
        numbers = [n for pair in found for n in pair if n is not None]
        if len(numbers) == 4:
            if max(numbers[0], numbers[2]) >= min(numbers[0] + numbers[1], numbers[2] + numbers[3]):
                return False
        elif not (one.covers(size) or other.covers(size)) or 0 in numbers:
            return False
    return True


def _may_wait(node: Node) -> bool:
    """Return whether threads may wait for other threads in a statement."""
    calls = [intrinsic_of(each) for each in find(node, Call)]
    unknown = any(each is None or each.name == foreign.NAME for each in calls)
    return unknown or contains(node, While) or any(each and each.sync not in PASSED for each in calls)
