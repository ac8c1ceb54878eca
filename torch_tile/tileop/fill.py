# SPDX-License-Identifier: Apache-2.0
"""T.fill and T.clear: set every element of a region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..diagnostics import Diagnostic, error
from ..ir.buffer import Region
from ..ir.expr import Expr, is_number
from ..ir.stmt import Stmt, Store
from .base import RegisteredOp, need_region, parallel, scalar, spread, squeezed, tile_op

if TYPE_CHECKING:
    from ..interp.env import Env


@tile_op("fill")
@dataclass(frozen=True, eq=False, repr=False)
class Fill(RegisteredOp):
    """`dst[...] = value`."""

    dst: Region
    value: Expr

    @classmethod
    def build(cls, dst: Any, value: Any) -> Fill:
        """Any region and a scalar, converted to the buffer's type."""
        region = need_region(dst, "fill", "buffer")
        if not isinstance(value, Expr) and not is_number(value):
            raise error("fill_value", None, got=type(value).__name__)
        return cls(region, scalar(value, "T.fill", region.buffer.dtype))

    def check(self) -> list[Diagnostic]:
        """Nothing can be wrong that `build` has not refused."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Writes the region."""
        return [], [self.dst]

    def lower_cpu(self) -> Stmt:
        """A parallel nest of stores."""

        def put(point: tuple[Any, ...]) -> Stmt:
            return Store(self.dst.buffer, spread(self.dst, point), self.value)

        extents = squeezed(self.dst)
        return parallel(extents, put) if extents else put(())

    def evaluate(self, env: Env) -> None:
        """Write a constant box."""
        env.write(self.dst, env.full(env.extents(self.dst), env.value(self.value), self.dst.buffer.dtype))
