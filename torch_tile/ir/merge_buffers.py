# SPDX-License-Identifier: Apache-2.0
"""Let parameters of a program share one buffer: for calls that give one tensor for several parameters.

The parameters stay in their places, so that launches pass the same arguments. All accesses name the kept buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch_tile.ir.buffer import Buffer
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter
from torch_tile.ir.stmt import Program


def may_merge(one: Buffer, other: Buffer) -> bool:
    """Return whether two parameters mean the same elements where a call gives one tensor for both."""
    facts = [(b.dtype, b.seen_as, b.lanes, b.rank) for b in (one, other)]
    return facts[0] == facts[1]


def merge_buffers(program: Program, merged: Mapping[Buffer, Buffer]) -> Program:
    """Return the program that accesses `merged[b]` in the place of each buffer `b`."""
    return _Merged(merged).program(program)


class _Merged(Rewriter):
    """Replace buffers, and views of them."""

    def __init__(self, merged: Mapping[Buffer, Buffer]):
        self.made = IdMap[Buffer, Buffer](merged.items())

    def program(self, program: Program) -> Program:
        """Rewrite the kernels of a program and its views; keep its parameters."""
        views = tuple(map(self.visit_Buffer, program.views))
        kernels = tuple(map(self, program.kernels))
        return replace(program, kernels=kernels, views=views)

    def visit_Buffer(self, buffer: Buffer) -> Buffer:
        """Return the buffer that takes the place of this one."""
        if buffer not in self.made and buffer.base is not None:
            base = self.visit_Buffer(buffer.base)
            self.made[buffer] = buffer if base is buffer.base else replace(buffer, base=base)
        return self.made.get(buffer, buffer)


__all__ = ["may_merge", "merge_buffers"]
