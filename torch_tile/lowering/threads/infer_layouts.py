# SPDX-License-Identifier: Apache-2.0
"""Give every shared buffer and fragment a layout, and divide every T.Parallel loop among the threads.

First the pass fixes what ops require. It then propagates known layouts in program order until nothing changes.
Fragments that nests use slice by slice follow last. Then it spreads the first loop that is still open for coalesced
access, and propagates again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from torch_tile.compiler.context import Build, Placement
from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.layout import replicated, row_major, shared_tile, spread
from torch_tile.ir.node import Node, Rewriter, children, find, with_fields
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, LoopKind, Program, Role, Stmt, Store, While
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.parallel.nest import Nest, is_static, nest_of
from torch_tile.tileop.parallel.op import contiguous, default_layout, demands, following
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext, role_context

Element = Load | Store


def infer_layouts(program: Program, build: Build) -> Program:
    """Set `Buffer.layout` of all on-chip tiles and `For.layout` of T.Parallel loops. Raises on layout_conflict."""
    kernels = tuple(_infer_kernel_layouts(kernel, build) for kernel in program.kernels)
    return replace(program, kernels=kernels)


@dataclass
class _Member:
    """A tile op or T.Parallel loop, with the threads and facts of its place."""

    node: RegisteredOp | For
    ctx: ThreadContext
    nest: Nest | None = None

    def demands(self, known: Layouts, grown: bool = False) -> list[Demand]:
        """Return the layouts that follow from the known ones; if `grown`, those of fragments that a nest slices."""
        if isinstance(self.node, RegisteredOp):
            return self.node.infer_layout(known, self.ctx)
        assert self.nest is not None
        if all(known.get(use.buffer) is not None for use in self.nest.fragments):
            return []
        layout = following(self.nest, known, self.ctx, partial=False)
        return [] if layout is None else demands(self.nest, layout, known, self.ctx, grown)

    def points(self) -> int:
        """Return the number of iterations of a nest, else 0: the largest nests get their default layouts first."""
        return math.prod(self.nest.extents) if self.nest is not None else 0

    def default_demands(self, known: Layouts) -> list[Demand]:
        """Return the layouts that follow if this member takes its default."""
        nest = self.nest
        if nest is None or all(known.get(use.buffer) is not None for use in nest.fragments):
            return []
        layout = following(nest, known, self.ctx, partial=True) or default_layout(nest, self.ctx)
        return demands(nest, layout, known, self.ctx)


def _infer_kernel_layouts(kernel: Kernel, build: Build) -> Kernel:
    """Infer the layouts of one kernel and apply them."""
    kernel = private_vars(kernel)
    survey = _Survey(build, kernel)
    survey(kernel)
    known = Layouts()
    _require(survey, known)
    _propagate(survey.members, known)
    for member in survey.members:
        grown = [_decide(demand, known) for demand in member.demands(known, grown=True)]
        if any(grown):
            _propagate(survey.members, known)
    for member in sorted(survey.members, key=lambda m: -m.points()):
        opened = [_decide(d, known) for d in member.default_demands(known)]
        if opened:
            _propagate(survey.members, known)
    if not build.options.measured:
        _part_banks(survey.members, known)
    _fill_up(survey, known)
    build.placements += [Placement(d.buffer.name, d.buffer.scope, str(d.layout), d.why, d.span) for d in known]
    new: Kernel = _Apply(known, survey.members)(kernel)
    return new if new.thread is not None else replace(new, thread=survey.running)


def _decide(demand: Demand, known: Layouts) -> bool:
    """Set the layout of a buffer that has none yet; return whether this is new."""
    if known.get(demand.buffer) is not None:
        return False
    known.decide(demand)
    return True


def _require(survey: _Survey, known: Layouts) -> None:
    """Set the layouts of authors, then those that ops require, then those that products prefer."""
    for buffer in survey.buffers:
        if buffer.layout is not None:
            known.decide(Demand(buffer, buffer.layout, True, "annotated", buffer.span))
    ops = [m for m in survey.members if isinstance(m.node, RegisteredOp)]
    for member in ops:
        for demand in member.demands(known):
            decided = known.reason(demand.buffer)
            if demand.required and decided is not None and decided.layout != demand.layout:
                raise _conflict(decided, demand)
            if demand.required:
                known.decide(demand)
    for member in ops:
        if isinstance(member.node, Gemm):
            for demand in member.demands(known):
                _decide(demand, known)
    for buffer in survey.scalars:
        shape = buffer.static_shape
        if shape is not None:
            _decide(Demand(buffer, replicated(shape, survey.count(buffer)), False, "read outside T.Parallel"), known)


def _propagate(members: list[_Member], known: Layouts) -> None:
    """Ask all members for layouts that follow from known ones, until none is new."""
    waiting = len(members)  # members still to ask until no member gives a new layout
    for member in itertools.cycle(members):
        if not waiting:
            break
        waiting -= 1
        news = [_decide(demand, known) for demand in member.demands(known)]
        if any(news):
            waiting = len(members)


def _part_banks(members: list[_Member], known: Layouts) -> None:
    """Swizzle the shared tiles that loops store from fragments: the rows that a warp stores lie in the same banks."""
    for nest in (member.nest for member in members if member.nest is not None and member.nest.fragments):
        for use in nest.memory:
            shape = use.buffer.static_shape
            if use.stored and use.buffer.scope == "shared" and shape is not None and contiguous(use, nest) is not None:
                layout, why = shared_tile(shape, use.buffer.dtype.bits), "swizzled against bank conflicts of a loop"
                _decide(Demand(use.buffer, layout, False, why, nest.loop.span), known)


def _fill_up(survey: _Survey, known: Layouts) -> None:
    """Set default layouts of the remaining buffers."""
    for buffer in survey.buffers:
        shape = buffer.static_shape
        if shape is None:
            continue
        if buffer.scope == "shared":
            layout, why = row_major(shape), "row-major"
        else:
            layout, why = spread(shape, survey.count(buffer), 1), "spread over the threads"
        _decide(Demand(buffer, layout, False, why), known)


def _conflict(first: Demand, second: Demand) -> TileError:
    """Build the error for two different required layouts of one buffer."""
    notes = [(first.span, f"{first.layout}   ({first.why})"), (second.span, f"{second.layout}   ({second.why})")]
    return error("layout_conflict", second.span, notes, buffer=first.buffer.name)


class _Survey(Known):
    """Collect tile ops and T.Parallel loops in program order, and the buffers that they may use."""

    def __init__(self, build: Build, kernel: Kernel):
        super().__init__()
        self.build = build
        self.of_block = math.prod(kernel.threads)
        self.running = Var("thread", dt.int32, "thread") if kernel.thread is None else kernel.thread
        self.role: Role | None = None
        self.counts: IdMap[Buffer, int] = IdMap()  # how many threads share a buffer
        self.members: list[_Member] = []
        self.buffers: list[Buffer] = []
        self.scalars: list[Buffer] = []

    def context(self) -> ThreadContext:
        """Return the threads and facts of the current statement."""
        known = dict(self.names)
        if self.role is None:
            return ThreadContext(self.build, self.running, self.of_block, self.ranges, known)
        return role_context(self.role, self.build, self.running, self.ranges, known)

    def visit_Role(self, role: Role) -> Role:
        """Visit a role with its own threads."""
        self.role = role
        super().visit_Role(role)
        self.role = None
        return role

    def count(self, buffer: Buffer) -> int:
        """Return the number of threads that share a fragment."""
        return self.counts.get(buffer, self.of_block)

    def visit_RegisteredOp(self, op: RegisteredOp) -> RegisteredOp:
        """Record an op on whole tiles."""
        ctx, loop = self.context(), op.as_loop()
        nest = nest_of(loop, ctx.values) if loop is not None and is_static(loop) else None
        self.members.append(_Member(op, ctx, nest))
        return op

    def visit_For(self, loop: For) -> For:
        """Record a parallel nest and its tiles, or visit another loop."""
        if loop.kind is not LoopKind.PARALLEL:
            return super().visit_For(loop)  # type: ignore[return-value]
        for node in find(loop.body, Alloc):
            if _is_tile(node.buffer):
                self._add(node.buffer)
        if is_static(loop):
            ctx = self.context()
            self.members.append(_Member(loop, ctx, nest_of(loop, ctx.values)))
        return loop

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Record a tile."""
        if _is_tile(node.buffer):
            self._add(node.buffer)
        return self.children(node)

    def _add(self, tile: Buffer) -> None:
        """Record a tile and the threads that share it."""
        self.buffers.append(tile)
        if self.role is not None:
            self.counts[tile] = self.role.count

    def visit_Load(self, node: Load) -> Load:
        """Record a fragment whose element all threads read."""
        return self._scalar(node)  # type: ignore[return-value]

    def visit_Store(self, node: Store) -> Store:
        """Record a fragment whose element all threads set."""
        return self._scalar(node)  # type: ignore[return-value]

    def _scalar(self, node: Element) -> Element:
        """Record a fragment that is accessed element by element."""
        if node.buffer.scope == "fragment":
            self.scalars.append(node.buffer)
        return self.children(node)


