# SPDX-License-Identifier: Apache-2.0
"""Keeps WGMMAs in flight across other work by delaying their waits.

A loop that only multiplies waits for the products of its last iteration, not for those of this one; the stages that
they read are released an iteration later. A loop of products, arithmetic on their results, and products again
(attention) is turned by half an iteration: the first products of the next iteration and the second ones of this run
beside its arithmetic. What arithmetic touches of the second products' operands comes after these (FlashAttention-3,
arXiv:2407.08608, section 3.2). With `ping_pong`, warpgroups take turns in starting both (section 3.1). Few first
iterations that take a branch which no later turn takes run before such a loop, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from torch_tile.compiler.context import Build
from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.intrinsics.bulk import ping_pong_call
from torch_tile.intrinsics.traits import Sync
from torch_tile.intrinsics.wgmma import wgmma_wait
from torch_tile.ir import stmt as st
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Const, Expr, Var, binary, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Let, LoopKind, Program, Role, Stmt, calls
from torch_tile.lowering.analysis.branch_range import taken_until
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.hopper.plan_tma_loads import Survey, is_zero
from torch_tile.lowering.pipelining.copy_plan import uses
from torch_tile.tileop.atomic import ArriveLast
from torch_tile.tileop.base import RegisteredOp
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults

ZERO = const(0, int32)
MOST_LEADING = 4  # turns that a loop is not turned for
LAST_BARRIER = 15  # with a number, of a block
MOST_PENDING = 7  # groups that a wait can leave in flight


def async_wgmma(program: Program, build: Build) -> Program:
    """Defer waits for products in the loops of roles; values do not change."""
    return _Async(build)(program) if build.target.has_wgmma else program


class _Async(Rewriter):
    def __init__(self, build: Build):
        self.build = build
        self.products: IdSet[Gemm] = IdSet()
        self.role: Role
        self.sums: IdSet[Buffer] = IdSet()  # integer accumulators
        self.thread = Var("thread", int32, "thread")
        self.known = Ranges()

    def visit_Let(self, let: Let) -> Let:
        """What follows knows the name."""
        self.known = self.known.define(let.var, let.value)
        return let

    def visit_Role(self, role: Role) -> Role:
        """Loops of a role whose order is the compiler's."""
        if role.by_hand:
            return role
        survey = Survey(self.build, self.thread, role.count)
        survey(role.body)
        self.products, self.role = IdSet(survey.products), role
        self.sums = IdSet(op.C.buffer for op in survey.products if op.C.buffer.dtype == int32)
        return self.children(role)

    def visit_Fill(self, op: Fill) -> Stmt:
        """Integer zeros are in registers before products add to them; the assembler would move them in between."""
        return Block((op, WgmmaResults(op.dst, span=op.span))) if op.dst.buffer in self.sums else op

    def visit_For(self, loop: st.For) -> Stmt:
        """A loop with products in its body, inner ones first."""
        new: st.For = self.children(loop)
        counts = is_zero(new.starts[0]) and new.step == 1 and new.kind is LoopKind.SERIAL
        if not counts or not any(s in self.products for s in new.body.stmts):
            return new
        made = self._deferred(new) or self._skewed(new) or self._queued(new)
        return new if made is None else made

    def _remark(self, op: Stmt, text: str) -> None:
        self.build.remark(op.span, "T.gemm", text)

    # Only products.

    def _deferred(self, loop: st.For) -> Stmt | None:
        """One iteration stays in flight; None if the loop does something else, too."""
        stmts = loop.body.stmts
        products = [s for s in stmts if s in self.products]
        waits, arrivals = [s for s in stmts if calls(s, "mbarrier_wait")], [s for s in stmts if _lets_go(s)]
        names = [s for s in stmts if isinstance(s, Let)]
        if len(products) + len(waits) + len(arrivals) + len(names) != len(stmts) or len(products) > MOST_PENDING:
            return None
        if arrivals and not _several_stages(waits):
            return None
        k, stop = loop.vars[0], loop.stops[0]
        body: list[Stmt] = []
        for one in stmts:
            if one in self.products:
                assert isinstance(one, Gemm)
                last = one is products[-1]
                body.append(replace(one, wg_wait=len(products) if last else -1))
            elif one not in arrivals:
                body.append(one)
        if any(s not in arrivals for s in stmts[stmts.index(products[-1]) + 1 :]):
            return None
        if arrivals:
            body.append(If(binary(">", k, ZERO), Block(tuple(_earlier(a, k, k) for a in arrivals)), Block(())))
        main = replace(loop, body=Block(tuple(body)))
        end = [wgmma_wait(0), *_results(products), *(_earlier(a, k, stop) for a in arrivals)]
        self._remark(products[0], "an iteration of products stays in flight beside the next")
        return _if_any((main, *end), stop)

    # Products behind each other.

    def _queued(self, loop: st.For) -> Stmt | None:
        """Products are in flight together, and beside what stands between them and does not touch what they use; None
        if there are no such.
        """
        body: list[Stmt] = []
        row: list[Stmt] = []
        for one in loop.body.stmts:
            goes_on = calls(one, "mbarrier_wait") or _lets_go(one) or self._is_apart(one, row)
            if one in self.products or (row and goes_on):
                row.append(one)
            else:
                body += [*self._row(row), one]
                row = []
        body += self._row(row)
        return replace(loop, body=Block(tuple(body))) if len(body) != len(loop.body.stmts) else None

    def _is_apart(self, one: Stmt, row: Sequence[Stmt]) -> bool:
        """Whether a statement neither touches what the products among `row` leave nor changes what they read."""
        if not isinstance(one, Alloc | Let | st.For | RegisteredOp) or contains(one, st.Do):
            return False
        reads, writes = uses(one)
        products = [s for s in row if isinstance(s, Gemm) and s in self.products]
        left = IdSet(op.C.buffer for op in products)
        read = IdSet(r.buffer for op in products for r in (op.A, op.B))
        return not left & IdSet(r.buffer for r in reads) and not (left | read) & IdSet(writes)

    def _row(self, row: Sequence[Stmt]) -> Sequence[Stmt]:
        """Products one behind the other: each tile is released when those that read it are done."""
        left = sum(one in self.products for one in row)
        started, arrivals = _apart(row)
        after = [sum(s in self.products for s in row[n:]) for n, one in enumerate(row) if one in arrivals]
        if left < 2 or max(after, default=0) > MOST_PENDING:
            return row
        ends: list[Stmt] = []
        pending = left
        for one in row:
            left -= one in self.products
            if one in arrivals:
                ends += [wgmma_wait(left), one]
                pending = left
        if pending:
            ends.append(wgmma_wait(0))
        self._remark(next(s for s in row if s in self.products), "beside what follows")
        return [*_started(started), *ends, *_results(row)]

    # Products, arithmetic, products.

    def _skewed(self, loop: st.For) -> Stmt | None:
        """The loop turned by half an iteration; None if it is not made so."""
        parts = self._parts(loop)
        if parts is None:
            return None
        k, stop = loop.vars[0], loop.stops[0]
        lead, count, passed = _lead(loop, parts, self.known)
        free, bound = _divided(replace(parts, between=tuple(s for s in parts.between if s not in passed)))
        ahead = simplify(k + 1)

        def at(iteration: Expr) -> Instance:
            return Instance(IdMap([(k, iteration)]), IdMap(), fresh=True)

        following, same = at(ahead), Instance(IdMap(), IdMap(), fresh=False)
        take, give, around = self._ping_pong(loop)
        body = [
            *take,
            *_all(following, _started(parts.first)),
            *_all(same, _started(parts.second)),
            *give,
            wgmma_wait(sum(isinstance(s, Gemm) for s in parts.second)),
            *_results(parts.first),
            *_all(following, parts.release),
            *_all(following, free),
            wgmma_wait(0),
            *_results((*parts.first, *parts.second)),
            *_all(same, parts.last),
            *_all(following, bound),
        ]
        end = at(simplify(stop - 1))
        epilogue = [*_all(end, _sync(parts.second)), *_all(end, parts.last)]
        main = replace(loop, starts=(simplify(count - 1),), stops=(simplify(stop - 1),), body=Block(tuple(body)))
        whole = _if_any((*lead, *around(main), *epilogue), stop)
        self._remark(
            next(s for s in parts.first if isinstance(s, Gemm)), "beside the arithmetic of the iteration before"
        )
        self._remark(
            next(s for s in parts.second if isinstance(s, Gemm)), "beside the arithmetic of the iteration after"
        )
        return Block((*parts.allocs, whole))

    def _ping_pong(self, loop: st.For) -> tuple[list[Stmt], list[Stmt], Callable[[Stmt], list[Stmt]]]:
        """What stands before and after products that warpgroups start in turns, and the loop with what it needs."""
        count = self.role.count // WARPGROUP
        if not loop.ping_pong or count < 2:
            return [], [], lambda main: [main]
        open_, take, give, close = (
            replace(ping_pong_call(what, LAST_BARRIER + 1 - count, self.role.first // WARPGROUP, count), span=loop.span)
            for what in ("open", "take", "pass", "close")
        )
        return [take], [give], lambda main: [open_, main, close]

    def _parts(self, loop: st.For) -> _Parts | None:
        """The loop's body in its parts; None if it has others."""
        if contains(loop.body, ArriveLast):  # what is written before it stays before it
            return None
        allocs = tuple(s for s in loop.body.stmts if isinstance(s, Alloc))
        stmts = [s for s in loop.body.stmts if not isinstance(s, Alloc)]
        if any(n in self.products for s in stmts if not isinstance(s, Gemm) for n in find(s, Gemm)):
            return None
        places = [n for n, s in enumerate(stmts) if s in self.products]
        if sum(isinstance(s, Gemm) for s in stmts) != len(places) or len(places) < 2:
            return None
        quiet = [calls(s, "mbarrier_wait") or _lets_go(s) for s in stmts]
        busy = [n for n, s in enumerate(stmts) if n not in places and not quiet[n] and not isinstance(s, Let)]
        if not busy or not places[0] < busy[0] or not busy[-1] < places[-1]:
            return None
        start = max(n for n in places if n < busy[0]) + 1  # of what lets the first products' tiles go
        begin = start + next(
            (n for n, q in enumerate(quiet[start:]) if not q or calls(stmts[start + n], "mbarrier_wait"))
        )
        finish = busy[-1] + 1
        middle = [n for n in places if begin <= n < finish]
        last = places[-1] + 1
        first, early = _apart(stmts[:start])
        second, late = _apart(stmts[finish:last])
        parts = _Parts(
            allocs, first, (*early, *stmts[start:begin]), tuple(stmts[begin:finish]), second, (*late, *stmts[last:])
        )
        calm = all(quiet[last:]) and _own(parts.between, came=True) == _own(parts.between, came=False)
        names = IdSet(s.var for s in stmts if isinstance(s, Let))
        later = (*parts.second, *parts.last)
        named = any(contains(s, Let) or names.meets(s) for s in later)
        return parts if calm and not middle and not named and _keeps(parts) else None


@dataclass(frozen=True)
class _Parts:
    """A loop's body: `first` products with their waits, `release` of their tiles, arithmetic `between`, `second`
    products with theirs, and what releases the `last` tiles.
    """

    allocs: tuple[Stmt, ...]
    first: tuple[Stmt, ...]
    release: tuple[Stmt, ...]
    between: tuple[Stmt, ...]
    second: tuple[Stmt, ...]
    last: tuple[Stmt, ...]


def _lead(loop: st.For, parts: _Parts, known: Ranges) -> tuple[list[Stmt], Expr, IdSet[Stmt]]:
    """What runs in front of a turned loop: its first iterations one by one, but for the second products of the last of
    them.

    It is one iteration, or the few that take branches which no later iteration takes, as those of a causal mask do if
    the last keys come first. Also their number, and these branches (by identity).
    """
    k, between = loop.vars[0], IdSet(parts.between)
    ends: IdMap[Stmt, Expr] = IdMap()
    for n, one in enumerate(loop.body.stmts):
        end = taken_until(n, loop) if one in between else None
        if end is not None and known.prove(binary("<=", end, const(MOST_LEADING, int32))):
            ends[one] = end
    least = const(1, int32)
    several = [end for end in ends.values() if not known.prove(binary("<=", end, least))]

    def iteration(k_now: Expr, *more: Stmt) -> list[Stmt]:
        at = Instance(IdMap([(k, k_now)]), IdMap(), fresh=True)
        return [*_all(at, _sync(parts.first)), *_all(at, parts.release), *_all(at, parts.between), *_all(at, more)]

    if not several:
        return iteration(ZERO), least, IdSet(ends)
    name, here = Var(f"{k.name}_lead", int32, "let"), Var(k.name, int32, "loop")
    count = reduce(lambda a, b: binary("max", a, b), several)
    bounded = simplify(binary("max", binary("min", count, loop.stops[0]), least))
    rest = If(binary("<", k + 1, name), Block((*_sync(parts.second), *parts.last)), Block(()))
    first = replace(loop, vars=(here,), stops=(name,), body=Block(tuple(iteration(here, rest))))
    return [Let(name, bounded, span=loop.span), first], name, IdSet(ends)


def _apart(stmts: Sequence[Stmt]) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Products, and what releases tiles between them."""
    return tuple(s for s in stmts if not _lets_go(s)), tuple(s for s in stmts if _lets_go(s))


def _keeps(parts: _Parts) -> bool:
    """Whether the first products of an iteration can run before the second ones of the iteration before, of which they
    may not write what those read. Tiles that both read need three stages: a turned loop keeps those of two iterations,
    and of two stages none would be filled meanwhile.
    """
    first = [s for s in parts.first if isinstance(s, Gemm)]
    second = [s for s in parts.second if isinstance(s, Gemm)]
    results = IdSet(op.C.buffer for op in first)
    used = IdSet(r.buffer for op in second for r in (op.A, op.B, op.C))
    if results & used or not all(op.clear_accum or op is not first[0] for op in first):
        return False
    waits = [s for s in parts.first if calls(s, "mbarrier_wait")]
    return len(waits) == len(parts.release) or _several_stages(waits, 3)


def _several_stages(waits: Sequence[Stmt], least: int = 2) -> bool:
    """Whether tiles of an iteration can come while those of the iteration before are kept."""
    stages = [b.shape[0] for s in waits for b in _barriers(s)]
    return all(isinstance(n, Const) and n.value >= least for n in stages)


def _barriers(stmt: Stmt) -> list[Buffer]:
    return [n.buffer for n in find(stmt, Address) if n.buffer.scope == "barrier"]


def _own(between: Sequence[Stmt], came: bool) -> IdSet[Buffer | None]:
    """The tiles (by identity) that arithmetic waits for, or releases: those that the barriers guard.

    One that is waited for here and released behind the second products would be waited for before it is free.
    """
    found = (s for s in between if (calls(s, "mbarrier_wait") if came else _lets_go(s)))
    return IdSet(b.guards for s in found for b in _barriers(s))


def _divided(parts: _Parts) -> tuple[list[Stmt], list[Stmt]]:
    """The arithmetic that can run beside the second products of the iteration before, and what has to wait for them.

    Tiles that the arithmetic reads itself are waited for as they come, and released after all that stands before that.
    """
    second = [s for s in parts.second if isinstance(s, Gemm)]
    touched = IdSet(r.buffer for op in second for r in (op.A, op.B, op.C))
    written = set(touched)
    names: IdSet[Var] = IdSet()
    free: list[Stmt] = []
    bound: list[Stmt] = []
    for one in parts.between:
        reads, writes = uses(one)
        mine = IdSet(writes)
        read = IdSet(r.buffer for r in reads)
        late = bool((read & written) or (mine & (touched | written)) or names.meets(one))
        late = late or bool(bound and _lets_go(one))
        (bound if late else free).append(one)
        if late:
            touched |= read
            written |= mine
            if isinstance(one, Let):
                names.add(one.var)
    return free, bound


def _if_any(stmts: Sequence[Stmt], stop: Expr) -> Stmt:
    """Statements around a loop, if it has an iteration: else sums from before would meet those in flight before the
    wait.
    """
    ran = simplify(binary("<", ZERO, stop))
    made = Block(tuple(stmts))
    return made if is_literal(ran, True) else If(ran, made, Block(()))


def _sync(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Products that are waited for at once."""
    return (replace(s, wg_wait=0) if isinstance(s, Gemm) else s for s in stmts)


def _started(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Products that nobody waits for yet."""
    return (replace(s, wg_wait=-1) if isinstance(s, Gemm) else s for s in stmts)


def _results(stmts: Sequence[Stmt]) -> list[Stmt]:
    """What the products among some statements leave is used only from here on."""
    fragments = IdMap((s.C.buffer, s.C) for s in stmts if isinstance(s, Gemm))
    return [WgmmaResults(region, span=region.span) for region in fragments.values()]


def _all(instance: Instance, stmts: Sequence[Stmt] | Iterator[Stmt]) -> list[Stmt]:
    return [instance(s) for s in stmts]


def _lets_go(one: Stmt) -> bool:
    """Whether a statement is the arrival of warps at an mbarrier."""
    if isinstance(one, If):
        return len(one.then.stmts) == 1 and not one.otherwise.stmts and calls(one.then.stmts[0], "mbarrier_arrive")
    return calls(one, "warp_arrive")


def _earlier(arrival: Stmt, k: Var, iteration: Expr) -> Stmt:
    """The arrival of the iteration before `iteration`, whose stage is counted without negative numbers."""
    (barrier,) = _barriers(arrival)
    stages = barrier.shape[0]
    new: Stmt = Instance(IdMap([(k, simplify(iteration + stages - 1))]), IdMap(), fresh=False)(arrival)
    return new


# Removes ping-pong scheduling where a barrier between the products would deadlock it.
#
# One that waits at a barrier for the others, while they wait for their turn, would wait for ever. Where a barrier has
# come to lie between `turn_take` and `turn_pass`, for what threads write to a tile that a product reads, the turns
# go: they order time only, never values. A loop that asks for turns and has none is reported with the reason.

OTHERWISE = "only several warpgroups take them, by wgmma, in a loop of products, arithmetic, and products again"


def resolve_ping_pong(program: Program, build: Build) -> Program:
    """Drop the turns of warpgroups that meet within one, and report what became of all."""
    asked = {n.span: OTHERWISE for n in find(program, For) if n.ping_pong}
    if not asked:
        return program
    dropped: IdSet[Do] = IdSet()
    for group, conflicts in _ping_pong(program):
        why = (
            "threads meet at a barrier between the products"
            if conflicts
            else ""
            if len(group) > 2
            else "no turn is left"
        )
        asked[group[0].span] = why
        dropped |= IdSet(group if why else ())
    for span, why in asked.items():
        build.remark(span, "T.Pipelined", f"{'no ' if why else ''}turns of warpgroups in starting products", why)
    return _Drop(dropped)(program) if dropped else program


def _ping_pong(program: Program) -> Iterator[tuple[list[Do], bool]]:
    """The calls of each kind of turns, from `turn_open` to `turn_close`, and whether threads meet within one."""
    calls: list[Do] = []
    inside = conflicts = False
    for node in find(program, Do):
        found = intrinsic_of(node)
        if found is not None and found.sync is Sync.TURN:
            calls.append(node)
            inside = found.name == "turn_take"
        elif inside:
            conflicts |= found is not None and found.meets
        if found is not None and found.name == "turn_close":
            yield calls, conflicts
            calls, conflicts = [], False


class _Drop(Rewriter):
    """Drops statements."""

    def __init__(self, dropped: IdSet[Do]):
        self.dropped = dropped

    def visit_Do(self, node: Do) -> Stmt:
        """Nothing, or what it was."""
        return Block(()) if node in self.dropped else node
