# SPDX-License-Identifier: Apache-2.0
"""Names of the thread level: which thread and block runs, barriers, groups of asynchronous copies.

Kernels that name the running thread are for GPUs; everything else here only orders, and nothing needs it on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

from ..diagnostics import error
from ..intrinsics import memory
from ..ir.expr import Const, Expr, Var
from .trace import tracer


def thread_index() -> Var:
    """The index of the running thread in its block, counted along all dimensions of `threads`, x fastest."""
    launch = _launch("T.thread_index")
    launch.uses_thread = True
    return launch.thread  # type: ignore[no-any-return]


def get_thread_binding(dim: int = 0) -> Expr:
    """The running thread's index along dimension `dim` of `threads`."""
    threads = _launch("T.get_thread_binding").threads
    _check("T.get_thread_binding", dim, len(threads))
    below, index = math.prod(threads[:dim]), thread_index()
    slower: Expr = index if below == 1 else index // below
    return slower if dim == len(threads) - 1 else slower % threads[dim]


def get_thread_bindings() -> tuple[Expr, ...]:
    """The running thread's index along each dimension of `threads`."""
    return tuple(get_thread_binding(d) for d in range(len(_launch("T.get_thread_bindings").threads)))


def get_thread_extent(dim: int = 0) -> int:
    """Threads of a block along dimension `dim`."""
    threads = _launch("T.get_thread_extent").threads
    _check("T.get_thread_extent", dim, len(threads))
    return int(threads[dim])


def get_thread_extents() -> tuple[int, ...]:
    """Threads of a block along each dimension."""
    return tuple(_launch("T.get_thread_extents").threads)


def get_block_binding(dim: int = 0) -> Var:
    """The block's index along dimension `dim` of the grid."""
    blocks = _launch("T.get_block_binding").blocks
    _check("T.get_block_binding", dim, len(blocks))
    return blocks[dim]  # type: ignore[no-any-return]


def get_block_bindings() -> tuple[Var, ...]:
    """The block's index along each dimension of the grid."""
    return tuple(_launch("T.get_block_bindings").blocks)


def get_block_extent(dim: int = 0) -> Any:
    """Blocks of the grid along dimension `dim`: an integer where it is known."""
    grid = _launch("T.get_block_extent").grid
    _check("T.get_block_extent", dim, len(grid))
    size = grid[dim]
    return int(size.value) if isinstance(size, Const) else size


def sync_threads(barrier_id: Any = None, arrive_count: Any = None) -> None:
    """Wait for all threads of the block; the compiler places the barriers that tiles need by itself."""
    at = tracer("T.sync_threads")
    if barrier_id is not None or arrive_count is not None:
        fix = "call T.sync_threads() with no arguments"
        raise error("bad_argument", None, op="T.sync_threads", name="barrier_id", why="names a barrier", fix=fix)
    at.emit(memory.barrier())


def sync_warp() -> None:
    """Wait for the threads of a warp."""
    tracer("T.sync_warp").emit(memory.warp_barrier())


def ptx_commit_group() -> None:
    """End a group of T.async_copy."""
    tracer("T.ptx_commit_group").emit(memory.cp_async_commit())


def ptx_wait_group(pending: int = 0) -> None:
    """Wait until at most `pending` groups of T.async_copy are on their way."""
    if not isinstance(pending, int) or isinstance(pending, bool) or pending < 0:
        fix = "give a natural number"
        raise error("bad_argument", None, op="T.ptx_wait_group", name="pending", why=f"is {pending!r}", fix=fix)
    tracer("T.ptx_wait_group").emit(memory.cp_async_wait(pending))


def _launch(what: str) -> Any:
    at = tracer(what)
    if at.launch is None or not at.scopes:
        raise error("not_in_kernel", None, what=what)
    return at.launch


def _check(what: str, dim: int, rank: int) -> None:
    if not isinstance(dim, int) or not 0 <= dim < rank:
        fix = f"give a dimension below {rank}"
        raise error("bad_argument", None, op=what, name="dim", why=f"is {dim!r}", fix=fix)
