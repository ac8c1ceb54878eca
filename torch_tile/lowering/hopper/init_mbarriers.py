# SPDX-License-Identifier: Apache-2.0
"""Let one thread initialise a kernel's mbarriers before any other use, and prefetch its tensor maps.

The pass runs once buffers have their addresses. A barrier of the block after the initialisation orders it before all
later statements. It is the barrier of the cluster if blocks reach each other's mbarriers. The maps come from memory
while the thread initialises the mbarriers. The first bulk copies need not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from torch_tile.intrinsics import bulk, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Binary, Call, const
from torch_tile.ir.node import equal, find, with_fields
from torch_tile.ir.stmt import Alloc, Block, If, Kernel, Program, Stmt


def init_mbarriers(program: Program) -> Program:
    """Initialise each mbarrier behind its allocation; programs without mbarriers stay as they are."""
    return with_fields(program, kernels=tuple(map(_initialised, program.kernels)))


def _initialised(kernel: Kernel) -> Kernel:
    """Insert the initialisation behind the last allocation of an mbarrier, unless the kernel has one."""
    stmts = kernel.body.stmts
    made = [n for n, s in enumerate(stmts) if isinstance(s, Alloc) and s.buffer.scope == "barrier"]
    done = any(n.name == "mbarrier_init" for n in find(kernel.body, Call))
    if not made or done or kernel.thread is None:
        return kernel
    buffers = [s.buffer for s in stmts if isinstance(s, Alloc) and s.buffer.scope == "barrier"]
    inits = Block((*_prefetches(kernel), *(each for b in buffers for each in _inits(b)), bulk.fence_barrier_init()))
    first = If(Binary("==", kernel.thread, const(0, dt.int32)), inits, Block(()))
    after = max(made) + 1
    reached = any(map(bulk.reaches_others, find(kernel.body, Call)))
    met = (bulk.cluster_arrive_relaxed(), bulk.cluster_wait()) if reached else (memory.barrier(),)
    return replace(kernel, body=Block((*stmts[:after], first, *met, *stmts[after:])))


def _prefetches(kernel: Kernel) -> Iterator[Stmt]:
    """Yield one prefetch for each different tensor map of a kernel."""
    found: list[TensorMap] = []
    for node in find(kernel.body, TensorMap):
        if not any(equal(node, known) for known in found):
            found.append(node)
            yield bulk.prefetch_map(node)


def _inits(buffer: Buffer) -> Iterator[Stmt]:
    """Yield the initialisation of each mbarrier in an array."""
    shape = buffer.static_shape
    assert shape is not None, f"`{buffer.name}` has a dynamic size"
    for place in product(*map(range, shape)):
        yield bulk.mbarrier_init(Address(buffer, tuple(const(n, dt.int32) for n in place)), buffer.arrivals)
