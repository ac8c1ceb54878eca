# SPDX-License-Identifier: Apache-2.0
"""Choose the thread of each point of a T.Parallel nest, and demand layouts of its fragments.

A nest follows a fragment with a known layout, so that every thread finds its elements in its own registers. Without one
it is spread for coalesced access. Fragments without a layout then follow the nest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch_tile.hardware import VECTOR_BYTES
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import divides
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, const
from torch_tile.ir.layout import Digit, Layout, spread
from torch_tile.ir.node import symbols
from torch_tile.ir.stmt import For
from torch_tile.tileop.parallel.index_map import Dim, dims_of_nest, fits, layout_of_buffer, renumbered, threads_of
from torch_tile.tileop.parallel.nest import Nest, Use, nest_of
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext


def layout_of(nest: Nest, ctx: ThreadContext) -> Layout:
    """Return the layout of a nest: its own if the author or a pass set one, else that of its fragments."""
    return following(nest, Layouts(), ctx, partial=True) or default_layout(nest, ctx)


def following(nest: Nest, known: Layouts, ctx: ThreadContext, partial: bool) -> Layout | None:
    """Compute the layout of a nest that follows a fragment with a known layout; None if there is none to follow.

    With `partial`, a fragment may lack variables of the nest; these are dealt out to the threads that hold replicas.
    """
    if nest.loop.layout is not None:
        return nest.loop.layout
    if nest.uniform:
        return _in_order(nest, ctx.count)
    best: tuple[tuple[int, bool, bool], Layout] | None = None
    sizes = nest.all_extents
    for use in nest.fragments:
        layout = known.get(use.buffer)
        dims = None if layout is None else dims_of_nest(use.map, layout, sizes)
        if layout is None or dims is None or not _allowed(nest, dims, known, ctx):
            continue
        missing = sum(d is None and size > 1 for d, size in zip(dims, nest.extents, strict=False))
        if missing and not partial:
            continue
        score = -missing, use.stored and not layout.canonical.replicas, use.stored
        if best is None or score > best[0]:
            best = score, _completed(nest, dims[: nest.rank], layout, use.stored, ctx)
    return None if best is None else best[1]


def demands(nest: Nest, layout: Layout, known: Layouts, ctx: ThreadContext, grown: bool = False) -> list[Demand]:
    """Return what layouts fragments without a layout must have for a nest in `layout`; `grown`: of slices, too."""
    found: dict[Buffer, Demand] = {}
    dims = all_dims(nest, layout)
    for use in nest.fragments:
        shape = use.buffer.static_shape
        if known.get(use.buffer) is not None or use.buffer in found or shape is None:
            continue
        wanted = layout_of_buffer(use.map, dims, shape, ctx.count, grown)
        if wanted is not None and all(
            fits(other.map, dims, wanted) for other in nest.fragments if other.buffer is use.buffer
        ):
            why = f"held by the threads that run this loop: {layout}"
            found[use.buffer] = Demand(use.buffer, wanted, False, why, nest.loop.span)
    return list(found.values())


def infer(loop: For, known: Layouts, ctx: ThreadContext) -> list[Demand]:
    """Derive demands on a nest's fragments from the known layouts; return none if no fragment decides the nest."""
    nest = nest_of(loop, ctx.values)
    if not any(known.get(use.buffer) is None for use in nest.fragments):
        return []
    layout = following(nest, known, ctx, partial=False)
    return [] if layout is None else demands(nest, layout, known, ctx)


def all_dims(nest: Nest, layout: Layout) -> list[Dim]:
    """Return the digits of all variables; each thread runs inner loops by itself."""
    dims, stride = list(layout.dims), layout.extent("r")
    for size in nest.all_extents[nest.rank :]:
        dims.append((Digit(size, stride, "r"),))
        stride *= max(size, 1)
    return dims


