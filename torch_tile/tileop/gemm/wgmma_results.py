# SPDX-License-Identifier: Apache-2.0
"""T.wgmma_results: products that stayed under way have been waited for, and their results are used from here on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic
from torch_tile.intrinsics.wgmma import wgmma_results
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Address, const
from torch_tile.ir.stmt import Block, Stmt
from torch_tile.tileop.base import RegisteredOp, need_region, tile_op
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.simulator.tile.env import Env


@tile_op("wgmma_results")
@dataclass(frozen=True, eq=False, repr=False)
class WgmmaResults(RegisteredOp):
    """After a wait for the products that wrote the fragment `C`: no arithmetic on it is moved before that wait."""

    C: Region

    @classmethod
    def build(cls, C: Any) -> WgmmaResults:
        """A whole fragment."""
        return cls(need_region(C, "wgmma_results", "C"))

    def check(self) -> list[Diagnostic]:
        """Nothing can be wrong."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """As good as computed here."""
        return [self.C], [self.C]

    def lower_cpu(self) -> Stmt:
        """Nothing."""
        return Block(())

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Any."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """This thread's accumulators."""
        registers, layout = ctx.registers(self.C.buffer), self.C.buffer.layout
        assert layout is not None
        return wgmma_results(Address(registers, (const(0, dt.int32),)), layout.extent("r"))

    def evaluate(self, env: Env) -> None:
        """Nothing."""
