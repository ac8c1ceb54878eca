# SPDX-License-Identifier: Apache-2.0
"""Hopper's asynchronous hardware: mbarriers, copies by the tensor memory accelerator, roles of warps.

A phase of an mbarrier completes once its arrivals and all expected bytes have come; the next phase begins at once.
`mbarrier_wait(b, p)` passes when the phase of parity p has completed. A fresh barrier is in phase 0, so waiting for
parity 1 passes and for parity 0 does not. The C++ is in csrc/mbarrier.h and csrc/tma.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch_tile.hardware import AMPERE, HOPPER
from torch_tile.intrinsics.base import Access, Intrinsic, declare, effect, intrinsic_of, same
from torch_tile.intrinsics.traits import Engine, Scope, Sync
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import TensorMap
from torch_tile.ir.expr import Address, Call, Const, Expr, cast, to_expr
from torch_tile.ir.stmt import Do

# Evict hints of L2, as options of `tma_load`.
POLICIES = ("", "evict_first", "evict_last")
OF_CLUSTER = "cluster"  # an option: arrivals and waits that order accesses across blocks
MULTICAST = "multicast"  # an option of `tma_load`, whose last operand is then a mask of blocks


def _int(value: Any) -> Expr:
    """Convert a value to an int32 expression."""
    return cast(to_expr(value), dt.int32)


# mbarriers.


def mbarrier_init(barrier: Address, arrivals: int) -> Do:
    """Initialize a barrier whose phases wait for `arrivals`, in one thread; `fence_barrier_init` follows."""
    return effect("mbarrier_init", barrier, options=(arrivals,))


def fence_barrier_init() -> Do:
    """Make this thread's new barriers visible to the copy engine, and to other threads after a block barrier."""
    return effect("fence_barrier_init")


def mbarrier_wait(barrier: Address, parity: Any, of_cluster: bool = False) -> Do:
    """Wait until the phase of this parity has completed. This thread then sees the results of its copies.

    With `of_cluster` it also sees what threads of other blocks stored before they arrived with `of_cluster`.
    """
    return effect("mbarrier_wait", barrier, _int(parity), options=(OF_CLUSTER,) if of_cluster else ())


def own_phase(barrier: Address) -> Do:
    """State that the phase just waited for is that of this thread's last arrival. The same holds for all threads of its
    role.

    So the wait orders what they did before these arrivals. Only `insert_barriers` reads this.
    """
    return effect("own_phase", barrier)


def mbarrier_arrive(barrier: Address, block: Expr | None = None, of_cluster: bool = False) -> Do:
    """Arrive at a barrier; with `block`, at the same barrier of the block of the cluster that has this rank.

    With `of_cluster`, threads that wait with `of_cluster` see this thread's earlier stores, in whatever block.
    """
    options = (OF_CLUSTER,) if of_cluster else ()
    return effect("mbarrier_arrive", barrier, *(() if block is None else (_int(block),)), options=options)


def warp_arrive(barrier: Address, blocks: Expr | None = None) -> Do:
    """Synchronise the threads of a warp, then arrive once for the warp.

    Bulk copies see the warp's earlier accesses to shared memory in order, as after `fence_proxy_async`. With `blocks`,
    arrive once at each block of the cluster whose bit is set.
    """
    return effect("warp_arrive", barrier, *(() if blocks is None else (_int(blocks),)))


def mbarrier_expect(barrier: Address, size: Any) -> Do:
    """Make the current phase wait for `size` bytes more, without an arrival."""
    return effect("mbarrier_expect", barrier, _int(size))


# Bulk copies, each by the one thread that calls it.


def tma_load(
    dst: Address,
    source: TensorMap,
    place: Sequence[Expr],
    barrier: Address,
    policy: str = "",
    blocks: Expr | None = None,
) -> Do:
    """Start copying a box to shared memory. Its bytes count for `barrier`; elements outside the tensor are 0.

    `place` is the index of the box's first element, outermost dimension first. `dst` lies at a multiple of 128 bytes,
    or of 8 times the swizzle's span. With `blocks`, each block of the cluster whose bit is set receives the box at the
    same place. Its bytes then count for that block's `barrier`.
    """
    operands = dst, source, barrier, *map(_int, place)
    if blocks is None:
        return effect("tma_load", *operands, options=(policy,))
    return effect("tma_load", *operands, _int(blocks), options=(policy, MULTICAST))


def tma_store(target: TensorMap, src: Address, place: Sequence[Expr], combine: str = "") -> Do:
    """Start copying a box from shared to global memory; elements outside the tensor are dropped.

    With `combine` ("add", "min", "max") each element is combined with the stored one. The copy belongs to the group
    that the next `bulk_commit` of the same thread closes.
    """
    return effect("tma_store", target, src, *map(_int, place), options=(combine,))


