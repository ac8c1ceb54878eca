# SPDX-License-Identifier: Apache-2.0
"""Let products go by wgmma although threads load their operands.

Threads that wrote a tile fence it before the barrier that shows it to the products (`insert_barriers`). Each product is
waited for at once. Afterwards `Gemm.wgmma` is set for these products. A kernel with roles stays as it is. So does a
kernel that takes slices of rows of an accumulator: by wgmma each warp has rows of its own, so that slices would change
warps. Beside products that need mma.sync, wgmma has those whose sums live in one iteration: sums that both kinds keep
over a loop take more registers than there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, contains, find, symbols
from torch_tile.ir.stmt import For, If, Kernel, Program, Role
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm import wgmma
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.threads import ThreadContext
from torch_tile.tileop.uses import count_uses


def choose_wgmma(program: Program, build: Build) -> Program:
    """Set `wgmma` for the products of each kernel whose products all can; values do not change."""
    kept = build.options.mma_sync or build.options.measured
    return _Choose(build)(program) if build.target.has_wgmma and not kept else program


class _Choose(Rewriter):
    """Set `wgmma` for products."""

    def __init__(self, build: Build):
        self.build = build
        self.chosen: IdSet[Gemm] = IdSet()

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Decide for all products of a kernel together."""
        products = list(find(kernel, Gemm))
        thread = Var("thread", dt.int32, "thread") if kernel.thread is None else kernel.thread
        ctx = ThreadContext(self.build, thread, math.prod(kernel.threads), Ranges())
        parted = any(thread in symbols(branch.condition) and contains(branch, Gemm) for branch in find(kernel, If))
        if not products or parted or contains(kernel, Role):
            return kernel
        able = [op for op in products if wgmma.refuses(replace(op, wgmma=True), ctx) is None]
        if len(able) < len(products):
            by_wgmma = IdSet(able)
            kept = IdSet(op.C.buffer for op in products if op not in by_wgmma)
            able = [op for op in able if op.C.buffer not in kept and _lives_in_one_iteration(op.C.buffer, kernel)]
        if _slices_rows(kernel, able):
            return kernel
        self.chosen = IdSet(able)
        return self.children(kernel)

    def visit_Gemm(self, op: Gemm) -> Gemm:
        """Ask for wgmma."""
        return replace(op, wgmma=True) if op in self.chosen else op


def _lives_in_one_iteration(sums: Buffer, kernel: Kernel) -> bool:
    """Return whether the innermost loop whose products add to these sums holds all accesses of them."""
    loops = [loop for loop in find(kernel, For) if any(op.C.buffer is sums for op in find(loop, Gemm))]
    return bool(loops) and count_uses(sums, loops[-1]) == count_uses(sums, kernel)


def _slices_rows(kernel: Kernel, products: Sequence[Gemm]) -> bool:
    """Return whether some rows of an accumulator are read apart from its other rows."""
    sums = IdSet(op.C.buffer for op in products)
    for node in find(kernel, Load, Copy):
        if isinstance(node, Load) and node.buffer in sums and not isinstance(node.indices[0], Var):
            return True
        if isinstance(node, Copy) and node.src.buffer in sums and not node.src.is_whole:
            return True
    return False
