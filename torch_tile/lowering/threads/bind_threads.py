# SPDX-License-Identifier: Apache-2.0
"""The block's program becomes one thread's: tile ops are lowered, T.Parallel loops bound, fragments made registers.

Outside T.Parallel every thread runs every statement; what touches memory there is done by thread 0, unless it says
which thread it is, or stands where only some threads come by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Call, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Do,
    For,
    If,
    Kernel,
    LoopKind,
    Print,
    Program,
    Role,
    Stmt,
    Store,
    While,
)
from torch_tile.lowering.analysis.clone import Instance, place_at
from torch_tile.lowering.analysis.scope_facts import Known
from torch_tile.lowering.analysis.thread_values import Divergence
from torch_tile.lowering.threads.bind_loop import bind_loop, load_of
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import serial, spread, squeezed
from torch_tile.tileop.parallel.nest import is_static
from torch_tile.tileop.threads import ThreadContext, role_context

ZERO = const(0, dt.int32)
Element = Load | Store


def bind_threads(program: Program, build: Build) -> Program:
    """Replace tile ops, T.Parallel loops and fragments. Afterwards the body is what one thread does (stage THREAD)."""
    return replace(program, kernels=tuple(_bound(kernel, build) for kernel in program.kernels))


def _bound(kernel: Kernel, build: Build) -> Kernel:
    if kernel.thread is None:
        kernel = replace(kernel, thread=Var("thread", dt.int32, "thread"))
    return _Bind(build, kernel)(kernel)  # type: ignore[no-any-return]


class _Bind(Known):
    def __init__(self, build: Build, kernel: Kernel):
        super().__init__()
        assert kernel.thread is not None
        self.ctx = ThreadContext(build, kernel.thread, math.prod(kernel.threads), self.ranges)
        self.of_thread = False  # it is said which thread does what: inside what an op became, or by a branch around
        self.divergence = Divergence(kernel, arrays=True)

    def here(self) -> ThreadContext:
        """The threads at this point."""
        return self.ctx.at(self.ranges, dict(self.names))

    def visit_Role(self, role: Role) -> Stmt:
        """The threads of a role among themselves."""
        assert self.thread is not None
        outer = self.ctx
        self.ctx = role_context(role, outer.build, self.thread, self.ranges, {})
        new = super().visit_Role(role)
        self.ctx = outer
        return new

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        """What a thread does for an op, its nests bound. Only a bare store speaks of the block, not of a thread."""
        lowered = Instance(IdMap(), IdMap(), fresh=True)(place_at(op, op.lower_cuda(self.here())))
        outer, self.of_thread = self.of_thread, self.of_thread or not isinstance(lowered, Store | Do)
        new = self(lowered)
        self.of_thread = outer
        return new  # type: ignore[no-any-return]

    def visit_For(self, loop: For) -> Stmt:
        """A nest is bound, its ops lowered first; other loops are kept."""
        if loop.kind is not LoopKind.PARALLEL:
            return self._apart(self.divergence.parts(loop), super().visit_For, loop)
        lowered: For = _LowerInside(self.here())(loop)
        if is_static(lowered):
            return bind_loop(lowered, self.here())
        return self(_in_chunks(lowered, self.ctx.count))  # type: ignore[no-any-return]

    def visit_If(self, node: If) -> Stmt:
        """In a branch that only some threads take, each of them does what it says."""
        return self._apart(self.divergence.is_divergent(node.condition), super().visit_If, node)

    def visit_While(self, loop: While) -> Stmt:
        return self._apart(self.divergence.parts(loop), self.children, loop)

    def _apart(self, divergent: bool, rewrite: Callable[[Any], Stmt], node: Stmt) -> Stmt:
        outer, self.of_thread = self.of_thread, self.of_thread or divergent
        new = rewrite(node)
        self.of_thread = outer
        return new

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """A fragment is an array of each thread."""
        if node.buffer.scope != "fragment":
            return self.children(node)
        return Alloc(self.ctx.registers(node.buffer), span=node.span)

    def visit_Load(self, load: Load) -> Load:
        """An element of a fragment that all threads hold."""
        new: Load = self.children(load)
        return load_of(new, self.ctx, self.register(new)) if load.buffer.scope == "fragment" else new

    def visit_Store(self, store: Store) -> Stmt:
        """Every thread's own copy, or memory by one thread."""
        new: Store = self.children(store)
        if store.buffer.scope == "fragment":
            return Store(self.ctx.registers(store.buffer), (self.register(new),), new.value, span=store.span)
        if store.buffer.scope in ("global", "shared"):
            return self.by_one(new, new.indices)
        if isinstance(new.value, Call) and new.value.name == "atomic":
            return self._told(new, new.buffer, new.value)
        return new

    def _told(self, store: Stmt, variable: Buffer, update: Call) -> Stmt:
        """A variable gets what an update found: where one thread makes that, it tells all others."""
        if self.by_one(store, update.args) is store:
            return store
        told = self.ctx.shared(variable.name, (1,), variable.dtype)
        once = self.by_one(Store(told, (ZERO,), update, span=store.span), update.args)
        return Block((Alloc(told), once, Store(variable, (), Load(told, (ZERO,)), span=store.span)))

    def visit_Do(self, node: Do) -> Stmt:
        """An update of memory by one thread."""
        new: Do = self.children(node)
        atomic = isinstance(new.call, Call) and new.call.name == "atomic"
        return self.by_one(new, new.call.args) if atomic and isinstance(new.call, Call) else new

    def visit_Print(self, node: Print) -> Stmt:
        """By one thread, element by element; fragments go through shared memory."""
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
        """Where every thread holds an element; the fragment must be replicated."""
        layout = node.buffer.layout
        assert layout is not None
        if any(d.axis == "t" and d.size > 1 for dim in layout.dims for d in dim):
            notes = [(node.span, f"{layout}   (no thread holds all of it)")]
            raise error("layout_conflict", node.span, notes, buffer=node.buffer.name)
        return layout.offset("r", node.indices, self.ranges)

    def by_one(self, node: Stmt, operands: Sequence[Expr]) -> Stmt:
        """`node` in thread 0, unless its operands say which thread they mean, or differ between threads."""
        if self.of_thread or any(self.divergence.is_divergent(o) for o in operands):
            return node
        first = binary("==", self.ctx.thread, ZERO)
        return If(first, node if isinstance(node, Block) else Block((node,)), Block(()), span=node.span)


def _in_chunks(loop: For, count: int) -> Stmt:
    """A nest with extents known only at run time: serial loops around one of as many points as there are threads."""
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
    """Ops on single elements inside a nest."""

    def __init__(self, ctx: ThreadContext):
        self.ctx = ctx

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        return place_at(op, op.lower_cuda(self.ctx))
