# SPDX-License-Identifier: Apache-2.0
"""Give sizes and scalar parameters of a program their values: for shared tiles whose size a call brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr, Scalar, Var, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter, find, rebuilt
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Program


def sizes_of_tiles(program: Program) -> list[Var]:
    """Return the sizes and parameters that the shapes of shared tiles depend on; [] where a loop decides one."""
    found: dict[Var, None] = {}
    for tile in (node.buffer for kernel in program.kernels for node in find(kernel, Alloc)):
        for size in tile.shape if tile.scope == "shared" else ():
            found.update((var, None) for var in find(size, Var))
    return list(found) if all(var.role in ("dim", "param") for var in found) else []


def fix_sizes(program: Program, values: Mapping[Var, Scalar]) -> Program:
    """Return the program for these values of some of its sizes and scalar parameters, which stay parameters."""
    return _Fixed({var: const(value, var.dtype) for var, value in values.items()}).program(program)


class _Fixed(Rewriter):
    """Replace variables by numbers, in the shapes of buffers as well."""

    def __init__(self, known: Mapping[Var, Const]):
        self.known = known
        self.made = IdMap[Buffer, Buffer]()

    def __call__(self, node: Any) -> Any:
        """Rewrite a node, and compute what is known of a value."""
        new = super().__call__(node)
        return simplify(new) if new is not node and isinstance(new, Expr) else new

    def program(self, program: Program) -> Program:
        """Rewrite a program with its buffers."""
        params = tuple(self.visit_Buffer(p) if isinstance(p, Buffer) else p for p in program.params)
        workspaces, outputs, views = (
            tuple(map(self.visit_Buffer, buffers)) for buffers in (program.workspaces, program.outputs, program.views)
        )
        new = self.children(program)
        return replace(new, params=params, workspaces=workspaces, outputs=outputs, views=views)

    def visit_Var(self, var: Var) -> Expr:
        """Return the number of a variable."""
        return self.known.get(var, var)

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        """Return the buffer with the numbers in its shape."""
        found = self.made.get(buffer)
        if found is None:
            shape = tuple(map(self, buffer.shape))
            strides = None if buffer.strides is None else tuple(map(self, buffer.strides))
            base = None if buffer.base is None else self.visit_Buffer(buffer.base)
            found = self.made[buffer] = replace(buffer, shape=shape, strides=strides, base=base)
        return found

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate the new buffer."""
        return rebuilt(self.children(node), buffer=self.visit_Buffer(node.buffer))


__all__ = ["fix_sizes", "sizes_of_tiles"]
