# SPDX-License-Identifier: Apache-2.0
"""Give a block more threads where its accumulators do not fit into the registers of those that the author wrote.

A tile of 128 x 256 sums takes 256 registers of each of 128 threads, and a thread has 255: each product would move sums
to memory and back. The block gets up to four times the threads if all sums fit then. Values do not change: only kernels
that never name a thread are changed, in which every operation is of the whole block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch_tile.compiler.context import Build
from torch_tile.hardware import PER_THREAD, WARPGROUP, equal_share
from torch_tile.intrinsics.base import intrinsic_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Load
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Node, find, with_fields
from torch_tile.ir.stmt import Alloc, For, Kernel, Program, Role, Store, TileOp, While
from torch_tile.tileop.gemm.mma import problem
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.partition import warpgroup_partitions

ADDRESSES = 16  # registers that a thread needs at least beside its accumulators
SPARE = 48  # registers beside them that a wider block must have
FACTORS = (2, 3, 4)  # of the threads that the author wrote
MOST_WIDENED = 512  # threads; of more, each has too few registers for sums
PANEL = 128  # bytes of a row of shared memory that warps do not share


def widen_blocks(program: Program, build: Build) -> Program:
    """Give more threads to each kernel whose accumulators otherwise spill; report it."""
    return with_fields(program, kernels=tuple(_widened(kernel, build) for kernel in program.kernels))


def _widened(kernel: Kernel, build: Build) -> Kernel:
    """Return a kernel with more threads if its accumulators need them and then fit, else the kernel itself."""
    threads = math.prod(kernel.threads)
    if build.options.measured or threads % WARPGROUP:
        return kernel
    needed, largest = max(map(_accumulator_registers, _bodies(kernel)), key=lambda found: found[0])
    if largest is None or needed // threads <= PER_THREAD - ADDRESSES or _names_threads(kernel):
        return kernel
    for more in (factor * threads for factor in FACTORS if factor * threads <= MOST_WIDENED):
        fits = needed // more <= min(PER_THREAD, equal_share(more)) - SPARE
        if fits and all(_splits(op, more) for op in find(kernel, Gemm)):
            taken = f"`{largest.name}`, take {needed // threads} registers of each of {threads} threads"
            build.remark(kernel.span, "T.Kernel", f"{more} threads: accumulators, such as {taken}")
            return replace(kernel, threads=(more,))
    return kernel


def _bodies(kernel: Kernel) -> Iterator[Node]:
    """Return the kernel's body and the bodies of its loops in which products are summed."""
    yield kernel.body
    yield from (loop.body for loop in find(kernel, For, While) if any(find(loop.body, Gemm)))


def _accumulator_registers(body: Node) -> tuple[int, Buffer | None]:
    """Count the registers, 4 bytes each, of accumulators that live at the same time in `body`; also return the largest
    accumulator.

    Those live together that the body only adds to, by products or by arithmetic. Of the accumulators of products that
    it begins anew at least one lives beside them.
    """
    sums, begun = _fragments(op.C.buffer for op in find(body, Gemm)), IdSet(_begun(body))
    kept = [_registers(tile) for tile in _fragments((*sums, *_stored(body))) if tile not in begun]
    passing = [_registers(tile) for tile in sums if tile in begun]
    return sum(kept) + max(passing, default=0), max(sums, key=_registers, default=None)


def _fragments(buffers: Iterable[Buffer]) -> IdSet[Buffer]:
    """Return those of the buffers that are in registers."""
    return IdSet(buffer for buffer in buffers if buffer.scope == "fragment")


def _registers(tile: Buffer) -> int:
    """Return how many registers of all threads together a fragment takes; 0 if its size is a symbol."""
    return math.prod(tile.static_shape or (0,)) * tile.dtype.itemsize // 4


def _stored(body: Node) -> Iterator[Buffer]:
    """Return the buffers that statements of `body` store to, element by element."""
    yield from (store.buffer for store in find(body, Store))


def _begun(body: Node) -> Iterator[Buffer]:
    """Return the buffers that a statement of `body` writes without reading them."""
    for op in find(body, TileOp):
        reads, writes = op.accesses()  # type: ignore[attr-defined]
        yield from (w.buffer for w in writes if not any(r.buffer is w.buffer for r in reads))
    for store in find(body, Store):
        if not any(load.buffer is store.buffer for load in find(store.value, Load)):
            yield store.buffer


def _names_threads(kernel: Kernel) -> bool:
    """Return whether the meaning of a kernel depends on how many threads run it, or its author places them."""
    if kernel.thread is not None or kernel.min_blocks > 1 or any(find(kernel, Role)):
        return True
    if any(n.buffer.scope == "barrier" or n.buffer.layout is not None for n in find(kernel, Alloc)):
        return True
    if any(loop.layout is not None for loop in find(kernel, For)) or any(op.wg_wait for op in find(kernel, Gemm)):
        return True
    return any(map(_is_of_threads, find(kernel, Call)))


def _is_of_threads(call: Call) -> bool:
    """Return whether threads make a call together, or order themselves by it; text of the author's own counts."""
    found = intrinsic_of(call)
    if found is None or found.convergent in ("role", "warpgroup", "warp"):
        return True
    return found.engine is not None or not (found.sync is None or found.is_barrier)


def _splits(op: Gemm, threads: int) -> bool:
    """Return whether all warps of so many threads take part in a product."""
    sizes = problem(op)
    if sizes is None:
        return False
    m, n, _ = sizes
    found = warpgroup_partitions(m, n, threads // WARPGROUP, op.policy.value, op.A.buffer.dtype.name)
    row = n * op.B.buffer.dtype.bits // 8
    return any(p.copies == 1 and (p.columns == 1 or row // p.columns % PANEL == 0) for p in found)
