# SPDX-License-Identifier: Apache-2.0
"""Manual ordering on Hopper: mbarriers, named barriers, fences, registers of roles, and early starts of kernels.

The compiler places all of this in kernels that do not; those that do are for GPUs from sm_90 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP, WARPGROUP
from torch_tile.intrinsics import bulk, memory, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Const, Expr, Load, binary, const, is_number, to_expr, truth
from torch_tile.ir.node import with_fields
from torch_tile.ir.stmt import Block, Do, For, If, Role, Stmt, While
from torch_tile.language.roles import check_registers
from torch_tile.language.threads import numbered, thread_index
from torch_tile.language.trace import Tracer, tracer
from torch_tile.tileop.base import Annotations, Scalar, Tile, is_one, region_of
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm.op import Gemm, GemmWarpPolicy
from torch_tile.tileop.gemm.wgmma import WgmmaResults

# mbarriers. A phase is over when its arrivals and the bytes expected have come; a fresh barrier is in phase 0.


def mbarrier_wait_parity(mbarrier: Tile, parity: Scalar, own: bool = False) -> None:
    """Wait until the phase of this parity of a T.alloc_barrier is complete. In a fresh mbarrier the phase of parity 1
    is.

    With `own`, it is the phase of this thread's last arrival, and all threads of its role arrived in it. In a fresh
    mbarrier no thread has arrived yet. Then what they did before these arrivals needs no barrier of the role.
    """
    at, where = mbarrier_of("T.mbarrier_wait_parity", mbarrier)
    value = to_expr(parity)
    if not value.dtype.is_integer or (isinstance(value, Const) and value.value not in (0, 1)):
        why, fix = f"is {parity!r}", "give 0 or 1: for iteration k through n stages, k // n % 2"
        raise error("bad_argument", None, op="T.mbarrier_wait_parity", name="parity", why=why, fix=fix)
    at.emit(bulk.mbarrier_wait(where, value, of_cluster=where.buffer in at.of_clusters))
    if own:
        at.emit(bulk.own_phase(where))


def mbarrier_arrive(mbarrier: Tile, cta_id: Scalar = None) -> None:
    """Arrive at an mbarrier with each thread that runs this. With `cta_id`, the mbarrier is that of this block of the
    cluster.

    An arrival at another block's mbarrier releases the tiles that this block has read. It does not publish writes:
    other blocks see those after T.cluster_sync, and what T.copy_cluster stored after its own arrival.
    """
    at, where = mbarrier_of("T.mbarrier_arrive", mbarrier)
    if cta_id is not None and at.launch.cluster == (1, 1, 1):
        why, fix = "names another block, and blocks have no cluster", "give T.Kernel cluster_dims"
        raise error("bad_argument", None, op="T.mbarrier_arrive", name="cta_id", why=why, fix=fix)
    at.emit(bulk.mbarrier_arrive(where, None if cta_id is None else to_expr(cta_id)))


def cp_async_barrier_noinc(mbarrier: Tile) -> None:
    """Arrive at an mbarrier with each thread that runs this, once the thread's asynchronous copies have arrived.

    The thread itself waits for them: an arrival that hardware makes later is not used.
    """
    at, where = mbarrier_of("T.cp_async_barrier_noinc", mbarrier)
    for one in (memory.cp_async_commit(), memory.cp_async_wait(0), bulk.mbarrier_arrive(where)):
        at.emit(one)


def mbarrier_expect_tx(mbarrier: Tile, tx: Scalar) -> None:
    """Add `tx` bytes to the phase of `mbarrier`, once for each thread that runs this. T.tma_copy adds its own."""
    at, where = mbarrier_of("T.mbarrier_expect_tx", mbarrier)
    at.emit(_expect("T.mbarrier_expect_tx", where, tx))


def mbarrier_arrive_expect_tx(mbarrier: Tile, tx: Scalar) -> None:
    """Expect `tx` bytes more in the phase of `mbarrier`, then arrive."""
    at, where = mbarrier_of("T.mbarrier_arrive_expect_tx", mbarrier)
    at.emit(_expect("T.mbarrier_arrive_expect_tx", where, tx))
    at.emit(bulk.mbarrier_arrive(where))


def barrier_wait(mbarrier: Tile = None, parity: Scalar = 0, *, barrier_id: Tile = None) -> None:
    """Wait as T.mbarrier_wait_parity does; `barrier_id` is an older name of `mbarrier`."""
    mbarrier_wait_parity(mbarrier if barrier_id is None else barrier_id, parity)


def barrier_arrive(mbarrier: Tile = None, *, barrier_id: Tile = None) -> None:
    """Arrive as T.mbarrier_arrive does; `barrier_id` is an older name of `mbarrier`."""
    mbarrier_arrive(mbarrier if barrier_id is None else barrier_id)


def ptx_arrive_barrier(barrier_id: Tile) -> None:
    """Arrive at `barrier_id`, as T.mbarrier_arrive does."""
    mbarrier_arrive(barrier_id)


def ptx_arrive_barrier_expect_tx(barrier_id: Tile, byte_count: Scalar) -> None:
    """Arrive at `barrier_id` and expect `byte_count` bytes, as T.mbarrier_arrive_expect_tx does."""
    mbarrier_arrive_expect_tx(barrier_id, byte_count)


def ptx_wait_barrier(barrier_id: Tile, parity: Scalar = 0) -> None:
    """Wait for the phase `parity` of `barrier_id` to complete, as T.mbarrier_wait_parity does."""
    mbarrier_wait_parity(barrier_id, parity)


def ptx_arrive_cluster_barrier(mbarrier: Tile, cta_id: Scalar) -> None:
    """Arrive at an mbarrier of block `cta_id` of the cluster."""
    mbarrier_arrive(mbarrier, cta_id)


def ptx_fence_barrier_init() -> None:
    """Do nothing: T.alloc_barrier makes mbarriers visible to all threads."""
    in_kernel("T.ptx_fence_barrier_init")


def tma_store_arrive() -> None:
    """Do nothing: a T.tma_copy to global memory commits its group by itself."""
    in_kernel("T.tma_store_arrive")


def tma_store_wait(count: int = 0, read: bool = True) -> None:
    """Do nothing, whatever `count`: a T.tma_copy to global memory has read its tile when it returns."""
    in_kernel("T.tma_store_wait")


def warpgroup_arrive() -> None:
    """Do nothing: T.wgmma_gemm orders its operands by itself."""
    in_kernel("T.warpgroup_arrive")


def warpgroup_commit_batch() -> None:
    """Do nothing: each T.wgmma_gemm is a group of its own."""
    in_kernel("T.warpgroup_commit_batch")


def warpgroup_wait(num_mma: int) -> None:
    """Wait as T.wait_wgmma does, until at most `num_mma` groups of products are in flight."""
    wait_wgmma(num_mma)


def warpgroup_fence_operand(buffer_or_ptr: Any, offset: Scalar = 0, num_regs: Scalar = None, dtype: Any = None) -> None:
    """Keep `num_regs` registers of `buffer_or_ptr` from `offset` on in place, as the compiler does by itself."""
    in_kernel("T.warpgroup_fence_operand")


def listed_mbarrier(what: str, number: Any) -> Load:
    """Return the mbarrier of T.create_list_of_mbarrier that has this number."""
    at = in_kernel(what)
    made = at.mbarriers.get(at.launch, [])
    if len(made) == 1 and (isinstance(number, Expr) or 0 <= number < made[0].buffer.static_shape[0]):
        return made[0][number]  # type: ignore[no-any-return]
    if not isinstance(number, Expr) and 0 <= number < len(made):
        return made[number][0]  # type: ignore[no-any-return]
    why, fix = f"is {number!r}"[:80], "begin with T.create_list_of_mbarrier(128, 128), and number its mbarriers from 0"
    if len(made) > 1 and isinstance(number, Expr):
        fix = "give a constant: mbarriers of different numbers of arrivals are no array"
    raise error("bad_argument", None, op=what, name="mbarrier", why=why, fix=fix)


def mbarrier_of(what: str, barrier: Any) -> tuple[Tracer, Address]:
    """Return the mbarrier element that an argument names. Raises an error for other values."""
    at, region = in_kernel(what), region_of(barrier)
    is_named = region is not None and region.buffer.scope == "barrier"
    if not is_named and at.launch in at.mbarriers and (is_number(barrier) or isinstance(barrier, Expr)):
        region = region_of(listed_mbarrier(what, barrier))
    if region is None or region.buffer.scope != "barrier" or not all(is_one(e) for e in region.extents):
        why, fix = f"is {barrier!r}"[:80], "give one mbarrier of a T.alloc_barrier, as in ready[stage]"
        raise error("bad_argument", None, op=what, name="mbarrier", why=why, fix=fix)
    return at, Address(region.buffer, region.starts)


def _expect(what: str, where: Address, size: Any) -> Do:
    """Check the byte count of an mbarrier expectation."""
    value = to_expr(size)
    if not value.dtype.is_integer or (isinstance(value, Const) and not 0 <= int(value.value) < 2**20):
        fix = "give the bytes of all copies of one phase, fewer than 2^20"
        raise error("bad_argument", None, op=what, name="tx", why=f"is {size!r}", fix=fix)
    return bulk.mbarrier_expect(where, value)


# Threads among themselves.


def fence_proxy_async() -> None:
    """Make this thread's writes to shared memory visible to wgmma and bulk copies after the next barrier.

    The compiler places these fences itself, in front of barriers and arrivals.
    """
    in_kernel("T.fence_proxy_async").emit(bulk.fence_proxy_async())


def named_barrier_arrive(barrier_id: int, arrive_count: int | None = None) -> None:
    """Arrive at a named barrier without waiting, for threads that wait in T.sync_threads(barrier_id, arrive_count)."""
    what = "T.named_barrier_arrive"
    at = in_kernel(what)
    at.emit(bulk.named_barrier_arrive(*numbered(at, what, barrier_id, arrive_count)))


def shuffle_elect(extent: int = 0) -> Expr:
    """Return whether the running thread is the first of each `extent` threads, or of the block if `extent` is 0."""
    if not isinstance(extent, int) or extent < 0 or extent % WARP:
        fix = f"give a multiple of {WARP}, or 0 for one thread of the block"
        raise error("bad_argument", None, op="T.shuffle_elect", name="extent", why=f"is {extent!r}", fix=fix)
    thread: Expr = thread_index()
    return binary("==", binary("%", thread, const(extent, dt.int32)) if extent else thread, const(0, dt.int32))


def get_warp_group_idx(warp_size: int | None = None, warps_per_group: int | None = None) -> Expr:
    """Return the running thread's warpgroup, of 4 warps or `warps_per_group`, each of 32 lanes or `warp_size`."""
    size = _lanes("T.get_warp_group_idx", "warp_size", warp_size, WARP)
    return thread_index() // (
        size * _lanes("T.get_warp_group_idx", "warps_per_group", warps_per_group, WARPGROUP // WARP)
    )


