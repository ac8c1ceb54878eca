# SPDX-License-Identifier: Apache-2.0
"""Rewrite a program with the facts of each place at hand: ranges of variables, conditions, values of names."""

from __future__ import annotations

import math

from torch_tile.ir import stmt
from torch_tile.ir.arith_util import Expand, Substitute, divides, divisor_of
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Call, Expr, Select, Var, unary
from torch_tile.ir.node import N, Node, Rewriter, find, with_fields
from torch_tile.ir.stmt import Block, For, If, Kernel, Let, Program, Role, Stmt


def values_for_names(*nodes: Node) -> Expand:
    """Return the rewriter that puts values into the place of all names that are bound inside the nodes."""
    return Expand({let.var: let.value for node in nodes for let in find(node, Let)})


class Known(Rewriter):
    """Carry `ranges` through kernels, loops, branches and names; unchanged nodes stay the same objects."""

    thread: Var | None = None  # the kernel's thread index

    def __init__(self) -> None:
        self.ranges: Ranges = Ranges()
        self.names: dict[Var, Expr] = {}  # values of names
        self.values: Substitute = Substitute(self.names)

    def visit_Program(self, program: Program) -> Program:
        """Add what launches check of sizes and scalar parameters."""
        return self.within(self.ranges.launched(program), program)

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Add the ranges of block indices and of the thread."""
        ranges = self.ranges.kernel(kernel)
        self.thread = kernel.thread
        if kernel.thread is not None:
            ranges = ranges.loop(kernel.thread, 0, math.prod(kernel.threads))
        return self.within(ranges, kernel)

    def visit_Role(self, role: Role) -> Stmt:
        """Narrow the range of the thread to the role."""
        if self.thread is None:
            return self.children(role)
        last = role.first + role.count - 1
        return self.within(self.ranges.within(self.thread, role.first, last), role)

    def visit_For(self, loop: For) -> Stmt:
        """Add the ranges of the loop variables."""
        return self.within(self.entered(loop), loop)

    def entered(self, loop: stmt.For) -> Ranges:
        """Return the ranges inside a loop, and record multiples that its variables are."""
        ranges = self.ranges
        for var, start, stop in zip(loop.vars, loop.starts, loop.stops, strict=True):
            ranges = ranges.loop(var, start, stop, loop.step)
            if loop.step > 1:
                multiple = math.gcd(loop.step, divisor_of(self.values(start), self.ranges))
                self.names[var] = Var(var.name, var.type, var.role, multiple)
        return ranges

    def visit_If(self, node: If) -> Stmt:
        """Visit each branch with its condition."""
        condition = self(node.condition)
        then = self.rewrite_where(node.condition, node.then)
        otherwise = self.rewrite_where(unary("not", node.condition), node.otherwise)
        if condition is node.condition and then is node.then and otherwise is node.otherwise:
            return node
        return If(condition, then, otherwise, span=node.span)

    def visit_Block(self, block: Block) -> Block:
        """Add names to the ranges up to the end of their block."""
        outer = self.ranges
        new = []
        for one in block.stmts:
            new.append(self(one))
            if isinstance(one, Let):
                value = one.value
                if isinstance(value, Call) and value.name == "here":  # `here(x)` has the value of x
                    value = value.args[0]
                self.ranges = self.ranges.define(one.var, value)
                if one.var.dtype.is_integer:
                    self.names[one.var] = self.values(value)
        self.ranges = outer
        return with_fields(block, stmts=tuple(new))

    def visit_Select(self, node: Select) -> Expr:
        """Visit each value with the condition under which it is chosen."""
        condition = self(node.condition)
        a = self.rewrite_where(node.condition, node.a)
        b = self.rewrite_where(unary("not", node.condition), node.b)
        return with_fields(node, condition=condition, a=a, b=b)

    def divides(self, by: int, expr: Expr) -> bool:
        """Return whether `by` certainly divides `expr`, with the names in `expr` replaced by their values."""
        return divides(by, self.values(expr), self.ranges)

    def rewrite_where(self, condition: Expr, node: N) -> N:
        """Return `node` rewritten where `condition` holds."""
        outer, self.ranges = self.ranges, self.ranges.assume(condition)
        new = self(node)
        self.ranges = outer
        return new  # type: ignore[no-any-return]

    def within(self, ranges: Ranges, node: N) -> N:
        """Return `node` with its children rewritten under `ranges`."""
        outer, self.ranges = self.ranges, ranges
        new = self.children(node)
        self.ranges = outer
        return new


Known.handled = 0  # these methods only carry facts, and seek no node of their own
