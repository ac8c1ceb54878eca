# SPDX-License-Identifier: Apache-2.0
"""T.scale_rows: multiply each row of a tile by its factor, as online softmax rescales sums when the row max grows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.intrinsics.memory import vote_any
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Load, Var, binary, cast, const
from torch_tile.ir.node import node_class
from torch_tile.ir.stmt import Block, For, If, Stmt, Store
from torch_tile.tileop.base import (
    RegisteredOp,
    Tile,
    describe,
    indices_at,
    need_region,
    parallel,
    same_extents,
    tile_op,
)
from torch_tile.tileop.parallel import op as parallel_loops
from torch_tile.tileop.parallel.nest import is_static, nest_of
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env

FEW = 8  # factors of a thread that are worth a look before its elements are multiplied


@tile_op("scale_rows")
@node_class
class ScaleRows(RegisteredOp):
    """Compute `tile[i, ...] *= factors[i]`. On a GPU, warps whose factors are all 1 skip the op."""

    tile: Region
    factors: Region

    @classmethod
    def build(cls, tile: Tile, factors: Tile) -> ScaleRows:
        """Multiply `tile[i, ...] *= factors[i]`: one factor for each index of the tile's first dimension."""
        return cls(need_region(tile, "scale_rows", "tile"), need_region(factors, "scale_rows", "factors"))

    def check(self) -> list[Diagnostic]:
        """Check that there is one factor for each row."""
        tile, factors = self.tile.tile_shape, self.factors.tile_shape
        if tile and same_extents(tile[:1], factors):
            return []
        return [
            diagnose(
                "bad_argument", self.span, op="T.scale_rows", name="factors",
                why=f"has shape {describe(factors)}, the tile has {describe(tile)}",
                fix="pass one factor for each element of the tile's first dimension",
            )
        ]  # fmt: skip

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return tile and factors as read, and the tile as written."""
        return [self.tile, self.factors], [self.tile]

    def lower_cpu(self) -> Stmt:
        """Emit a parallel nest of products."""
        return self.as_loop()

    def as_loop(self) -> For:
        """Return the nest of products."""

        def scaled(point: tuple[Var, ...]) -> Stmt:
            place, row = indices_at(self.tile, point), indices_at(self.factors, point[:1])
            factor = cast(Load(self.factors.buffer, row), self.tile.buffer.dtype)
            return Store(self.tile.buffer, place, Load(self.tile.buffer, place) * factor)

        nest = parallel(self.tile.tile_shape, scaled)
        assert isinstance(nest, For)
        return nest

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand factors in the threads of their rows."""
        loop = self.as_loop()
        return parallel_loops.infer(loop, known, ctx) if is_static(loop) else []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit the nest, under a vote of the warp where each thread holds the factors of its own rows."""
        loop = self.as_loop()
        factors = self.factors.buffer
        if not self._holds_factors(loop, ctx):
            return loop
        registers = ctx.registers(factors)
        (size,) = registers.static_shape or (0,)
        one = const(1, factors.dtype)
        changed = (binary("!=", Load(registers, (const(r, dt.int32),)), one) for r in range(size))
        return If(vote_any(functools.reduce(lambda a, b: binary("or", a, b), changed)), Block((loop,)), Block(()))

    def _holds_factors(self, loop: For, ctx: ThreadContext) -> bool:
        """Return whether a thread holds all its factors in a few written registers, and the nest moves no data.

        The lanes of a warp run the op together then, and the branch has no barrier inside.
        """
        sides: tuple[Region, ...] = (self.tile, self.factors)
        if not all(s.buffer.scope == "fragment" and s.is_whole for s in sides) or ctx.count % 32 or not is_static(loop):
            return False
        nest = nest_of(loop, ctx.values)
        layout, held = parallel_loops.layout_of(nest, ctx), self.factors.buffer.layout
        if held is None or parallel_loops.misplaced(nest, layout, Layouts()):
            return False
        return held.shape == self.factors.buffer.static_shape and held.extent("r") <= FEW

    def evaluate(self, env: Env) -> None:
        """Multiply each row by its factor, in the tile's type."""
        tile, factors = env.read(self.tile), env.read(self.factors)
        rows = [env.size(e) for e in self.factors.tile_shape]
        rest = [1] * (len(self.tile.tile_shape) - 1)
        shape = [env.size(e) for e in self.tile.tile_shape]
        scaled = tile.reshape(shape) * factors.to(tile.dtype).reshape(*rows, *rest)
        env.write(self.tile, scaled.reshape(tile.shape))
