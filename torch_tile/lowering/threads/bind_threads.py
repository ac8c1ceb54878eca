# SPDX-License-Identifier: Apache-2.0
"""Turn the block's program into one thread's: lower tile ops, bind T.Parallel loops, put fragments into registers.

Outside T.Parallel every thread runs every statement. Thread 0 makes the accesses to memory there. There are two
exceptions: statements that name their thread, and statements that only some threads reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Expand, Substitute
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Call, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.layout_ops import offset_of
from torch_tile.ir.node import N, Rewriter
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Do,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Print,
    Program,
    Role,
    Stmt,
    Store,
    While,
)
from torch_tile.lowering.analysis.clone import Instance, place_at
from torch_tile.lowering.analysis.thread_values import Divergence, passing
from torch_tile.lowering.threads.bind_elements import bind_elements, is_everywhere, needs_holder
from torch_tile.lowering.threads.bind_loop import bind_loop, load_of
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import serial, spread, squeezed
from torch_tile.tileop.parallel.nest import is_static
from torch_tile.tileop.threads import ThreadContext, role_context

ZERO = const(0, dt.int32)
Element = Load | Store


def bind_threads(program: Program, build: Build) -> Program:
    """Replace tile ops, T.Parallel loops and fragments by the code of one thread (stage THREAD)."""
    return replace(program, kernels=tuple(_bound(kernel, build) for kernel in program.kernels))


def _bound(kernel: Kernel, build: Build) -> Kernel:
    """Bind one kernel, with a variable for its thread."""
    if kernel.thread is None:
        kernel = replace(kernel, thread=Var("thread", dt.int32, "thread"))
    return _Bind(build, kernel)(kernel)  # type: ignore[no-any-return]


class _Bind(Known):
    """Rewrite a kernel into the code of one thread."""

    def __init__(self, build: Build, kernel: Kernel):
        super().__init__()
        assert kernel.thread is not None
        self.ctx = ThreadContext(build, kernel.thread, math.prod(kernel.threads), self.ranges)
        # True if the code itself says which thread runs it: in a lowered op, or under a branch of some threads.
        self.of_thread = False
        self.parted = False  # whether threads differ in whether they come here
        self.divergence = Divergence(kernel, arrays=True)
        self.unrolled: tuple[For, ...] = ()  # loops around
        self.branches: tuple[Expr, ...] | None = ()  # around that only some threads take; None where loops part them

    def here(self) -> ThreadContext:
        """Return the threads and facts of the current statement."""
        here = replace(self.ctx.at(self.ranges, dict(self.names)), unrolled=self.unrolled, parted=self.parted)
        if not self.parted or self.branches is None:
            return here
        return replace(here, comers=passing(map(Expand(here.values), self.branches), here.thread, here.count))

    def visit_Role(self, role: Role) -> Stmt:
        """Bind the body of a role to the threads of the role."""
        assert self.thread is not None
        outer = self.ctx
        self.ctx = role_context(role, outer.build, self.thread, self.ranges, {})
        new = super().visit_Role(role)
        self.ctx = outer
        return new

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """Lower a tile op and bind the nests that it becomes; one thread of the block makes a bare store."""
        lowered = Instance(IdMap(), IdMap(), fresh=True)(place_at(op, op.lower_cuda(self.here())))
        outer, self.of_thread = self.of_thread, self.of_thread or not isinstance(lowered, Store | Do)
        new = self(lowered)
        self.of_thread = outer
        return new  # type: ignore[no-any-return]

    def visit_For(self, loop: For) -> Stmt:
        """Bind a parallel nest after lowering the ops in it; keep other loops."""
        if loop.kind is not LoopKind.PARALLEL:
            outer = self.unrolled
            if loop.kind is LoopKind.UNROLLED:
                self.unrolled = *outer, loop
            new = self._rewrite_per_thread(self.divergence.is_divergent_loop(loop), super().visit_For, loop)
            self.unrolled = outer
            return new
        lowered: For = _LowerInside(self.here())(loop)
        if is_static(lowered):
            return bind_loop(lowered, self.here())
        return self(_in_chunks(lowered, self.ctx.count))  # type: ignore[no-any-return]

    def visit_If(self, node: If) -> Stmt:
        """Rewrite a branch; if only some threads take it, each of them runs all of its statements."""
        return self._rewrite_per_thread(self.divergence.is_divergent(node.condition), super().visit_If, node)

    def rewrite_where(self, condition: Expr, node: N) -> N:
        """Rewrite a node under a condition, and record the condition if only some threads satisfy it."""
        outer = self.branches
        if outer is not None and self.divergence.is_divergent(condition):
            self.branches = *outer, condition
        new = super().rewrite_where(condition, node)
        self.branches = outer
        return new

    def visit_While(self, loop: While) -> Stmt:
        return self._rewrite_per_thread(self.divergence.is_divergent_loop(loop), self.children, loop)

    def _rewrite_per_thread(self, divergent: bool, rewrite: Callable[[Any], Stmt], node: Stmt) -> Stmt:
        """Rewrite a statement, in which each thread acts for itself if threads diverge there."""
        outer = self.of_thread, self.parted, self.branches
        self.of_thread, self.parted = self.of_thread or divergent, self.parted or divergent
        if divergent and not isinstance(node, If):
            self.branches = None
        new = rewrite(node)
        self.of_thread, self.parted, self.branches = outer
        return new

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Replace a fragment by an array of each thread."""
        if node.buffer.scope != "fragment":
            return self.children(node)
        return Alloc(self.ctx.registers(node.buffer), span=node.span)

    def visit_Load(self, load: Load) -> Load:
        """Replace a load of a fragment's element that all threads hold by a load of a register."""
        new: Load = self.children(load)
        return load_of(new, self.ctx, self.register(new)) if load.buffer.scope == "fragment" else new

    def visit_Let(self, let: Let) -> Stmt:
        """Name a value; an element of a fragment comes from the thread that holds it."""
        if not self.parted and needs_holder(let):
            return bind_elements(let, self.here(), self)
        return self.children(let)

    def visit_Store(self, store: Store) -> Stmt:
        """Store a fragment's element in each thread's copy, and an element in memory by one thread."""
        if not self.parted and needs_holder(store):
            return bind_elements(store, self.here(), self)
        new: Store = self.children(store)
        if store.buffer.scope == "fragment":
            return Store(self.ctx.registers(store.buffer), (self.register(new),), new.value, span=store.span)
        if store.buffer.scope in ("global", "shared"):
            return self.by_one(new, new.indices)
        if isinstance(new.value, Call) and new.value.name == "atomic":
            return self._share_old_value(new, new.buffer, new.value)
        return new

    def _share_old_value(self, store: Stmt, variable: Buffer, update: Call) -> Stmt:
        """Store the old value of an update in a variable; if one thread makes the update, it tells all threads."""
        if self.by_one(store, update.args) is store:
            return store
        told = self.ctx.shared(variable.name, (1,), variable.dtype)
        once = self.by_one(Store(told, (ZERO,), update, span=store.span), update.args)
        return Block((Alloc(told), once, Store(variable, (), Load(told, (ZERO,)), span=store.span)))

    def visit_Do(self, node: Do) -> Stmt:
        """Let one thread make an update of memory."""
        if not self.parted and needs_holder(node):
            return bind_elements(node, self.here(), self)
        new: Do = self.children(node)
        atomic = isinstance(new.call, Call) and new.call.name == "atomic"
        return self.by_one(new, new.call.args) if atomic and isinstance(new.call, Call) else new

    def visit_Print(self, node: Print) -> Stmt:
        """Print by one thread, element by element; fragments go through shared memory."""
        region = node.value
        if not isinstance(region, Region):
            return self.by_one(self.children(node), ())
        message = f"{node.message} {region.buffer.name}".strip()
        tile = region.buffer
        before: tuple[Stmt, ...] = ()
        if tile.scope == "fragment":
            shape = tile.static_shape
            assert shape is not None
            tile = self.ctx.shared(tile.name, shape, tile.dtype)
            names = tuple(Var("ijklmn"[d], dt.int32, "loop") for d in range(tile.rank))
            fill = Block((Store(tile, names, Load(region.buffer, names)),))
            zeros = (ZERO,) * tile.rank
            move = For(LoopKind.PARALLEL, names, zeros, tile.shape, fill, layout=region.buffer.layout)
            before = Alloc(tile), bind_loop(move, self.here())
        whole = Region(tile, region.ranges)

        def nest(rest: Sequence[Expr], point: tuple[Expr, ...]) -> Stmt:
            if not rest:
                return Print(message, Load(tile, spread(whole, point)), span=node.span)
            return serial(rest[0], lambda v: nest(rest[1:], (*point, v)), name="ijklmn"[len(point)])

        return Block((*before, self.by_one(self.children(nest(squeezed(whole), ())), ())), span=node.span)

    def register(self, node: Element) -> Expr:
        """Return the register in which every thread holds an element; the fragment must be replicated."""
        layout = node.buffer.layout
        assert layout is not None
        if not is_everywhere(layout):
            notes = [(node.span, f"{layout}   (no thread holds all of it)")]
            raise error("layout_conflict", node.span, notes, buffer=node.buffer.name)
        return offset_of(layout, "r", node.indices, self.ranges)

    def by_one(self, node: Stmt, operands: Sequence[Expr]) -> Stmt:
        """Run `node` in thread 0, unless its operands name their thread or differ between threads."""
        if self.of_thread or any(self.divergence.is_divergent(o) for o in operands):
            return node
        first = binary("==", self.ctx.thread, ZERO)
        return If(first, node if isinstance(node, Block) else Block((node,)), Block(()), span=node.span)


