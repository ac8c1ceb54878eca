# SPDX-License-Identifier: Apache-2.0
"""Decide which rows of a tile a warpgroup computes, for T.own_rows and the `skip` of T.Pipelined.

In roles that the compiler made, a warpgroup has 64 rows of its own. All products there go by wgmma and give each
warpgroup as many rows. Elsewhere all rows are its own. Afterwards no call of T.own_rows is left, and only loops of such
roles keep `skip`. The values of a kernel do not change: authors promise that for skipped iterations.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics import wgmma
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Call, Const, Expr, Var, binary, const
from torch_tile.ir.node import Rewriter, find
from torch_tile.ir.stmt import Block, For, Kernel, Let, Program, Role
from torch_tile.lowering.hopper.plan_tma_loads import Survey
from torch_tile.tileop.gemm.mma import problem
from torch_tile.tileop.gemm.op import Gemm, GemmWarpPolicy

OWN = "64 rows for each warpgroup"  # of the report


def resolve_own_rows(program: Program, build: Build | None = None, shared: bool = False) -> Program:
    """Replace T.own_rows by numbers, or by rows of the thread's warpgroup.

    Without `build` the target has no warpgroups; with `shared` no warpgroup has rows of its own.
    """
    asked = _calls(program) or any(loop.skip is not None for loop in find(program, For))
    return _Resolve(None if shared else build)(program) if asked else program


def _calls(node: Program | Role) -> list[Call]:
    """Return the calls of T.own_rows."""
    return [call for call in find(node, Call) if call.name in wgmma.OWN_ROWS]


class _Resolve(Rewriter):
    """Replace calls of T.own_rows, and leave `skip` out where a warpgroup has no rows of its own."""

    def __init__(self, build: Build | None):
        self.build = build
        self.thread: Var | None = None
        self.rows = 0  # of the products of the role, if each warpgroup has 64 of its own; else 0
        self.group: Expr = const(0, int32)  # number of the running warpgroup in the role

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Remember the name of the running thread."""
        self.thread = kernel.thread
        return self.children(kernel)

    def visit_Role(self, role: Role) -> Role:
        """Name the warpgroup's number in a role whose warpgroups have rows of their own."""
        calls = _calls(role)
        if role.by_hand or not calls or self.build is None or self.thread is None:
            return self.children(role)
        self.rows = _rows(role, self.build, self.thread)
        if not self.rows:
            return self.children(role)
        self.build.remark(calls[0].span, "T.own_rows", OWN)
        name, groups = Var("group", int32, "let"), const(role.count // WARPGROUP, int32)
        number = binary("//", self.thread, const(WARPGROUP, int32)) - role.first // WARPGROUP
        self.group = name
        new: Role = self.children(role)
        self.rows = 0
        let = Let(name, binary("%", number, groups))  # the remainder tells the range of the name
        return replace(new, body=Block((let, *new.body.stmts), span=new.body.span))

    def visit_For(self, loop: For) -> For:
        """Keep `skip` in loops of roles whose warpgroups have rows of their own."""
        return self.children(loop if self.rows or loop.skip is None else replace(loop, skip=None))

    def visit_Call(self, call: Call) -> Expr:
        """Replace a call of T.own_rows."""
        if call.name not in wgmma.OWN_ROWS:
            return self.children(call)
        (asked,), ends = call.args, call.name == wgmma.OWN_ROWS[1]
        if isinstance(asked, Const) and asked.value == self.rows:
            return self.group * wgmma.M + (wgmma.M if ends else 0)
        return asked if ends else const(0, int32)


def _rows(role: Role, build: Build, thread: Var) -> int:
    """Return the number of rows of a role's products, if each warpgroup has 64 of its own; else 0."""
    survey = Survey(build, thread, role.count)
    survey(role.body)
    groups, products = role.count // WARPGROUP, list(find(role.body, Gemm))
    if groups < 2 or not products or len(survey.products) < len(products):
        return 0
    sizes = [problem(op) for op in products]
    own = all(size is not None and size[0] == groups * wgmma.M for size in sizes)
    return groups * wgmma.M if own and all(op.policy is GemmWarpPolicy.FullRow for op in products) else 0
