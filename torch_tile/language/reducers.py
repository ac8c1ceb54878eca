# SPDX-License-Identifier: Apache-2.0
"""T.alloc_reducer: a fragment that accumulates values of many iterations of T.Parallel into each element.

A nest that updates a reducer becomes two things: a nest that fills a tile, each iteration its own element, and
reductions of that tile into the reducer. So a reducer is always up to date, and T.finalize_reducer has nothing left to
do. A nest that does more with a reducer than update it stays as it is: its iterations run in order.

T.reducer_init opens an epoch, as in TileLang: until T.finalize_reducer in the same scope, T.reducer_update alone
touches the reducer. One that T.fill or T.clear begins has no epochs, and is read and updated like a fragment.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import TileAssertionError, TileError, current_span, diagnose, error
from torch_tile.hardware import WARP
from torch_tile.intrinsics import memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Binary, Call, Cast, Const, Expr, Load, Var, cast, const, select, to_expr, truth
from torch_tile.ir.node import Rewriter, equal, find, symbols
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, For, Let, Stmt, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.scopes import alloc_fragment
from torch_tile.language.threads import get_thread_binding, thread_index
from torch_tile.language.trace import Epoch, Tracer, author_span, let
from torch_tile.language.values import Handle, stored
from torch_tile.language.warps import predicate_of
from torch_tile.tileop.base import Annotations, RegisteredOp, Scalar, Tile, identity_of, need_choice, need_region
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.reduce.op import REDUCTIONS, check_batch, combine

# How an update of each kind is written: an operator, or the function of the same meaning that keeps NaN.
UPDATES = {
    "sum": ("+",), "max": ("max", "maximum"), "min": ("min", "minimum"), "bitand": ("&",), "bitor": ("|",),
    "bitxor": ("^",),
}  # fmt: skip
Reducers = Mapping[Buffer, str]


def alloc_reducer(
    shape: Any, dtype: Any = "float32", op: str = "sum", replication: str | None = None, annotations: Annotations = None
) -> Handle:
    """Allocate a fragment that accumulates values of T.Parallel loops by `op`: sum, max, min, bitand, bitor or bitxor.

    T.reducer_init opens it, T.reducer_update(acc[i], v) updates it, T.finalize_reducer ends it. Or T.fill or T.clear
    begins it; then `acc[i] += v` and `acc[i] = T.max(acc[i], v)` update it. `replication` ("all" or "none") and
    `annotations` are hints of TileLang's without effect.
    """
    need_choice("alloc_reducer", "replication", replication, (None, "all", "none"))
    at = in_kernel("T.alloc_reducer")
    if op not in UPDATES:
        why, fix = f"is {op!r}", f"give one of {', '.join(UPDATES)}"
        raise error("bad_argument", None, op="T.alloc_reducer", name="op", why=why, fix=fix)
    made = alloc_fragment(shape, dtype)
    if op.startswith("bit") and made.dtype.is_float:
        why, fix = f"is {made.dtype}", "bitwise reductions take an integer dtype"
        found = diagnose("bad_argument", current_span(), op="T.alloc_reducer", name="dtype", why=why, fix=fix)
        raise TileAssertionError(found)
    at.reducers[made.buffer] = op
    return made


def reducer_init(reducer: Tile, init: Scalar = None) -> None:
    """Start a reduction from `init`, or from the neutral element: 0 for a sum, the least value for a maximum.

    Until T.finalize_reducer, which stands in the same scope, only T.reducer_update touches the reducer.
    """
    what = "T.reducer_init"
    at = in_kernel(what)
    buffer, op = _reducer(what, reducer)
    if buffer in at.epochs:
        raise _refused_step(
            buffer, f"double {what}: the one before is not finalized", "write T.finalize_reducer before"
        )
    if isinstance(init, Expr) and init.dtype != buffer.dtype:
        why = f"is {init.dtype}, which does not match reducer `{buffer.name}` of {buffer.dtype}"
        raise error("bad_argument", None, op=what, name="init", why=why, fix=f"write T.cast(init, {buffer.dtype})")
    at.emit(Fill.build(buffer, identity_of(op, buffer.dtype) if init is None else init))
    at.epochs[buffer] = Epoch(at.scopes[-1], author_span())


def reducer_update(target: Tile, value: Scalar) -> None:
    """Accumulate `value` into `target`, an element `acc[i]`, in a T.Parallel between the reducer's init and its end."""
    what = "T.reducer_update"
    at = in_kernel(what)
    buffer, op = _reducer(what, target)
    if not isinstance(target, Load):
        why, fix = "is no element of a reducer", "give acc[i]"
        raise error("bad_argument", None, op=what, name="target", why=why, fix=fix)
    if buffer not in at.epochs:
        raise _refused_step(buffer, f"{what} before T.reducer_init", "begin the reduction by T.reducer_init(acc)")
    if not at.in_nest:
        fix = "write it inside `for i in T.Parallel(n):`: each iteration contributes once"
        raise _refused_step(buffer, f"{what} outside any T.Parallel", fix)
    value = stored(value, buffer)
    at.check_scopes(value)  # a value may not read the reducer
    with at.allow_open_reducers(buffer):
        at.emit(Store(buffer, target.indices, combine(op, target, value)))


