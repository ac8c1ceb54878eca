# SPDX-License-Identifier: Apache-2.0
"""T.cumsum and T.cummax: inclusive scans along one dimension of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch_tile.diagnostics.errors import Diagnostic, diagnose, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Expr, Load, cast, const, select
from torch_tile.ir.stmt import Stmt, Store
from torch_tile.tileop.base import (
    RegisteredOp,
    Tile,
    describe,
    need_region,
    parallel,
    same_extents,
    serial,
    tile_op,
)
from torch_tile.tileop.reduce.op import combine, ordered
from torch_tile.tileop.reduce.scan_threads import scan_on_threads
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.simulator.tile.env import Env


@dataclass(frozen=True, eq=False, repr=False)
class Scan(RegisteredOp):
    """`dst[..., k, ...] = fold(src[..., :k + 1, ...])`, from the other end with reverse."""

    kind: ClassVar[str] = ""
    src: Region
    dst: Region
    dim: int = 0
    reverse: bool = False

    @classmethod
    def build(cls, src: Tile, dst: Tile | None = None, dim: int = 0, reverse: bool = False) -> Scan:
        """Running values of `src` along `dim`, the element itself included, into `dst` of its shape, or in place.

        With `reverse` they run from the last element to the first.
        """
        a = need_region(src, cls.op_name, "src")
        b = a if dst is None else need_region(dst, cls.op_name, "dst")
        rank = len(a.tile_shape)
        if not -rank <= dim < rank:
            raise error("reduce_dim", None, op=cls.op_name, dim=dim, rank=rank)
        return cls(a, b, dim % rank, bool(reverse))

    def check(self) -> list[Diagnostic]:
        """Source and destination have one shape."""
        if same_extents(self.src.tile_shape, self.dst.tile_shape):
            return []
        src, dst = describe(self.src.tile_shape), describe(self.dst.tile_shape)
        return [diagnose("scan_shape", self.span, op=self.op_name, src=src, dst=dst)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Reads the source, writes the destination."""
        return [self.src], [self.dst]

    def lower_cpu(self) -> Stmt:
        """A serial walk along the dimension; each step adds the previous result."""
        shape = self.src.tile_shape
        outer = (*shape[: self.dim], *shape[self.dim + 1 :])
        extent, target = shape[self.dim], self.dst.buffer
        kind = "sum" if self.kind == "sum" else "max"

        def at(region: Region, point: tuple[Expr, ...], k: Expr) -> tuple[Expr, ...]:
            steps = iter([*point[: self.dim], k, *point[self.dim :]])
            return tuple(r.start + next(steps) if r.keep else r.start for r in region.ranges)

        def step(point: tuple[Any, ...], k: Expr) -> Stmt:
            here = extent - 1 - k if self.reverse else k
            before = here + 1 if self.reverse else here - 1
            value = cast(Load(self.src.buffer, at(self.src, point, here)), target.dtype)
            total = combine(kind, Load(target, at(self.dst, point, before)), value)
            return Store(target, at(self.dst, point, here), select(k == const(0, dt.int32), value, total))

        return serial(extent, lambda k: parallel(outer, lambda p: step(p, k)) if outer else step((), k))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Fragments pass through shared memory, so that any layout will do; that of the other side if there is one."""
        source, target = self.src.buffer, self.dst.buffer
        layout = known.get(source) if "fragment" == source.scope == target.scope else None
        if layout is None or source is target or not same_extents(source.shape, target.shape):
            return []
        return [Demand(target, layout, False, f"holds the running values of `{source.name}`", self.span)]

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Rows by a few lanes of a warp each: scan_threads.py."""
        return scan_on_threads(self, ctx, combine)

    def evaluate(self, env: Env) -> None:
        """torch's scan in float64 (int64 for integers)."""
        import torch

        old = env.read(self.dst)
        tile = (
            env.read(self.src).reshape([env.size(e) for e in self.src.tile_shape]).to(env.wide(self.dst.buffer.dtype))
        )
        tile = tile.flip(self.dim) if self.reverse else tile
        unsigned = self.src.buffer.dtype == dt.uint64 and not tile.is_floating_point()
        if self.kind == "sum":
            tile = torch.cumsum(tile, self.dim)
        else:
            tile = torch.cummax(ordered(tile) if unsigned else tile, self.dim).values
            tile = ordered(tile) if unsigned else tile
        tile = tile.flip(self.dim) if self.reverse else tile
        env.write(self.dst, tile.to(old.dtype).reshape(old.shape))


@tile_op("cumsum")
@dataclass(frozen=True, eq=False, repr=False)
class CumSum(Scan):
    """Inclusive sums."""

    kind: ClassVar[str] = "sum"


@tile_op("cummax")
@dataclass(frozen=True, eq=False, repr=False)
class CumMax(Scan):
    """Running maxima."""

    kind: ClassVar[str] = "max"