def bulk_commit() -> Do:
    """Close this thread's group of bulk stores."""
    return effect("bulk_commit")


def bulk_wait(pending: int, read: bool = True, tiles: Sequence[Address] = (), box: tuple[int, int] = (0, 0)) -> Do:
    """Wait until at most `pending` of this thread's newest groups are in flight.

    With `read`, a group is done when it has read its source, else when its results are there. `tiles` are addresses in
    the buffers that the completed groups read, if other threads may wait for it. With `box`, rows and columns, the
    groups read a box at each of them, else anything of the buffers.
    """
    return effect("bulk_wait", *tiles, *map(_int, box if all(box) else ()), options=(pending, read))


def prefetch_map(source: TensorMap) -> Do:
    """Prefetch a tensor map before its first use."""
    return effect("prefetch_map", source)


def fence_proxy_async() -> Do:
    """Order this thread's accesses to shared memory before later wgmma and bulk copies, from a barrier on."""
    return effect("fence_proxy_async")


# Roles.


def named_barrier(number: int, threads: int) -> Do:
    """Make `threads` threads of the block (whole warps) wait for each other at barrier `number` (1 to 15)."""
    return effect("named_barrier", options=(number, threads))


def named_barrier_arrive(number: int, threads: int) -> Do:
    """Arrive at a named barrier without waiting. The threads that wait there see this thread's earlier writes."""
    return effect("named_barrier_arrive", options=(number, threads))


def ping_pong_call(what: str, barrier: int, warpgroup: int, count: int) -> Do:
    """Run one step of `count` warpgroups, from number `warpgroup` on, that take turns by the barriers from `barrier`
    on.

    what: "open", before all iterations; "take", to wait for this warpgroup's turn; "pass", to let the next one go on;
    "close", after all iterations. All warpgroups run the same number of iterations.
    """
    return effect(f"turn_{what}", options=(barrier, warpgroup, count))


def set_registers(count: int, more: bool) -> Do:
    """Give each thread of this warpgroup `count` registers from here on, `more` than before or fewer."""
    return effect("set_registers", options=(count, more))


def grid_wait() -> Do:
    """Wait until the preceding kernels of the stream are done, if this one was started early."""
    return effect("grid_wait")


def grid_launch() -> Do:
    """Let the next kernel of the stream start early, as far as this block is concerned."""
    return effect("grid_launch")


# Clusters.


def cluster_arrive() -> Do:
    """Arrive for the `cluster_wait` of the cluster's threads, which then see this thread's earlier writes."""
    return effect("cluster_arrive")


def cluster_arrive_relaxed() -> Do:
    """Arrive as `cluster_arrive`; waiting threads see only mbarriers made before a `fence_barrier_init`."""
    return effect("cluster_arrive_relaxed")


def cluster_wait() -> Do:
    """Wait until all threads of the cluster have arrived."""
    return effect("cluster_wait")


# Effects.


def reaches_others(call: Call) -> bool:
    """Return whether a call acts on other blocks of the cluster."""
    found = intrinsic_of(call)
    if found is not None and found.sync is Sync.ARRIVE and found.scope is Scope.MBARRIER:
        return len(call.args) > 1
    return found is not None and found.engine is Engine.BULK and MULTICAST in call.options


def box_elements(call: Call) -> int:
    """Count the elements of the box that a bulk copy moves."""
    return math.prod(rows_and_columns(call))


def rows_and_columns(call: Call) -> tuple[int, int]:
    """Return the rows and columns of the box that a bulk copy moves, or that a wait names; zeros for no box."""
    for found in call.args:
        if isinstance(found, TensorMap):
            return math.prod(found.box[:-1]), found.box[-1]
    sizes = [int(a.value) for a in call.args if isinstance(a, Const)] if call.name == "bulk_wait" else []
    return (sizes[0], sizes[1]) if sizes else (0, 0)


def _tma_load(call: Call) -> tuple[Access, ...]:
    """Return the accesses of tma_load: it writes a box of shared memory asynchronously."""
    return (Access(0, "w", box_elements(call), True),)


def _tma_store(call: Call) -> tuple[Access, ...]:
    """Return the accesses of tma_store: it reads a box of shared memory asynchronously."""
    return (Access(1, "r", box_elements(call), True),)


def _bulk_wait(call: Call) -> tuple[Access, ...]:
    """Return the accesses of bulk_wait: reads of the tiles that the stores read, of unknown size if no box is named."""
    count = box_elements(call) or -1
    return tuple(Access(n, "r", count) for n, place in enumerate(call.args) if isinstance(place, Address))


def _declare(name: str, arity: int, header: str, arch: int = HOPPER, **fields: Any) -> None:
    """Declare an intrinsic for bulk copies."""
    declare(Intrinsic(name, arity, same, "", cuda=fields.pop("cuda", name), header=header, arch=arch, **fields))


