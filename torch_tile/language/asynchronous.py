# SPDX-License-Identifier: Apache-2.0
"""Hopper's order by hand: mbarriers, named barriers, fences, registers of roles, clusters, early starts of kernels.

The compiler places all of this in kernels that do not; those that do are for GPUs from sm_90 on.
"""

from __future__ import annotations

import math
from typing import Any

from ..diagnostics import error
from ..intrinsics import bulk
from ..ir import dtype as dt
from ..ir.expr import Address, Const, Expr, binary, const, to_expr
from ..ir.stmt import Do
from ..tileop.base import is_one, region_of
from .roles import check_registers
from .threads import numbered, thread_index
from .trace import Tracer, tracer

WARP, WARPGROUP = 32, 128
AXES = 3  # of a grid

# mbarriers. A phase is over when its arrivals and the bytes expected have come; a fresh barrier is in phase 0.


def mbarrier_wait_parity(barrier: Any, parity: Any) -> None:
    """Wait until the phase of this parity of a T.alloc_barrier is over; of a fresh one, that of parity 1 is."""
    at, where = _barrier("T.mbarrier_wait_parity", barrier)
    value = to_expr(parity)
    if not value.dtype.is_integer or (isinstance(value, Const) and value.value not in (0, 1)):
        why, fix = f"is {parity!r}", "give 0 or 1: for turn k through n stages, k // n % 2"
        raise error("bad_argument", None, op="T.mbarrier_wait_parity", name="parity", why=why, fix=fix)
    at.emit(bulk.mbarrier_wait(where, value))


def mbarrier_arrive(barrier: Any, cta_id: Any = None) -> None:
    """Each thread that runs this arrives."""
    at, where = _barrier("T.mbarrier_arrive", barrier)
    if cta_id is not None:
        why, fix = "names another block of the cluster", "arrive at mbarriers of the own block only"
        raise error("bad_argument", None, op="T.mbarrier_arrive", name="cta_id", why=why, fix=fix)
    at.emit(bulk.mbarrier_arrive(where))


def mbarrier_expect_tx(barrier: Any, size: Any) -> None:
    """The phase waits for `size` bytes more, for each thread that runs this; T.tma_copy says it for itself."""
    at, where = _barrier("T.mbarrier_expect_tx", barrier)
    at.emit(_expect("T.mbarrier_expect_tx", where, size))


def mbarrier_arrive_expect_tx(barrier: Any, size: Any) -> None:
    """Expect `size` bytes more, then arrive."""
    at, where = _barrier("T.mbarrier_arrive_expect_tx", barrier)
    at.emit(_expect("T.mbarrier_arrive_expect_tx", where, size))
    at.emit(bulk.mbarrier_arrive(where))


def barrier_wait(barrier: Any, parity: Any = 0) -> None:
    """T.mbarrier_wait_parity."""
    mbarrier_wait_parity(barrier, parity)


def barrier_arrive(barrier: Any) -> None:
    """T.mbarrier_arrive."""
    mbarrier_arrive(barrier)


def _barrier(what: str, barrier: Any) -> tuple[Tracer, Address]:
    at, region = _tracer(what), region_of(barrier)
    if region is None or region.buffer.scope != "barrier" or not all(is_one(e) for e in region.extents):
        why, fix = f"is {barrier!r}"[:80], "give one mbarrier of a T.alloc_barrier, as in ready[stage]"
        raise error("bad_argument", None, op=what, name="barrier", why=why, fix=fix)
    return at, Address(region.buffer, region.starts)


def _expect(what: str, where: Address, size: Any) -> Do:
    value = to_expr(size)
    if not value.dtype.is_integer or (isinstance(value, Const) and not 0 <= int(value.value) < 2**20):
        fix = "give the bytes of all copies of one phase, fewer than 2^20"
        raise error("bad_argument", None, op=what, name="size", why=f"is {size!r}", fix=fix)
    return bulk.mbarrier_expect(where, value)


# Threads among themselves.


def fence_proxy_async() -> None:
    """What this thread wrote to shared memory is seen by wgmma and bulk copies after the next barrier.

    The compiler places these fences itself, in front of barriers and arrivals.
    """
    _tracer("T.fence_proxy_async").emit(bulk.fence_proxy_async())


def named_barrier_arrive(barrier_id: int, arrive_count: int | None = None) -> None:
    """Count for the others that T.sync_threads(barrier_id, arrive_count), without waiting for them."""
    what = "T.named_barrier_arrive"
    at = _tracer(what)
    at.emit(bulk.named_barrier_arrive(*numbered(at, what, barrier_id, arrive_count)))


def shuffle_elect(extent: int = 0) -> Expr:
    """Whether the running thread is the first of each `extent` threads; of the block, if 0."""
    if not isinstance(extent, int) or extent < 0 or extent % WARP:
        fix = f"give a multiple of {WARP}, or 0 for one thread of the block"
        raise error("bad_argument", None, op="T.shuffle_elect", name="extent", why=f"is {extent!r}", fix=fix)
    thread: Expr = thread_index()
    return binary("==", binary("%", thread, const(extent, dt.int32)) if extent else thread, const(0, dt.int32))