def get_warp_idx(warp_size: int | None = None) -> Expr:
    """Return the running thread's warp in the block, of 32 threads or of `warp_size`."""
    return thread_index() // _lanes("T.get_warp_idx", "warp_size", warp_size, WARP)


def get_lane_idx(warp_size: int | None = None) -> Expr:
    """Return the running thread's lane in its warp, of 32 threads or of `warp_size`."""
    return thread_index() % _lanes("T.get_lane_idx", "warp_size", warp_size, WARP)


def _lanes(what: str, name: str, number: Any, default: int) -> int:
    """Check a number of lanes, or return the default."""
    if number is None:
        return default
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise error("bad_argument", None, op=what, name=name, why=f"is {number!r}", fix="give a positive integer")
    return number


# Registers.


def set_max_nreg(n: int, is_inc: Any = None) -> None:
    """Give each thread of the enclosing T.ws `n` registers for its whole body, instead of an equal share.

    A branch of whole warpgroups, as `if tx < 128:`, counts as such a role. `n` is a multiple of 8 from 24 to 256. The
    compiler finds out by itself whether that is more (`is_inc`) or fewer than the share. All roles together have the
    registers that their block starts with; more are an error. Before Hopper threads keep equal shares.
    """
    at = in_kernel("T.set_max_nreg")
    if not at.barrier_group and not any(scope.what in ("if", "else") for scope in at.scopes):
        why, fix = "is said outside T.ws", "say it in the body of a T.ws: it holds for all of it"
        raise error("bad_argument", None, op="T.set_max_nreg", name="n", why=why, fix=fix)
    check_registers("T.set_max_nreg", "n", n or 1)
    at.emit(bulk.set_registers(n, bool(is_inc)))


