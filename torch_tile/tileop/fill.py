# SPDX-License-Identifier: Apache-2.0
"""T.fill and T.clear: set every element of a region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Expr, Load, Var, const, is_number
from torch_tile.ir.node import find, node_class
from torch_tile.ir.stmt import Block, For, Let, LoopKind, Stmt, Store
from torch_tile.tileop.base import (
    RegisteredOp,
    Scalar,
    Tile,
    need_region,
    parallel,
    region_of,
    same_extents,
    scalar,
    spread,
    squeezed,
    tile_op,
)
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env


@tile_op("fill")
@node_class
class Fill(RegisteredOp):
    """Set every element of `dst` to `value`."""

    dst: Region
    value: Expr

    @classmethod
    def build(cls, buffer: Tile, value: Scalar) -> Fill:
        """Set every element of a buffer, region or element to `value`, converted to its dtype."""
        region = need_region(buffer, "fill", "buffer")
        if not isinstance(value, Expr) and not is_number(value):
            raise error("fill_value", None, got="a buffer" if region_of(value) is not None else type(value).__name__)
        return cls(region, scalar(value, "T.fill", region.buffer))

    def check(self) -> list[Diagnostic]:
        """Return no diagnostics: `build` checks all arguments."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the region as written."""
        return [], [self.dst]

    def lower_cpu(self) -> Stmt:
        """Emit a parallel nest of stores."""
        return self._stores()

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand no layout."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Set all registers of a whole fragment; else emit a parallel nest."""
        if self.dst.buffer.scope != "fragment" or not same_extents(self.dst.extents, self.dst.buffer.shape):
            return self._stores()
        registers = ctx.registers(self.dst.buffer)
        v = Var("v", dt.int32, "loop")
        body = Block((Store(registers, (v,), self.value),))
        return For(LoopKind.UNROLLED, (v,), (const(0, dt.int32),), (registers.shape[0],), body)

    def _stores(self) -> Stmt:
        """Build the parallel nest of stores, or one store for a single element."""
        value, before = self.value, []
        if any(load.buffer is self.dst.buffer for load in find(value, Load)):  # read once, before it is overwritten
            before = [Let(Var("filling", value.dtype, "let"), value)]
            value = before[0].var

        def put(point: tuple[Any, ...]) -> Stmt:
            """Build the store of one element."""
            return Store(self.dst.buffer, spread(self.dst, point), value)

        extents = squeezed(self.dst)
        stores = parallel(extents, put) if extents else put(())
        return Block((*before, stores)) if before else stores

    def evaluate(self, env: Env) -> None:
        """Write a constant box."""
        env.write(self.dst, env.full(env.extents(self.dst), env.value(self.value), self.dst.buffer.dtype))
