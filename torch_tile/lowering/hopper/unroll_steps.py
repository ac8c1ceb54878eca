# SPDX-License-Identifier: Apache-2.0
"""Unroll short loops whose products have sums of their own, so that each product runs beside arithmetic.

An iteration of such a loop fills operands, multiplies, and adds the results to sums of the loop. As it is written, it
waits for its last product before the next iteration fills operands. Here each product of all iterations starts in front
of the arithmetic on the result of the product before. No product is in flight from one iteration of a loop to the next:
the assembler would make products with operands in registers wait for each other. May assume a role's loop of one
variable that counts from 0 in steps of 1; values do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_tile.intrinsics.wgmma import wgmma_wait
from torch_tile.ir import stmt as st
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import contains, find
from torch_tile.ir.stmt import Alloc, Block, Do, If, Stmt, calls
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.tileop.base import RegisteredOp
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.gemm.wgmma import WgmmaResults
from torch_tile.tileop.uses import uses

MOST = 4  # iterations that are unrolled
LEAST_SUMS = 32  # registers of a product's result in a thread; shorter products gain nothing


def unroll_steps(loop: st.For, threads: int) -> Block | None:
    """Return the iterations one behind the other, or None if the loop of so many threads has no such form."""
    stop, parts = loop.stops[0], _parts(loop.body.stmts)
    if parts is None or not isinstance(stop, Const) or not 2 <= stop.value <= MOST:
        return None
    if _reads_stages(parts, loop.vars[0]) or any(_sums(op, threads) < LEAST_SUMS for op in parts.products):
        return None
    k, steps = loop.vars[0], [const(number, int32) for number in range(int(stop.value))]
    found = _clone_at(parts.starts[0], k, steps[0])
    for now, following in zip(steps, (*steps[1:], None), strict=True):
        found += [*_iteration(parts, k, now), *_end_of_iteration(parts, k, now, following)]
    return Block((*parts.allocs, *found))


def _sums(product: Gemm, threads: int) -> int:
    """Return how many registers of each thread the result of a product takes; 0 if that is not known."""
    shape = product.C.buffer.static_shape
    return 0 if shape is None else math.prod(shape) // threads


def _iteration(parts: _Parts, k: Var, now: Expr) -> list[Stmt]:
    """Return the statements of iteration `now` between the start of its first product and that of the next one."""
    found: list[Stmt] = []
    aside = parts.aside
    for number, start in enumerate(parts.starts[1:]):
        product = parts.products[number]
        done = wgmma_wait(1), WgmmaResults(product.C, span=product.span)
        found += _clone_at((*start, *aside, *done, *parts.results[number]), k, now)
        aside = ()
    return found


def _end_of_iteration(parts: _Parts, k: Var, now: Expr, following: Expr | None) -> list[Stmt]:
    """Return the end of iteration `now`. The first product of the `following` one starts in front of it, if given."""
    product = parts.products[-1]
    ahead = [] if following is None else _clone_at(parts.starts[0], k, following)
    done = wgmma_wait(1 if ahead else 0), WgmmaResults(product.C, span=product.span)
    return [*ahead, *_clone_at((*done, *parts.releases, *parts.results[-1]), k, now)]


def _clone_at(stmts: Sequence[Stmt], k: Var, iteration: Expr) -> list[Stmt]:
    """Clone statements for an iteration; products among them are not waited for."""
    one = Instance(IdMap([(k, iteration)]), IdMap(), fresh=True)
    return [one(s.started() if isinstance(s, Gemm) else s) for s in stmts]


@dataclass(frozen=True)
class _Parts:
    """The parts of an iteration: for each product what it needs and itself, in `starts`.

    `results` is arithmetic on the result of each product, and `aside` other arithmetic. `releases` give tiles back.
    """

    allocs: tuple[Stmt, ...]
    products: tuple[Gemm, ...]
    starts: list[list[Stmt]]
    aside: Sequence[Stmt]
    results: list[list[Stmt]]
    releases: list[Stmt]


def _parts(stmts: Sequence[Stmt]) -> _Parts | None:
    """Split an iteration; return None if it has another form."""
    products = tuple(s for s in stmts if isinstance(s, Gemm))
    allocs = tuple(s for s in stmts if isinstance(s, Alloc))
    made, owner = IdSet(s.buffer for s in allocs), IdMap((op.C.buffer, n) for n, op in enumerate(products))
    if (
        len(products) < 2
        or len(owner) < len(products)
        or not all(s.clear_accum and s.C.buffer in made for s in products)
    ):
        return None
    starts: list[list[Stmt]] = [[] for _ in products]
    results: list[list[Stmt]] = [[] for _ in products]
    aside, releases = list[Stmt](), list[Stmt]()
    needed, done = _operand_arithmetic(stmts), 0
    for one in stmts:
        used = {owner[b] for b in (_touched((one,))[0] | _touched((one,))[1]) if b in owner}
        if isinstance(one, Gemm):
            starts[done].append(one)
            done += 1
        elif isinstance(one, Alloc):
            continue
        elif is_release(one):
            releases.append(one)
        elif calls(one, "mbarrier_wait") or (one in needed and not used):
            if done == len(products):
                return None
            starts[done].append(one)
        elif _is_arithmetic(one) and len(used) == 1 and done == len(products):
            results[used.pop()].append(one)
        elif _is_arithmetic(one) and not used and not done:
            aside.append(one)
        else:
            return None
    parts = _Parts(allocs, products, starts, aside, results, releases)
    whole = all(results) and sum(1 for s in stmts for _ in find(s, Gemm)) == len(products)
    return parts if whole and _may_cross(parts) else None


def _operand_arithmetic(stmts: Sequence[Stmt]) -> IdSet[Stmt]:
    """Return the arithmetic that fills operands of products."""
    wanted: IdSet[Buffer] = IdSet()
    found: IdSet[Stmt] = IdSet()
    for one in reversed(stmts):
        if isinstance(one, Gemm):
            wanted |= IdSet([one.A.buffer, one.B.buffer])
        elif _is_arithmetic(one) and wanted & _touched((one,))[1]:
            wanted |= _touched((one,))[0]
            found.add(one)
    return found


def _may_cross(parts: _Parts) -> bool:
    """Return whether the arithmetic that moves touches nothing that starts of products write, and the reverse.

    What a product needs is written beside the product before. It must leave that product's operands and result alone.
    """
    starts = parts.starts
    read, written = _touched([s for start in starts for s in start])
    reads, writes = _touched([*parts.aside, *(s for result in parts.results for s in result)])
    results = IdSet(op.C.buffer for op in parts.products)
    kept = IdSet(b for b in written if b not in results)
    for start, before in zip(starts, (parts.products[-1], *parts.products), strict=False):
        if _touched(start)[1] & IdSet([before.A.buffer, before.B.buffer, before.C.buffer]):
            return False
    return not (kept & (reads | writes) or writes & read)


def _reads_stages(parts: _Parts, k: Var) -> bool:
    """Return whether arithmetic that moves reads a stage of the loop, which may be released before."""
    moved = [*parts.aside, *(s for result in parts.results for s in result)]
    read = [n for s in moved for n in find(s, Load, Region) if n.buffer.scope == "shared"]
    places = [n.indices[0] if isinstance(n, Load) else n.ranges[0] for n in read]
    return any(v is k for place in places for v in find(place, Var))


def _is_arithmetic(one: Stmt) -> bool:
    """Return whether a statement computes, and neither waits nor releases a tile."""
    return isinstance(one, st.For | RegisteredOp) and not isinstance(one, Gemm) and not contains(one, Do)


def is_release(one: Stmt) -> bool:
    """Return whether a statement is the arrival of warps at an mbarrier."""
    if isinstance(one, If):
        return len(one.then.stmts) == 1 and not one.otherwise.stmts and calls(one.then.stmts[0], "mbarrier_arrive")
    return calls(one, "warp_arrive")


def _touched(stmts: Sequence[Stmt]) -> tuple[IdSet[Buffer], IdSet[Buffer]]:
    """Return the buffers that statements read, and those that they write."""
    found = [uses(s) for s in stmts]
    return IdSet(b for reads, _ in found for b in reads), IdSet(b for _, writes in found for b in writes)
