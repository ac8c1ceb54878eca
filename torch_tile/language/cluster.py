# SPDX-License-Identifier: Apache-2.0
"""Clusters, T.Kernel(..., cluster_dims=(2, 1, 1)): blocks that run at the same time, meet, and read each other's tiles.

For GPUs from sm_90 on.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import replace
from typing import Any, TypeVar

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.hardware import MOST_BLOCKS_OF_CLUSTER as MOST_BLOCKS
from torch_tile.intrinsics import bulk, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.expr import Address, Const, Expr, Load, Var, binary, cast, const, select, to_expr
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Block, If, Stmt
from torch_tile.language.asynchronous import in_kernel, mbarrier_of
from torch_tile.language.lengths import settled
from torch_tile.language.threads import thread_index
from torch_tile.language.trace import Tracer, expand_names
from torch_tile.tileop.base import Annotations, Scalar, Tile, parallel, region_of, spread, squeezed
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import TmaCopy

AXES = 3  # of a grid
C = TypeVar("C", bound=Copy)


def cluster_arrive() -> None:
    """Arrive for the T.cluster_wait of the other blocks of the cluster."""
    _of_block("T.cluster_arrive").emit(bulk.cluster_arrive())


def cluster_arrive_relaxed() -> None:
    """Arrive as T.cluster_arrive does. The author asks for no memory order, but this call gives it."""
    cluster_arrive()


def cluster_wait() -> None:
    """Wait until all threads of the cluster have called T.cluster_arrive."""
    _of_block("T.cluster_wait").emit(bulk.cluster_wait())


def cluster_sync() -> None:
    """Wait for all threads of the cluster."""
    cluster_arrive()
    cluster_wait()


def get_cluster_id(dim: int = 0) -> Expr:
    """Return the cluster's index along dimension `dim` of the grid of clusters."""
    block, size = _along("T.get_cluster_id", dim)
    return block // size


def get_cluster_dims() -> tuple[int, int, int]:
    """Return the blocks of a cluster along each dimension."""
    cluster: tuple[int, int, int] = in_kernel("T.get_cluster_dims").launch.cluster
    return cluster


def get_cluster_ids() -> tuple[Expr, ...]:
    """Return the cluster's index along each dimension of the grid of clusters."""
    return tuple(get_cluster_id(d) for d in range(len(in_kernel("T.get_cluster_ids").launch.blocks)))


def get_cluster_size() -> int:
    """Return the number of blocks of a cluster."""
    return math.prod(get_cluster_dims())


def get_cluster_extent(dim: int = 0) -> int:
    """Return the blocks of a cluster along dimension `dim`."""
    if not isinstance(dim, int) or not 0 <= dim < AXES:
        fix = f"give a dimension below {AXES}"
        raise error("bad_argument", None, op="T.get_cluster_extent", name="dim", why=f"is {dim!r}", fix=fix)
    return get_cluster_dims()[dim]


def get_cluster_extents() -> tuple[int, int, int]:
    """Return the blocks of a cluster along each dimension, as T.get_cluster_dims."""
    return get_cluster_dims()


def block_rank_in_cluster() -> Expr:
    """Return the block's number in its cluster, x fastest."""
    launch = in_kernel("T.block_rank_in_cluster").launch
    sizes = launch.cluster[: len(launch.blocks)]
    own = [block % size for block, size in zip(launch.blocks, sizes, strict=True)]
    rank: Expr = own.pop()
    while own:
        rank = rank * sizes[len(own) - 1] + own.pop()
    return rank


def at_rank(element: Any, rank: Any) -> Expr:
    """Access the element `tile[i, j]` of shared memory in the block of the cluster with this rank.

    The author orders the blocks with T.cluster_sync: between a write and the reads of other blocks, and again before
    the element is overwritten or its block ends.
    """
    launch, region = in_kernel("T.at_rank").launch, region_of(element)
    why = ""
    if region is None or any(r.keep for r in region.ranges) or region.buffer.scope != "shared":
        why, fix = "is no element of shared memory", "give an element tile[i, j] of a T.alloc_shared tile"
    elif launch.cluster == (1, 1, 1):
        why, fix = "is read where blocks have no cluster", "give T.Kernel cluster_dims"
    if why:
        raise error("bad_argument", None, op="T.at_rank", name="element", why=why, fix=fix)
    assert region is not None
    return memory.at_rank(Address(region.buffer, region.starts), rank)


