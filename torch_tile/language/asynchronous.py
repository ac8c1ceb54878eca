# SPDX-License-Identifier: Apache-2.0
"""Hopper's order by hand: mbarriers, named barriers, fences, registers of roles, early starts of kernels.

The compiler places all of this in kernels that do not; those that do are for GPUs from sm_90 on.
"""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.intrinsics import bulk
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Address, Const, Expr, binary, const, to_expr
from torch_tile.ir.stmt import Do
from torch_tile.language.roles import check_registers
from torch_tile.language.threads import numbered, thread_index
from torch_tile.language.trace import Tracer, tracer
from torch_tile.tileop.base import Scalar, Tile, is_one, region_of

# mbarriers. A phase is over when its arrivals and the bytes expected have come; a fresh barrier is in phase 0.


def mbarrier_wait_parity(mbarrier: Tile, parity: Scalar) -> None:
    """Wait until the phase of this parity of a T.alloc_barrier is over; of a fresh one, that of parity 1 is."""
    at, where = _barrier("T.mbarrier_wait_parity", mbarrier)
    value = to_expr(parity)
    if not value.dtype.is_integer or (isinstance(value, Const) and value.value not in (0, 1)):
        why, fix = f"is {parity!r}", "give 0 or 1: for turn k through n stages, k // n % 2"
        raise error("bad_argument", None, op="T.mbarrier_wait_parity", name="parity", why=why, fix=fix)
    at.emit(bulk.mbarrier_wait(where, value))


def mbarrier_arrive(mbarrier: Tile, cta_id: Scalar = None) -> None:
    """Each thread that runs this arrives."""
    at, where = _barrier("T.mbarrier_arrive", mbarrier)
    if cta_id is not None:
        why, fix = "names another block of the cluster", "arrive at mbarriers of the own block only"
        raise error("bad_argument", None, op="T.mbarrier_arrive", name="cta_id", why=why, fix=fix)
    at.emit(bulk.mbarrier_arrive(where))


def mbarrier_expect_tx(mbarrier: Tile, tx: Scalar) -> None:
    """The phase waits for `tx` bytes more, for each thread that runs this; T.tma_copy says it for itself."""
    at, where = _barrier("T.mbarrier_expect_tx", mbarrier)
    at.emit(_expect("T.mbarrier_expect_tx", where, tx))


def mbarrier_arrive_expect_tx(mbarrier: Tile, tx: Scalar) -> None:
    """Expect `tx` bytes more, then arrive."""
    at, where = _barrier("T.mbarrier_arrive_expect_tx", mbarrier)
    at.emit(_expect("T.mbarrier_arrive_expect_tx", where, tx))
    at.emit(bulk.mbarrier_arrive(where))


def barrier_wait(barrier_id: Tile, parity: Scalar = 0) -> None:
    """T.mbarrier_wait_parity."""
    mbarrier_wait_parity(barrier_id, parity)


def barrier_arrive(barrier_id: Tile) -> None:
    """T.mbarrier_arrive."""
    mbarrier_arrive(barrier_id)


def _barrier(what: str, barrier: Any) -> tuple[Tracer, Address]:
    at, region = in_kernel(what), region_of(barrier)
    if region is None or region.buffer.scope != "barrier" or not all(is_one(e) for e in region.extents):
        why, fix = f"is {barrier!r}"[:80], "give one mbarrier of a T.alloc_barrier, as in ready[stage]"
        raise error("bad_argument", None, op=what, name="mbarrier", why=why, fix=fix)
    return at, Address(region.buffer, region.starts)


def _expect(what: str, where: Address, size: Any) -> Do:
    value = to_expr(size)
    if not value.dtype.is_integer or (isinstance(value, Const) and not 0 <= int(value.value) < 2**20):
        fix = "give the bytes of all copies of one phase, fewer than 2^20"
        raise error("bad_argument", None, op=what, name="tx", why=f"is {size!r}", fix=fix)
    return bulk.mbarrier_expect(where, value)


# Threads among themselves.


def fence_proxy_async() -> None:
    """What this thread wrote to shared memory is seen by wgmma and bulk copies after the next barrier.

    The compiler places these fences itself, in front of barriers and arrivals.
    """
    in_kernel("T.fence_proxy_async").emit(bulk.fence_proxy_async())


def named_barrier_arrive(barrier_id: int, arrive_count: int | None = None) -> None:
    """Count for the others that T.sync_threads(barrier_id, arrive_count), without waiting for them."""
    what = "T.named_barrier_arrive"
    at = in_kernel(what)
    at.emit(bulk.named_barrier_arrive(*numbered(at, what, barrier_id, arrive_count)))


def shuffle_elect(extent: int = 0) -> Expr:
    """Whether the running thread is the first of each `extent` threads; of the block, if 0."""
    if not isinstance(extent, int) or extent < 0 or extent % WARP:
        fix = f"give a multiple of {WARP}, or 0 for one thread of the block"
        raise error("bad_argument", None, op="T.shuffle_elect", name="extent", why=f"is {extent!r}", fix=fix)
    thread: Expr = thread_index()
    return binary("==", binary("%", thread, const(extent, dt.int32)) if extent else thread, const(0, dt.int32))


def get_warp_group_idx(warp_size: int | None = None, warps_per_group: int | None = None) -> Expr:
    """The running thread's group of 4 warps, or of `warps_per_group`, as T.ws counts them."""
    size = _lanes("T.get_warp_group_idx", "warp_size", warp_size, WARP)
    return thread_index() // (
        size * _lanes("T.get_warp_group_idx", "warps_per_group", warps_per_group, WARPGROUP // WARP)
    )


def get_warp_idx(warp_size: int | None = None) -> Expr:
    """The running thread's warp in the block, of 32 threads or of `warp_size`."""
    return thread_index() // _lanes("T.get_warp_idx", "warp_size", warp_size, WARP)


def get_lane_idx(warp_size: int | None = None) -> Expr:
    """The running thread's number in its warp, of 32 threads or of `warp_size`."""
    return thread_index() % _lanes("T.get_lane_idx", "warp_size", warp_size, WARP)


def _lanes(what: str, name: str, number: Any, default: int) -> int:
    if number is None:
        return default
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise error("bad_argument", None, op=what, name=name, why=f"is {number!r}", fix="give a positive integer")
    return number


# Registers.


def set_max_nreg(n: int, is_inc: Any = None) -> None:
    """Each thread of the T.ws around has `n` registers, for all of its body, instead of an equal share.

    A multiple of 8 from 24 to 256. Whether that is more (`is_inc`) or fewer the compiler knows.
    """
    at = in_kernel("T.set_max_nreg")
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
    in_kernel("T.no_set_max_nreg")


# Kernels that begin before the one ahead of them in the stream has ended.


def pdl_sync() -> None:
    """Wait for the kernels before this one: what comes before may run beside them, and touches nothing of theirs."""
    in_kernel("T.pdl_sync").emit(bulk.grid_wait())


def pdl_trigger() -> None:
    """As far as this block is concerned, the next kernel may begin what it does before its T.pdl_sync."""
    in_kernel("T.pdl_trigger").emit(bulk.grid_launch())


def in_kernel(what: str) -> Tracer:
    """The tracer, inside a T.Kernel."""
    at = tracer(what)
    if at.launch is None or not at.scopes:
        raise error("not_in_kernel", None, what=what)
    return at
