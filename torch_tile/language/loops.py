# SPDX-License-Identifier: Apache-2.0
"""Loops of the language: T.serial, T.unroll, T.vectorized, T.Parallel, T.Pipelined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch_tile.diagnostics.errors import diagnose, error
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import (
    Expr,
    Load,
    Var,
    cast,
    const,
    is_constant,
    is_number,
    is_zero,
    maximum,
    to_expr,
    to_number,
)
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import Rewriter, contains, find
from torch_tile.ir.stmt import Block, Break, For, LoopKind
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.layout import loop_layout as requested
from torch_tile.language.math import ceildiv, max as larger, min as smaller
from torch_tile.language.reducers import split_updates
from torch_tile.language.thread_roles import needs_all
from torch_tile.language.threads import get_block_extent
from torch_tile.language.trace import author_span, close_body, let, make_variable, tracer
from torch_tile.language.values import Indices, store_variable
from torch_tile.tileop.base import Annotations, RegisteredOp, Scalar
from torch_tile.tileop.copy.cp_async import AsyncLoop
from torch_tile.tileop.copy.op import policy_of


@dataclass(frozen=True)
class Loop:
    """A device loop of T.serial, T.Parallel and the like, before Python iterates over it."""

    kind: LoopKind
    starts: tuple[Expr, ...]
    stops: tuple[Expr, ...]
    step: int = 1
    stages: int = 0
    order: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()
    layout: Layout | None = None
    ping_pong: bool = False
    independent: bool = False
    factor: int = 0
    skip: Expr | None = None
    asynchronous: bool = False
    policy: str = ""

    def __reversed__(self) -> Iterator[Any]:
        """Raise TileError: the device counts upwards."""
        fix = "count back inside the loop: `for k in T.serial(n):`, then `i = n - 1 - k`"
        raise error("python_value", None, problem="`reversed` takes a loop of the device", fix=fix)

    def iterate(self, names: Any = None) -> Iterator[Any]:
        """Record the body, which Python runs once with symbolic loop variables."""
        at = tracer(f"T.{self.kind.value}")
        given = names if isinstance(names, tuple) else (names,)
        if isinstance(names, tuple) and None not in names and len(names) != len(self.stops):
            why, fix = f"are {len(self.stops)} for {len(names)} names", "give one name for each extent"
            if self.kind is not LoopKind.PARALLEL:
                fix = "name one variable; loops in each other are T.grid(m, n) or T.Parallel(m, n)"
            raise error("bad_argument", None, op=f"T.{self.kind.value}", name="extents", why=why, fix=fix)
        if isinstance(names, str) and len(self.stops) > 1 and is_zero(self.stops[0]):
            why = f"are {', '.join(map(repr, self.stops))}: sizes of loops in each other, not a start and a stop"
            fix = f"count from 0, T.Parallel({self.stops[1]!r}), and add the start to the index"
            raise error("bad_argument", None, op=f"T.{self.kind.value}", name="extents", why=why, fix=fix)
        given = given if len(given) == len(self.stops) else (None,) * len(self.stops)
        if self.step < 0:
            yield from self._downwards(given[0])
            return
        loop_vars = tuple(Var(n or "ijklmn"[d % 6], dt.int32, "loop") for d, n in enumerate(given))
        nested, at.in_nest = at.in_nest, at.in_nest or self.kind is LoopKind.PARALLEL
        with at.open("loop") as scope:
            for var in loop_vars:
                at.own(var)
            yield Indices(loop_vars, author_span()) if isinstance(names, tuple) or len(loop_vars) > 1 else loop_vars[0]
        at.in_nest = nested
        body = close_body(scope)
        body = _Policy(self.policy)(body) if self.policy else body
        starts = tuple(_settled("start", bound, body) for bound in self.starts)
        stops = tuple(_settled("stop", bound, body) for bound in self.stops)
        of_block = any(_is_collective(n) for n in find(body, RegisteredOp))
        if self.kind is LoopKind.PARALLEL and of_block and not contains(body, Break):
            if not IdSet(loop_vars).any_in(body):
                _warn_of_repeats(loop_vars, stops, body)
            at.emit(_one_by_one(loop_vars, stops, body))
            return
        made = For(
            self.kind, loop_vars, starts, stops, body, self.step, self.stages, self.order, self.stage,
            self.layout, self.ping_pong, self.independent, self.factor, self.skip,
        )  # fmt: skip
        if at.in_nest or self.kind is not LoopKind.PARALLEL or not at.reducers:
            at.emit(AsyncLoop(made) if self.asynchronous else made)
            return
        with at.allow_open_reducers(*at.reducers):
            for one in split_updates(made, at.reducers):
                at.emit(one)

    def _downwards(self, name: Any) -> Iterator[Any]:
        """Return the iterations of a loop with a negative step, counted upwards."""
        start, stop = (let("bound", bound) for bound in (self.starts[0], self.stops[0]))  # the body may change it
        trips = maximum((start - stop + (-self.step - 1)) // -self.step, 0)
        for iteration in replace(self, starts=(const(0, dt.int32),), stops=(trips,), step=1).iterate("turn"):
            yield let(name or "i", start + iteration * self.step)

    def __iter__(self) -> Iterator[Any]:
        return LoopIterator(self)


class _Policy(Rewriter):
    """Give each read of a tensor the eviction policy of its loop, if it has none of its own."""

    def __init__(self, policy: str):
        self.policy = policy

    def visit_Load(self, load: Load) -> Load:
        """Give a read of global memory the policy."""
        new: Load = self.children(load)
        return new if new.policy or new.buffer.scope != "global" else replace(new, policy=self.policy)


class LoopIterator:
    """What Python's `for` of a helper function steps through. Inside of enumerate and zip it is an author's error."""

    def __init__(self, loop: Loop):
        self.steps: Iterator[Any] = loop.iterate()

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        return next(self.steps)


def check_iterable(iterable: object) -> None:
    """Raise TileError for what a `for` of a kernel cannot step through.

    In `enumerate(T.serial(n))` and its like Python would count one turn of a loop of many.
    """
    if isinstance(iterable, FunctionType):
        fix = f"call it: `for i in T.{iterable.__name__}(n):`"
        raise error("python_value", None, problem=f"the function {iterable.__name__} is no loop", fix=fix)
    if hasattr(iterable, "take_names"):
        fix = "write `with T.Kernel(blocks, threads=128) as bx:`"
        raise error("python_value", None, problem="T.Kernel is no loop", fix=fix)
    if hasattr(iterable, "requires_grad"):
        what = "a loop over a tensor of torch gives tensors, which the kernel does not know"
        raise error("python_value", None, problem=what, fix="count by `for i in T.serial(n):`, a loop of the device")
    if not isinstance(iterable, enumerate | zip | map | filter):
        return
    name, parts = type(iterable).__name__, iterable.__reduce__()[1]
    if any(isinstance(part, LoopIterator) for each in parts for part in (each if isinstance(each, tuple) else (each,))):
        what = f"{name}() takes the turns of a loop that the device runs"
        fix = "write `for i in T.serial(n):`, whose i counts the turns"
        raise error("python_value", None, problem=what, fix=fix)


def _is_collective(op: RegisteredOp) -> bool:
    """Return whether the threads of a block do an operation together, so that it cannot be divided among them."""
    return needs_all(op) and not op.op_name.startswith("atomic")


def _one_by_one(loop_vars: Sequence[Var], stops: Sequence[Expr], body: Block) -> For:
    """Turn a T.Parallel nest with such operations into a serial nest: iterations in order, each with all threads."""
    for var, stop in reversed([*zip(loop_vars, stops, strict=True)]):
        body = Block((For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (stop,), body),))
    (outermost,) = body.stmts
    assert isinstance(outermost, For)
    return outermost


def _warn_of_repeats(loop_vars: Sequence[Var], stops: Sequence[Expr], body: Block) -> None:
    """Warn of an operation of the whole block in a T.Parallel of several iterations, none of whose indices it names."""
    op = next(n for n in find(body, RegisteredOp) if _is_collective(n))
    if not all(is_constant(stop, 1) for stop in stops):
        names, sizes = ", ".join(var.name for var in loop_vars), ", ".join(map(repr, stops))
        warn_of([diagnose("repeated_op", op.span, op=op.op_name, sizes=sizes, names=names)])


def _settled(name: str, bound: Expr, body: Block) -> Expr:
    """Read a bound before the loop if it reads memory that the body mentions, so that it is ordered before."""
    shared = IdSet(load.buffer for load in find(bound, Load) if load.buffer.scope in ("global", "shared"))
    return let(name, bound) if shared.any_in(body) else bound


def loop_break() -> None:
    """Leave the enclosing loop, as the statement `break` does."""
    raise error("bad_argument", None, op="T.loop_break", name="()", why="stands in no loop", fix="write `break`")


loop_break.is_break = True  # type: ignore[attr-defined]  # rewrite.py looks for it


def While(condition: Scalar) -> Any:
    """Loop while a condition holds, by TileLang's name: `with T.While(state[0] == 0):` is Python's `while`.

    Returns the condition, which is asked before each iteration. T.loop_break() leaves the loop.
    """
    return condition


While.is_while = True  # type: ignore[attr-defined]


def index_bound(value: Any, what: str) -> Expr:
    """Convert a loop bound to an integer expression."""
    if isinstance(value, Expr) and value.dtype.is_integer:
        return value
    if is_number(value) and isinstance(to_number(value), int):
        return to_expr(value)
    raise error("bad_loop_range", None, what=what, got=repr(value)[:60])


def _warn_of_no_iteration(what: str, start: Any, stop: Any) -> None:
    """Warn of a loop whose bounds are numbers the wrong way round, as T.Pipelined(4, 3) for num_stages=3."""
    fix = "two numbers are start and stop; stages are named, num_stages=3" if "Pipelined" in what else "swap the bounds"
    warn_of([diagnose("no_iteration", author_span(), what=what, start=start, stop=stop, fix=fix)])


def _range(kind: LoopKind, start: Scalar, stop: Scalar, step: Any = 1, **fields: Any) -> Loop:
    """Build a loop from range-like arguments."""
    what = f"T.{kind.value}"
    step = 1 if step is None else step
    if stop is None:
        start, stop = 0, start
    if not is_number(step) or not isinstance(to_number(step), int) or step == 0:
        raise error("bad_argument", None, op=what, name="step", why=f"is {step!r}", fix="give an integer other than 0")
    least = 1 if kind is LoopKind.PIPELINED and is_number(start) and to_number(start) else 0  # tails may be empty
    if is_number(start) and is_number(stop) and int(step) == 1 and to_number(stop) < to_number(start) + least:
        _warn_of_no_iteration(what, start, stop)
    return Loop(kind, (index_bound(start, what),), (index_bound(stop, what),), int(step), **fields)


def serial(start: Scalar, stop: Scalar = None, step: int | None = 1, *, annotations: Annotations = None) -> Loop:
    """Loop in order from `start` (0 if one bound is given) to below `stop`; downwards where `step` is negative.

    `annotations` has no effect.
    """
    return _range(LoopKind.SERIAL, start, stop, step)


def unroll(
    start: Scalar,
    stop: Scalar = None,
    step: int | None = 1,
    *,
    explicit: bool = False,
    unroll_factor: int | None = None,
    annotations: Annotations = None,
) -> Loop:
    """Run a loop as T.serial does, with its body repeated in the generated code: `unroll_factor` times on a GPU, 1 for
    a loop that must stay one, or as often as the compiler likes. Loops that pick registers are always unrolled.

    `explicit` and `annotations` are hints of TileLang's without effect. Raises TileError (bad_argument) for a factor
    that is no positive integer.
    """
    if unroll_factor is not None and not (isinstance(unroll_factor, int) and unroll_factor >= 1):
        why, fix = f"is {unroll_factor!r}"[:60], "give how often the body is repeated, 1 or more"
        raise error("bad_argument", None, op="T.unroll", name="unroll_factor", why=why, fix=fix)
    if unroll_factor is None:
        return _range(LoopKind.UNROLLED, start, stop, step)
    return _range(LoopKind.SERIAL, start, stop, step, factor=int(unroll_factor))


def vectorized(start: Scalar, stop: Scalar = None, *, annotations: Annotations = None) -> Loop:
    """Loop in one thread from `start` up to `stop`, over independent iterations: one vector instruction where possible.

    `annotations` has no effect.
    """
    return _range(LoopKind.VECTOR, start, stop)


def Parallel(
    *extents: Scalar,
    loop_layout: Any = None,
    asynchronous: bool = False,
    independent: bool = False,
    eviction_policy: str | None = None,
    coalesced_width: int | None = None,
    prefer_async: bool | None = None,
    annotations: Annotations = None,
) -> Loop:
    """Run an elementwise nest over a box of `extents`, spread over the threads of the block.

    A nest with operations of all threads, such as T.copy or T.gemm, runs in order: one of them in each iteration.
    Iterations that may write an element that another one accesses run in order, too; on a GPU one thread runs them.
    With `independent` the author promises that iterations never meet, as in `y[to[i]] = x[i]` where `to` is a
    permutation. Threads then share the work. If iterations meet nevertheless, the last write wins.

    `loop_layout`, a T.Fragment or a function as it takes, says which thread runs which iterations, in which order. With
    `asynchronous`, a loop that only fills a shared tile from global memory is started as T.async_copy is.
    `eviction_policy` is that of T.copy, for all that the loop reads from tensors.
    `coalesced_width`, `prefer_async` and `annotations` are hints of TileLang's without effect.
    """
    if not extents:
        raise error(
            "bad_argument", None, op="T.Parallel", name="extents", why="is empty", fix="give at least one extent"
        )
    stops = tuple(index_bound(e, "T.Parallel") for e in extents)
    for extent in extents:
        if isinstance(extent, int) and extent < 0:
            why, fix = f"hold {extent}, and no loop has so many iterations", "give sizes of 0 and more"
            raise error("bad_argument", None, op="T.Parallel", name="extents", why=why, fix=fix)
    layout = requested(loop_layout, extents, tracer("T.Parallel").threads)
    return Loop(
        LoopKind.PARALLEL, tuple(const(0, dt.int32) for _ in stops), stops, layout=layout,
        independent=bool(independent), asynchronous=asynchronous,
        policy=policy_of("Parallel", eviction_policy) or "",
    )  # fmt: skip


def Pipelined(
    start: Scalar,
    stop: Scalar = None,
    num_stages: int = 0,
    order: Sequence[int] | None = None,
    stage: Sequence[int] | None = None,
    sync: Sequence[Sequence[int]] | None = None,
    group: Sequence[Sequence[int]] | None = None,
    *,
    ping_pong: bool = False,
    skip: Scalar = None,
    annotations: Annotations = None,
) -> Loop:
    """Run a loop from `start` up to `stop` in order, with copies up to `num_stages` iterations ahead.

    With one number, the loop runs from 0 up to it. Results do not depend on `num_stages`, nor on `stage` and `order`,
    which have a number for each statement. Lists of another length have no effect, with a warning.

    `ping_pong` is for a loop of products, arithmetic and products again (Hopper). Warpgroups take turns: one runs its
    products while the others do their arithmetic. `sync` and `annotations` are hints of TileLang's without effect.
    With `group`, lists of statements, `order` and `stage` count those, and the compiler keeps its own schedule.

    With `skip`, the author promises that so many first iterations change nothing in the rows of T.own_rows. Such a loop
    may leave them out, warpgroup by warpgroup. Under a causal mask, these are tiles that no row of a warpgroup sees.
    """
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 0:
        fix = "give a non-negative integer"
        raise error("bad_argument", None, op="T.Pipelined", name="num_stages", why=f"is {num_stages!r}", fix=fix)
    given: dict[str, tuple[int, ...]] = {} if group else {"order": tuple(order or ()), "stage": tuple(stage or ())}
    skipped = None if skip is None else index_bound(skip, "T.Pipelined")
    fields: dict[str, Any] = {"ping_pong": bool(ping_pong), "skip": skipped, **given}
    return _range(LoopKind.PIPELINED, start, stop, stages=num_stages, **fields)


class Grid(Loop):
    """Nested serial loops, the last size innermost."""

    def iterate(self, names: Any = None) -> Iterator[Any]:
        """Record the body with one loop variable for each size."""
        several = isinstance(names, tuple) or len(self.stops) > 1
        given = names if isinstance(names, tuple) else (names,)
        if isinstance(names, tuple) and len(names) != len(self.stops):
            why, fix = f"are {len(self.stops)} for {len(names)} names", "give one name for each extent"
            raise error("bad_argument", None, op="T.grid", name="extents", why=why, fix=fix)
        given = given if len(given) == len(self.stops) else tuple("ijklmn"[d % 6] for d in range(len(self.stops)))
        for found in self._nested(given, 0):
            yield Indices(found, author_span()) if several else found[0]

    def _nested(self, names: Sequence[Any], depth: int) -> Iterator[tuple[Any, ...]]:
        """Record nested loops, one for each name."""
        if depth == len(self.stops):
            yield ()
            return
        loop = Loop(self.kind, (self.starts[depth],), (self.stops[depth],))
        for outer in loop.iterate(names[depth]):
            for inner in self._nested(names, depth + 1):
                yield (outer, *inner)


def grid(*extents: Scalar) -> Loop:
    """Loop over a box of `extents` by nested loops: `for i, j in T.grid(m, n)`, the last index fastest."""
    if not extents:
        fix = "give at least one extent; the blocks of the grid meet at T.sync_grid()"
        raise error("bad_argument", None, op="T.grid", name="extents", why="is empty", fix=fix)
    stops = tuple(index_bound(e, "T.grid") for e in extents)
    return Grid(LoopKind.SERIAL, tuple(const(0, dt.int32) for _ in stops), stops)


# T.Persistent and T.PersistentTileScheduler: a block that takes tile after tile.


@dataclass(frozen=True)
class Tiles(Loop):
    """The loop of T.Persistent over a block's tiles. Iteration `i` has tile number `index + i * wave_size`.
    Iteration `i` has tile number `index + i * wave_size` of the domain.
    """

    domain: tuple[Any, ...] = ()
    wave_size: Any = 1
    index: Any = 0
    group_size: int = 1

    def iterate(self, names: Any = None) -> Iterator[Any]:
        """Record the body with the coordinates of a tile."""
        given = names if isinstance(names, tuple) else (names,)
        given = given if len(given) == len(self.domain) else (None,) * len(self.domain)
        for iteration in Loop.iterate(self, "turn"):
            found = self.place(let("tile", self.index + iteration * self.wave_size))
            named = tuple(let(n or "xyz"[d % 3], c) for d, (n, c) in enumerate(zip(given, found, strict=True)))
            yield named if isinstance(names, tuple) or len(named) > 1 else named[0]

    def place(self, tile: Expr) -> tuple[Expr, ...]:
        """Return the coordinates of a tile: panels of `group_size` tiles of the last dimension, each row by row."""
        *outer, last = self.domain
        if not outer:
            return (tile,)
        each = math.prod(outer) * self.group_size
        panel, inside = tile // each, tile % each
        width: Any = self.group_size
        if not is_number(last) or last % width:
            width = larger(smaller(last - panel * width, width), 1)  # of the last panel
        row, found = inside // width, [panel * self.group_size + inside % width]
        for size in reversed(outer[1:]):
            found.insert(0, row % size)
            row = row // size
        return (row, *found)


def Persistent(domain: Sequence[Any], wave_size: Any, index: Any, group_size: int = 8) -> Loop:
    """Loop over this block's share of the tiles of `domain`: those at `index`, `index + wave_size`, and so on.

    All blocks together visit each tile once. `for x, y in T.Persistent([rows, columns], blocks, block)` gives the
    coordinates of a tile; with one dimension its number. Consecutive tiles lie in panels of `group_size` along the last
    dimension, so that their operands stay in cache.
    """
    if not isinstance(domain, list | tuple) or not domain:
        fix = "give a list of sizes, such as [T.ceildiv(M, 128), T.ceildiv(N, 128)]"
        raise error("bad_argument", None, op="T.Persistent", name="domain", why=f"is {domain!r}", fix=fix)
    if not isinstance(group_size, int) or group_size < 1:
        fix = "give a positive integer"
        raise error("bad_argument", None, op="T.Persistent", name="group_size", why=f"is {group_size!r}", fix=fix)
    for value in (*domain, wave_size, index):
        index_bound(value, "T.Persistent")
    iterations = ceildiv(math.prod(domain) - index, wave_size)
    bounds = (index_bound(0, "T.Persistent"),), (index_bound(iterations, "T.Persistent"),)
    return Tiles(
        LoopKind.SERIAL, *bounds, domain=tuple(domain), wave_size=wave_size, index=index, group_size=group_size
    )


@dataclass(frozen=True, eq=False)
class Cell(Load):
    """A mutable index of a tile scheduler: a value, which older texts read as `cell[0]`."""

    def __getitem__(self, key: int) -> Load:
        if key != 0:
            fix = "read it as a number, or as [0]"
            raise error("bad_argument", None, op="T.PersistentTileScheduler", name="index", why=f"is {key!r}", fix=fix)
        return self

    def set(self, value: Any) -> None:
        """Store a number."""
        store_variable(self, cast(to_expr(value), dt.int32))


class PersistentTileScheduler:
    """Iterate over the tiles `(m_idx, n_idx)` of this block; `m_idx[0]` is the same.

    `scheduler.init(block)`, then `while scheduler.valid():` with `scheduler.next_tile()` at the end. The block takes
    the tiles numbered `block`, `block + num_workers`, ... of `num_m_tiles` by `num_n_tiles`. `num_workers` defaults to
    the number of blocks along x. With `cluster_size` it is that of clusters of so many blocks along M, and `m_idx`
    counts clusters. Tiles follow each other along M, or along N unless `column_major`, in panels of `swizzle_size`
    along the other dimension. `current_iter` counts from 0. With `stateful=False` there is only `coord(number)`.
    `name` begins the names of the indices; it may stand first, before both numbers of tiles.
    """

    m_idx: Cell
    n_idx: Cell
    linear_idx: Cell
    current_iter: Cell

    def __init__(
        self,
        num_m_tiles: Any,
        num_n_tiles: Any,
        num_workers: Any = None,
        *,
        swizzle_size: int = 1,
        column_major: bool = True,
        cluster_size: int = 1,
        stateful: bool = True,
        name: str | None = None,
    ):
        what = "T.PersistentTileScheduler"
        in_kernel(what)
        if isinstance(num_m_tiles, str):
            if num_workers is None or name is not None:
                why, fix = f"is the text {num_m_tiles!r}", "give (m_tiles, n_tiles, num_workers, name=...)"
                raise error("bad_argument", None, op=what, name="num_m_tiles", why=why, fix=fix)
            name, num_m_tiles, num_n_tiles, num_workers = num_m_tiles, num_n_tiles, num_workers, None
        for size, value in (("swizzle_size", swizzle_size), ("cluster_size", cluster_size)):
            if not isinstance(value, int) or value < 1:
                fix = "give a positive integer"
                raise error("bad_argument", None, op=what, name=size, why=f"is {value!r}", fix=fix)
        for value in (num_m_tiles, num_n_tiles):
            index_bound(value, what)
        self.num_workers: Any = get_block_extent(0) // cluster_size if num_workers is None else num_workers
        index_bound(self.num_workers, what)
        rows = ceildiv(num_m_tiles, cluster_size)
        self._column_major = column_major
        domain = (rows, num_n_tiles) if column_major else (num_n_tiles, rows)
        self._tiles = Tiles(LoopKind.SERIAL, (), (), domain=domain, group_size=swizzle_size)
        self._count = rows * num_n_tiles
        if stateful:
            names = ("m_idx", "n_idx", "linear_idx", "current_iter")
            self.m_idx, self.n_idx, self.linear_idx, self.current_iter = (
                Cell(make_variable(f"{name or 'tiles'}_{n}", dt.int32, None).buffer, ()) for n in names
            )

    def coord(self, tile_id: Any) -> tuple[Expr, Expr]:
        """Return the coordinates (m, n) of tile number `tile_id`."""
        fast, slow = self._tiles.place(to_expr(tile_id))
        return (fast, slow) if self._column_major else (slow, fast)

    def init(self, worker_id: Any) -> None:
        """Start at the first tile of a worker."""
        self.current_iter.set(0)
        self._take(worker_id)

    def next_tile(self) -> None:
        """Advance to the worker's next tile."""
        self.current_iter.set(self.current_iter + 1)
        self._take(self.linear_idx + self.num_workers)

    def valid(self) -> Expr:
        """Return whether the worker has such a tile."""
        holds: Expr = self.linear_idx < self._count
        return holds

    def _take(self, number: Any) -> None:
        """Set the scheduler to the tile with this number."""
        self.linear_idx.set(number)
        m, n = self.coord(self.linear_idx)
        self.m_idx.set(m)
        self.n_idx.set(n)
