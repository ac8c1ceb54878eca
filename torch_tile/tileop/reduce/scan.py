# SPDX-License-Identifier: Apache-2.0
"""T.cumsum and T.cummax: inclusive scans along one dimension of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch_tile.diagnostics.errors import Diagnostic, diagnose, error
from torch_tile.intrinsics.memory import shuffle, shuffle_up
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Const, Expr, Load, cast, const, select
from torch_tile.ir.layout_ops import owner_of
from torch_tile.ir.node import node_class
from torch_tile.ir.stmt import Alloc, Block, Stmt, Store
from torch_tile.tileop.base import (
    Annotations,
    RegisteredOp,
    Tile,
    conjunction,
    describe_tile,
    identity_of,
    indices_at,
    need_region,
    parallel,
    same_extents,
    serial,
    tile_op,
)
from torch_tile.tileop.reduce.op import combine, ordered
from torch_tile.tileop.reduce.threads import accumulator, coordinate, guarded, steps_of, unrolled
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env


@node_class
class Scan(RegisteredOp):
    """Scan one dimension: `dst[..., k, ...] = fold(src[..., :k + 1, ...])`, from the other end with reverse."""

    kind: ClassVar[str] = ""
    src: Region
    dst: Region
    dim: int = 0
    reverse: bool = False

    @classmethod
    def build(
        cls, src: Tile, dst: Tile | None = None, dim: int = 0, reverse: bool = False, annotations: Annotations = None
    ) -> Scan:
        """Write running values of `src` along `dim`, the element itself included, into `dst` of its shape, or in place.

        With `reverse` they run from the last element to the first. `annotations` are hints of TileLang's without
        effect.
        """
        a = need_region(src, cls.op_name, "src")
        b = a if dst is None else need_region(dst, cls.op_name, "dst")
        rank = len(a.tile_shape)
        if not (isinstance(dim, int) and -rank <= dim < rank):
            raise error("reduce_dim", None, op=cls.op_name, dim=dim, rank=rank)
        return cls(a, b, dim % rank, bool(reverse))

    def check(self) -> list[Diagnostic]:
        """Check that source and destination have one shape."""
        if same_extents(self.src.tile_shape, self.dst.tile_shape):
            return []
        src, dst = describe_tile(self.src), describe_tile(self.dst)
        return [diagnose("scan_shape", self.span, op=self.op_name, src=src, dst=dst)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the source as read and the destination as written."""
        return [self.src], [self.dst]

    def lower_cpu(self) -> Stmt:
        """Emit a serial walk along the dimension; each step adds the previous result."""
        shape = self.src.tile_shape
        outer = (*shape[: self.dim], *shape[self.dim + 1 :])
        extent, target = shape[self.dim], self.dst.buffer
        kind = "sum" if self.kind == "sum" else "max"

        def at(region: Region, point: tuple[Expr, ...], k: Expr) -> tuple[Expr, ...]:
            return indices_at(region, [*point[: self.dim], k, *point[self.dim :]])

        def step(point: tuple[Any, ...], k: Expr) -> Stmt:
            """Emit the store of one result: an element combined with the previous result."""
            here = extent - 1 - k if self.reverse else k
            before = here + 1 if self.reverse else here - 1
            value = cast(Load(self.src.buffer, at(self.src, point, here)), target.dtype)
            total = combine(kind, Load(target, at(self.dst, point, before)), value)
            return Store(target, at(self.dst, point, here), select(k > const(0, dt.int32), total, value))

        return serial(extent, lambda k: parallel(outer, lambda p: step(p, k)) if outer else step((), k))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Prefer the other side's layout, if any. Fragments pass through shared memory, so any layout works."""
        source, target = self.src.buffer, self.dst.buffer
        layout = known.get(source) if "fragment" == source.scope == target.scope else None
        if layout is None or source is target or not same_extents(source.shape, target.shape):
            return []
        return [Demand(target, layout, False, f"holds the running values of `{source.name}`", self.span)]

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Scan each row by a few lanes of a warp."""
        return scan_on_threads(self, ctx, combine)

    def evaluate(self, env: Env) -> None:
        """Scan by torch in float64 (int64 for integers)."""
        import torch

        to = self.dst.buffer.dtype
        tile = env.read(self.src).reshape([env.size(e) for e in self.src.tile_shape]).to(env.wide(to))
        tile = tile.flip(self.dim) if self.reverse else tile
        unsigned = self.src.buffer.dtype == dt.uint64 and not tile.is_floating_point()
        if self.kind == "sum":
            tile = torch.cumsum(tile, self.dim)
        else:
            tile = torch.cummax(ordered(tile) if unsigned else tile, self.dim).values
            tile = ordered(tile) if unsigned else tile
        tile = tile.flip(self.dim) if self.reverse else tile
        env.write(self.dst, dt.rounded_tensor(tile, to).reshape(env.extents(self.dst)))


@tile_op("cumsum")
@node_class
class CumSum(Scan):
    """Compute inclusive sums."""

    kind: ClassVar[str] = "sum"


@tile_op("cummax")
@node_class
class CumMax(Scan):
    """Compute running maxima."""

    kind: ClassVar[str] = "max"


# A scan on the threads of a block: each row by a few lanes of one warp, piece after piece, each piece by shuffles.
#
# Works on memory; fragments pass through shared memory. Extents may be known at run time only.

ZERO = const(0, dt.int32)


@dataclass(frozen=True)
class Place:
    """The place that the scan reads or writes: a buffer in memory, and its index for a point of the region."""

    buffer: Buffer
    at: Callable[[Sequence[Expr]], tuple[Expr, ...]]


def scan_on_threads(op: Scan, ctx: ThreadContext, merge: Callable[[str, Expr, Expr], Expr]) -> Stmt:
    """Emit the statements of one thread."""
    before: list[Stmt] = []
    after: list[Stmt] = []
    source, target = _place(op.src), _place(op.dst)
    if op.src.buffer.scope == "fragment":
        staged = ctx.shared(op.src.buffer.name, _padded(op.src.buffer), op.src.buffer.dtype)
        before += [Alloc(staged), _spill(op.src.buffer, staged, ctx)]
        source = Place(staged, source.at)
    if op.dst.buffer.scope == "fragment":
        if op.src.buffer is op.dst.buffer:
            staged = source.buffer
        else:
            staged = ctx.shared(op.dst.buffer.name, _padded(op.dst.buffer), op.dst.buffer.dtype)
            before.append(Alloc(staged))
        target = Place(staged, target.at)
        after = [_fetch(op.dst, staged, ctx)]
    return Block((*before, _scan(op, source, target, ctx, merge), *after))


def _scan(op: Scan, source: Place, target: Place, ctx: ThreadContext, merge: Callable[[str, Expr, Expr], Expr]) -> Stmt:
    """Scan row `iteration * groups + group` by a group's `lanes` threads; `carry` is from the row's earlier pieces."""
    shape = op.src.tile_shape
    length, outer = shape[op.dim], (*shape[: op.dim], *shape[op.dim + 1 :])
    lanes = _lanes(length, ctx.count)
    groups = ctx.count // lanes
    dtype = accumulator(op.src.buffer.dtype, op.dst.buffer.dtype)
    identity = identity_of(op.kind, dtype)
    running, below, carry = (ctx.local(name, 1, dtype) for name in ("running", "below", "carry"))
    now, so_far = Load(running, (ZERO,)), Load(carry, (ZERO,))
    lane, rows = ctx.thread % lanes, math.prod(outer, start=const(1, dt.int32))
    in_group = [ctx.thread < groups * lanes] if ctx.count % lanes else []  # the last threads are no group

    def piece(row: Expr, start: Expr) -> Stmt:
        """Scan one piece of a row by shuffles, one element for each lane, on top of the carry."""
        step = start * lanes + lane
        valid = conjunction([*in_group, row < rows, step < length])
        along = length - 1 - step if op.reverse else step
        point = _unravel(row, outer)
        point.insert(op.dim, along)
        value = cast(Load(source.buffer, source.at(point)), dtype)
        stmts: list[Stmt] = [Store(running, (ZERO,), select(valid, value, identity))]
        distance = 1
        while distance < lanes:
            joined = merge(op.kind, Load(below, (ZERO,)), now)
            stmts.append(Store(below, (ZERO,), shuffle_up(now, distance)))
            stmts.append(Store(running, (ZERO,), select(lane >= distance, joined, now)))
            distance *= 2
        last = (ctx.thread | (lanes - 1)) % 32
        stmts += [
            Store(running, (ZERO,), merge(op.kind, so_far, now)),
            guarded([valid], Store(target.buffer, target.at(point), cast(now, target.buffer.dtype))),
            Store(carry, (ZERO,), shuffle(now, last)),
        ]
        return Block(tuple(stmts))

    def iteration(number: Expr) -> Stmt:
        row = number * groups + ctx.thread // lanes
        pieces = serial((length + (lanes - 1)) // lanes, lambda start: piece(row, start), name="piece")
        return Block((Store(carry, (ZERO,), identity), pieces))

    iterations = serial((rows + (groups - 1)) // groups, iteration, name="turn")
    return Block((Alloc(running), Alloc(below), Alloc(carry), iterations))


def _place(region: Region) -> Place:
    """Return the map from a point to an element of a region."""
    return Place(region.buffer, lambda point: indices_at(region, point))


def _lanes(length: Expr, count: int) -> int:
    """Choose how many threads share a row: at most its elements, a warp, or the threads of the group."""
    most = 1 << (min(32, count).bit_length() - 1)
    if isinstance(length, Const):
        most = min(most, 1 << max(0, int(length.value) - 1).bit_length())
    return most


def _unravel(row: Expr, extents: Sequence[Expr]) -> list[Expr]:
    """Return the indices of row number `row`, the last dimension fastest."""
    point: list[Expr] = []
    for n, extent in reversed(list(enumerate(extents))):
        point.insert(0, row % extent if n else row)
        row = row // extent
    return point


def _padded(fragment: Buffer) -> tuple[int, ...]:
    """Return the shape of a fragment's layout, which may reach beyond the fragment's."""
    assert fragment.layout is not None
    return tuple(math.prod(d.size for d in digits) for digits in fragment.layout.dims)


def _spill(fragment: Buffer, staged: Buffer, ctx: ThreadContext) -> Stmt:
    """Copy a fragment to shared memory; one of the threads that hold an element writes it."""
    assert fragment.layout is not None
    steps = steps_of(fragment.layout)
    point = tuple(coordinate(fragment.layout, d, ctx.thread, steps) for d in range(fragment.rank))
    value = Load(ctx.registers(fragment), (sum((s.var * s.stride for s in steps), ZERO),))
    owner = owner_of(fragment.layout, ctx.thread)
    return guarded([] if owner is None else [owner], unrolled(steps, Store(staged, point, value)))


def _fetch(region: Region, staged: Buffer, ctx: ThreadContext) -> Stmt:
    """Copy from shared memory into the region of a fragment, in every thread that holds a part of it."""
    fragment = region.buffer
    assert fragment.layout is not None
    steps = steps_of(fragment.layout)
    point = tuple(coordinate(fragment.layout, d, ctx.thread, steps) for d in range(fragment.rank))
    place = (sum((s.var * s.stride for s in steps), ZERO),)
    inside: list[Expr] = []
    for here, r, size, n in zip(point, region.ranges, _padded(fragment), fragment.shape, strict=True):
        if not region.is_whole or not isinstance(n, Const) or size > n.value:  # what is beyond was not written
            inside += [here >= r.start, here < r.start + r.extent]
    put = Store(ctx.registers(fragment), place, Load(staged, point))
    return unrolled(steps, guarded(inside, put))