def copy_cluster(
    src: Tile,
    dst: Tile,
    *,
    dst_block: Scalar | None = None,
    cluster_mask: int | None = None,
    remote_barrier: Any = None,
    eviction_policy: str | None = None,
    coalesced_width: int | None = None,
    annotations: Annotations = None,
) -> None:
    """Copy `src` to `dst` in each block of the cluster that comes here, as T.copy does.

    All blocks in `cluster_mask`, whose bits are ranks, get the tile that the one of the lowest rank reads. Where `src`
    does not depend on the block's index in the cluster, one may load for all: the compiler decides who loads.

    With `dst_block`, a rank, a tile of shared memory goes to the tile `dst` of that block. Its threads see it after
    T.cluster_sync. With `remote_barrier`, of T.alloc_cluster_barrier, this block arrives once at that block's mbarrier
    when all is stored; a T.mbarrier_wait_parity there is enough. The author keeps that block from ending before.
    """
    at = in_kernel("T.copy_cluster")
    if dst_block is not None:
        _store_to(src, dst, dst_block, cluster_mask, remote_barrier)
        return
    if remote_barrier is not None:
        why, fix = "is given without `dst_block`", "leave it out: T.copy_cluster waits for its tile"
        raise error("bad_argument", None, op="T.copy_cluster", name="remote_barrier", why=why, fix=fix)
    made = Copy.build(src, dst, eviction_policy=eviction_policy, coalesced_width=coalesced_width)
    at.emit(settled(_led("T.copy_cluster", made, cluster_mask)[0]))


def tma_copy(
    src: Tile,
    dst: Tile,
    barrier: Any = None,
    blocks: Scalar = None,
    share: Scalar = None,
    *,
    shares: int = 1,
    by: int = 0,
    counts: bool = True,
    combine: str | None = None,
    eviction_policy: str | None = None,
    by_warps: bool = False,
    cluster_mask: int | None = None,
    leader_scope_threads: int | None = None,
    annotations: Annotations = None,
) -> None:
    """Copy in bulk between global and shared memory, started by one thread of those that run the op (Hopper).

    A load needs a `barrier`, one element of a T.alloc_barrier, which then waits for its bytes; a store has none and
    is complete after the call. `by` is the number of the thread. With `counts=False` the author's
    T.mbarrier_expect_tx counts the bytes. `eviction_policy` is as for T.copy.

    A store with `combine` "add", "min" or "max" combines each element with the stored one, in any order among
    blocks: int32 and uint32, and "add" of float32, float16 and bfloat16, too.

    With `by_warps` a store is parted: the first thread of each warp stores an equal part of the rows. Warps that wrote
    these rows themselves then wait for no other warp, if T.sync_warp stands in between.

    In a cluster, all blocks in `cluster_mask`, whose bits are ranks, run the copy. They get the tile that the block
    of the lowest rank reads. Each block loads an equal part of it for all. With `blocks`, a mask of its own, this
    block starts part `share` of `shares` equal parts. A block may load into the tiles of blocks that are not here
    yet: call T.cluster_sync before a tile is loaded again.

    `leader_scope_threads` is the number of all threads that come here; `annotations` has no effect. Raises TileError
    for fewer: one thread starts a copy.
    """
    at = in_kernel("T.tma_copy")
    asks_leaders = leader_scope_threads is not None and leader_scope_threads != at.threads
    is_shared, by_hand = cluster_mask is not None, blocks is not None or share is not None
    scope = f"is {leader_scope_threads!r}, and of the {at.threads} threads that come here one starts the copy"
    each = "start each copy by itself: for w in T.unroll(n): T.tma_copy(A[w, :], a[w, :], barrier=full[w])"
    for is_refused, name, why, fix in (
        (asks_leaders, "leader_scope_threads", scope, each),
        (is_shared and by_hand, "cluster_mask", "is given beside `blocks` or `share`", "leave one of both out"),
        (is_shared and barrier is None, "cluster_mask", "is given for a store", "leave it out: each block stores"),
    ):
        if is_refused:
            raise error("bad_argument", None, op="T.tma_copy", name=name, why=why, fix=fix)
    made = TmaCopy.build(
        src, dst, barrier, blocks, share, shares=shares, by=by, counts=counts, combine=combine,
        eviction_policy=eviction_policy, by_warps=by_warps,
    )  # fmt: skip
    led, mask = _led("T.tma_copy", made, cluster_mask)
    if not mask:
        at.emit(made)
        return
    asked = [n for n in range(mask.bit_length()) if mask >> n & 1]
    rank = block_rank_in_cluster()
    number = rank
    if mask & (mask + 1):  # ranks that do not count from 0
        number = functools.reduce(operator.add, (cast(rank > n, dt.int32) for n in asked))
    shared = replace(led, blocks=const(mask, dt.int32), share=number, shares=len(asked))
    is_asked = binary("!=", binary("&", const(mask, dt.int32) >> rank, 1), 0)
    whole = len(asked) == get_cluster_size()
    at.emit(shared if whole else If(is_asked, Block((shared,)), Block((made,))))


def _led(op: str, copy: C, cluster_mask: int | None) -> tuple[C, int]:
    """Return a copy of what the lowest rank of the mask reads, and the mask; of one block, the copy itself and 0."""
    mask = _sharers(op, cluster_mask)
    return (_read_by_leader(op, copy, mask), mask) if mask else (copy, 0)


def _sharers(op: str, mask: Any) -> int:
    """Return `cluster_mask`, or 0 if it names one block at most. Raises TileError for a mask of other blocks."""
    count = get_cluster_size()
    if mask is not None and (not isinstance(mask, int) or isinstance(mask, bool) or not 0 < mask < 1 << count):
        why = f"is {mask!r} in a cluster of {count} block{'s'[: count != 1]}"
        fix = f"give a number from 1 to {(1 << count) - 1}, whose bits are ranks"
        raise error("bad_argument", None, op=op, name="cluster_mask", why=why, fix=fix)
    return int(mask) if mask is not None and mask.bit_count() > 1 else 0