def finalize_reducer(reducer: Tile, dst: Tile | None = None, *, batch: int = 1) -> None:
    """Finish the reduction of `reducer`. With `dst`, a tile of the same shape, copy the result there.

    `batch`, elements that are reduced together, is a hint of TileLang's without effect. It divides the elements.
    """
    what = "T.finalize_reducer"
    at = in_kernel(what)
    buffer, _ = _reducer(what, reducer)
    check_batch("finalize_reducer", batch, buffer)
    epoch = at.epochs.pop(buffer, None)
    if epoch is None:
        _check_begun(what, buffer)
    elif any(scope.what in ("loop", "while") for scope in at.scopes[at.scopes.index(epoch.scope) + 1 :]):
        why = f"{what} is not in the scope of its T.reducer_init: a loop around would end it again"
        raise _refused_step(buffer, why, "write both into the loop, or both before and after it")
    if dst is not None:
        at.emit(Copy.build(Handle(buffer), dst))


def _check_begun(what: str, buffer: Buffer) -> None:
    """Raise an author error unless something was written to the reducer before."""
    stmts = [one for scope in in_kernel(what).scopes for one in scope.stmts]
    written = [n.buffer for one in stmts for n in find(one, Store)]
    written += [region.buffer for one in stmts for op in find(one, RegisteredOp) for region in op.accesses()[1]]
    if not any(each is buffer for each in written):
        raise _refused_step(buffer, f"{what} before T.reducer_init", "begin the reduction by T.reducer_init(acc)")


def _refused_step(buffer: Buffer, why: str, fix: str) -> TileError:
    """Make the error for a step that the protocol of a reducer does not have there."""
    return error("reducer_protocol", None, name=buffer.name, why=why, fix=fix)


def _reducer(what: str, value: Any) -> tuple[Buffer, str]:
    """Return the reducer that a value names. Raises an error for other values."""
    buffer = need_region(value, what.removeprefix("T."), "reducer").buffer
    op = in_kernel(what).reducers.get(buffer)
    if op is None:
        why, fix = f"is `{buffer.name}`, no reducer", "give a tile of T.alloc_reducer"
        raise error("bad_argument", None, op=what, name="reducer", why=why, fix=fix)
    return buffer, op


def split_updates(nest: For, reducers: Reducers) -> Iterator[Stmt]:
    """Split a T.Parallel nest that updates `reducers` into the nest without the updates, and their reductions."""
    _check_updates(nest, reducers)
    stored = {n.buffer for n in find(nest.body, Store)}
    parts = [part for one, op in reducers.items() if one in stored and (part := _part(nest, one, op))]
    yield from (Alloc(part.tile) for part in parts)
    yield _SeparateUpdates(parts).nest(nest) if parts else nest
    for part in parts:
        yield from part.reductions()


