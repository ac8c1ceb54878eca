# SPDX-License-Identifier: Apache-2.0
"""Turn a T.Parallel nest into the code of one thread: loops over its own steps, with fragments in its registers.

Assumes a static nest with a layout, and fragments with layouts. A fragment goes through shared memory if the thread
needs elements of it that other threads hold. Of a few that each warp holds, every thread gets a copy by shuffles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_tile.diagnostics.errors import InternalError, error
from torch_tile.hardware import WARP
from torch_tile.intrinsics.memory import added, shuffle
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Expand, Substitute
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, Var, binary, const
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.layout import Digit, Layout, replicated
from torch_tile.ir.layout_ops import offset_of, owner_of
from torch_tile.ir.node import Node, Rewriter, children, contains, find, symbols
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import Alloc, Block, Break, Continue, Do, For, If, Let, LoopKind, Print, Stmt, Store, While
from torch_tile.tileop.parallel.index_map import Index, fits
from torch_tile.tileop.parallel.nest import Nest, Use, carriers, nest_of
from torch_tile.tileop.parallel.op import all_dims, contiguous, layout_of, misplaced
from torch_tile.tileop.threads import Layouts, ThreadContext

ZERO = const(0, dt.int32)
Element = Load | Store
FETCHED = 8  # most elements that threads fetch from lanes, at a shuffle each
UNROLLED = 32  # most steps of an unrolled loop that touches no register array


def bind_loop(loop: For, ctx: ThreadContext) -> Stmt:
    """Return the statements of one thread for a static nest; fragments that do not fit are staged around it."""
    nest = nest_of(loop, ctx.values, ctx.unrolled)
    layout = layout_of(nest, ctx)
    updated = [e.buffer for e in find(loop.body, Address) if e.buffer.scope == "fragment"]
    elsewhere = [*misplaced(nest, layout, Layouts()), *updated]
    staged = elsewhere or _find_copy_conflicts(nest, layout, ctx)
    if not staged:
        _remark_order(nest, layout, ctx)
        return _Binder(nest, layout, ctx).statements()
    staged = list(dict.fromkeys(staged))
    written = [*updated, *(use.buffer for use in nest.fragments if use.stored)]
    if near := [f for f in staged if f in elsewhere and f not in written and _is_near(f, nest, layout, ctx)]:
        return _bind_with_shuffles(replace(loop, layout=layout), near, ctx)
    why = "the threads that need its elements do not hold them"
    if updated:
        why = "its elements are updated atomically"
    elif not elsewhere:
        why = "threads with copies of an element would meet in memory"
    ctx.build.remark(loop.span, "T.Parallel", f"{', '.join(f.name for f in staged)} moved through shared memory", why)
    kept = [f for f in staged if f in updated or not is_overwritten(f, nest)]
    return through_shared(replace(loop, layout=layout), staged, kept, written, ctx, lambda moved: bind_loop(moved, ctx))


def _is_near(fragment: Buffer, nest: Nest, spread: Layout, ctx: ThreadContext) -> bool:
    """Return whether lanes of all warps hold the same elements of a fragment, few and all of them, as registers."""
    layout, shape = fragment.layout, fragment.static_shape
    if layout is None or shape is None or math.prod(shape) > FETCHED or ctx.parted or ctx.count % WARP:
        return False
    dims, whole = all_dims(nest, spread), replicated(shape, ctx.count)
    within = all(WARP % (d.stride * d.size) == 0 for dim in layout.canonical.dims for d in dim if d.axis == "t")
    reads = (use.map for use in nest.fragments if use.buffer is fragment)
    return within and layout.canonical.extent("t") == ctx.count and all(fits(one, dims, whole) for one in reads)


def _bind_with_shuffles(loop: For, fragments: Sequence[Buffer], ctx: ThreadContext) -> Stmt:
    """Bind a nest that reads whole copies of fragments, which threads gather by warp shuffles."""
    before: list[Stmt] = []
    copies: dict[Buffer, Buffer] = {}
    for fragment in fragments:
        layout, shape = fragment.layout, fragment.static_shape
        assert layout is not None and shape is not None
        copy = copies[fragment] = replace(fragment, layout=replicated(shape, ctx.count))
        own, whole = ctx.registers(fragment), ctx.registers(copy)
        before.append(Alloc(whole))
        for n, place in enumerate(itertools.product(*map(range, shape))):
            indices = tuple(const(i, dt.int32) for i in place)
            lane, register = (offset_of(layout, axis, indices) for axis in "tr")
            before.append(Store(whole, (const(n, dt.int32),), shuffle(Load(own, (register,)), lane), span=loop.span))
    names = ", ".join(f.name for f in fragments)
    ctx.build.remark(loop.span, "T.Parallel", f"{names} fetched by shuffles", "other lanes hold some of its elements")
    return Block((*before, bind_loop(_Swap(copies)(loop), ctx)), span=loop.span)


def through_shared(
    node: Stmt,
    fragments: Sequence[Buffer],
    kept: Sequence[Buffer],
    written: Sequence[Buffer],
    ctx: ThreadContext,
    bind: Callable[[Any], Stmt],
) -> Stmt:
    """Bind a statement that uses copies of fragments in shared memory.

    Copy the values of the `kept` ones there before, and of the `written` ones back afterwards.
    """
    before: list[Stmt] = []
    after: list[Stmt] = []
    tiles: dict[Buffer, Buffer] = {}
    for fragment in fragments:
        shape = fragment.static_shape
        assert shape is not None
        tile = tiles[fragment] = ctx.shared(fragment.name, shape, fragment.dtype)
        before.append(Alloc(tile))
        if fragment in kept:
            before.append(bind_loop(_move(fragment, tile, fragment), ctx))
        if fragment in written:
            after.append(bind_loop(_move(tile, fragment, fragment), ctx))
    return Block((*before, bind(_Swap(tiles)(node)), *after), span=node.span)


def is_overwritten(fragment: Buffer, nest: Nest) -> bool:
    """Return whether the nest stores every element of a fragment and loads none, so that no old value matters."""
    body = nest.loop.body
    if any(use.buffer is fragment and not use.stored for use in nest.fragments) or contains(body, Break, Continue):
        return False
    own = (one.indices for one in body.stmts if isinstance(one, Store) and one.buffer is fragment)
    return fragment.static_shape == nest.extents and any(
        all(index is var for index, var in zip(indices, nest.loop.vars, strict=True)) for indices in own
    )


def _find_copy_conflicts(nest: Nest, layout: Layout, ctx: ThreadContext) -> list[Buffer]:
    """Find the fragments to stage: threads that hold copies of one element would conflict in memory.

    All these threads run the iteration for its fragments, but one thread makes its stores and updates. The other
    threads would read memory before or after that, in no fixed order.
    """
    if nest.uniform or not any(use.stored for use in nest.fragments) or owner_of(layout.canonical, ctx.thread) is None:
        return []
    stored = IdSet(use.buffer for use in nest.memory if use.stored)
    if not _updates(nest.loop.body) and not any(use.buffer in stored for use in nest.memory if not use.stored):
        return []
    return list(dict.fromkeys(use.buffer for use in nest.fragments))


def _remark_order(nest: Nest, layout: Layout, ctx: ThreadContext) -> None:
    """Report the variables of the nest that are not spread over threads."""
    dims = zip(nest.loop.vars, nest.extents, layout.canonical.dims, strict=True)
    alone = {var for var, extent, dim in dims if extent > 1 and not any(d.axis == "t" for d in dim)}
    met = [(var, store.buffer.name) for var, store in carriers(nest.loop) if var in alone]
    if met and nest.carried:
        names, buffers = ("`, `".join(dict.fromkeys(part)) for part in ([v.name for v, _ in met], [b for _, b in met]))
        why = f"iterations may touch the same elements of `{buffers}`; if they never do, say independent=True"
        ctx.build.remark(nest.loop.span, "T.Parallel", f"`{names}` runs in order, in one thread", why)


def _move(source: Buffer, target: Buffer, fragment: Buffer) -> For:
    """Build the copy of a whole tile between a fragment and shared memory; each thread copies its own part."""
    names = tuple(Var("ijklmn"[d], dt.int32, "loop") for d in range(fragment.rank))
    body = Block((Store(target, names, Load(source, names)),))
    zeros = (ZERO,) * fragment.rank
    return For(LoopKind.PARALLEL, names, zeros, fragment.shape, body, layout=fragment.layout)


class _Swap(Rewriter):
    """Replace buffers by the tiles that stage them."""

    def __init__(self, tiles: Mapping[Buffer, Buffer]):
        self.tiles = tiles

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        return self.tiles.get(buffer, buffer)


class _Step:
    """A register digit of the nest: a loop of `size` iterations, each moving variable `dim` by `place`."""

    def __init__(self, digit: Digit, dim: int, place: int, name: str):
        self.digit, self.dim, self.place = digit, dim, place
        self.var = Var(name, dt.int32, "loop")
        self.kind = LoopKind.UNROLLED


class _Binder:
    """Bind one nest whose fragment elements are all held by their users."""

    def __init__(self, nest: Nest, layout: Layout, ctx: ThreadContext):
        self.nest, self.layout, self.ctx = nest, layout.canonical, ctx
        if any(size < extent for size, extent in zip(self.layout.shape, nest.extents, strict=True)):
            raise InternalError(f"layout {layout} has no place for {nest.extents} iterations", nest.loop.span)
        self.steps = self._steps()
        self.values = self._values()
        self.owner = owner_of(self.layout, ctx.thread) if nest.effects or any(u.stored for u in nest.memory) else None
        self.private = any(u.stored for u in nest.fragments) or nest.uniform
        if self.owner is not None and self.private and _updates(nest.loop.body):
            what, fix = (
                "the old value of an update, kept by several threads",
                "store it to shared or global memory there",
            )
            raise error("unsupported_on_target", nest.loop.span, what=what, target=str(ctx.target), fix=fix)

    def statements(self) -> Stmt:
        """Build loops over the steps around the body, with guards where the layout is larger than the nest."""
        ranges = self.ctx.ranges
        if isinstance(self.ctx.thread, Var):
            ranges = ranges.loop(self.ctx.thread, 0, self.ctx.count)
        for step in self.steps:
            ranges = ranges.loop(step.var, 0, step.digit.size)
        unrolled = {f for f in self.nest.inner if _indexes(f, self.nest)}
        body: Stmt = _Body(self, ranges, self.owner if self.private else None, unrolled)(self.nest.loop.body)
        if not self.steps and _goes_on(self.nest.loop.body):  # the loop that `continue` belongs to
            once = Var("once", dt.int32)
            body = For(LoopKind.SERIAL, (once,), (ZERO,), (const(1, dt.int32),), _block(body), span=self.nest.loop.span)
        guards = self._guards()
        for depth in range(len(self.steps), -1, -1):
            if depth < len(self.steps):
                body = self._loop(self.steps[depth], body)
            due = [g for level, g in guards if level == depth]
            for guard in due:
                body = If(guard, _block(body), Block(()), span=self.nest.loop.span)
        if self.owner is not None and not self.private:
            body = If(self.owner, _block(body), Block(()), span=self.nest.loop.span)
        return body

    def _loop(self, step: _Step, body: Stmt) -> Stmt:
        """Build the loop of one step."""
        size = const(step.digit.size, dt.int32)
        return For(step.kind, (step.var,), (ZERO,), (size,), _block(body), span=self.nest.loop.span)

    def _steps(self) -> list[_Step]:
        """List the loops over a thread's registers, one for each register digit, the last maybe a vector loop."""
        found = []
        for dim, digits in enumerate(self.layout.dims):
            place = 1
            for d in reversed(digits):
                if d.axis == "r":
                    found.append((d, dim, place))
                place *= d.size
        found.sort(key=lambda part: -part[0].stride)
        if found and self._width(*found[-1][1:]) == 1 and not any(use.stored for use in self.nest.memory):
            # Registers are loaded in any order: so along memory last, if their own order is another.
            found.sort(key=lambda part: self._runs(*part[1:]))
        if found:
            last, dim, place = found[-1]
            width = self._width(dim, place)
            if 1 < width < last.size and last.size % width == 0:
                found[-1:] = [
                    (Digit(last.size // width, last.stride * width, "r"), dim, place * width),
                    (Digit(width, last.stride, "r"), dim, place),
                ]
        names = [v.name for v in self.nest.loop.vars]
        steps = [_Step(d, dim, place, names[dim]) for d, dim, place in found]
        if steps and self._width(steps[-1].dim, steps[-1].place) > 1:
            steps[-1].kind = LoopKind.VECTOR
        if not self.nest.fragments and math.prod(s.digit.size for s in steps) > UNROLLED:
            for step in steps[:-1]:
                step.kind = LoopKind.SERIAL
        return steps

    def _width(self, dim: int, place: int) -> int:
        """Return the elements of a 16-byte vector along `dim`; 1 if the nest cannot be a vector loop along it."""
        if place != 1 or dim in self.nest.carried or not self.nest.memory or not _is_straight(self.nest.loop.body):
            return 1
        var = self.nest.loop.vars[dim]
        moving = [use for use in self.nest.memory if any(var in symbols(i) for i in use.indices)]
        return 16 // min(16, max(use.buffer.dtype.itemsize for use in moving or self.nest.memory))

    def _runs(self, dim: int, place: int) -> bool:
        """Return whether vectors of memory run along `dim`."""
        along = {contiguous(use, self.nest) for use in self.nest.memory if use.map}
        return self._width(dim, place) > 1 and along == {dim}

    def _values(self) -> dict[Var, Expr]:
        """Express each variable of the nest by the thread and the steps."""
        found = {}
        top = self.layout.extent("t")
        for dim, (var, digits) in enumerate(zip(self.nest.loop.vars, self.layout.dims, strict=True)):
            total: Expr | None = None
            place = math.prod(d.size for d in digits)
            for d in digits:
                place //= d.size
                if d.axis == "t":
                    part: Expr = self.ctx.thread if d.stride == 1 else self.ctx.thread // d.stride
                    part = part if d.stride * d.size >= top else part % d.size
                    part = part if place == 1 else part * place
                    total = part if total is None else total + part
            for step in self.steps:
                if step.dim == dim:
                    part = step.var if step.place == 1 else step.var * step.place
                    total = part if total is None else total + part
            found[var] = ZERO if total is None else total
        return found

    def _guards(self) -> list[tuple[int, Expr]]:
        """Return the conditions that keep variables inside the nest, each with the number of loops around it."""
        found = []
        for dim, (var, extent) in enumerate(zip(self.nest.loop.vars, self.nest.extents, strict=True)):
            if self.layout.shape[dim] <= extent or not self._needs_guard(dim):
                continue
            value = self.values[var]
            depth = max((n + 1 for n, s in enumerate(self.steps) if s.dim == dim), default=0)
            last = self.steps[-1] if self.steps else None
            whole = last is not None and last.kind is LoopKind.VECTOR and last.dim == dim
            if last is not None and whole and extent % last.digit.size == 0 and depth == len(self.steps):
                depth -= 1
                value = Substitute({last.var: ZERO})(value)
            found.append((depth, binary("<", value, extent)))
        return found

    def _needs_guard(self, dim: int) -> bool:
        """Return whether running beyond the nest along `dim` has an effect; padding registers belong to no element."""
        nest = self.nest
        if nest.memory or nest.effects or nest.uniform or nest.carried or _iterations_vary(nest.loop.body):
            return True
        if _indexes_arrays(nest.loop):
            return True
        beyond = range(nest.extents[dim], self.layout.shape[dim])
        return not all(self._stays_in_padding(use, dim, beyond) for use in nest.fragments)

    def _stays_in_padding(self, use: Use, dim: int, beyond: range) -> bool:
        """Return whether an access to a fragment does no harm while `dim` is in `beyond`: in registers, no write."""
        layout, shape = use.buffer.layout, use.buffer.static_shape
        assert layout is not None and shape is not None
        spans = [self._span(index, dim, beyond) for index in use.map]
        if not all(span is not None and span[1] < size for span, size in zip(spans, layout.shape, strict=True)):
            return False
        ends = zip(spans, shape, strict=True)
        return not use.stored or any(span is not None and span[0] >= size for span, size in ends)

    def _span(self, index: Index | None, dim: int, beyond: range) -> tuple[int, int] | None:
        """Return the least and greatest value of an index while variable `dim` is in `beyond`; None if not known."""
        if index is None or not isinstance(index.rest, Const | None):
            return None
        rest = 0 if index.rest is None else int(index.rest.value)
        sizes = *self.layout.shape, *self.nest.all_extents[self.nest.rank :]
        most = sum(
            p.at(sizes[p.var] - 1) if p.size is None else p.factor * (p.size - 1) for p in index.pieces if p.var != dim
        )
        own = [sum(p.at(value) for p in index.pieces if p.var == dim) for value in beyond]
        return rest + min(own), rest + max(own) + most


class _Body(Rewriter):
    """Rewrite the body for one thread: variables replaced, fragments in registers, stores to memory by the owner."""

    def __init__(self, binder: _Binder, ranges: Ranges, owner: Expr | None, unrolled: set[For]):
        self.binder, self.ranges, self.owner, self.unrolled = binder, ranges, owner, unrolled
        self.inline = Expand({**binder.ctx.values, **binder.values})
        self.names = dict(binder.values)
        self.places: dict[Hashable, Expr] = {}  # registers, by layouts and indices

    def visit_Var(self, var: Var) -> Expr:
        return self.names.get(var, var)

    def visit_Let(self, let: Let) -> Stmt:
        """Replace names of indices by their values, so that later passes see how addresses move."""
        new: Let = self.children(let)
        if not let.var.dtype.is_integer:
            return new
        self.inline = Expand({**self.inline.known, let.var: let.value})
        if contains(new.value, Load, Call):
            return new
        self.names[let.var] = new.value
        return Block(())

    def visit_Load(self, load: Load) -> Load:
        return load_of(load, self.binder.ctx, self._register(load)) if _is_fragment(load) else self.children(load)

    def visit_Store(self, store: Store) -> Stmt:
        if _is_fragment(store):
            registers = self.binder.ctx.registers(store.buffer)
            return Store(registers, (self._register(store),), self(store.value), span=store.span)
        return self._owned(self.children(store), store.buffer.scope in ("local", "var") and not _updates(store.value))

    def visit_Do(self, node: Do) -> Stmt:
        """Rewrite a call for its effect."""
        return self._owned(self.children(node), False)

    def visit_Print(self, node: Print) -> Stmt:
        return self._owned(self.children(node), False)

    def visit_For(self, loop: For) -> For:
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            self.ranges = self.ranges.loop(var, self(start), self(stop), loop.step)
        self.places = {}  # the ranges have changed
        new: For = self.children(loop)
        unrolled = loop in self.unrolled and loop.kind is not LoopKind.VECTOR
        return replace(new, kind=LoopKind.UNROLLED) if unrolled else new

    def _owned(self, node: Stmt, everyone: bool) -> Stmt:
        """Let only the owner thread run a statement."""
        if self.owner is None or everyone:
            return node
        return If(self.owner, Block((node,)), Block(()), span=node.span)

    def _register(self, node: Element) -> Expr:
        """Return the register index of a fragment's element, from the cache if it is known."""
        layout = node.buffer.layout
        assert layout is not None
        indices = tuple(self.inline(i) for i in node.indices)
        key = layout, structure(indices)
        if key not in self.places:
            self.places[key] = offset_of(layout, "r", indices, self.ranges)
        return self.places[key]


def load_of(load: Load, ctx: ThreadContext, register: Expr) -> Load:
    """Return a load of a fragment's element from this thread's registers."""
    return Load(ctx.registers(load.buffer), (register,), span=load.span)


def _goes_on(node: Node) -> bool:
    """Return whether a loop's body has a `continue` of that loop."""
    own = (child for child in children(node) if not isinstance(child, For | While))
    return isinstance(node, Continue) or any(map(_goes_on, own))


def _iterations_vary(body: Block) -> bool:
    """Return whether values decide how often something runs; values of the padding might never end it."""
    bounds = [e for loop in find(body, For) for e in (*loop.starts, *loop.stops)]
    return contains(body, While) or not all(isinstance(e, Const) for e in bounds)


def _indexes_arrays(loop: For) -> bool:
    """Return whether the variables of a nest index an array of the thread, which may end before the padding."""
    own = IdSet(loop.vars)
    arrays = (n for n in find(loop.body, Load, Store) if n.buffer.scope == "local")
    return any(own.any_in(i) for n in arrays for i in n.indices)


def _is_fragment(node: Load | Store | Address) -> bool:
    """Return whether an access is to a fragment."""
    return node.buffer.scope == "fragment"


def _indexes(loop: For, nest: Nest) -> bool:
    """Return whether the variable of an inner loop selects registers."""
    number = nest.rank + next(k for k, f in enumerate(nest.inner) if f is loop)
    return any(i is not None and any(p.var == number for p in i.pieces) for use in nest.fragments for i in use.map)


def _is_straight(body: Block) -> bool:
    """Return whether a body has only stores, names and atomic additions, so that it can be vectorised."""
    calls = [call for call in find(body, Call) if call.name == "atomic"]
    adds = [node for node in find(body, Do) if added(node) is not None]
    others = contains(body, For, While, Break, Continue, Print) or len(adds) < len(list(find(body, Do)))
    return not others and len(calls) == len(adds)


def _updates(node: Stmt | Expr) -> bool:
    """Return whether a value updates memory; one thread does that, even if several run the iteration."""
    return any(call.name == "atomic" for call in find(node, Call))


def _block(body: Stmt) -> Block:
    """Wrap a statement as a block."""
    return body if isinstance(body, Block) else Block((body,))
