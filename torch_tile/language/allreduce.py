# SPDX-License-Identifier: Apache-2.0
"""TIR's reduction over threads: `with T.attr(T.comm_reducer(...), "reduce_scope", ...)` around T.tvm_thread_allreduce.

Threads that differ in an index of T.get_thread_binding fold their values: lanes of a warp by shuffles, and what is left
through shared memory, where the compiler places the barriers. So do T.syncthreads_count, _or and _and.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP
from torch_tile.intrinsics import memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Load, Var, cast, const, select, to_expr, truth
from torch_tile.ir.node import equal
from torch_tile.ir.stmt import Alloc, Let, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.threads import get_thread_binding, thread_index
from torch_tile.language.trace import Tracer, let
from torch_tile.tileop.base import Scalar, Tile, need_region


@dataclass(frozen=True)
class CommReducer:
    """How two values are folded, and what changes nothing."""

    combine: Callable[[Any, Any], Any]
    identity: Any


def comm_reducer(combiner: Callable[[Any, Any], Any], identity: Sequence[Any]) -> CommReducer:
    """A commutative function of two values, `lambda x, y: x + y`, and a list of the value that changes nothing."""
    if len(identity) != 1:
        why, fix = f"has {len(identity)} values", "fold one value at a time"
        raise error("bad_argument", None, op="T.comm_reducer", name="identity", why=why, fix=fix)
    return CommReducer(combiner, identity[0])


def attr(node: Any, key: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Around T.tvm_thread_allreduce: by which T.comm_reducer it folds. The language has no other attributes."""
    at = in_kernel("T.attr")
    if not isinstance(node, CommReducer) or key != "reduce_scope":
        fix = 'give T.comm_reducer(...), "reduce_scope" and anything, around T.tvm_thread_allreduce'
        raise error("bad_argument", None, op="T.attr", name="key", why=f"is {key!r}", fix=fix)
    return _folding(at, node)


@contextlib.contextmanager
def _folding(at: Tracer, by: CommReducer) -> Iterator[None]:
    outer, at.folds_by = at.folds_by, by
    try:
        yield
    finally:
        at.folds_by = outer


def tvm_thread_allreduce(
    size: int, value: Scalar, condition: Scalar, result: Tile, *bindings: Scalar, dtype: str = "handle"
) -> None:
    """Fold `value` over the threads that differ in `bindings` only, indices by T.get_thread_binding, into `result`.

    `result` is an element of each thread's own memory; `value` counts where `condition` holds. All threads come here.
    `dtype` is TIR's, of the call.
    """
    what = "T.tvm_thread_allreduce"
    at = in_kernel(what)
    by, target = at.folds_by, need_region(result, "tvm_thread_allreduce", "result")
    why, name, fix = "", "size", "fold one value at a time"
    if getattr(size, "value", size) != 1:
        why = f"is {size!r}"
    elif not isinstance(by, CommReducer):
        name, why, fix = (
            "value",
            "is folded by nothing",
            'write it inside `with T.attr(T.comm_reducer(...), "reduce_scope", 0)`',
        )
    elif target.buffer.scope not in ("local", "var") or any(r.keep for r in target.ranges):
        name, why, fix = "result", "is no element of a thread's own memory", "give an element of T.alloc_local"
    elif at.crew or at.in_nest:
        name, why, fix = "value", "is folded where not all threads come", "write it outside T.Parallel and T.ws"
    if why:
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    assert isinstance(by, CommReducer)
    to = target.buffer.dtype
    total = cast(to_expr(value, op=what), to)
    holds = truth(to_expr(condition))
    total = select(holds, total, cast(to_expr(by.identity), to))

    def fold(a: Expr, b: Expr) -> Expr:
        return let("total", cast(to_expr(by.combine(a, b)), to))

    for binding in bindings:
        total = _over(at, let("part", total), _dimension(at, what, binding), fold)
    at.emit(Store(target.buffer, target.starts, total))


def syncthreads_count(predicate: Scalar) -> Expr:
    """In how many threads of the block `predicate` holds, an int32, told to all of them, who come here together.

    What they wrote to shared and global memory before, all see after it. For GPUs.
    """
    return _counted("T.syncthreads_count", predicate)


def syncthreads_or(predicate: Scalar) -> Expr:
    """An int32: 1 where `predicate` holds in any thread of the block, else 0. As T.syncthreads_count."""
    return cast(_counted("T.syncthreads_or", predicate) != 0, dt.int32)


def syncthreads_and(predicate: Scalar) -> Expr:
    """An int32: 1 where `predicate` holds in all threads of the block, else 0. As T.syncthreads_count."""
    total = _counted("T.syncthreads_and", predicate)
    return cast(total == math.prod(in_kernel("T.syncthreads_and").launch.threads), dt.int32)


def _counted(what: str, predicate: Any) -> Expr:
    at = in_kernel(what)
    why, fix = "", "write it outside T.Parallel and T.ws, in a line before"
    if at.crew or at.in_nest:
        why = "is asked for where not all threads come"
    elif at.doubtful:
        why = f"is wanted only if {at.doubtful} asks for it"
    if why:
        raise error("bad_argument", None, op=what, name="predicate", why=why, fix=fix)
    total: Expr = cast(truth(to_expr(predicate, op=what)), dt.int32)
    at.emit(memory.barrier())

    def add(a: Expr, b: Expr) -> Expr:
        return let("total", a + b)

    for dim, count in enumerate(at.launch.threads):
        if count > 1:
            total = _over(at, let("part", total), dim, add)
    return let("total", total)


def _dimension(at: Tracer, what: str, binding: Any) -> int:
    """Along which dimension of the block's threads an index counts."""
    index = _resolved(at, to_expr(binding))
    for dim in range(len(at.launch.threads)):
        if equal(index, _resolved(at, get_thread_binding(dim))):
            return dim
    fix = "give indices by T.get_thread_binding"
    raise error("bad_argument", None, op=what, name="bindings", why=f"holds {binding!r}", fix=fix)


def _resolved(at: Tracer, value: Expr) -> Expr:
    """What a name stands for."""
    while isinstance(value, Var):
        found = next((s for scope in at.scopes for s in scope.stmts if isinstance(s, Let) and s.var is value), None)
        if found is None:
            break
        value = found.value
    return value


def _over(at: Tracer, part: Expr, dim: int, fold: Callable[[Expr, Expr], Expr]) -> Expr:
    """The fold over the threads that differ along one dimension, the same bits in each of them."""
    threads = at.launch.threads
    count, stride = threads[dim], math.prod(threads[:dim])
    lanes = math.gcd(count, max(1, WARP // stride)) if WARP % stride == 0 and math.prod(threads) % WARP == 0 else 1
    step = 1
    while step < lanes:
        part = fold(part, let("other", memory.shuffle_xor(part, step * stride)))
        step *= 2
    if lanes == count:
        return part
    tile = Buffer("parts", (const(math.prod(threads), dt.int32),), part.dtype, "shared")
    at.emit(Alloc(tile))
    thread, apart = thread_index(), stride * lanes
    at.emit(Store(tile, (thread,), part))
    first = let("first", thread - thread // apart % (count // lanes) * apart)
    total: Expr = Load(tile, (first,))
    for n in range(1, count // lanes):
        total = fold(total, Load(tile, (first + n * apart,)))
    return total