class _Apply(Rewriter):
    """Write the inferred layouts into buffers and loops."""

    def __init__(self, known: Layouts, members: list[_Member]):
        self.known = known
        self.members = IdMap((m.node, m) for m in members)
        self.made: IdMap[Buffer, Buffer] = IdMap()

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        """Return the buffer with its layout."""
        if not _is_tile(buffer):
            return buffer
        found = self.made.get(buffer)
        if found is None:
            found = self.made[buffer] = with_fields(buffer, layout=self.known.get(buffer))
        return found

    def visit_Alloc(self, node: Alloc) -> Alloc:
        return with_fields(self.children(node), buffer=self.visit_Buffer(node.buffer))

    def visit_For(self, loop: For) -> For:
        """Give a parallel nest its layout."""
        member = self.members.get(loop)
        new: For = self.children(loop)
        if member is None or member.nest is None or loop.layout is not None:
            return new
        layout = following(member.nest, self.known, member.ctx, partial=True)
        return replace(new, layout=layout or default_layout(member.nest, member.ctx))


def _is_tile(buffer: Buffer) -> bool:
    """Return whether a buffer is in shared memory or a fragment."""
    return buffer.scope in ("shared", "fragment")


# A variable that each iteration of a T.Parallel nest sets before it reads it becomes a variable of the iteration.
#
# Such variables come from names that a kernel binds again. They change only where no later statement reads the value.


