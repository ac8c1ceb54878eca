# SPDX-License-Identifier: Apache-2.0
"""Keep WGMMAs in flight across other work by delaying their waits.

A loop that only multiplies waits for the products of the previous iteration, not for those of the current one. It
releases the stages of those products one iteration later.

A loop of products, arithmetic on their results, and products again (attention) is shifted by half an iteration. Two
groups of products then run beside the arithmetic of this iteration: the first ones of the next iteration and the second
ones of this one. Arithmetic on operands of the second products comes after these products (FlashAttention-3,
arXiv:2407.08608, section 3.2). With `ping_pong`, warpgroups take turns in starting both (section 3.1). The first few
iterations may take a branch that later iterations skip. They then run before such a loop, one by one.

A loop of arithmetic that fills shared operands, and then products, gets two versions of these operands. An example is
a loop that decodes weights. The products of one iteration then run beside the arithmetic of the next one.

A loop of one product and arithmetic on its result (sums of two levels) gets a second accumulator. The product of the
next iteration then runs beside the arithmetic of this one. The two accumulators take turns.

A short loop of products with sums of their own is unrolled. Each product starts in front of the arithmetic on the
result of the product before (unroll_steps.py).

In other loops of one warpgroup a statement waits only for those products of its iteration whose tiles it touches.
"""

from __future__ import annotations

import math
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
from torch_tile.ir.dtype import float32, int32
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, Var, binary, const, is_zero
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, calls
from torch_tile.lowering.analysis.branch_range import taken_until
from torch_tile.lowering.analysis.clone import Instance, versions_of
from torch_tile.lowering.analysis.whole_writes import writes_whole
from torch_tile.lowering.hopper.plan_tma_loads import Survey
from torch_tile.lowering.hopper.unroll_steps import is_release, unroll_steps
from torch_tile.lowering.pipelining.count_stages import is_counted
from torch_tile.tileop.atomic import ArriveLast
from torch_tile.tileop.base import RegisteredOp
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults
from torch_tile.tileop.uses import count_uses, reads_of, touched_by, uses, writes_of

ZERO = const(0, int32)
NOTHING_KNOWN = Ranges()
MOST_LEADING = 4  # most iterations that run in front of a shifted loop
LAST_BARRIER = 15  # highest number of a block's named barriers
MOST_REGISTERS = 240  # of a thread
OTHERS = 24  # of its registers, for anything but fragments, where it has a second accumulator
MOST_PENDING = 7  # most groups that a wait can leave in flight


LEFT_OUT = "a warpgroup leaves out first iterations that change nothing in its rows"  # of the report
DOUBLED = "in flight beside the arithmetic of the next iteration, with two versions of"  # of the report


def async_wgmma(program: Program, build: Build, single: bool = False) -> Program:
    """Defer waits for products in the loops of roles. With `single` tiles that threads write keep one version."""
    return _Async(build, single)(program) if build.target.has_wgmma else program