def misplaced(nest: Nest, layout: Layout, known: Layouts) -> list[Buffer]:
    """Return the fragments with elements that a thread would need from other threads."""
    dims = all_dims(nest, layout)
    found: dict[Buffer, None] = {}
    for use in nest.fragments:
        own = known.get(use.buffer)
        if own is None or not fits(use.map, dims, own):
            found[use.buffer] = None
    return list(found)


def _allowed(nest: Nest, dims: Sequence[Dim | None], known: Layouts, ctx: ThreadContext) -> bool:
    """Return whether a layout keeps inner loops, and iterations that need an order, in one thread."""
    spread_over = {k for k, dim in enumerate(dims) if any(d.axis == "t" and d.size > 1 for d in dim or ())}
    if any(k >= nest.rank for k in spread_over):
        return False
    return spread_over.isdisjoint(nest.carried) or _meet_in_one_thread(nest, dims, known, ctx)


def _meet_in_one_thread(nest: Nest, dims: Sequence[Dim | None], known: Layouts, ctx: ThreadContext) -> bool:
    """Return whether iterations meet only in elements of fragments that their thread alone holds."""
    whole = [dim for dim in dims if dim is not None]
    if len(whole) < len(dims):
        return False
    for use in nest.fragments:
        if use.buffer not in nest.meeting:
            continue
        shape, layout = use.buffer.static_shape, known.get(use.buffer)
        if layout is None and shape is not None:
            layout = layout_of_buffer(use.map, whole, shape, ctx.count)
        if layout is None or layout.canonical.replicas or not fits(use.map, whole, layout):
            return False
    return all(buffer.scope == "fragment" for buffer in nest.meeting)