class _Part:
    """The updates of one reducer element by all iterations of a nest, moved to a tile of their own.

    The nest's variables `kept` count along dimensions of the reducer, in their order. The other variables, `lost`, do
    not.
    """

    def __init__(
        self, reducer: Buffer, op: str, target: tuple[Range, ...], kept: list[Var], lost: list[Var], nest: For
    ):
        extents = dict(zip(nest.vars, nest.stops, strict=True))
        self.reducer, self.op, self.target = reducer, op, target
        self.place = (*kept, *lost)
        self.lost = len(lost)
        self.tile = Buffer(f"{reducer.name}_part", tuple(extents[v] for v in self.place), reducer.dtype, "fragment")

    def reductions(self) -> Iterator[Stmt]:
        """Reduce the tile from the last dimension on. The last reduction adds the reducer's earlier value."""
        source, reduction = self.tile, REDUCTIONS[self.op]
        keeping: dict[str, Any] = {"nan_propagate": True} if self.op in ("max", "min") else {}  # as updates do
        for _ in range(self.lost - 1):
            smaller = Buffer(self.tile.name, source.shape[:-1], source.dtype, "fragment")
            yield Alloc(smaller)
            yield reduction.build(source, smaller, dim=-1, **keeping)
            source = smaller
        yield reduction.build(source, Region(self.reducer, self.target), dim=-1, clear=False, **keeping)


def _part(nest: For, reducer: Buffer, op: str) -> _Part | None:
    """Plan how to separate the updates of `reducer`. None if they share no element, or are not all of the nest."""
    stores = [n for n in find(nest.body, Store) if n.buffer is reducer]
    loads = [n for n in find(nest.body, Load) if n.buffer is reducer]
    places = [*(n.indices for n in stores), *(n.indices for n in loads)]
    same = all(all(map(equal, places[0], place)) for place in places)
    if not same or len(loads) != len(stores) or not all(_updates(s.value, reducer, op) for s in stores):
        return None
    extents = dict(zip(nest.vars, nest.stops, strict=True))
    inner = {v for n in find(nest.body, For) for v in n.vars} | {n.var for n in find(nest.body, Let)}
    target: list[Range] = []
    kept: dict[Var, None] = {}
    for index in places[0]:
        moving = [v for v in nest.vars if v in symbols(index)]
        start = simplify(index - moving[0]) if moving else index
        known = symbols(start)
        if not known.isdisjoint(inner | set(extents)) or not set(kept).isdisjoint(moving):
            return None  # the element depends on more than one variable of the nest
        kept |= dict.fromkeys(moving)
        extent = extents[moving[0]] if moving else const(1, index.dtype)
        target.append(Range(start, extent, keep=bool(moving)))
    lost = [v for v in nest.vars if v not in kept]
    if not lost or not all(isinstance(n, Const) for n in nest.stops):
        return None
    return _Part(reducer, op, tuple(target), list(kept), lost, nest)


def _check_updates(nest: For, reducers: Reducers) -> None:
    """Raise TileError for a store to a reducer that combines its element by another operation than the reducer's."""
    for store in find(nest.body, Store):
        op = reducers.get(store.buffer)
        if op is None or _updates(store.value, store.buffer, op):
            continue
        other = next((each for each in UPDATES if each != op and _updates(store.value, store.buffer, each)), None)
        if other is not None:
            why = f"of `{store.buffer.name}` is {op!r}, and this update is of {other!r}"
            fix = f"write T.alloc_reducer(..., op={other!r}), or an update of {op!r}"
            raise error("bad_argument", store.span, op="T.alloc_reducer", name="op", why=why, fix=fix)


