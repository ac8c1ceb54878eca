# SPDX-License-Identifier: Apache-2.0
"""Make loops that are short of registers compute their addresses anew in each iteration.

The C++ compiler hoists all constant index arithmetic out of a loop, and each result keeps a register. Beside large
accumulators it then has to spill. In such loops the thread's index becomes a value known only inside the iteration. So
do addresses of operands that many products by wgmma walk in the same way in each iteration: as values of the iteration
they stay in uniform registers. Runs last, on stage FLAT; values do not change.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tile.hardware import WARPGROUP
from torch_tile.intrinsics.memory import here
from torch_tile.intrinsics.wgmma import walks_of
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Address, Binary, Call, Const, Expr, Var, const
from torch_tile.ir.node import Node, Rewriter, children, find, symbols, with_fields
from torch_tile.ir.stmt import Alloc, Block, For, Kernel, Let, LoopKind, Program, Stmt

MANY = 16  # most descriptors that a loop keeps in registers
PLENTY = 192  # 4-byte registers of local arrays, of 255: the rest holds a loop's addresses and scalars


def recompute_indices(program: Program) -> Program:
    """Hide the thread's index, or operand addresses, from the C++ compiler in loops that lack registers.

    The thread's index is hidden in kernels whose arrays take more than PLENTY registers. Addresses are hidden in loops
    of products by wgmma with more than MANY descriptors.
    """
    return with_fields(program, kernels=tuple(_hidden(kernel) for kernel in program.kernels))


def registers_of(kernel: Kernel) -> int:
    """Count the 4-byte registers that the local arrays of a kernel fill if all are alive at once."""
    total = 0
    for node in find(kernel.body, Alloc):
        if node.buffer.scope == "local":
            size = node.buffer.shape[0]
            total += -(-int(size.value) * node.buffer.dtype.itemsize // 4) if isinstance(size, Const) else 0
    return total


def _hidden(kernel: Kernel) -> Kernel:
    """Rewrite the loops of one kernel."""
    body = _HideOperands()(kernel.body)
    if kernel.thread is not None and registers_of(kernel) > PLENTY:
        body = _Hide(kernel.thread)(body)
    return with_fields(kernel, body=body)


class _Hide(Rewriter):
    """Give loops around products a thread index of their own.

    These are the innermost loops around products, and loops around loops of products by wgmma. The latter need many
    addresses between two loops of products, and no register should keep these meanwhile.
    """

    def __init__(self, thread: Var):
        self.thread = thread

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite a loop around products that is not unrolled."""
        new = self.children(loop)
        if loop.kind is not LoopKind.SERIAL or not (_multiplies(loop.body) or _repeats_products(loop.body)):
            return new
        own = Var(self.thread.name, self.thread.type, "let")
        body = _InLoop({self.thread: own})(new.body)
        return new if body is new.body else replace(new, body=Block((Let(own, here(self.thread)), *body.stmts)))


class _InLoop(Substitute):
    """Replace the thread's index, but not in the number of its warpgroup, which is the same for a whole warp.

    A uniform register holds that number through the kernel. Each operand of a product by wgmma is computed from it.
    """

    def visit_Binary(self, node: Binary) -> Expr:
        """Substitute in an expression, unless it is the number of the warpgroup: that stays as it is."""
        groups = node.op == "//" and node.a in self.known and isinstance(node.b, Const) and node.b.value == WARPGROUP
        return node if groups else self.children(node)


def _multiplies(node: Node) -> bool:
    """Return whether products stand in `node`, outside loops that are not unrolled."""
    if isinstance(node, Call) and node.name == "mma":
        return True
    if isinstance(node, For) and node.kind is LoopKind.SERIAL:
        return False
    return any(_multiplies(child) for child in children(node))


def _repeats_products(body: Block) -> bool:
    """Return whether a loop of products by wgmma stands inside."""
    inner = (n for n in find(body, For) if n.kind is LoopKind.SERIAL)
    return any(call.name == "wgmma" for loop in inner for call in find(loop.body, Call))


class _HideOperands(Rewriter):
    """Add a zero that is known only inside the iteration to operand addresses of wgmma."""

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite a loop that is not unrolled, after the loops inside it."""
        new = self.children(loop)
        if loop.kind is not LoopKind.SERIAL:
            return new
        move = _Move(new)
        body = move(new.body)
        if move.descriptors <= MANY:
            return new
        return replace(new, body=Block((Let(move.zero, here(const(0, int32))), *body.stmts)))


class _Move(Rewriter):
    """Add `zero` to the addresses of shared-memory operands that are the same in all iterations of a loop."""

    def __init__(self, loop: For):
        self.zero = Var("zero", int32, "let")
        self.descriptors, self.copies = 0, 1
        inside = list(find(loop.body, For, Let))
        changing = [*loop.vars, *(v for n in inside for v in (n.vars if isinstance(n, For) else (n.var,)))]
        self.changing = set(changing)

    def visit_For(self, loop: For) -> For:
        """Count the products of an unrolled loop once for each iteration; skip other loops, done before."""
        if loop.kind is not LoopKind.UNROLLED:
            return loop
        count = loop.stops[0]
        outside, self.copies = self.copies, self.copies * (int(count.value) if isinstance(count, Const) else 1)
        new: For = self.children(loop)
        self.copies = outside
        return new

    def visit_Call(self, call: Call) -> Expr:
        """Rewrite the operands of a product."""
        if call.name != "wgmma":
            return call
        d, a, b, *rest = call.args
        left, right = walks_of(call)
        return replace(call, args=(d, self.plus_zero(a) if left else a, self.plus_zero(b) if right else b, *rest))

    def plus_zero(self, operand: Expr) -> Expr:
        """Add the variable `zero` to an operand's address, unless the loop changes the address itself."""
        assert isinstance(operand, Address)
        if not self.changing.isdisjoint(symbols(operand)):
            return operand
        self.descriptors += self.copies
        return replace(operand, indices=(operand.indices[0] + self.zero,))