def _completed(nest: Nest, dims: Sequence[Dim | None], layout: Layout, stored: bool, ctx: ThreadContext) -> Layout:
    """Add digits for variables that a fragment lacks: in threads of replicas, unless these must write all."""
    replicas = [] if stored else list(threads_of([dim for dim in dims if dim is not None], ctx.count) or ())
    widths = {k: w for k, w in vectors(nest, ctx).items() if dims[k] is None}
    fastest = max(widths, key=lambda k: (widths[k], k), default=None)
    step = 1 + sum((d.size - 1) * d.stride for dim in dims for d in dim or () if d.axis == "r")
    step = max(step, layout.extent("r"))
    found: list[Dim] = []
    for k in reversed(range(nest.rank)):
        dim = dims[k]
        if dim is None:
            size = nest.extents[k]
            vector = math.gcd(widths[k], size) if k == fastest else 1
            lanes = () if k in nest.carried else _taken(replicas, size // vector)
            rest = size // (vector * math.prod(d.size for d in lanes))
            # Strides only say the order here: vectors are innermost, what the fragment holds is next.
            dim = (Digit(rest, step, "r"), *lanes, Digit(vector, 0, "r"))
            step *= max(rest, 2)
        found.append(dim)
    found.reverse()
    return Layout(renumbered(found), threads_of(found, ctx.count) or ()).canonical


def _taken(replicas: list[Digit], size: int) -> Dim:
    """Take thread digits that split `size` values out of `replicas`; neighbouring threads first."""
    found: list[Digit] = []
    for d in sorted(replicas, key=lambda d: d.stride):
        part = math.gcd(d.size, size)
        if part > 1:
            found.append(Digit(part, d.stride, "t"))
            size //= part
            replicas.remove(d)
            if d.size > part:
                replicas.append(Digit(d.size // part, d.stride * part, "t"))
        if part != d.size:
            break
    return tuple(reversed(found))


def _in_order(nest: Nest, count: int) -> Layout:
    """Return the layout in which every thread runs all iterations."""
    strides = [math.prod(nest.extents[k + 1 :]) for k in range(nest.rank)]
    dims = tuple((Digit(n, s, "r"),) for n, s in zip(nest.extents, strides, strict=True))
    return Layout(dims, (Digit(count, 1, "t"),)).canonical


# Nests that follow no fragment.


def default_layout(nest: Nest, ctx: ThreadContext) -> Layout:
    """Give neighbouring threads neighbouring elements of memory, in vectors as wide as is proved to be aligned."""
    widths = vectors(nest, ctx)
    free = [k for k in range(nest.rank) if k not in nest.carried]
    fastest = max(widths, key=lambda k: (widths[k], k), default=free[-1] if free else 0)
    order = [k for k in free if k != fastest] + [k for k in free if k == fastest]
    shape = [nest.extents[k] for k in order]
    vector = widths.get(fastest, 1)
    while vector > 1 and (shape[-1] % vector or math.prod(shape) < vector * ctx.count):
        vector //= 2
    outer = spread(shape, ctx.count, vector)
    dims: list[Dim] = [()] * nest.rank
    for k, dim in zip(order, outer.dims, strict=True):
        dims[k] = dim
    step = max(1, outer.extent("r"))
    for k in sorted(nest.carried, reverse=True):
        dims[k] = (Digit(nest.extents[k], step, "r"),)
        step *= max(1, nest.extents[k])
    return Layout(tuple(dims), outer.replicas).canonical


def vectors(nest: Nest, ctx: ThreadContext) -> dict[int, int]:
    """Compute how many neighbours one access may take, for each variable along which memory is contiguous."""
    found: dict[int, int] = {}
    # Indices are few, and read again for each element: they decide only where nobody knows what they lead to.
    known = any(use.map and use.map[-1] is not None for use in nest.memory if not use.locates)
    for scope in ("global", "shared"):
        uses = [use for use in nest.memory if use.buffer.scope == scope and not (known and use.locates)]
        sized: dict[int, list[Use]] = {}
        for use in uses:
            if (k := contiguous(use, nest)) is not None:
                sized.setdefault(k, []).append(use)
        for k, group in sized.items():
            if k in found or k in nest.carried:
                continue
            width = VECTOR_BYTES // max(use.buffer.dtype.itemsize for use in group)
            while width > 1 and not all(_aligned(use, k, width, nest, ctx) for use in group):
                width //= 2
            found[k] = max(1, width)
        if found:
            break
    return found


def contiguous(use: Use, nest: Nest) -> int | None:
    """Return the variable that alone moves an access to the next element of memory."""
    if not use.map or use.map[-1] is None:
        return None
    first = [p for p in use.map[-1].pieces if p.factor == 1 and p.divisor == 1 and p.var < nest.rank]
    strides = use.buffer.strides
    dense = strides is None or (isinstance(strides[-1], Const) and strides[-1].value == 1)
    return first[0].var if first and dense else None


def _aligned(use: Use, k: int, width: int, nest: Nest, ctx: ThreadContext) -> bool:
    """Return whether runs of `width` along variable `k` start at multiples of `width` elements and stay together."""
    var = nest.loop.vars[k]
    last = use.map[-1]
    assert last is not None
    if any(var in symbols(i) for i in use.indices[:-1]):
        return False
    for p in last.pieces:
        here = p.var == k
        if (here and (p.factor, p.divisor) != (1, 1)) or (here and p.size is not None and p.size % width):
            return False
        if not here and p.factor % width:
            return False
    if last.rest is not None and not divides(width, last.rest, ctx.ranges):
        return False
    return all(divides(width, s, ctx.ranges) for s in _outer_strides(use.buffer))


def _outer_strides(buffer: Buffer) -> Iterable[Expr]:
    """Return the strides of all dimensions but the last (and those of size 1, which never move)."""
    strides: list[Expr] = list(buffer.strides or ())
    if not strides:
        step: Expr = const(1, dt.int32)
        for size in reversed(buffer.shape):
            strides.insert(0, step)
            step = step * size
    for size, stride in zip(buffer.shape[:-1], strides[:-1], strict=True):
        if not (isinstance(size, Const) and size.value == 1):
            yield stride
