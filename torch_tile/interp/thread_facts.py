# SPDX-License-Identifier: Apache-2.0
"""What the thread interpreter learns from a kernel's text before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..diagnostics import InternalError
from ..intrinsics import lookup
from ..ir import stmt as st
from ..ir.buffer import Buffer
from ..ir.expr import Address, Call
from ..ir.node import Node, walk
from ..ir.tensor_map import TensorMap

# Calls whose order block barriers alone do not tell.
CONCURRENT = {
    "mbarrier_init", "fence_barrier_init", "mbarrier_wait", "mbarrier_arrive", "warp_arrive", "mbarrier_expect",
    "tma_load", "tma_store", "bulk_commit", "bulk_wait", "fence_proxy_async", "named_barrier", "named_barrier_arrive",
    "wgmma", "wgmma_fence", "wgmma_commit", "wgmma_wait", "wgmma_results",
}  # fmt: skip


def is_concurrent(kernel: st.Kernel) -> bool:
    """Whether more than the threads of one role, in step, is at work at a time."""
    return any(isinstance(n, st.Role) or (isinstance(n, Call) and n.name in CONCURRENT) for n in walk(kernel.body))


def leaves(node: Node) -> bool:
    """Whether a statement may end the iteration that it is in."""
    if isinstance(node, st.For | st.While):
        return False
    if isinstance(node, st.Break | st.Continue):
        return True
    if isinstance(node, st.If):
        return any(leaves(s) for s in (*node.then.stmts, *node.otherwise.stmts))
    return False


def writes(node: Node, buffer: Buffer) -> bool:
    """Whether a statement writes to a buffer."""
    if isinstance(node, st.Store):
        return node.buffer is buffer
    if not isinstance(node, Call):
        return False
    if node.name == "tma_store":
        return any(isinstance(a, TensorMap) and a.buffer is buffer for a in node.args)
    written = [a.operand for a in lookup(node.name).effects(node) if "w" in a.kind]
    return any(isinstance(a := node.args[n], Address) and a.buffer is buffer for n in written)


def product_registers(kernel: st.Kernel) -> Iterator[int]:
    """`id`s of the buffers that products of warpgroups use as registers."""
    for node in walk(kernel.body):
        if isinstance(node, Call) and node.name in ("wgmma", "wgmma_results"):
            yield from (id(a.buffer) for a in node.args if isinstance(a, Address) and a.buffer.scope == "local")


def shared_size(kernel: st.Kernel) -> tuple[int, int]:
    """Bytes of shared memory that a kernel needs, and of its smallest element."""
    end, place = kernel.shared_bytes, 16
    for node in walk(kernel.body):
        if isinstance(node, st.Alloc) and node.buffer.scope == "shared":
            shape, offset = node.buffer.static_shape, node.buffer.offset
            if shape is None or offset is None:
                raise InternalError(f"`{node.buffer.name}` has no place in shared memory", node.span)
            place = math.gcd(place, node.buffer.dtype.itemsize, offset)
            end = max(end, offset + math.prod(shape) * node.buffer.dtype.itemsize)
    return -(-end // 16) * 16, place