def _store_to(src: Tile, dst: Tile, dst_block: Scalar, cluster_mask: int | None, remote_barrier: Any) -> None:
    """Store a tile to the same place of another block's shared memory, and arrive at its mbarrier."""
    at, copy = _of_block("T.copy_cluster"), Copy.build(src, dst)
    rank, count = to_expr(dst_block), get_cluster_size()
    name, why, fix = "dst_block", "", f"give a rank from 0 to {count - 1}, an integer"
    if count == 1:
        why, fix = "names another block, and blocks have no cluster", "give T.Kernel cluster_dims"
    elif not rank.dtype.is_integer or (isinstance(rank, Const) and not 0 <= rank.value < count):
        why = f"is {dst_block!r} in a cluster of {count} blocks"
    elif cluster_mask is not None:
        name, why, fix = "cluster_mask", "is given beside `dst_block`", "leave one of both out"
    for side, region in ("src", copy.src), ("dst", copy.dst):
        if not why and region.buffer.scope != "shared":
            name, why = side, f"is in {region.buffer.scope} memory"
            fix = "with `dst_block`, copy between tiles of T.alloc_shared"
    if why:
        raise error("bad_argument", None, op="T.copy_cluster", name=name, why=why, fix=fix)
    if found := copy.check():
        raise TileError(*found)

    def one(point: tuple[Var, ...]) -> Stmt:
        """Store one element."""
        value = Load(copy.src.buffer, spread(copy.src, point))
        return memory.store_at_rank(Address(copy.dst.buffer, spread(copy.dst, point)), value, rank)

    extents = squeezed(copy.dst)
    at.emit(parallel(extents, one) if extents else one(()))
    if remote_barrier is not None:
        _, barrier = mbarrier_of("T.copy_cluster", remote_barrier)
        at.emit(memory.barrier())
        first = binary("==", thread_index(), const(0, dt.int32))
        at.emit(If(first, Block((bulk.mbarrier_arrive(barrier, rank, of_cluster=True),)), Block(())))


def _read_by_leader(op: str, copy: C, mask: int) -> C:
    """Return a copy whose source, in each block of `mask`, is that of the block of the lowest rank there."""
    launch = in_kernel(op).launch
    rank, leader = block_rank_in_cluster(), (mask & -mask).bit_length() - 1
    is_asked = binary("!=", binary("&", const(mask, dt.int32) >> rank, 1), 0)
    known: dict[Var, Expr] = {}
    for block, size in zip(launch.blocks, launch.cluster, strict=False):
        if size == 1:
            continue
        led = block - block % size + leader % size
        known[block] = led if mask + 1 == 1 << get_cluster_size() else select(is_asked, led, block)
        leader //= size
    ranges = []
    for given in copy.src.ranges:
        start = expand_names(given.start)
        used = list(walk(start))
        if any(isinstance(node, Load) and node.buffer.scope != "global" for node in used):
            why = f"reads where `{start!r}` says, which may differ between the blocks of `cluster_mask`"
            fix = "write T.copy: the compiler loads once for a cluster what its blocks share"
            raise error("bad_argument", None, op=op, name="src", why=why, fix=fix)
        own = any(node is block for block in known for node in used)
        ranges.append(replace(given, start=Substitute(known)(start)) if own else given)
    return replace(copy, src=replace(copy.src, ranges=tuple(ranges)))


def _of_block(what: str) -> Tracer:
    """Return the tracer. Raises an error inside roles, since all threads of the cluster are counted."""
    at = in_kernel(what)
    if at.barrier_group:
        raise error("not_outermost", None, what=what, region="role")
    return at


def _along(what: str, dim: int) -> tuple[Expr, int]:
    """Check the dimension of a cluster function."""
    launch = in_kernel(what).launch
    if not isinstance(dim, int) or not 0 <= dim < len(launch.blocks):
        fix = f"give a dimension below {len(launch.blocks)}"
        raise error("bad_argument", None, op=what, name="dim", why=f"is {dim!r}", fix=fix)
    return launch.blocks[dim], launch.cluster[dim]


def clusters(given: Any, rank: int) -> tuple[int, int, int]:
    """Check `cluster_dims` of T.Kernel: up to three sizes, for a grid of `rank` dimensions."""
    sizes = (1,) if given is None else tuple(given) if isinstance(given, tuple | list) else (given,)
    good = (
        0 < len(sizes) <= AXES and all(isinstance(n, int) and n > 0 for n in sizes) and math.prod(sizes) <= MOST_BLOCKS
    )
    if not good or any(n != 1 for n in sizes[rank:]):
        fix = f"give a size for each dimension of the grid, at most {MOST_BLOCKS} blocks together"
        raise error("bad_argument", None, op="T.Kernel", name="cluster_dims", why=f"is {given!r}", fix=fix)
    x, y, z = (*sizes, 1, 1)[:AXES]
    return x, y, z
