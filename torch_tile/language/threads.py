# SPDX-License-Identifier: Apache-2.0
"""Names of the thread level: which thread and block runs, barriers, groups of asynchronous copies.

Kernels that name the running thread are for GPUs; everything else here only orders, and nothing needs it on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP
from torch_tile.intrinsics import bulk, memory, wgmma
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Call, Const, Expr, Var, const, is_number, to_expr
from torch_tile.ir.node import equal
from torch_tile.language.trace import Tracer, tracer
from torch_tile.tileop.base import need_choice

RANK = 3  # dimensions of a grid and of a block
NUMBERS = range(1, 16)  # of named barriers; 0 is that of the block


def thread_index() -> Var:
    """Return the index of the running thread in its block, counted along all dimensions of `threads`, x fastest."""
    launch = _launch("T.thread_index")
    launch.uses_thread = True
    return launch.thread  # type: ignore[no-any-return]


def get_thread_binding(dim: int = 0) -> Expr:
    """Return the running thread's index along dimension `dim` of `threads`: 0 along one that these leave out."""
    threads = _launch("T.get_thread_binding").threads
    _check("T.get_thread_binding", dim)
    if dim >= len(threads):
        return const(0, dt.int32)
    below, index = math.prod(threads[:dim]), thread_index()
    slower: Expr = index if below == 1 else index // below
    return slower if dim == len(threads) - 1 else slower % threads[dim]


def get_thread_bindings() -> tuple[Expr, ...]:
    """Return the running thread's index along each of three dimensions."""
    return tuple(get_thread_binding(d) for d in range(RANK))


def own_rows(rows: int) -> tuple[Expr, Expr]:
    """Return the first row and the end of the running warpgroup's own rows, of a tile of `rows`.

    On Hopper, warpgroups have 64 rows each where all products have `rows` rows and the policy FullRow. In all other
    kernels these are 0 and `rows`. A kernel may leave work out for rows that are not its warpgroup's own.
    """
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        fix = "give the number of rows of a tile, known when the kernel is traced"
        raise error("bad_argument", None, op="T.own_rows", name="rows", why=f"is {rows!r}"[:60], fix=fix)
    tracer("T.own_rows")
    begin, end = (Call(name, (const(rows, dt.int32),), dt.int32) for name in wgmma.OWN_ROWS)
    return begin, end


def get_thread_extent(dim: int = 0) -> int:
    """Return how many threads a block has along dimension `dim`: 1 along one that `threads` leaves out."""
    threads = _launch("T.get_thread_extent").threads
    _check("T.get_thread_extent", dim)
    return int(threads[dim]) if dim < len(threads) else 1


def get_thread_extents() -> tuple[int, ...]:
    """Return how many threads a block has along each of three dimensions."""
    return tuple(get_thread_extent(d) for d in range(RANK))


def get_block_binding(dim: int = 0) -> Var:
    """Return the block's index along dimension `dim` of the grid."""
    blocks = _launch("T.get_block_binding").blocks
    _check("T.get_block_binding", dim, len(blocks))
    return blocks[dim]  # type: ignore[no-any-return]


def get_block_bindings() -> tuple[Var, ...]:
    """Return the block's index along each dimension of the grid."""
    return tuple(_launch("T.get_block_bindings").blocks)


def get_block_extent(dim: int = 0) -> Any:
    """Return how many blocks the grid has along `dim`: an integer if known, 1 along one that the grid leaves out."""
    grid = _launch("T.get_block_extent").grid
    _check("T.get_block_extent", dim)
    size = grid[dim] if dim < len(grid) else 1
    return int(size.value) if isinstance(size, Const) else size


def get_block_extents() -> tuple[Any, ...]:
    """Return how many blocks the grid has along each of three dimensions."""
    return tuple(get_block_extent(d) for d in range(RANK))


def thread_binding(
    start: Any, stop: Any = None, thread: str = "threadIdx.x", *, annotations: Mapping[str, Any] | None = None
) -> Expr:
    """Return the index that the kernel around counts: `tx = T.thread_binding(0, 128, thread="threadIdx.x")`.

    `for tx in T.thread_binding(...):` names it for the body. `annotations` has no effect. In a function without
    T.Kernel the bindings make one launch, of blocks and threads of these extents.
    `thread` is threadIdx.x, .y or .z, or blockIdx.x, .y or .z; `stop`, or `start` alone, is its extent.
    """
    what = "T.thread_binding"
    if isinstance(stop, str):  # T.thread_binding(128, "threadIdx.x")
        stop, thread = None, stop
    if stop is None:
        start, stop = 0, start
    unit, _, axis = str(thread).partition(".")
    if unit not in ("threadIdx", "blockIdx") or axis not in ("x", "y", "z"):
        fix = "give one of threadIdx.x, .y, .z, blockIdx.x, .y, .z"
        raise error("bad_argument", None, op=what, name="thread", why=f"is {thread!r}", fix=fix)
    dim, of_block = "xyz".index(axis), unit == "blockIdx"
    if is_number(start) and start == 0:
        _launch(what).bind(of_block, dim, stop)
    size = get_block_extent(dim) if of_block else get_thread_extent(dim)
    if not is_number(start) or start != 0 or not _is_same(stop, size):
        why, fix = f"counts from {start!r} to {stop!r}", f"count from 0 to {size!r}, as T.Kernel says"
        raise error("bad_argument", None, op=what, name="stop", why=why, fix=fix)
    return get_block_binding(dim) if of_block else get_thread_binding(dim)


