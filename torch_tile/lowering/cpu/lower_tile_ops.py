# SPDX-License-Identifier: Apache-2.0
"""Each tile op becomes the plain IR that its own `lower_cpu` gives."""

from __future__ import annotations

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import lookup
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Call, Expr, Load
from torch_tile.ir.node import Rewriter
from torch_tile.ir.stmt import Block, Do, Kernel, Print, Program, Role, Stmt
from torch_tile.lowering.analysis.statement_at import place_at
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import serial, spread, squeezed


def lower_tile_ops(program: Program) -> Program:
    """Replace every tile op. Afterwards only loops, stores and helper calls remain (stage LOOPS)."""
    return _Lower()(program)  # type: ignore[no-any-return]


class _Lower(Rewriter):
    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """What names the running thread is for GPUs: a CPU runs a block as one."""
        if kernel.thread is not None:
            fix = "write T.Parallel, or choose a CUDA target"
            raise error("unsupported_on_target", kernel.span, what="T.get_thread_binding", target="cpu", fix=fix)
        return self.children(kernel)

    def visit_Role(self, role: Role) -> Role:
        """A block without threads has none to give roles to."""
        fix = "choose a CUDA target, or let all threads do the same"
        raise error(
            "unsupported_on_target", role.span, what="T.ws" if role.by_hand else "T.role", target="cpu", fix=fix
        )

    def visit_Call(self, call: Call) -> Expr:
        """Blocks run one after another."""
        if call.name == "at_rank":
            fix = "choose a CUDA target from sm_90 on"
            raise error("unsupported_on_target", call.span, what="T.at_rank", target="cpu", fix=fix)
        return self.children(call)

    def visit_Do(self, node: Do) -> Stmt:
        """Barriers and waits: what comes before them is done already."""
        if not isinstance(node.call, Call):
            return node
        if lookup(node.call.name).idle:
            return Block(())
        if lookup(node.call.name).header and not lookup(node.call.name).cpu:
            fix = "choose a CUDA target, or leave the order of threads to the compiler"
            raise error("unsupported_on_target", node.span, what=f"`{node.call.name}`", target="cpu", fix=fix)
        return node

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        return place_at(op, op.lower_cpu())

    def visit_Print(self, node: Print) -> Stmt:
        """A printed region is printed element by element."""
        region = node.value
        if not isinstance(region, Region):
            return node
        message = f"{node.message} {region.buffer.name}".strip()

        def nest(rest: tuple[Expr, ...], point: tuple[Expr, ...]) -> Stmt:
            if not rest:
                return Print(message, Load(region.buffer, spread(region, point)))
            return serial(rest[0], lambda v: nest(rest[1:], (*point, v)), name="ijklmn"[len(point)])

        return place_at(node, nest(squeezed(region), ()))