def private_vars(kernel: Kernel) -> Kernel:
    """Give nests variables of their own, unless that changes a value."""
    stored = {
        n.buffer: None
        for loop in find(kernel, For)
        if loop.kind is LoopKind.PARALLEL
        for n in find(loop.body, Store)
        if n.buffer.scope == "var"
    }
    private = {buffer for buffer in stored if _Reads(buffer).are_covered(kernel.body)}
    return _Own(private)(kernel) if private else kernel


class _Reads:
    """Check whether every read of a variable sees a value set outside nests or by its own iteration."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer
        self.covered = True

    def are_covered(self, body: Block) -> bool:
        """Return the answer for the whole kernel."""
        self._block(body.stmts, False)
        return self.covered

    def _block(self, stmts: Iterable[Stmt], known: bool) -> bool:
        """Check the reads of the variable in statements; return whether its value is known afterwards."""
        for one in stmts:
            known = self._statement(one, known)
        return known

    def _statement(self, one: Stmt, known: bool) -> bool:
        """Check the reads of the variable in one statement; return whether its value is known afterwards."""
        if isinstance(one, Alloc) and one.buffer is self.buffer:
            return one.init is not None
        if isinstance(one, Block):
            return self._block(one.stmts, known)
        if isinstance(one, If):
            self._reads((one.condition,), known)
            ways = [self._block(branch.stmts, known) for branch in (one.then, one.otherwise)]
            return all(ways)
        if isinstance(one, For | While):
            self._reads([c for c in children(one) if not isinstance(c, Stmt)], known)
            sets = any(n.buffer is self.buffer for n in find(one.body, Store))
            nest = isinstance(one, For) and one.kind is LoopKind.PARALLEL
            after = self._block(one.body.stmts, known and not sets)
            return known if not sets else known and after and not nest
        self._reads((one,), known)
        return known or (isinstance(one, Store) and one.buffer is self.buffer)

    def _reads(self, nodes: Iterable[Node], known: bool) -> None:
        """Note whether a read of the variable sees an unknown value."""
        if not known:
            self.covered &= not any(n.buffer is self.buffer for node in nodes for n in find(node, Load))


class _Own(Rewriter):
    """Replace variables in `private` by a variable of each nest."""

    def __init__(self, private: Set[Buffer]):
        self.private = private
        self.here: dict[Buffer, Buffer] = {}

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        return self.here.get(buffer, buffer)

    def visit_For(self, loop: For) -> For:
        """Give a parallel nest copies of the private variables that it sets."""
        if loop.kind is not LoopKind.PARALLEL or self.here:
            return self.children(loop)
        stored = {n.buffer: None for n in find(loop.body, Store) if n.buffer in self.private}
        made_here = {n.buffer for n in find(loop.body, Alloc)}  # buffers that the iteration owns already
        self.here = {buffer: replace(buffer) for buffer in stored if buffer not in made_here}
        allocs = tuple(Alloc(b, span=loop.span) for b in self.here.values())
        new: For = self.children(loop)
        self.here = {}
        return replace(new, body=Block((*allocs, *new.body.stmts))) if allocs else new
