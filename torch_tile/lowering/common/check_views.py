# SPDX-License-Identifier: Apache-2.0
"""A kernel that writes a tensor uses it by one name: passes take buffers of different names for different memory."""

from __future__ import annotations

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.intrinsics import lookup
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Call, Load
from torch_tile.ir.node import Node, find
from torch_tile.ir.stmt import Kernel, Program, Store
from torch_tile.tileop import RegisteredOp


def check_views(program: Program) -> list[Diagnostic]:
    """What is wrong in kernels that use a tensor and a view of it, or two views."""
    return [d for kernel in program.kernels for d in _check(kernel)] if program.views else []


def _check(kernel: Kernel) -> list[Diagnostic]:
    names: dict[int, dict[int, Buffer]] = {}  # of the memory of each buffer
    for node in find(kernel.body, Load, Store, Region, Address):
        names.setdefault(_memory(node.buffer), {})[id(node.buffer)] = node.buffer
    found: dict[int, Diagnostic] = {}
    for writer in find(kernel.body, Store, RegisteredOp, Call):
        for buffer in _writes(writer):
            others = [b.name for b in names[_memory(buffer)].values() if b is not buffer]
            if others:
                why = f"is written as `{buffer.name}` and used as `{others[0]}` in one kernel"
                fix = "use one of the two names there"
                problem = diagnose("bad_argument", writer.span, op="T.view", name="src", why=why, fix=fix)
                found.setdefault(_memory(buffer), problem)
    return list(found.values())


def _memory(buffer: Buffer) -> int:
    return id(buffer.base or buffer)


def _writes(node: Node) -> list[Buffer]:
    if isinstance(node, Store):
        return [node.buffer]
    if isinstance(node, RegisteredOp):
        return [region.buffer for region in node.accesses()[1]]
    if not isinstance(node, Call):
        return []
    places = [(e.kind, node.args[e.operand]) for e in lookup(node.name).effects(node)]
    return [place.buffer for kind, place in places if "w" in kind and isinstance(place, Address)]