def inc_max_nreg(n: int) -> None:
    """Set `n` registers as T.set_max_nreg does, for a role that takes more than its share."""
    set_max_nreg(n, True)


def dec_max_nreg(n: int) -> None:
    """Set `n` registers as T.set_max_nreg does, for a role that gives registers back."""
    set_max_nreg(n, False)


def no_set_max_nreg() -> None:
    """Give all threads an equal share of registers. Roles by T.ws have that without this call."""
    in_kernel("T.no_set_max_nreg")


# Kernels that begin before the one ahead of them in the stream has ended.


def pdl_sync() -> None:
    """Wait for the preceding kernels. Code before this call may run beside them, and must not touch their data."""
    in_kernel("T.pdl_sync").emit(bulk.grid_wait())


def pdl_trigger() -> None:
    """Allow the next kernel to start its code before its T.pdl_sync, as far as this block is concerned."""
    in_kernel("T.pdl_trigger").emit(bulk.grid_launch())


def in_kernel(what: str) -> Tracer:
    """Return the tracer, and check that it is inside a T.Kernel."""
    at = tracer(what)
    if at.launch is None or not at.scopes:
        raise error("not_in_kernel", None, what=what)
    return at


# T.wgmma_gemm and T.wait_wgmma: products that the author leaves in flight, and waits for. Only results that a wait
# completes may be used. A wait that leaves products in flight says nothing about their accumulators: if the kernel
# touched these registers, the assembler would wait for all products.