def _updates(value: Expr, reducer: Buffer, op: str) -> bool:
    """Return whether a value combines the reducer's element with something else by `op`."""
    while isinstance(value, Cast):
        value = value.a
    if isinstance(value, Load):
        return value.buffer is reducer
    if isinstance(value, Call) and value.name in UPDATES[op]:
        return any(_updates(a, reducer, op) for a in value.args)
    if isinstance(value, Binary) and (value.op in UPDATES[op] or (value.op == "-" and op == "sum")):
        return _updates(value.a, reducer, op) or (value.op != "-" and _updates(value.b, reducer, op))
    return False


class _SeparateUpdates(Rewriter):
    """Replace each reducer by its part's tile. Every iteration begins with the neutral element."""

    def __init__(self, parts: list[_Part]):
        self.parts = {p.reducer: p for p in parts}

    def nest(self, nest: For) -> For:
        fresh = [Store(p.tile, p.place, identity_of(p.op, p.tile.dtype)) for p in self.parts.values()]
        body: Block = self(nest.body)
        return For(
            nest.kind, nest.vars, nest.starts, nest.stops, Block((*fresh, *body.stmts)), nest.step, layout=nest.layout,
            independent=nest.independent, span=nest.span,
        )  # fmt: skip

    def visit_Load(self, load: Load) -> Load:
        part = self.parts.get(load.buffer)
        return self.children(load) if part is None else Load(part.tile, part.place, span=load.span)

    def visit_Store(self, store: Store) -> Stmt:
        part = self.parts.get(store.buffer)
        new: Store = self.children(store)
        return new if part is None else Store(part.tile, part.place, new.value, span=store.span)


# TIR's reduction over threads: `with T.attr(T.comm_reducer(...), "reduce_scope", ...)` around T.tvm_thread_allreduce.
#
# Threads that differ in an index of T.get_thread_binding fold their values: lanes of a warp by shuffles, and what is
# left through shared memory, where the compiler places the barriers. So do T.syncthreads_count, _or and _and.


@dataclass(frozen=True)
class CommReducer:
    """A reduction: how two values are combined, and its neutral element."""

    combine: Callable[[Any, Any], Any]
    identity: Any


def comm_reducer(combiner: Callable[[Any, Any], Any], identity: Sequence[Any]) -> CommReducer:
    """Define a commutative reduction: a `combiner`, as `lambda x, y: x + y`, and its `identity`, a list."""
    if len(identity) != 1:
        why, fix = f"has {len(identity)} values", "fold one value at a time"
        raise error("bad_argument", None, op="T.comm_reducer", name="identity", why=why, fix=fix)
    return CommReducer(combiner, identity[0])


