# SPDX-License-Identifier: Apache-2.0
"""Cut loops of products in two where their last iterations do more work, as those of a causal mask do.

The condition of an `if` may hold from some iteration on, which can be computed before the loop. The iterations before
it then lose the `if`. The statements around it become one piece of code, whose instructions the assembler can
interleave. This is worth another copy of the loop only where products are in flight beside the `if`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.intrinsics.wgmma import wait_of
from torch_tile.ir import stmt as st
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Expr, Var, binary
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Block, If, Let, LoopKind, Program, Stmt
from torch_tile.lowering.analysis.branch_range import taken_from
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.lowering.hopper.warp_specialize import LoopsOfRoles
from torch_tile.tileop.gemm.op import Gemm


def peel_causal(program: Program, build: Build) -> Program:
    """Cut loops of roles at the iteration where a branch begins; values do not change."""
    return _Peel()(program) if build.target.has_wgmma else program


class _Peel(LoopsOfRoles):
    """Cut the loops of roles that the compiler made."""

    def visit_For(self, loop: st.For) -> Stmt:
        """Cut a loop at the first branch that runs beside products in flight."""
        new: st.For = self.children(loop)
        if not self.inside or new.kind is not LoopKind.SERIAL or new.step != 1:
            return new
        beside = _beside_products(new.body.stmts)
        found = next(((n, first) for n in beside if (first := taken_from(n, new)) is not None), None)
        return new if found is None else _split_loop(new, *found)


def _beside_products(stmts: Sequence[Stmt]) -> list[int]:
    """Return the places in a loop's body where products are in flight, those of the previous iteration included."""
    in_flight = False
    found: list[int] = []
    for n, one in [*enumerate(stmts)] * 2:
        if isinstance(one, Gemm):
            in_flight = one.wg_wait != 0
        elif (wait := wait_of(one)) is not None:
            in_flight = in_flight and wait.pending != 0
        elif in_flight and n not in found:
            found.append(n)
    return sorted(found)


def _split_loop(loop: st.For, place: int, first: Expr) -> Block:
    """Split a loop: without its branch up to iteration `first`, and with the branch's body from there on."""
    start, stop = loop.starts[0], loop.stops[0]
    middle = Var(f"{loop.vars[0].name}_more", int32, "let")
    stmts = loop.body.stmts
    branch = stmts[place]
    assert isinstance(branch, If)
    before = replace(loop, stops=(middle,), body=Block((*stmts[:place], *stmts[place + 1 :])))
    whole = Block((*stmts[:place], *branch.then.stmts, *stmts[place + 1 :]))
    after: st.For = Instance(IdMap(), IdMap(), fresh=True)(replace(loop, starts=(middle,), body=whole))
    bounded = simplify(binary("max", start, binary("min", first, stop)))
    return Block((Let(middle, bounded, span=loop.span), before, after))