def launch_thread(thread: str, extent: Any) -> Expr:
    """Return the index `thread`, which the kernel counts up to `extent`: `tx = T.launch_thread("threadIdx.x", 128)`.

    `with T.launch_thread("threadIdx.x", 128) as tx:` names it for the body.
    """
    return thread_binding(0, extent, thread)


def sync_threads(barrier_id: Any = None, arrive_count: Any = None) -> None:
    """Wait for all threads of the block, or of the role around; the compiler places what tiles need by itself.

    With a `barrier_id` (1 to 15) `arrive_count` threads meet there, whole warps, from any roles: those that call this
    and those that T.named_barrier_arrive.
    """
    at = tracer("T.sync_threads")
    if barrier_id is None and arrive_count is None:
        at.emit(memory.barrier())
    else:
        _launch("T.sync_threads")
        at.emit(bulk.named_barrier(*numbered(at, "T.sync_threads", barrier_id, arrive_count)))


def numbered(at: Tracer, what: str, number: Any, count: Any) -> tuple[int, int]:
    """Check a named barrier and how many threads meet there: those of the role, or of the block, if `count` is None."""
    threads = math.prod(at.launch.threads)
    count = at.threads if count is None else count
    number, count = (value.value if isinstance(value, Const) else value for value in (number, count))
    known = isinstance(number, int) and not isinstance(number, bool) and number in NUMBERS
    whole = isinstance(count, int) and 0 < count <= threads and count % WARP == 0
    numbers = f"give a number from {NUMBERS[0]} to {NUMBERS[-1]}"
    if isinstance(number, Expr):
        why = f"is computed, {number!r}, and the compiler checks for each barrier which threads meet there"
        fix = f"{numbers}; where threads choose between barriers, write a branch for each"
        raise error("bad_argument", None, op=what, name="barrier_id", why=why, fix=fix)
    for name, value, good, fix in (
        ("barrier_id", number, known, numbers),
        ("arrive_count", count, whole, f"give a multiple of {WARP} up to the {threads} threads of the block"),
    ):
        if not good:
            raise error("bad_argument", None, op=what, name=name, why=f"is {value!r}", fix=fix)
    return int(number), int(count)


def tvm_storage_sync(scope: str = "shared") -> None:
    """Emit `T.sync_threads()` where `scope` is "shared" or "global", T.sync_warp() for "warp": TIR's spelling."""
    need_choice("tvm_storage_sync", "scope", scope, ("shared", "shared.dyn", "global", "warp"))
    sync_warp() if scope == "warp" else sync_threads()


def sync_warp() -> None:
    """Wait for the threads of a warp, where all of them pass. Each then sees what the others wrote before."""
    tracer("T.sync_warp").emit(memory.warp_barrier())


def ptx_commit_group() -> None:
    """End a group of asynchronous copies. Each T.async_copy ends its own, so that this one is empty behind it."""
    tracer("T.ptx_commit_group").emit(memory.cp_async_commit())


def ptx_wait_group(pending: int = 0) -> None:
    """Wait until at most the `pending` newest groups are on their way. Each T.async_copy is a group of its own."""
    if not isinstance(pending, int) or isinstance(pending, bool) or pending < 0:
        fix = "give a natural number"
        raise error("bad_argument", None, op="T.ptx_wait_group", name="pending", why=f"is {pending!r}", fix=fix)
    tracer("T.ptx_wait_group").emit(memory.cp_async_wait(pending))


def _launch(what: str) -> Any:
    """Return the current kernel launch. Raises an error outside of a kernel."""
    at = tracer(what)
    if at.launch is None or not at.scopes:
        raise error("not_in_kernel", None, what=what)
    return at.launch


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two sizes are the same number or the same expression."""
    return equal(to_expr(a), to_expr(b)) if isinstance(a, Expr) or isinstance(b, Expr) else bool(a == b)


def _check(what: str, dim: int, rank: int = RANK) -> None:
    """Check a dimension number."""
    if not isinstance(dim, int) or not 0 <= dim < rank:
        fix = f"give a dimension below {rank}"
        raise error("bad_argument", None, op=what, name="dim", why=f"is {dim!r}", fix=fix)