def attr(node: Any, key: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Set the T.comm_reducer of T.tvm_thread_allreduce inside the `with`, as `node` with the `key` "reduce_scope".

    "async_scope" around copies by elements changes nothing here: they are done where they stand. The language has no
    other attributes.
    """
    at = in_kernel("T.attr")
    if key == "async_scope":
        return contextlib.nullcontext()
    if not isinstance(node, CommReducer) or key != "reduce_scope":
        fix = 'give T.comm_reducer(...), "reduce_scope" and anything, around T.tvm_thread_allreduce'
        raise error("bad_argument", None, op="T.attr", name="key", why=f"is {key!r}", fix=fix)
    return _folding(at, node)


@contextlib.contextmanager
def _folding(at: Tracer, by: CommReducer) -> Iterator[None]:
    """Fold updates inside by this reducer."""
    outer, at.folds_by = at.folds_by, by
    try:
        yield
    finally:
        at.folds_by = outer


def tvm_thread_allreduce(
    size: int, value: Scalar, condition: Scalar, result: Tile, *bindings: Scalar, dtype: str = "handle"
) -> None:
    """Reduce `value` over the threads that differ in `bindings` only, into `result` of each thread. `size` is 1.

    `bindings` are indices by T.get_thread_binding. `result` is an element of each thread's own memory. `value` counts
    where `condition` holds. All threads come here. `dtype` is that of TIR's call.
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
    elif at.barrier_group or at.in_nest:
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
        dim, threads = _dimension(at, what, binding), at.launch.threads
        total = _reduce_strided(at, let("part", total), threads[dim], math.prod(threads[:dim]), fold)
    at.emit(Store(target.buffer, target.starts, total))


def syncthreads_count(predicate: Scalar) -> Expr:
    """Count the threads of the block in which `predicate` holds. All threads come here and get the count, an int32.

    After it, all threads see earlier writes of the others to shared and global memory. For GPUs.
    """
    return _counted("T.syncthreads_count", predicate)


def syncthreads_or(predicate: Scalar) -> Expr:
    """Return 1 where `predicate` holds in any thread of the block, else 0, as an int32. As T.syncthreads_count."""
    return cast(_counted("T.syncthreads_or", predicate) != 0, dt.int32)


def syncthreads_and(predicate: Scalar) -> Expr:
    """Return 1 where `predicate` holds in all threads of the block, else 0, as an int32. As T.syncthreads_count."""
    total = _counted("T.syncthreads_and", predicate)
    return cast(total == math.prod(in_kernel("T.syncthreads_and").launch.threads), dt.int32)


def _counted(what: str, predicate: Any) -> Expr:
    """Record a block-wide count of the threads whose predicate holds. Raises an error where not all threads come."""
    condition = predicate_of(what, predicate)
    at = in_kernel(what)
    why, fix = "", "write it outside T.Parallel and T.ws, in a line before"
    if at.barrier_group or at.in_nest:
        why = "is asked for where not all threads come"
    elif at.doubtful:
        why = f"is wanted only if {at.doubtful} asks for it"
    if why:
        raise error("bad_argument", None, op=what, name="predicate", why=why, fix=fix)
    total: Expr = cast(condition, dt.int32)
    at.emit(memory.barrier())

    def add(a: Expr, b: Expr) -> Expr:
        return let("total", a + b)

    threads = math.prod(at.launch.threads)
    return let("total", _reduce_strided(at, let("part", total), threads, 1, add, for_all=True))


def _dimension(at: Tracer, what: str, binding: Any) -> int:
    """Return the dimension of the block's threads that an index counts along."""
    index = _resolved(at, to_expr(binding))
    for dim in range(len(at.launch.threads)):
        if equal(index, _resolved(at, get_thread_binding(dim))):
            return dim
    fix = "give indices by T.get_thread_binding"
    raise error("bad_argument", None, op=what, name="bindings", why=f"holds {binding!r}", fix=fix)


def _resolved(at: Tracer, value: Expr) -> Expr:
    """Return the value that a name stands for."""
    while isinstance(value, Var):
        found = next((s for scope in at.scopes for s in scope.stmts if isinstance(s, Let) and s.var is value), None)
        if found is None:
            break
        value = found.value
    return value


def _reduce_strided(
    at: Tracer, part: Expr, count: int, stride: int, fold: Callable[[Expr, Expr], Expr], for_all: bool = False
) -> Expr:
    """Reduce over `count` threads that are `stride` apart. All of them get the same bits.

    `for_all` says that these are all threads of the block. The result then comes from one place of shared memory.
    Passes see that all threads get the same one, so that it may decide about their barriers.
    """
    threads = math.prod(at.launch.threads)
    lanes = math.gcd(count, max(1, WARP // stride)) if WARP % stride == 0 and threads % WARP == 0 else 1
    step = 1
    while step < lanes:
        part = fold(part, let("other", memory.shuffle_xor(part, step * stride)))
        step *= 2
    if lanes == count and not for_all:
        return part
    tile = Buffer("parts", (const(threads, dt.int32),), part.dtype, "shared")
    at.emit(Alloc(tile))
    thread, apart = thread_index(), stride * lanes
    at.emit(Store(tile, (thread,), part))
    first = const(0, dt.int32) if for_all else let("first", thread - thread // apart % (count // lanes) * apart)
    parts: list[Expr] = [Load(tile, (first + n * apart,)) for n in range(count // lanes)]
    while len(parts) > 1:  # neighbours first, as the shuffles do
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [fold(a, b) for a, b in pairs] + parts[len(parts) // 2 * 2 :]
    return parts[0]