def _in_chunks(loop: For, count: int) -> Stmt:
    """Split a nest with extents known only at run time into serial loops around a nest of `count` iterations."""
    names = tuple(Var(v.name, v.type, "loop") for v in loop.vars)
    values: dict[Var, Expr] = {}
    last = len(names) - 1
    for d, (old, new) in enumerate(zip(loop.vars, names, strict=True)):
        values[old] = new if d < last else loop.starts[d] + new
    body: Block = Substitute(values)(loop.body)
    iteration = Var(f"{names[last].name}_turn", dt.int32, "loop")
    size = loop.stops[last] - loop.starts[last]
    lane = Var(names[last].name, dt.int32, "loop")
    body = Substitute({names[last]: iteration * count + lane})(body)
    inside = If(binary("<", iteration * count + lane, size), body, Block(()), span=loop.span)
    extent, body = const(count, dt.int32), Block((inside,))
    nest: Stmt = For(
        LoopKind.PARALLEL, (lane,), (ZERO,), (extent,), body, independent=loop.independent, span=loop.span
    )  # fmt: skip
    nest = For(LoopKind.SERIAL, (iteration,), (ZERO,), ((size + (count - 1)) // count,), Block((nest,)), span=loop.span)
    for d in reversed(range(last)):
        nest = For(LoopKind.SERIAL, (names[d],), (loop.starts[d],), (loop.stops[d],), Block((nest,)), span=loop.span)
    return nest


class _LowerInside(Rewriter):
    """Lower ops on single elements inside a nest."""

    def __init__(self, ctx: ThreadContext):
        self.ctx = ctx

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        return place_at(op, op.lower_cuda(self.ctx))