class _Async(Rewriter):
    """Delay the waits for products in the roles of a program; one method tries each form of loop."""

    def __init__(self, build: Build, single: bool):
        self.build, self.single = build, single
        self.doubled: IdMap[Buffer, Buffer] = IdMap()  # tiles that got a second version
        self.kernel: Kernel
        self.products: IdSet[Gemm] = IdSet()
        self.role: Role
        self.sums: IdSet[Buffer] = IdSet()  # integer accumulators
        self.thread = Var("thread", int32, "thread")
        self.known = Ranges()
        self.apart: IdSet[Var] = IdSet()  # names whose values differ between warpgroups

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Rewrite the roles of a kernel, then allocate the tiles that got a second version."""
        self.kernel, self.doubled = kernel, IdMap()
        new: Kernel = self.children(kernel)
        return _Reallocated(self.doubled)(new) if self.doubled else new

    def visit_Let(self, let: Let) -> Let:
        """Record the range of a name for the statements that follow, and whether it differs between warpgroups."""
        self.known = self.known.define(let.var, let.value)
        if self.apart.any_in(let.value) or any(n.role == "thread" for n in find(let.value, Var)):
            self.apart.add(let.var)
        return let

    def visit_Role(self, role: Role) -> Role:
        """Rewrite the loops of a role that the compiler made; leave roles of the author alone."""
        if role.by_hand:
            return role
        survey = Survey(self.build, self.thread, role.count)
        survey(role.body)
        self.products, self.role = IdSet(survey.products), role
        self.sums = IdSet(op.C.buffer for op in survey.products if op.C.buffer.dtype == int32)
        return self.children(role)

    def visit_Fill(self, op: Fill) -> Stmt:
        """Pin integer zeros in registers before products add to them, or the assembler would move them in between."""
        return Block((op, WgmmaResults(op.dst, span=op.span))) if op.dst.buffer in self.sums else op

    def visit_For(self, loop: st.For) -> Stmt:
        """Rewrite a loop that has products in its body, after the loops inside it."""
        found: st.For = self.children(loop)
        new, skip = replace(found, skip=None) if found.skip is not None else found, found.skip
        counts = is_zero(new.starts[0]) and new.step == 1 and new.kind is LoopKind.SERIAL
        if not counts or not any(s in self.products for s in new.body.stmts):
            return new
        made = (
            self._deferred(new) or self._skewed(new, skip) or self._alternated(new) or self._doubled(new)
            or self._unrolled(new) or self._queued(new)
        )  # fmt: skip
        return new if made is None else made

    def _remark(self, op: Stmt, text: str) -> None:
        """Report a decision about a product to the author."""
        self.build.remark(op.span, "T.gemm", text)

    # Loops of products only.

    def _deferred(self, loop: st.For) -> Stmt | None:
        """Keep the products of one iteration in flight; return None if the loop does anything but multiply."""
        stmts = loop.body.stmts
        products = [s for s in stmts if s in self.products]
        waits, arrivals = [s for s in stmts if calls(s, "mbarrier_wait")], [s for s in stmts if is_release(s)]
        names = [s for s in stmts if isinstance(s, Let)]
        if len(products) + len(waits) + len(arrivals) + len(names) != len(stmts) or len(products) > MOST_PENDING:
            return None
        if arrivals and not _several_stages(waits):
            return None
        if any(s not in arrivals for s in stmts[stmts.index(products[-1]) + 1 :]):
            return None
        if arrivals:
            self._remark(products[0], "an iteration of products stays in flight beside the next")
        return _one_behind(loop, stmts, products, arrivals)

    # Loops of arithmetic that fills operands, and products.

    def _doubled(self, loop: st.For) -> Stmt | None:
        """Keep the products of one iteration in flight beside the arithmetic of the next one.

        Shared operands that the arithmetic writes get two versions. Return None if the loop has no such form. The
        registers of two warpgroups fill a multiprocessor, so that more shared memory costs no block.
        """
        stmts = loop.body.stmts
        products = [s for s in stmts if isinstance(s, Gemm) and s in self.products]
        if self.single or self.build.options.measured or len(products) > MOST_PENDING or self.kernel.min_blocks > 1:
            return None
        if self.role.count < 2 * WARPGROUP or sum(1 for _ in find(loop.body, Gemm)) != len(products):
            return None
        head, tail = stmts[: stmts.index(products[0])], stmts[stmts.index(products[0]) :]
        arrivals = [s for s in tail if is_release(s)]
        if any(s not in self.products and s not in arrivals and not calls(s, "mbarrier_wait") for s in tail):
            return None
        if not all(_syncs_by_tiles(s) for s in head) or contains(loop.body, ArriveLast) or stmts[-1] in self.products:
            return None
        if not _several_stages([s for s in stmts if calls(s, "mbarrier_wait")]):
            return None
        written = IdSet(b for s in head for b in writes_of(s))
        if any(op.C.buffer in touched_by(s) for s in head for op in products):
            return None
        filled = [b for b in IdSet(r.buffer for op in products for r in (op.A, op.B)) if b in written]
        if not filled or not all(self._can_double(b, loop, head) for b in filled):
            return None
        k = loop.vars[0]
        versions: IdMap[Buffer, tuple[Buffer, Expr]] = IdMap()
        for tile in filled:
            self.doubled[tile] = versions_of(tile, 2)
            versions[tile] = self.doubled[tile], simplify(binary("%", k, const(2, int32)))
        self._remark(products[0], f"{DOUBLED} {', '.join(tile.name for tile in filled)}")
        made = _one_behind(loop, stmts, products, arrivals)
        new: Stmt = Instance(IdMap(), versions, fresh=False)(made)
        return new

    def _can_double(self, tile: Buffer, loop: st.For, head: Sequence[Stmt]) -> bool:
        """Return whether each iteration of a loop writes a shared tile anew, and nothing else touches the tile."""
        if tile.scope != "shared" or tile in self.doubled or any(_allocates(s, tile) for s in find(loop, Alloc)):
            return False
        if count_uses(tile, self.kernel.body) != count_uses(tile, loop):
            return False
        return writes_whole(head, tile, self.kernel.thread, self.role.count)

    # Loops of one product, and arithmetic on its result.

    def _alternated(self, loop: st.For) -> Stmt | None:
        """Start the next iteration's product in a second accumulator beside the arithmetic, if registers allow."""
        parts = self._one_product(loop)
        if parts is None:
            return None
        product, (k, stop) = parts.product, (loop.vars[0], loop.stops[0])
        one, fill = product.C.buffer, product.C.buffer
        two = Buffer(fill.name, fill.shape, fill.dtype, fill.scope, layout=fill.layout, span=fill.span)
        pair = Var(k.name, int32, "loop")

        def at(iteration: Expr, sums: Buffer) -> Instance:
            made = Instance(IdMap([(k, simplify(iteration))]), IdMap(), fresh=True)
            made.buffers[one] = sums
            return made

        def start(iteration: Expr, sums: Buffer) -> list[Stmt]:
            """Return the statements that start the product of an iteration."""
            return _clone_all(at(iteration, sums), _started(parts.start))

        def used(iteration: Expr, sums: Buffer, pending: int) -> tuple[list[Stmt], list[Stmt]]:
            """Return the arithmetic in front of an iteration's product, and that behind the wait for it.

            `pending` products may stay in flight.
            """
            here, wait = at(iteration, sums), (wgmma_wait(pending), WgmmaResults(product.C, span=product.span))
            return _clone_all(here, parts.before), _clone_all(here, (*wait, *parts.after))

        # What an iteration reads comes in front of the wait for the next one's tiles. Behind it, reads of shared memory
        # would stand between the parts of a product. Numbers of all columns would fill registers there.
        early = not _has_numbers_of_columns(parts)

        def started(iteration: Expr, sums: Buffer, before: Sequence[Stmt]) -> list[Stmt]:
            """Return the start of a product and, in their order, what the iteration before it reads."""
            first = start(iteration, sums)
            return [*before, *first] if early else [*first, *before]

        body: list[Stmt] = []
        for n, (sums, others) in enumerate(((one, two), (two, one))):
            before, after = used(pair * 2 + n if n else pair * 2, sums, 1)
            body += [*started(pair * 2 + (n + 1), others, before), *after]
        # Rings are counted from the loop's end on. Masks know more of `stop`, which is not negative.
        counted = any(is_counted(n) for n in _stages_waited_for(parts.start))
        value = simplify(binary("//", stop - 1, const(2, int32)))
        name = Let(Var(f"{k.name}_pairs", int32, "let"), value, span=loop.span)
        pairs = name.var if counted else value
        main = replace(loop, vars=(pair,), stops=(pairs,), body=Block(tuple(body)))
        last = pairs * 2 + 1 if counted else simplify(stop - 1)
        before, after = used(pairs * 2 if counted else stop - 2, one, 1)
        ends, odds = used(last, two, 0), used(pairs * 2 if counted else last, one, 0)
        even = [*started(last, two, before), *after, *ends[0], *ends[1]]
        odd = simplify(binary("%", stop, const(2, int32)))
        end = _either(binary("==", odd, ZERO), even, [*odds[0], *odds[1]])
        self._remark(product, "beside the arithmetic of the iteration before, in a second accumulator")
        inside = [s for s in loop.body.stmts if _allocates(s, one)]
        whole = _if_any((*([name] if counted else []), *start(ZERO, one), main, end), stop)
        return Block((*inside, Alloc(two, span=fill.span), whole))

    def _one_product(self, loop: st.For) -> _OneProduct | None:
        """Split a loop's body around its only product; return None if the body has another form."""
        stmts = loop.body.stmts
        products = [s for s in stmts if s in self.products]
        if len(products) != 1 or sum(1 for _ in find(loop.body, Gemm)) != 1 or contains(loop.body, ArriveLast):
            return None
        (product,), place = products, stmts.index(products[0])
        assert isinstance(product, Gemm)
        waits = [s for s in stmts[:place] if calls(s, "mbarrier_wait")]
        names = [s for s in stmts[:place] if isinstance(s, Let)]
        before = [s for s in stmts[:place] if s not in waits and not _allocates(s, product.C.buffer)]
        after, sums = stmts[place + 1 :], product.C.buffer
        busy = [s for s in after if not is_release(s)]
        if not product.clear_accum or not busy or not waits or not _several_stages(waits, 3):
            return None
        quiet = [s for s in (*before, *busy) if not is_release(s)]
        if any(contains(s, st.Do) for s in quiet) or any(contains(s, Load) for s in names):
            return None
        written = IdSet(b for s in (*before, *busy) for b in writes_of(s))
        if any(b.scope == "shared" for b in written) or any(sums in reads_of(s) for s in before) or sums in written:
            return None
        if product.A.buffer in written or product.B.buffer in written:  # in this iteration, before the product
            return None
        held = [*touched_by(loop.body), sums]
        registers = sum(_registers(b, self.role.count) for b in held)
        if registers > _room(self.role) or count_uses(sums, self.role.body) != count_uses(sums, loop):
            return None
        return _OneProduct((*names, *waits, product), tuple(before), product, tuple(after))

    # Loops of products in any order.

    def _queued(self, loop: st.For) -> Stmt | None:
        """Keep products in flight beside statements that touch none of their tiles, and beside later products.

        A statement that touches them waits for these products alone. In a role of several warpgroups it waits for all:
        another's arithmetic runs meanwhile. Return None if no product stays in flight.
        """
        queue = _Queue(self.role.count > WARPGROUP)
        for one in loop.body.stmts:
            if isinstance(one, Gemm) and one in self.products:
                queue.start(one)
            elif is_release(one):
                queue.release(one)
            else:
                queue.run(one)
        queue.wait(0)
        for product in queue.overlapped:
            self._remark(product, "beside what follows")
        return replace(loop, body=Block(tuple(queue.stmts))) if queue.overlapped else None

    def _unrolled(self, loop: st.For) -> Stmt | None:
        """Unroll a short loop, whose products start in front of the arithmetic on the one before.

        Return None for other loops. One warpgroup alone gains nothing: two blocks share its multiprocessor.
        """
        stmts = loop.body.stmts
        products = [s for s in stmts if isinstance(s, Gemm)]
        waits = [s for s in stmts if calls(s, "mbarrier_wait")]
        if self.role.count <= WARPGROUP or not all(s in self.products for s in products) or not _several_stages(waits):
            return None
        made = unroll_steps(loop, self.role.count)
        for product in products if made else ():
            self._remark(product, "beside the arithmetic on the result before")
        return made

    # Loops of products, arithmetic and products.

    def _skewed(self, loop: st.For, skip: Expr | None) -> Stmt | None:
        """Shift a loop by half an iteration; return None if its body has no such form.

        Each warpgroup leaves its first `skip` iterations out, but for waits and releases. The arithmetic may then touch
        nothing but registers.
        """
        parts = self._parts(loop)
        if parts is None:
            return None
        k, stop = loop.vars[0], loop.stops[0]
        take, give, around = self._ping_pong(loop)
        skipped = None if skip is None or not _in_registers(parts.between) else Var(f"{k.name}_skipped", int32, "let")
        lead, count, passed = _lead(loop, parts, self.known, skipped, (*take, *give), self.apart)
        free, bound = _divided(replace(parts, between=tuple(s for s in parts.between if s not in passed)))
        ahead = simplify(k + 1)

        def at(iteration: Expr) -> Instance:
            return Instance(IdMap([(k, iteration)]), IdMap(), fresh=True)

        following, same = at(ahead), Instance(IdMap(), IdMap(), fresh=False)
        behind = IdSet(buffer for one in bound for buffer in touched_by(one))
        used = [s for s in parts.first if isinstance(s, Gemm) and s.C.buffer in behind]
        narrow = any(s.A.buffer.dtype.bits == 8 for s in parts.second if isinstance(s, Gemm))
        alone = self.role.count == WARPGROUP and not narrow  # no other warpgroup's arithmetic is beside its products
        held = [WgmmaResults(s.C, held=True) for s in used if s.C.buffer.dtype == float32 and alone]
        body = [
            *take,
            *_clone_all(following, _started(parts.first)),
            *_clone_all(same, _started(parts.second)),
            *give,
            wgmma_wait(sum(isinstance(s, Gemm) for s in parts.second)),
            *_results(parts.first),
            *_clone_all(following, parts.release),
            *_clone_all(following, free),
            *held,
            wgmma_wait(0, behind=all(s.A.buffer.dtype.bits == 8 for s in parts.second if isinstance(s, Gemm))),
            *_results((*used, *parts.second)),
            *_clone_all(same, parts.last),
            *_clone_all(following, bound),
        ]
        end = at(simplify(stop - 1))
        epilogue = [*_clone_all(end, _sync(parts.second)), *_clone_all(end, parts.last)]
        main = replace(loop, starts=(simplify(count - 1),), stops=(simplify(stop - 1),), body=Block(tuple(body)))
        if skipped is None:
            whole = _if_any((*lead, *around(main), *epilogue), stop, self.known)
        else:
            bounded = simplify(binary("max", binary("min", skip, stop), ZERO))
            left_out = _left_out(loop, parts, skipped, (*take, *give))
            rest = If(binary("<", skipped, stop), Block((*lead, main, *epilogue)), Block(()))
            whole = _if_any((Let(skipped, bounded, span=loop.span), *around(Block((left_out, rest)))), stop)
            self.build.remark(loop.span, "T.Pipelined", LEFT_OUT)
        self._remark(
            next(s for s in parts.first if isinstance(s, Gemm)), "beside the arithmetic of the iteration before"
        )
        self._remark(
            next(s for s in parts.second if isinstance(s, Gemm)), "beside the arithmetic of the iteration after"
        )
        return Block((*parts.allocs, whole))

    def _ping_pong(self, loop: st.For) -> tuple[list[Stmt], list[Stmt], Callable[[Stmt], list[Stmt]]]:
        """Return the statements around products that warpgroups start by turns, and what wraps the loop in turns."""
        count = self.role.count // WARPGROUP
        if not loop.ping_pong or count < 2:
            return [], [], lambda main: [main]
        open_, take, give, close = (
            replace(ping_pong_call(what, LAST_BARRIER + 1 - count, self.role.first // WARPGROUP, count), span=loop.span)
            for what in ("open", "take", "pass", "close")
        )
        return [take], [give], lambda main: [open_, main, close]

    def _parts(self, loop: st.For) -> _Parts | None:
        """Split a loop's body into first products, arithmetic and second products; return None for other bodies."""
        if contains(loop.body, ArriveLast):  # writes in front of T.arrive_last stay in front of it
            return None
        allocs = tuple(s for s in loop.body.stmts if isinstance(s, Alloc))
        stmts = [s for s in loop.body.stmts if not isinstance(s, Alloc)]
        if any(n in self.products for s in stmts if not isinstance(s, Gemm) for n in find(s, Gemm)):
            return None
        places = [n for n, s in enumerate(stmts) if s in self.products]
        if sum(isinstance(s, Gemm) for s in stmts) != len(places) or len(places) < 2:
            return None
        quiet = [calls(s, "mbarrier_wait") or is_release(s) for s in stmts]
        busy = [n for n, s in enumerate(stmts) if n not in places and not quiet[n] and not isinstance(s, Let)]
        if not busy or not places[0] < busy[0] or not busy[-1] < places[-1]:
            return None
        start = max(n for n in places if n < busy[0]) + 1  # the start of the release of the first products' tiles
        begin = start + next(
            (n for n, q in enumerate(quiet[start:]) if not q or calls(stmts[start + n], "mbarrier_wait"))
        )
        finish = busy[-1] + 1
        middle = [n for n in places if begin <= n < finish]
        last = places[-1] + 1
        first, early = _split_releases(stmts[:start])
        second, late = _split_releases(stmts[finish:last])
        parts = _Parts(
            allocs, first, (*early, *stmts[start:begin]), tuple(stmts[begin:finish]), second, (*late, *stmts[last:])
        )
        # Tiles that the arithmetic waits for are released there, or where those of the second products are.
        kept = _waited_for(parts) <= _tiles_of(parts.last, came=False)
        calm = (
            all(quiet[last:]) and kept and _tiles_of(parts.between, came=False) <= _tiles_of(parts.between, came=True)
        )
        names = IdSet(s.var for s in stmts if isinstance(s, Let))
        later = (*parts.second, *parts.last)
        named = any(contains(s, Let) or names.any_in(s) for s in later)
        return parts if calm and not middle and not named and _keeps(parts) and _reads_after_waits(parts) else None


class _Reallocated(Rewriter):
    """Allocate other buffers in place of some."""

    def __init__(self, made: IdMap[Buffer, Buffer]):
        self.made = made

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate the new buffer."""
        new = self.made.get(node.buffer)
        return node if new is None else replace(node, buffer=new)


def _one_behind(loop: st.For, stmts: Sequence[Stmt], products: Sequence[Stmt], arrivals: Sequence[Stmt]) -> Stmt:
    """Wait for the products of each iteration in the next one, and move `arrivals` behind that wait."""
    k, stop = loop.vars[0], loop.stops[0]
    body: list[Stmt] = []
    for one in stmts:
        if isinstance(one, Gemm) and any(one is product for product in products):
            body.append(one.started(len(products) if one is products[-1] else -1))
        elif not any(one is arrival for arrival in arrivals):
            body.append(one)
    if arrivals:
        body.append(If(binary(">", k, ZERO), Block(tuple(_earlier(a, k, k) for a in arrivals)), Block(())))
    end = [wgmma_wait(0), *_results(products), *(_earlier(a, k, stop) for a in arrivals)]
    return _if_any((replace(loop, body=Block(tuple(body))), *end), stop)


def _syncs_by_tiles(one: Stmt) -> bool:
    """Return whether a statement synchronizes by nothing but mbarrier waits for tiles and their releases."""
    found = [intrinsic_of(call) for call in find(one, Call)]
    return calls(one, "mbarrier_wait") or is_release(one) or not any(f is not None and f.by_hand for f in found)


class _Queue:
    """Statements of a loop's body: products are in flight until a statement touches their tiles."""

    def __init__(self, together: bool) -> None:
        self.together = together  # whether a wait is for all products
        self.stmts: list[Stmt] = []
        self.pending: list[Gemm] = []  # oldest first
        self.held: list[tuple[Stmt, int]] = []  # releases, and how many products started before them
        self.started = 0
        self.first = 0  # the place of the oldest product in `stmts`
        self.busy = False  # whether anything runs beside it
        self.overlapped: list[Gemm] = []

    def start(self, product: Gemm) -> None:
        """Start a product behind those whose results it multiplies, or whose operands it adds to."""
        self._wait_for(IdSet([product.A.buffer, product.B.buffer]), IdSet([product.C.buffer]))
        if self.pending:
            self.busy = True
        else:
            self.first, self.busy = len(self.stmts), False
        self.pending.append(product)
        self.started += 1
        self.stmts.append(product.started())

    def release(self, arrival: Stmt) -> None:
        """Release a tile once the products before are done."""
        if self.pending:
            self.held.append((arrival, self.started))
        else:
            self.stmts.append(arrival)

    def run(self, one: Stmt) -> None:
        """Run a statement behind the products whose tiles it touches."""
        if calls(one, "mbarrier_wait") or isinstance(one, Alloc):
            self.stmts.append(one)
            return
        if not isinstance(one, Let | st.For | If | RegisteredOp) or contains(one, st.Do):
            self.wait(0)
        else:
            self._wait_for(touched_by(one), writes_of(one))
        self.busy |= bool(self.pending) and not isinstance(one, Let)
        self.stmts.append(one)

    def _wait_for(self, touched: IdSet[Buffer], written: IdSet[Buffer]) -> None:
        """Wait for products whose results are touched, or whose operands are written."""
        for n in reversed(range(len(self.pending))):
            one = self.pending[n]
            if one.C.buffer in touched or one.A.buffer in written or one.B.buffer in written:
                self.wait(0 if self.together else len(self.pending) - 1 - n)
                return

    def wait(self, left: int) -> None:
        """Wait until at most the `left` youngest products are in flight, and release the tiles of the others."""
        left = min(left, MOST_PENDING)
        place = len(self.pending) - left
        done, self.pending = self.pending[:place], self.pending[place:]
        if not done:
            return
        finished, fewest = self.started - left, MOST_PENDING + 1
        ready = [(arrival, started) for arrival, started in self.held if started <= finished]
        self.held = [(arrival, started) for arrival, started in self.held if started > finished]
        if not self.busy:  # the product waits for itself
            self.stmts[self.first] = done[0]
            self.stmts += [arrival for arrival, _ in ready]
            return
        self.overlapped += done
        for arrival, started in ready:
            if self.started - started < fewest:
                fewest = min(self.started - started, MOST_PENDING)
                self.stmts.append(wgmma_wait(fewest))
            self.stmts.append(arrival)
        if left < fewest:
            self.stmts.append(wgmma_wait(left))
        unfinished = IdSet(one.C.buffer for one in self.pending)
        self.stmts += _results([one for one in done if one.C.buffer not in unfinished])


@dataclass(frozen=True)
class _OneProduct:
    """A loop's body with one product: `start` waits and multiplies, `before` and `after` are the arithmetic."""

    start: tuple[Stmt, ...]
    before: tuple[Stmt, ...]
    product: Gemm
    after: tuple[Stmt, ...]


def _has_numbers_of_columns(parts: _OneProduct) -> bool:
    """Return whether the arithmetic in front of a product writes a number for each column of the product's sums."""
    written, sums = IdSet(b for s in parts.before for b in writes_of(s)), parts.product.C.buffer
    loads = [load for s in parts.after for load in find(s, Load)]
    columns = IdSet(simplify(load.indices[-1]) for load in loads if load.buffer is sums)
    own = [load for load in loads if load.buffer in written and len(load.indices) == 1]
    return any(simplify(load.indices[0]) in columns for load in own)


def _registers(buffer: Buffer, threads: int) -> int:
    """Return how many registers of each of `threads` threads a fragment takes; 0 for other buffers."""
    if buffer.scope != "fragment" or buffer.static_shape is None:
        return 0
    return math.prod(buffer.static_shape) * buffer.dtype.bits // 32 // threads


def _room(role: Role) -> int:
    """Return how many registers of a thread of a role fragments may take, where a loop has two accumulators."""
    return min(role.registers or MOST_REGISTERS, MOST_REGISTERS) - OTHERS


@dataclass(frozen=True)
class _Parts:
    """The parts of a loop's body, in their order.

    `first` are products with their waits, and `release` releases their tiles. `between` is arithmetic. `second` are
    products with their waits, and `last` releases their tiles.
    """

    allocs: tuple[Stmt, ...]
    first: tuple[Stmt, ...]
    release: tuple[Stmt, ...]
    between: tuple[Stmt, ...]
    second: tuple[Stmt, ...]
    last: tuple[Stmt, ...]


def _left_out(loop: st.For, parts: _Parts, skipped: Var, passing: Sequence[Stmt]) -> Stmt:
    """Build the iterations that a warpgroup leaves out: it waits for their tiles, releases them and passes its turns.

    Another warpgroup multiplies in these iterations, and each has one turn in all iterations but the last one.
    """
    k, here = loop.vars[0], Var(loop.vars[0].name, int32, "loop")
    at = Instance(IdMap([(k, here)]), IdMap(), fresh=True)
    kept = [s for s in (*parts.first, *parts.release, *parts.second, *parts.last) if not isinstance(s, Gemm)]
    passed = If(binary("<", here + 1, loop.stops[0]), Block(tuple(passing)), Block(()))
    body = Block((*_clone_all(at, kept), *([passed] if passing else [])))
    return replace(loop, vars=(here,), stops=(skipped,), body=body)


def _in_registers(stmts: Sequence[Stmt]) -> bool:
    """Return whether statements touch nothing but registers of threads, and no thread waits in them."""
    scopes = {buffer.scope for one in stmts for buffer in touched_by(one)}
    return scopes <= {"fragment", "local", "var"} and not any(contains(s, Do) for s in stmts)


def _lead(
    loop: st.For, parts: _Parts, known: Ranges, skipped: Var | None, passing: Sequence[Stmt], apart: IdSet[Var]
) -> tuple[list[Stmt], Expr, IdSet[Stmt]]:
    """Build the statements in front of a shifted loop: its first iterations, without the last one's second products.

    Usually that is one iteration. It is a few if they take branches that no later iteration takes. The branches of a
    causal mask are such if the last keys come first. Also return the end of these iterations, and these branches (by
    identity). With `skipped`, the first iteration has that number. Ends may depend on names that differ between
    warpgroups (`apart`). Each warpgroup then passes its turns here, so that all have equally many.
    """
    k, between = loop.vars[0], IdSet(parts.between)
    ends: IdMap[Stmt, Expr] = IdMap()
    for n, one in enumerate(loop.body.stmts):
        end = taken_until(n, loop) if one in between else None
        if end is not None and known.prove(binary("<=", end, const(MOST_LEADING, int32))):
            ends[one] = end
    begin: Expr = ZERO if skipped is None else skipped
    least = simplify(begin + 1)
    several = [end for end in ends.values() if not known.prove(binary("<=", end, least))]

    def iteration(k_now: Expr, *more: Stmt) -> list[Stmt]:
        at = Instance(IdMap([(k, k_now)]), IdMap(), fresh=True)
        return [
            *_clone_all(at, _sync(parts.first)),
            *_clone_all(at, parts.release),
            *_clone_all(at, parts.between),
            *_clone_all(at, more),
        ]

    if not several:
        return iteration(begin), least, IdSet(ends)
    name, here = Var(f"{k.name}_lead", int32, "let"), Var(k.name, int32, "loop")
    count = reduce(lambda a, b: binary("max", a, b), several)
    bounded = simplify(binary("max", binary("min", count, loop.stops[0]), least))
    passing = passing if skipped is not None or apart.any_in(count) else ()
    rest = If(binary("<", k + 1, name), Block((*_sync(parts.second), *parts.last, *passing)), Block(()))
    first = replace(loop, vars=(here,), starts=(begin,), stops=(name,), body=Block(tuple(iteration(here, rest))))
    return [Let(name, bounded, span=loop.span), first], name, IdSet(ends)


def _split_releases(stmts: Sequence[Stmt]) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Separate products from the statements between them that release tiles."""
    return tuple(s for s in stmts if not is_release(s)), tuple(s for s in stmts if is_release(s))


def _keeps(parts: _Parts) -> bool:
    """Return whether the first products of an iteration can run before the second products of the previous one.

    The first products may not write what the second ones read. Tiles that both read need three stages: a shifted loop
    keeps the tiles of two iterations, and with two stages none could be filled meanwhile.
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
    """Return whether the tiles have enough stages to load one iteration while the previous one is kept."""
    stages = [b.shape[0] for s in waits for b in _barriers(s)]
    return all(isinstance(n, Const) and n.value >= least for n in stages)


def _stages_waited_for(stmts: Sequence[Stmt]) -> list[int]:
    """Return the stages of the rings that statements wait for."""
    found = (b.shape[0] for s in stmts if calls(s, "mbarrier_wait") for b in _barriers(s))
    return [int(n.value) for n in found if isinstance(n, Const)]


def _barriers(stmt: Stmt) -> list[Buffer]:
    """Return the barriers that a statement names."""
    return [n.buffer for n in find(stmt, Address) if n.buffer.scope == "barrier"]


def _tiles_of(between: Sequence[Stmt], came: bool) -> IdSet[Buffer | None]:
    """Return the tiles (by identity) that statements wait for (`came`) or release, by what their barriers guard."""
    found = (s for s in between if (calls(s, "mbarrier_wait") if came else is_release(s)))
    return IdSet(b.guards for s in found for b in _barriers(s))


def _waited_for(parts: _Parts) -> IdSet[Buffer | None]:
    """Return the tiles that the arithmetic waits for and does not release, as it changes operands of the second
    products.

    In a shifted loop the wait comes behind the release of the iteration before. Otherwise one stage would wait for
    itself.
    """
    released = _tiles_of(parts.between, came=False)
    return IdSet(tile for tile in _tiles_of(parts.between, came=True) if tile not in released)


def _reads_after_waits(parts: _Parts) -> bool:
    """Return whether no arithmetic would run in front of the wait for a tile that it reads.

    Waits that come behind the second products leave the arithmetic in front of these without what they bring.
    """
    free, bound = map(IdSet, _divided(parts))
    waits = [n for n, one in enumerate(parts.between) if one in bound and calls(one, "mbarrier_wait")]
    early = (one for one in parts.between[min(waits) :] if one in free) if waits else ()
    return not any(buffer.scope == "shared" for one in early for buffer in reads_of(one))


def _divided(parts: _Parts) -> tuple[list[Stmt], list[Stmt]]:
    """Split the arithmetic: what can run beside the previous iteration's second products, and what must wait for them.

    A tile that the arithmetic reads itself is waited for as it comes. It is released after the arithmetic in front of
    its release.
    """
    second = [s for s in parts.second if isinstance(s, Gemm)]
    touched = IdSet(r.buffer for op in second for r in (op.A, op.B, op.C))
    written = set(touched)
    behind = _waited_for(parts)
    names: IdSet[Var] = IdSet()
    free: list[Stmt] = []
    bound: list[Stmt] = []
    for one in parts.between:
        read, mine = uses(one)
        late = bool((read & written) or (mine & (touched | written)) or names.any_in(one))
        late = late or bool(bound and is_release(one))
        late = late or bool(calls(one, "mbarrier_wait") and _tiles_of((one,), came=True) & behind)
        (bound if late else free).append(one)
        if late:
            touched |= read
            written |= mine
            if isinstance(one, Let):
                names.add(one.var)
    return free, bound


def _either(condition: Expr, then: Sequence[Stmt], otherwise: Sequence[Stmt]) -> Stmt:
    """Run one of two lists of statements; the condition may be known."""
    known = simplify(condition)
    if isinstance(known, Const):
        return Block(tuple(then if known.value else otherwise))
    return If(known, Block(tuple(then)), Block(tuple(otherwise)))


def _allocates(stmt: Stmt, buffer: Buffer) -> bool:
    """Return whether a statement allocates a buffer."""
    return isinstance(stmt, Alloc) and stmt.buffer is buffer


def _if_any(stmts: Sequence[Stmt], stop: Expr, known: Ranges = NOTHING_KNOWN) -> Stmt:
    """Run the statements around a loop only if the loop has an iteration, which may be `known`.

    Otherwise sums from before would meet products that are in flight before the wait.
    """
    ran = simplify(binary("<", ZERO, stop))
    made = Block(tuple(stmts))
    return made if known.prove(ran) else If(ran, made, Block(()))


def _sync(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield the statements with products that are waited for at once."""
    return (replace(s, wg_wait=0) if isinstance(s, Gemm) else s for s in stmts)


def _started(stmts: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield the statements with products that no wait follows yet."""
    return (s.started() if isinstance(s, Gemm) else s for s in stmts)


def _results(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Return markers after which the program may use the results of the products in `stmts`."""
    fragments = IdMap((s.C.buffer, s.C) for s in stmts if isinstance(s, Gemm))
    return [WgmmaResults(region, span=region.span) for region in fragments.values()]


def _clone_all(instance: Instance, stmts: Sequence[Stmt] | Iterator[Stmt]) -> list[Stmt]:
    """Clone several statements."""
    return [instance(s) for s in stmts]


def _earlier(arrival: Stmt, k: Var, iteration: Expr) -> Stmt:
    """Return the arrival of the iteration before `iteration`; its stage is computed without negative numbers."""
    (barrier,) = _barriers(arrival)
    stages = barrier.shape[0]
    new: Stmt = Instance(IdMap([(k, simplify(iteration + stages - 1))]), IdMap(), fresh=False)(arrival)
    return new


# Removes ping-pong scheduling where a barrier between the products would deadlock it.
#
# A warpgroup that waits at a barrier for warpgroups that wait for their turn would wait for ever. insert_barriers may
# put a barrier between `turn_take` and `turn_pass`, for writes to a tile that a product reads. Then this pass removes
# the turns: they order time only, never values. It reports each loop that asks for turns and has none, with the reason.

OTHERWISE = "only several warpgroups take them, by wgmma, in a loop of products, arithmetic, and products again"


def resolve_ping_pong(program: Program, build: Build) -> Program:
    """Remove the turns of warpgroups that meet at a barrier inside a turn, and report all turns."""
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
    """Yield the calls of each group of turns, `turn_open` to `turn_close`, and whether threads meet inside a turn."""
    calls: list[Do] = []
    inside = conflicts = False
    for node in find(program, Do):
        found = intrinsic_of(node)
        if found is not None and found.sync is Sync.TURN:
            calls.append(node)
            inside = found.name == "turn_take"
        elif inside:
            conflicts |= found is not None and found.is_barrier
        if found is not None and found.name == "turn_close":
            yield calls, conflicts
            calls, conflicts = [], False


class _Drop(Rewriter):
    """Remove the given statements."""

    def __init__(self, dropped: IdSet[Do]):
        self.dropped = dropped

    def visit_Do(self, node: Do) -> Stmt:
        """Replace a dropped statement by an empty block."""
        return Block(()) if node in self.dropped else node
