# SPDX-License-Identifier: Apache-2.0
"""Say which tensors a FLAT program is passed, which it may write, and which of them must be apart."""

from __future__ import annotations

from collections.abc import Sequence

from torch_tile.intrinsics import lookup
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Call, Load
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node
from torch_tile.ir.stmt import Program, Store


def tensors_of(program: Program) -> list[Buffer]:
    """Return everything that is passed by pointer: buffer parameters, outputs, workspaces."""
    params = [p for p in program.params if isinstance(p, Buffer)]
    return [*params, *program.outputs, *program.workspaces]


def written_buffers(nodes: Sequence[Node]) -> IdSet[Buffer]:
    """Return the buffers that `nodes` may write to."""
    found: IdSet[Buffer] = IdSet()
    for node in nodes:
        if isinstance(node, Store):
            found.add(node.buffer)
        elif isinstance(node, Call):
            for access in lookup(node.name).effects(node):
                address = node.args[access.operand]
                if "w" in access.kind and isinstance(address, Address):
                    found.add(address.buffer)
            if node.name == "tma_store":
                found |= IdSet(a.buffer for a in node.args if isinstance(a, TensorMap))
    return found


def disjoint_tensors(tensors: Sequence[Buffer], kernels: Sequence[Sequence[Node]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of positions of tensors: a kernel, given by its nodes, only reads the first and writes the second.

    Passes and compilers take what is only read for constant. So the two must not overlap.
    """
    found: set[tuple[int, int]] = set()
    for nodes in kernels:
        written = written_buffers(nodes)
        touched = IdSet(n.buffer for n in nodes if isinstance(n, Load | Address | Store | TensorMap))
        places = [(n, b in written) for n, b in enumerate(tensors) if b in touched]
        found |= {(n, m) for n, one in places for m, other in places if other and not one}
    return tuple(sorted(found))