MOST_PENDING = 7  # groups of products
# The fragments that products write: how many products began after the last one of each.
Ages = Mapping[Buffer, tuple[int, Region]]


def gemm(
    A: Tile,
    B: Tile,
    C: Tile,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: Scalar = False,
    *,
    wg_wait: int = 0,
    wgmma: bool = False,
    used: Scalar = None,
    k_pack: int = 1,
    mbar: Any = None,
    annotations: Annotations = None,
) -> None:
    """Compute `C += A B`, of tiles in shared memory or fragments, summed in C's dtype.

    A is (M, K), or (K, M) with `transpose_A`; B is (K, N), or (N, K) with `transpose_B`; C is (M, N). Leading
    dimensions have size 1. Where `clear_accum` holds, a bool or an expression as in `k == 0`, C is set to 0 before.
    `policy` says how warps split C.

    With `wgmma` the product goes by wgmma or not at all; `wg_wait` groups of such products may stay in flight. With
    `used` the author promises: columns of A from there on are zeros in the rows of T.own_rows. A product that is waited
    for at once may then leave its second half out. `k_pack` and `annotations` are hints of TileLang's without effect.
    Raises TileError for shapes and dtypes that have no product, and for `mbar`, which only products of sm_100 signal.
    """
    at = tracer("T.gemm")
    if mbar is not None:
        why, fix = "is signalled by products of sm_100 only", "leave it out: the product is complete after T.gemm"
        raise error("bad_argument", None, op="T.gemm", name="mbar", why=why, fix=fix)
    if isinstance(k_pack, bool) or k_pack not in (1, 2) or not isinstance(k_pack, int):
        fix = "leave it out: it has no effect here"
        raise error(
            "wrong_value", None, op="T.gemm", name="k_pack", want="an int equal to 1 or 2", got=repr(k_pack), fix=fix
        )
    clears = _cleared(at, C, clear_accum)
    columns = to_expr(used) if isinstance(used, Expr) or (is_number(used) and not isinstance(used, bool)) else None
    if used is not None and (columns is None or not columns.dtype.is_integer):
        why, fix = f"is {used!r}"[:60], "give the number of columns of A that a product needs"
        raise error("bad_argument", None, op="T.gemm", name="used", why=why, fix=fix)
    at.emit(Gemm.build(A, B, C, transpose_A, transpose_B, policy, clears, wg_wait=wg_wait, wgmma=wgmma, used=columns))


