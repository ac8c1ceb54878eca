# SPDX-License-Identifier: Apache-2.0
"""Roles of warps: T.ws and T.role, and the order in which a kernel has them.

T.ws may stand in loops and branches that all threads run. The tracer gives each role its own copy of such a loop. What
all threads do there goes to the first role, between barriers. So a kernel consists of statements of all threads, and of
roles that run at the same time. Each fragment belongs to the role that uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

from torch_tile.diagnostics.errors import Span, error
from torch_tile.hardware import REGISTERS_OF_ROLES, UNIT, WARPGROUP
from torch_tile.intrinsics.base import lookup
from torch_tile.intrinsics.bulk import named_barrier
from torch_tile.intrinsics.memory import option
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Load, Var, const
from torch_tile.ir.node import Rewriter, contains, find, symbols
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Let, LoopKind, Role, Stmt, Store, While
from torch_tile.language.thread_roles import Fresh, is_of_a_thread, registers_of, roles_by_threads
from torch_tile.language.trace import Tracer, author_span, close_body, describe_statement, tracer, with_span


def outermost(what: str) -> Tracer:
    """Return the tracer, and check that it is in the body of a kernel itself."""
    at = tracer(what)
    if not at.scopes:
        raise error("not_in_kernel", None, what=what)
    if len(at.scopes) > 1:
        raise error("not_outermost", None, what=what, region=at.scopes[-1].what)
    return at


def role(first: int, count: int, registers: int = 0, by_hand: bool = False) -> contextlib.AbstractContextManager[None]:
    """Run the body on threads `first` to `first + count - 1` of the block, whole warps: `with T.role(first, count):`.

    Roles that follow each other run at the same time. Each thread may use `registers` registers, or an equal share
    without it: a multiple of 8 from 24 to 256, for whole warpgroups of 128 threads. The compiler may defer the waits
    and releases of a role. Authors who order them themselves write T.ws, or say `by_hand`.
    """
    at, unit = outermost("T.role"), WARPGROUP if registers else 32
    fix = f"give multiples of {unit} within the {at.threads} threads of the block"
    for name, value, good in (
        ("first", first, isinstance(first, int) and 0 <= first < at.threads and first % unit == 0),
        ("count", count, isinstance(count, int) and 0 < count <= at.threads - first and count % unit == 0),
    ):
        if not good:
            raise error("bad_argument", None, op="T.role", name=name, why=f"is {value!r}", fix=fix)
    check_registers("T.role", "registers", registers)
    return _recorded(at, Role(first, count, Block(()), registers, bool(by_hand)), author_span())


def ws(*groups: int, registers: int = 0) -> contextlib.AbstractContextManager[None]:
    """Run the body as written on `groups`, consecutive warpgroups of 128 threads: `with T.ws(0, 1):`.

    Other warpgroups skip it. `registers` is as for T.role; T.set_max_nreg says the same.
    """
    at = tracer("T.ws")
    if not at.scopes:
        raise error("not_in_kernel", None, what="T.ws")
    if at.barrier_group:
        raise error("not_outermost", None, what="T.ws", region="role")
    ordered = sorted(groups) if all(isinstance(g, int) for g in groups) else []
    if not ordered or ordered != list(range(ordered[0], ordered[0] + len(ordered))):
        fix = "give numbers that follow each other, or several roles"
        raise error("bad_argument", None, op="T.ws", name="groups", why=f"is {groups!r}", fix=fix)
    if ordered[0] < 0 or WARPGROUP * (ordered[-1] + 1) > at.threads:
        most = at.threads // WARPGROUP
        fix = f"give numbers below {most}, or T.Kernel more threads" if most else "give T.Kernel threads=128 or more"
        why = f"is {groups!r}, and the block has {at.threads} threads"
        raise error("bad_argument", None, op="T.ws", name="groups", why=why, fix=fix)
    check_registers("T.ws", "registers", registers)
    made = Role(WARPGROUP * ordered[0], WARPGROUP * len(ordered), Block(()), registers, by_hand=True)
    return _recorded(at, made, author_span())


def check_registers(op: str, name: str, registers: object) -> None:
    """Raise an author error unless a thread can have this many registers. 0 is an equal share."""
    if not isinstance(registers, int) or (registers and registers not in REGISTERS_OF_ROLES):
        fix = f"give a multiple of {UNIT} from {REGISTERS_OF_ROLES[0]} to {REGISTERS_OF_ROLES[-1]}"
        raise error("bad_argument", None, op=op, name=name, why=f"is {registers!r}", fix=fix)


@contextlib.contextmanager
def _recorded(at: Tracer, made: Role, span: Span | None) -> Iterator[None]:
    """Record the statements inside as a role."""
    at.barrier_group = made.count
    try:
        with at.open("role") as scope:
            yield
    finally:
        at.barrier_group = 0
    whole = with_span(replace(made, body=close_body(scope)), span)
    at.emit(with_registers(whole) if made.by_hand else whole)


# A kernel's roles, put in order.


def gather_roles(body: Block, threads: Sequence[int], thread: Var | None) -> Block:
    """Move the roles of a kernel's body outermost, each with its registers and fragments.

    `threads` are those of the block. A branch on the index `thread` is a role if it holds tile operations.
    """
    if thread is not None:
        body = roles_by_threads(body, thread, math.prod(threads))
    if not any(n.by_hand for n in find(body, Role)):
        _no_registers(body)
        return body
    body = _WithRegisters()(body)
    stmts = [new for one in body.stmts for new in (_each_role(one) if _has_roles(one) else [one])]
    stmts = _own_fragments(_hand_over(_together(stmts)))
    for one in stmts:
        _no_registers(one)
    return Block(tuple(stmts))


def _has_roles(one: Stmt) -> bool:
    """Return whether a statement contains roles."""
    return not isinstance(one, Role) and contains(one, Role)


def _each_role(one: Stmt) -> list[Role]:
    """Turn a loop or branch with roles inside into one role for each set of warps."""
    roles: dict[tuple[int, int], list[Role]] = {}
    for n in find(one, Role):
        roles.setdefault((n.first, n.count), []).append(n)
    meeting = named_barrier(_unused_barrier_number(one), sum(count for _, count in roles))
    made = []
    for number, (key, same) in enumerate(roles.items()):
        body = _Part(key, meeting, leads=not number).block(Block((one,)))
        if number:
            body = Fresh(body)(body)
        made.append(replace(same[0], body=body, registers=reduce(_registers, same, 0)))
    return made


def _unused_barrier_number(one: Stmt) -> int:
    """Return the highest barrier number that a statement does not use."""
    taken = {option(call) for call in find(one, Call) if call.name.startswith("named_barrier")}
    return max(set(range(1, 16)) - taken, default=1)


class _Part:
    """Builds the part of a loop or branch that the threads of the role `key` run.

    What all threads do inside, the first role does for all of them: each role waits at `meeting` before and behind it.
    """

    def __init__(self, key: tuple[int, int], meeting: Do, leads: bool):
        self.key, self.meeting, self.leads = key, meeting, leads

    def block(self, block: Block) -> Block:
        """Return the role's part of a block."""
        made: list[Stmt] = []
        for shared, run in itertools.groupby(block.stmts, _is_for_all):
            if shared:
                done = [s for s in run if is_of_a_thread(s) or (self.leads and not _is_barrier(s))]
                made += [self.meeting, *done, self.meeting]
            else:
                made += [new for one in run for new in self.of(one)]
        return Block(tuple(made))

    def of(self, one: Stmt) -> tuple[Stmt, ...]:
        """Return the role's part of a statement that is not for all threads."""
        if isinstance(one, Role):
            return one.body.stmts if (one.first, one.count) == self.key else ()
        if not _has_roles(one):
            return (one,)
        if isinstance(one, If):
            return (replace(one, then=self.block(one.then), otherwise=self.block(one.otherwise)),)
        assert isinstance(one, For | While)
        if isinstance(one, For) and one.kind is LoopKind.PIPELINED:  # roles order their copies themselves
            one = replace(one, kind=LoopKind.SERIAL, stages=0, order=(), stage=())
        return (replace(one, body=self.block(one.body)),)