def get_warp_group_idx() -> Expr:
    """The running thread's group of 128, as T.ws counts them."""
    return thread_index() // WARPGROUP


def get_warp_idx() -> Expr:
    """The running thread's warp in the block."""
    return thread_index() // WARP


def get_lane_idx() -> Expr:
    """The running thread's number in its warp."""
    return thread_index() % WARP


# Registers.


def set_max_nreg(n: int, is_inc: Any = None) -> None:
    """Each thread of the T.ws around has `n` registers, for all of its body, instead of an equal share.

    A multiple of 8 from 24 to 256. Whether that is more (`is_inc`) or fewer the compiler knows.
    """
    at = _tracer("T.set_max_nreg")
    if not at.crew:
        why, fix = "is said outside T.ws", "say it in the body of a T.ws: it holds for all of it"
        raise error("bad_argument", None, op="T.set_max_nreg", name="n", why=why, fix=fix)
    check_registers("T.set_max_nreg", "n", n or 1)
    at.emit(bulk.set_registers(n, bool(is_inc)))


def inc_max_nreg(n: int) -> None:
    """T.set_max_nreg, of a role that has more registers than its share."""
    set_max_nreg(n, True)


def dec_max_nreg(n: int) -> None:
    """T.set_max_nreg, of a role that gives registers back."""
    set_max_nreg(n, False)


def no_set_max_nreg() -> None:
    """All threads have an equal share of registers, which they have anyway in roles by T.ws that say nothing else."""
    _tracer("T.no_set_max_nreg")


# Kernels that begin before the one ahead of them in the stream has ended.


def pdl_sync() -> None:
    """Wait for the kernels before this one: what comes before may run beside them, and touches nothing of theirs."""
    _tracer("T.pdl_sync").emit(bulk.grid_wait())


def pdl_trigger() -> None:
    """As far as this block is concerned, the next kernel may begin what it does before its T.pdl_sync."""
    _tracer("T.pdl_trigger").emit(bulk.grid_launch())


# Clusters: T.Kernel(..., cluster_dims=(2, 1, 1)).


def cluster_arrive() -> None:
    """This block counts for the T.cluster_wait of the others of its cluster."""
    _of_block("T.cluster_arrive").emit(bulk.cluster_arrive())


def cluster_wait() -> None:
    """Wait until all threads of the cluster have called T.cluster_arrive."""
    _of_block("T.cluster_wait").emit(bulk.cluster_wait())


def cluster_sync() -> None:
    """All threads of the cluster wait for each other."""
    cluster_arrive()
    cluster_wait()


def get_cluster_id(dim: int = 0) -> Expr:
    """The cluster's index along dimension `dim` of the grid of clusters."""
    block, size = _along("T.get_cluster_id", dim)
    return block // size


def get_cluster_dims() -> tuple[int, int, int]:
    """Blocks of a cluster along each dimension."""
    cluster: tuple[int, int, int] = _tracer("T.get_cluster_dims").launch.cluster
    return cluster


def block_rank_in_cluster() -> Expr:
    """The block's number in its cluster, x fastest."""
    launch = _tracer("T.block_rank_in_cluster").launch
    sizes = launch.cluster[: len(launch.blocks)]
    own = [block % size for block, size in zip(launch.blocks, sizes, strict=True)]
    rank: Expr = own.pop()
    while own:
        rank = rank * sizes[len(own) - 1] + own.pop()
    return rank


def _of_block(what: str) -> Tracer:
    """The tracer, outside roles: all threads of the cluster are counted."""
    at = _tracer(what)
    if at.crew:
        raise error("not_outermost", None, what=what, region="role")
    return at


def _along(what: str, dim: int) -> tuple[Expr, int]:
    launch = _tracer(what).launch
    if not isinstance(dim, int) or not 0 <= dim < len(launch.blocks):
        fix = f"give a dimension below {len(launch.blocks)}"
        raise error("bad_argument", None, op=what, name="dim", why=f"is {dim!r}", fix=fix)
    return launch.blocks[dim], launch.cluster[dim]


def clusters(given: Any, rank: int) -> tuple[int, int, int]:
    """`cluster_dims` of T.Kernel: up to three sizes, for a grid of `rank` dimensions."""
    sizes = (1,) if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)
    good = 0 < len(sizes) <= AXES and all(isinstance(n, int) and n > 0 for n in sizes) and math.prod(sizes) <= 8
    if not good or any(n != 1 for n in sizes[rank:]):
        fix = "give a size for each dimension of the grid, at most 8 blocks together"
        raise error("bad_argument", None, op="T.Kernel", name="cluster_dims", why=f"is {given!r}", fix=fix)
    x, y, z = (*sizes, 1, 1)[:AXES]
    return x, y, z


def _tracer(what: str) -> Tracer:
    at = tracer(what)
    if at.launch is None or not at.scopes:
        raise error("not_in_kernel", None, what=what)
    return at
