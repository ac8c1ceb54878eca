# SPDX-License-Identifier: Apache-2.0
"""Analyse a kernel's text before the thread interpreter runs the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torch_tile.diagnostics.errors import InternalError
from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.base import intrinsic_of, starts, syncs
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import stmt as st
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Call, Expr
from torch_tile.ir.node import Node, walk
from torch_tile.simulator.simt.races import Array


def _is_concurrent(node: Node) -> bool:
    """Return whether a call does work whose order block barriers alone do not determine."""
    found = intrinsic_of(node) if isinstance(node, Call) else None
    if found is None:
        return False
    proxy = found.engine is not None and found.engine.is_proxy
    return proxy or found.scope in (Scope.MBARRIER, Scope.GROUP) or found.sync is Sync.PROXY_FENCE


def _blocks(node: Node) -> bool:
    """Return whether threads wait at a call for other threads of the block."""
    found = intrinsic_of(node) if isinstance(node, Call) else None
    return found is not None and (found.is_barrier or (found.sync is Sync.WAIT and found.scope is Scope.MBARRIER))


def is_concurrent(kernel: st.Kernel) -> bool:
    """Return whether a kernel has roles, or engines and barriers that let parts of a block run apart."""
    return any(isinstance(n, st.Role) or _is_concurrent(n) for n in walk(kernel.body))


def barrier_groups(role: st.Role, lanes: int, known: Callable[[Expr], Any]) -> list[Array]:
    """Split the threads of a role into parts that wait independently, and return their masks.

    A role has several parts where whole warps wait in branches of their own, or take turns. One warp's wait does not
    keep another warp from going on. `known` gives the value of a condition that depends on the thread alone. A role
    with products has whole warpgroups as parts.
    """
    inside = list(walk(role.body))
    unit = 128 if role.count % 128 == 0 and any(starts(n, Engine.WGMMA) for n in inside) else 32
    parts = np.zeros(role.count // unit, np.int64)
    for node in inside:
        if isinstance(node, Call) and syncs(node, Sync.TURN):
            parts = np.arange(len(parts))
        if isinstance(node, st.If) and any(map(_blocks, walk(node))):
            condition = known(node.condition)
            if isinstance(condition, np.ndarray):
                rows = condition[role.first : role.first + role.count].reshape(-1, unit)
                if (rows == rows[:, :1]).all():
                    parts = np.unique(parts * 2 + rows[:, 0], return_inverse=True)[1]
    found = []
    for part in range(int(parts.max()) + 1):
        mask = np.zeros(lanes, bool)
        mask[role.first : role.first + role.count] = np.repeat(parts == part, unit)
        found.append(mask)
    return found


def parts_warps(branch: st.If, known: Callable[[Expr], Any]) -> bool:
    """Return whether whole warps wait in a branch; `known` is that of `barrier_groups`."""
    if not any(map(_blocks, walk(branch))):
        return False
    condition = known(branch.condition)
    if not isinstance(condition, np.ndarray):
        return False
    warps = condition.reshape(-1, 32)
    return bool((warps == warps[:, :1]).all())


def leaves(node: Node) -> bool:
    """Return whether a statement may end the iteration that it is in."""
    if isinstance(node, st.For | st.While):
        return False
    if isinstance(node, st.Break | st.Continue):
        return True
    if isinstance(node, st.If):
        return any(leaves(s) for s in (*node.then.stmts, *node.otherwise.stmts))
    return False


def writes(node: Node, buffer: Buffer) -> bool:
    """Return whether a statement writes to a buffer."""
    if isinstance(node, st.Store):
        return node.buffer is buffer
    if not isinstance(node, Call):
        return False
    if node.name == "tma_store":
        return any(isinstance(a, TensorMap) and a.buffer is buffer for a in node.args)
    written = [a.operand for a in lookup(node.name).effects(node) if "w" in a.kind]
    return any(isinstance(a := node.args[n], Address) and a.buffer is buffer for n in written)


def product_registers(kernel: st.Kernel) -> Iterator[Buffer]:
    """Yield the buffers that products of warpgroups use as registers."""
    for node in walk(kernel.body):
        found = intrinsic_of(node) if isinstance(node, Call) else None
        if isinstance(node, Call) and found is not None and found.engine is Engine.WGMMA:
            yield from (a.buffer for a in node.args if isinstance(a, Address) and a.buffer.scope == "local")


def shared_size(kernel: st.Kernel) -> tuple[int, int]:
    """Return the bytes of shared memory that a kernel needs, and the bytes of its smallest element.

    mbarriers live as long as the block. Raises InternalError if an mbarrier shares its place.
    """
    end, place = kernel.shared_bytes, 16
    taken: dict[str, list[tuple[int, int]]] = {"shared": [], "barrier": []}
    for node in walk(kernel.body):
        if isinstance(node, st.Alloc) and node.buffer.scope in taken:
            shape, offset, size = node.buffer.static_shape, node.buffer.offset, node.buffer.dtype.itemsize
            if shape is None or offset is None:
                raise InternalError(f"`{node.buffer.name}` has no place in shared memory", node.span)
            last = offset + math.prod(shape) * size
            taken[node.buffer.scope].append((offset, last))
            if node.buffer.scope == "shared":
                place = math.gcd(place, size, offset)
                end = max(end, last)
            elif offset % size:
                raise InternalError(f"`{node.buffer.name}` lies at no multiple of {size} bytes", node.span)
    for first, last in taken["barrier"]:
        if sum(a < last and first < b for spans in taken.values() for a, b in spans) > 1:
            raise InternalError(f"mbarriers at bytes {first} to {last} share their place")
    return -(-end // 16) * 16, place