def _is_for_all(one: Stmt) -> bool:
    """Return whether all threads must do a statement together. Raise an author error if roles around it cannot."""
    if isinstance(one, Role) or (_has_roles(one) and not (isinstance(one, For) and one.kind is LoopKind.PARALLEL)):
        return False
    if _is_private(one) or (is_of_a_thread(one) and any(lookup(call.name).by_hand for call in find(one, Call))):
        return False
    own = next((x for x in symbols(one) if isinstance(x, Buffer) and x.scope == "fragment"), None)
    if own is not None or registers_of(one) or _has_roles(one):
        part = "" if own is None else f", each with a part of `{own.name}`"
        why = f"is for all threads{part}, in a loop or branch that roles run by themselves"
        fix = "write it into the T.ws that shall do it"
        raise error("mixed_roles", one.span, what=describe_statement(one), why=why, fix=fix)
    return True


def _is_private(one: Stmt) -> bool:
    """Return whether a statement touches names and variables only, which each thread has for itself."""
    if isinstance(one, For | While | If):
        return all(_is_private(s) for b in vars(one).values() if isinstance(b, Block) for s in b.stmts)
    return isinstance(one, Let | Alloc | Break | Continue) or (isinstance(one, Store) and one.buffer.scope == "var")


def _is_barrier(one: Stmt) -> bool:
    """Return whether a statement is T.sync_threads of the whole block."""
    return isinstance(one, Do) and isinstance(one.call, Call) and one.call.name == "barrier"


