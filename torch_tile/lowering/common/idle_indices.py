# SPDX-License-Identifier: Apache-2.0
"""Find grids without a block, block indices that no statement names, and copies that a pipelined loop repeats.

All blocks of an index that no statement names do the same work, so that atomic sums count it again. Names that begin
with `_` say that this is meant. Kernels whose blocks ask for work, by an atomic operation that returns a value, are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Const, Load, Var, is_zero
from torch_tile.ir.node import Node, contains, find, symbols
from torch_tile.ir.stmt import Alloc, Do, For, Kernel, Let, LoopKind, Program, Store
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.uses import writes_of


def idle_indices(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each block index that nothing names, and for each copy that a loop repeats.

    The library's own lines are left out: one text serves tensors that have the index, and those that do not.
    """
    found = (each for kernel in program.kernels for each in (*_idle_blocks(kernel), *_repeated_copies(kernel)))
    return [each for each in found if each.span is None or not each.span.is_of_library]


def empty_grids(program: Program) -> list[Diagnostic]:
    """Return a diagnostic for each kernel with a size 0 in its grid.

    Programs with an empty tensor are left out: no block is right for it.
    """
    shapes = (size for param in program.params if isinstance(param, Buffer) for size in param.shape)
    if any(is_zero(size) for size in shapes):
        return []
    empty = (kernel for kernel in program.kernels if any(map(is_zero, kernel.grid)))
    return [diagnose("no_blocks", each.span, grid=", ".join(map(repr, each.grid))) for each in empty]


def _idle_blocks(kernel: Kernel) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each index of several blocks that the kernel does not name."""
    if kernel.cluster != (1, 1, 1) or contains(kernel.body, Do) or any("atomic" in c.name for c in find(kernel, Call)):
        return
    used = symbols(kernel.body)
    for var, count in zip(kernel.blocks, kernel.grid, strict=True):
        is_several = isinstance(count, Const) and int(count.value) > 1
        if is_several and var not in used and not var.name.startswith("_"):
            yield diagnose("idle_index", kernel.span, index=var.name, count=repr(count))


def _repeated_copies(kernel: Kernel) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each copy of a pipelined loop that brings the same tile in each iteration."""
    written: Any = None
    for loop in find(kernel.body, For):
        if loop.kind is not LoopKind.PIPELINED:
            continue
        written = frozenset(writes_of(kernel.body)) if written is None else written
        inside = frozenset((*loop.vars, *_made(loop.body)))
        for copy in (one for one in loop.body.stmts if isinstance(one, Copy)):
            source, tile = copy.src, copy.dst.buffer
            is_load = source.buffer.scope == "global" and tile.scope in ("shared", "fragment")
            if not is_load or source.buffer in written or contains(source, Load) or symbols(copy) & inside:
                continue
            if sum(any(b is tile for b in writes_of(one)) for one in find(loop.body, RegisteredOp, Store)) == 1:
                index = ", ".join(var.name for var in loop.vars)
                yield diagnose("repeated_copy", copy.span, buffer=source.buffer.name, index=index)


def _made(body: Node) -> Iterator[Var | Buffer]:
    """Yield the names and variables that may change in the body of a loop."""
    for node in find(body, Let, For, Alloc, Store):
        if isinstance(node, Let):
            yield node.var
        elif isinstance(node, For):
            yield from node.vars
        else:
            yield node.buffer
