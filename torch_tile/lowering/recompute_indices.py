# SPDX-License-Identifier: Apache-2.0
"""Loops that are short of registers compute their addresses anew in each iteration.

The C++ compiler moves all index arithmetic that does not change out of a loop, and each result keeps a register; beside
large accumulators it then has to spill. There, the thread's index becomes a value known only inside the iteration. Runs
last, on stage FLAT; values do not change.
"""

from __future__ import annotations

from dataclasses import replace

from ..intrinsics.memory import here
from ..ir.expr import Call, Const, Var
from ..ir.node import Node, Rewriter, children, walk
from ..ir.stmt import Alloc, Block, For, Kernel, Let, LoopKind, Program, Stmt

PLENTY = 192  # 4-byte registers of local arrays, of 255: what is left holds the addresses of a loop and its scalars


def recompute_indices(program: Program) -> Program:
    """Hide the thread's index in the loops of kernels whose arrays take more than PLENTY registers."""
    kernels = tuple(_hidden(kernel) for kernel in program.kernels)
    same = all(a is b for a, b in zip(kernels, program.kernels, strict=True))
    return program if same else replace(program, kernels=kernels)


def registers_of(kernel: Kernel) -> int:
    """Registers that the local arrays of a kernel fill, were all of them alive at once."""
    total = 0
    for node in walk(kernel.body):
        if isinstance(node, Alloc) and node.buffer.scope == "local":
            size = node.buffer.shape[0]
            total += -(-int(size.value) * node.buffer.dtype.itemsize // 4) if isinstance(size, Const) else 0
    return total


def _hidden(kernel: Kernel) -> Kernel:
    if kernel.thread is None or registers_of(kernel) <= PLENTY:
        return kernel
    body = _Hide(kernel.thread)(kernel.body)
    return kernel if body is kernel.body else replace(kernel, body=body)


class _Hide(Rewriter):
    """Gives the innermost loops around products a thread index of their own."""

    def __init__(self, thread: Var):
        self.thread = thread

    def For(self, loop: For) -> Stmt:
        """A loop that is not unrolled and multiplies outside its inner loops."""
        new = self.children(loop)
        if loop.kind is not LoopKind.SERIAL or not _multiplies(loop.body):
            return new
        own = Var(self.thread.name, self.thread.type, "let")
        body = _Replace(self.thread, own)(new.body)
        return new if body is new.body else replace(new, body=Block((Let(own, here(self.thread)), *body.stmts)))


class _Replace(Rewriter):
    def __init__(self, old: Var, new: Var):
        self.old, self.new = old, new

    def Var(self, var: Var) -> Var:
        """The new name for the old one."""
        return self.new if var is self.old else var


def _multiplies(node: Node) -> bool:
    """Whether products stand here, not in a loop inside that runs by itself."""
    if isinstance(node, Call) and node.name == "mma":
        return True
    if isinstance(node, For) and node.kind is LoopKind.SERIAL:
        return False
    return any(_multiplies(child) for child in children(node))