def _together(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Merge consecutive roles of the same warps. Names and buffers made between roles come before them."""
    found: list[Stmt] = []
    start = 0  # of the roles at the end
    for one in stmts:
        if not isinstance(one, Role):
            if start < len(found) and _is_pure(one):
                found.insert(start, one)
                start += 1
            else:
                found.append(one)
                start = len(found)
            continue
        for n, other in enumerate(found[start:], start):
            assert isinstance(other, Role)
            if (other.first, other.count) == (one.first, one.count) and one.by_hand and other.by_hand:
                body = Block((*other.body.stmts, *one.body.stmts))
                found[n] = replace(other, body=body, registers=_registers(other.registers, one))
                break
            if other.first < one.first + one.count and one.first < other.first + other.count:
                fix = "give both the same warpgroups, or call T.sync_threads() between them"
                why = "has some of the warps of the role before it, and some others"
                raise error("mixed_roles", one.span, what="T.ws", why=why, fix=fix)
        else:
            found.append(one)
    return found


def _is_pure(one: Stmt) -> bool:
    """Return whether a statement only names a value that reads no memory and calls no function."""
    value = one.value if isinstance(one, Let) else one.init if isinstance(one, Alloc) else one
    return value is None or (not isinstance(value, Stmt) and not contains(value, Load, Call))


def _hand_over(stmts: Sequence[Stmt]) -> Sequence[Stmt]:
    """Name what a tile of one element holds before roles that only load it: each thread has a copy of the tile."""
    for tile in [one.buffer for one in stmts if isinstance(one, Alloc) and one.buffer.scope == "fragment"]:
        if tile.static_shape == (1,):
            named = _with_name(stmts, tile)
            if not any(isinstance(one, Role) and _uses(one, tile) for one in named):
                stmts = named
    return stmts


def _with_name(stmts: Sequence[Stmt], tile: Buffer) -> list[Stmt]:
    """Bind the element of a tile before each row of roles that use it. They load it by that name."""
    found: list[Stmt] = []
    start = 0  # of the roles at the end
    for one in stmts:
        if not isinstance(one, Role):
            start = len(found) + 1
        elif _uses(one, tile) and one.by_hand:
            name = Var(tile.name, tile.dtype)
            found.insert(start, Let(name, Load(tile, (const(0, dt.int32),)), span=one.span))
            start, one = start + 1, _Named(tile, name)(one)
        found.append(one)
    return found


class _Named(Rewriter):
    """Replace loads of a tile of one element by its name."""

    def __init__(self, tile: Buffer, name: Var):
        super().__init__()
        self.tile, self.name = tile, name

    def visit_Load(self, one: Load) -> Expr:
        return self.name if one.buffer is self.tile else self.children(one)


def _own_fragments(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Move the allocation of fragments that only roles use into the roles. Each role gets its own."""
    found: list[Stmt] = []
    mine: dict[Stmt, list[Stmt]] = {}
    for one in stmts:
        tile = one.buffer if isinstance(one, Alloc) and one.buffer.scope == "fragment" else None
        users = [] if tile is None else [s for s in stmts if s is not one and _uses(s, tile)]
        roles = [s for s in users if isinstance(s, Role)]
        if tile is None or not roles or not all(r.by_hand for r in roles):
            found.append(one)
            continue
        if len({(r.first, r.count) for r in roles}) < len(users):
            wrong = next((s for s in users if not isinstance(s, Role)), roles[-1])
            why = "is used by a role and beside it, and each thread has a part of it"
            fix = "use it in one T.ws only, or hand its content over in shared memory"
            notes = [(role.span, "only the threads of this role come here") for role in roles if role is not wrong][:2]
            raise error("mixed_roles", wrong.span, notes, what=f"`{tile.name}`", why=why, fix=fix)
        for r in roles:
            mine.setdefault(r, []).append(one)
    return [_with_own(s, mine[s]) if s in mine else s for s in found]


def _uses(stmt: Stmt, tile: Buffer) -> bool:
    """Return whether a statement names a tile or a view of it."""
    return any(isinstance(x, Buffer) and (x is tile or x.base is tile) for x in symbols(stmt))


def _with_own(user: Stmt, allocs: Sequence[Stmt]) -> Stmt:
    """Move allocations into the role that uses them, as fresh buffers."""
    assert isinstance(user, Role)
    body = Block((*allocs, *user.body.stmts))
    return replace(user, body=Fresh(Block(tuple(allocs)))(body))


# Registers.


def with_registers(one: Role) -> Role:
    """Give a role the registers that its T.set_max_nreg asks for."""
    said = [s for s in one.body.stmts if registers_of(s)]
    if not said:
        return one
    if one.first % WARPGROUP or one.count % WARPGROUP:
        why, fix = f"is said of {one.count} threads from {one.first} on", "give it to whole warpgroups of 128 threads"
        raise error("bad_argument", said[0].span, op="T.set_max_nreg", name="n", why=why, fix=fix)
    made = replace(one, body=Block(tuple(s for s in one.body.stmts if s not in said)))
    counts = [replace(one, registers=registers_of(s), span=s.span) for s in said]
    return replace(made, registers=reduce(_registers, counts, one.registers))


class _WithRegisters(Rewriter):
    """Give each T.ws role the registers that its T.set_max_nreg asks for."""

    def visit_Role(self, one: Role) -> Role:
        return with_registers(one) if one.by_hand else one


def _registers(known: int, one: Role) -> int:
    """Combine the register counts of two parts of a role. Two different counts are an error."""
    if known and one.registers and known != one.registers:
        why, fix = (
            f"is {one.registers}, and other parts of the role have {known} registers",
            "say it once for each role",
        )
        raise error("bad_argument", one.span, op="T.set_max_nreg", name="n", why=why, fix=fix)
    return known or one.registers


def _no_registers(node: Stmt) -> None:
    """Raise an error for a register count that is set for some statements only."""
    wrong = next((n for n in find(node, Do) if registers_of(n)), None)
    if wrong is not None:
        why, fix = "is said of some statements only", "say it in the body of a T.ws itself: it holds for all of it"
        raise error("bad_argument", wrong.span, op="T.set_max_nreg", name="n", why=why, fix=fix)