_declare("mbarrier_init", 1, "mbarrier.h", sync=Sync.INIT, scope=Scope.MBARRIER)
_declare("fence_barrier_init", 0, "mbarrier.h", sync=Sync.FENCE, scope=Scope.MBARRIER)
_declare("mbarrier_wait", 2, "mbarrier.h", cuda=lambda call: _in_scope(call), sync=Sync.WAIT, scope=Scope.MBARRIER)
_declare("own_phase", 1, "mbarrier.h", idle=True)
_declare("mbarrier_arrive", -1, "mbarrier.h", cuda=lambda call: _in_scope(call), sync=Sync.ARRIVE, scope=Scope.MBARRIER)
_declare("warp_arrive", -1, "mbarrier.h", convergent="warp", sync=Sync.ARRIVE, scope=Scope.MBARRIER)
_declare("mbarrier_expect", 2, "mbarrier.h", sync=Sync.EXPECT, scope=Scope.MBARRIER)
_declare("tma_load", -1, "tma.h", effects=_tma_load, cuda=lambda call: _tma_load_name(call), engine=Engine.BULK)
_declare("tma_store", -1, "tma.h", effects=_tma_store, cuda=lambda call: _tma_store_name(call), engine=Engine.BULK)
_declare("bulk_commit", 0, "tma.h", engine=Engine.BULK, sync=Sync.COMMIT)
_declare("bulk_wait", -1, "tma.h", effects=_bulk_wait, engine=Engine.BULK, sync=Sync.DRAIN)
_declare("prefetch_map", 1, "tma.h")
_declare("fence_proxy_async", 0, "tma.h", sync=Sync.PROXY_FENCE, scope=Scope.BLOCK, idle=True)
_declare("named_barrier", 0, "sync.h", arch=AMPERE, convergent="role", sync=Sync.BARRIER, scope=Scope.GROUP)
_declare("named_barrier_arrive", 0, "sync.h", arch=AMPERE, convergent="warp", sync=Sync.ARRIVE, scope=Scope.GROUP)
for _name in ("turn_open", "turn_take", "turn_pass", "turn_close"):
    _declare(_name, 0, "sync.h", convergent="warpgroup", sync=Sync.TURN, scope=Scope.GROUP)
_declare("set_registers", 0, "sync.h", convergent="warpgroup", sync=Sync.REGISTERS, scope=Scope.BLOCK)
# Nothing before Hopper, where kernels run one after the other.
_declare("grid_wait", 0, "sync.h", arch=AMPERE, sync=Sync.WAIT, scope=Scope.GRID, idle=True)
_declare("grid_launch", 0, "sync.h", arch=AMPERE, sync=Sync.ARRIVE, scope=Scope.GRID, idle=True)
_declare("cluster_arrive", 0, "sync.h", convergent="warp", sync=Sync.ARRIVE, scope=Scope.CLUSTER, idle=True)
_declare("cluster_arrive_relaxed", 0, "sync.h", convergent="warp", sync=Sync.ARRIVE, scope=Scope.CLUSTER, idle=True)
_declare("cluster_wait", 0, "sync.h", convergent="warp", sync=Sync.WAIT, scope=Scope.CLUSTER, idle=True)


def _in_scope(call: Call) -> str:
    """Return the CUDA function of an arrival or wait, by whether it orders accesses of other blocks."""
    return f"{call.name}{''.join(map(_suffix, call.options))}"


def _tma_load_name(call: Call) -> str:
    """Return the CUDA function of a tma_load, by its multicast and cache policy."""
    policy, *multicast = call.options
    return f"tma_load{''.join(map(_suffix, multicast))}{_suffix(policy)}"


def _tma_store_name(call: Call) -> str:
    """Return the CUDA function of a tma_store, by its way to combine values."""
    return f"tma_store{_suffix(call.options[0])}"


def _suffix(word: object) -> str:
    """Return a word as the suffix of a function's name, empty for an empty word."""
    return f"_{word}" if word else ""


__all__ = [
    "MULTICAST",
    "POLICIES",
    "box_elements",
    "bulk_commit",
    "bulk_wait",
    "cluster_arrive",
    "cluster_arrive_relaxed",
    "cluster_wait",
    "fence_barrier_init",
    "fence_proxy_async",
    "grid_launch",
    "grid_wait",
    "mbarrier_arrive",
    "mbarrier_expect",
    "mbarrier_init",
    "mbarrier_wait",
    "named_barrier",
    "named_barrier_arrive",
    "own_phase",
    "ping_pong_call",
    "prefetch_map",
    "reaches_others",
    "rows_and_columns",
    "set_registers",
    "tma_load",
    "tma_store",
    "warp_arrive",
]  # fmt: skip