def wgmma_gemm(
    A: Tile,
    B: Tile,
    C: Tile,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.Square,
    clear_accum: Scalar = False,
    *,
    annotations: Annotations = None,
) -> None:
    """Start T.gemm, with its operands and options, by wgmma without waiting.

    After T.wait_wgmma, C is complete, and A and B may be overwritten.

    Hopper only. An author error where wgmma cannot do it.
    """
    at = tracer("T.wgmma_gemm")
    made = Gemm.build(A, B, C, transpose_A, transpose_B, policy, _cleared(at, C, clear_accum))
    at.emit(replace(made, wg_wait=-1, wgmma=True))


def _cleared(at: Tracer, accumulator: Tile, condition: Scalar) -> bool:
    """Return whether a product clears its accumulator itself. If only the device knows, record an `if`."""
    holds = truth(condition) if isinstance(condition, Expr) else condition
    if isinstance(holds, Expr) and not isinstance(holds, Const):
        at.emit(If(holds, Block((Fill.build(accumulator, 0),)), Block(())))
        return False
    return bool(holds.value if isinstance(holds, Const) else holds)


def wait_wgmma(pending: int = 0) -> None:
    """Wait until at most `pending` of this warpgroup's newest T.wgmma_gemm are in flight."""
    at = tracer("T.wait_wgmma")
    if not isinstance(pending, int) or not 0 <= pending <= MOST_PENDING:
        fix = f"give a number from 0 to {MOST_PENDING}"
        raise error("bad_argument", None, op="T.wait_wgmma", name="pending", why=f"is {pending!r}", fix=fix)
    at.emit(wgmma.wgmma_wait(pending))


def pin_results(body: Block) -> Block:
    """Mark after each wait which accumulators are complete. A body without waits stays as it is."""
    return _block(body, {})[0]


def _block(block: Block, ages: Ages) -> tuple[Block, Ages]:
    """Rewrite the statements of a block, and track the products in flight."""
    new: list[Stmt] = []
    stmts = block.stmts
    for n, one in enumerate(stmts):
        has_results = n + 1 < len(stmts) and isinstance(stmts[n + 1], WgmmaResults)
        made, ages = _stmt(one, ages)
        new.append(made)
        if (pending := _pending(one)) is not None:
            if not has_results:
                new += [WgmmaResults(c, span=one.span) for age, c in ages.values() if age >= pending]
            ages = {key: (age, c) for key, (age, c) in ages.items() if age < pending}
    return with_fields(block, stmts=tuple(new)), ages


def _stmt(one: Stmt, ages: Ages) -> tuple[Stmt, Ages]:
    """Rewrite one statement, and track the products in flight."""
    if isinstance(one, Gemm) and one.wg_wait:
        older = {key: (age + 1, c) for key, (age, c) in ages.items()}
        return one, {**older, one.C.buffer: (0, one.C)}
    if isinstance(one, Role):
        return with_fields(one, body=_block(one.body, {})[0]), ages
    if isinstance(one, If):
        (then, a), (otherwise, b) = _block(one.then, ages), _block(one.otherwise, ages)
        return with_fields(one, then=then, otherwise=otherwise), _joined(a, b)
    if isinstance(one, For | While):
        before: Ages | None = None
        while before is None or _ages_only(before) != _ages_only(ages):
            before = ages
            body, after = _block(one.body, ages)
            ages = _joined(ages, after)
        return with_fields(one, body=body), ages
    return one, ages


def _joined(a: Ages, b: Ages) -> Ages:
    """Merge the products in flight where two control paths meet. The newest product of each fragment counts."""
    return {key: min((x[key] for x in (a, b) if key in x), key=lambda found: found[0]) for key in {**a, **b}}


def _ages_only(ages: Ages) -> dict[Buffer, int]:
    """Return the age of each entry without its other facts."""
    return {key: age for key, (age, _) in ages.items()}


def _pending(one: Stmt) -> int | None:
    """Return the number of products that a wait leaves in flight, or None for other statements."""
    wait = wgmma.wait_of(one)
    return None if wait is None else wait.pending
