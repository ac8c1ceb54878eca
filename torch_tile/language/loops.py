# SPDX-License-Identifier: Apache-2.0
"""Loops of the language: T.serial, T.unroll, T.vectorized, T.Parallel, T.Pipelined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Var, const, is_number, maximum, to_expr, to_number
from torch_tile.ir.layout import Layout
from torch_tile.ir.stmt import For, LoopKind
from torch_tile.language.layout import loop_layout as requested
from torch_tile.language.reducers import folded
from torch_tile.language.trace import close_body, let, tracer
from torch_tile.tileop.base import Annotations, Scalar
from torch_tile.tileop.copy.async_loop import AsyncLoop


@dataclass(frozen=True)
class Loop:
    """A device loop, not yet entered."""

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
    asynchronous: bool = False

    def iterate(self, names: Any = None) -> Iterator[Any]:
        """Record the body, which Python runs once with symbolic loop variables."""
        at = tracer(f"T.{self.kind.value}")
        given = names if isinstance(names, tuple) else (names,)
        if isinstance(names, tuple) and None not in names and len(names) != len(self.stops):
            why, fix = f"are {len(self.stops)} for {len(names)} names", "give one name for each extent"
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
            yield loop_vars if isinstance(names, tuple) or len(loop_vars) > 1 else loop_vars[0]
        at.in_nest = nested
        body = close_body(scope)
        made = For(
            self.kind, loop_vars, self.starts, self.stops, body, self.step, self.stages, self.order, self.stage,
            self.layout, self.ping_pong, self.independent,
        )  # fmt: skip
        if at.in_nest or self.kind is not LoopKind.PARALLEL or not at.reducers:
            at.emit(AsyncLoop(made) if self.asynchronous else made)
            return
        for one in folded(made, at.reducers):
            at.emit(one)

    def _downwards(self, name: Any) -> Iterator[Any]:
        """The turns of a negative step, counted upwards."""
        start, stop = (let("bound", bound) for bound in (self.starts[0], self.stops[0]))  # the body may change it
        trips = maximum((start - stop + (-self.step - 1)) // -self.step, 0)
        for turn in replace(self, starts=(const(0, dt.int32),), stops=(trips,), step=1).iterate("turn"):
            yield let(name or "i", start + turn * self.step)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()


def index_bound(value: Any, what: str) -> Expr:
    """An integer, or an expression of integers, as a bound of the loop `what`."""
    if isinstance(value, Expr) and value.dtype.is_integer:
        return value
    if is_number(value) and isinstance(to_number(value), int):
        return to_expr(value)
    raise error("bad_loop_range", None, what=what, got=repr(value)[:60])


def _range(kind: LoopKind, start: Scalar, stop: Scalar, step: Any = 1, **fields: Any) -> Loop:
    what = f"T.{kind.value}"
    step = 1 if step is None else step
    if stop is None:
        start, stop = 0, start
    if not is_number(step) or not isinstance(to_number(step), int) or step == 0:
        raise error("bad_argument", None, op=what, name="step", why=f"is {step!r}", fix="give an integer other than 0")
    return Loop(kind, (index_bound(start, what),), (index_bound(stop, what),), int(step), **fields)


def serial(start: Scalar, stop: Scalar = None, step: int | None = 1, *, annotations: Annotations = None) -> Loop:
    """A loop from `start` (0 if one bound is given) to below `stop`, in order; downwards where `step` is negative.

    `annotations` has no effect.
    """
    return _range(LoopKind.SERIAL, start, stop, step)


def unroll(
    start: Scalar, stop: Scalar = None, step: int | None = 1, *, explicit: bool = False,
    unroll_factor: int | None = None, annotations: Annotations = None,
) -> Loop:  # fmt: skip
    """As T.serial, its body repeated in the generated code.

    `explicit`, `unroll_factor` and `annotations` are hints of TileLang's without effect.
    """
    return _range(LoopKind.UNROLLED, start, stop, step)


def vectorized(start: Scalar, stop: Scalar = None, *, annotations: Annotations = None) -> Loop:
    """A loop of one thread whose iterations are independent: one vector instruction where possible.

    `annotations` has no effect.
    """
    return _range(LoopKind.VECTOR, start, stop)


def Parallel(
    *extents: Scalar, loop_layout: Any = None, asynchronous: bool = False, independent: bool = False,
    coalesced_width: int | None = None, prefer_async: bool | None = None, annotations: Annotations = None,
) -> Loop:  # fmt: skip
    """An elementwise nest over a box, spread over the threads of the block.

    Where iterations may meet in an element that one of them writes, they run in order, which on a GPU one thread does.
    With `independent`, they never meet, as the author knows and the compiler cannot, of `y[to[i]] = x[i]` where `to` is
    a permutation: threads then share the work, and where they do meet nevertheless, the last to come has its way.

    `loop_layout`, a T.Fragment or a function as it takes, says which thread runs which iterations, in which order.
    With `asynchronous`, a loop that only fills a shared tile from global memory is started as T.async_copy is.
    `coalesced_width`, `prefer_async` and `annotations` are hints of TileLang's without effect.
    """
    if not extents:
        raise error(
            "bad_argument", None, op="T.Parallel", name="extents", why="is empty", fix="give at least one extent"
        )
    stops = tuple(index_bound(e, "T.Parallel") for e in extents)
    layout = requested(loop_layout, extents, tracer("T.Parallel").threads)
    return Loop(
        LoopKind.PARALLEL, tuple(const(0, dt.int32) for _ in stops), stops, layout=layout,
        independent=bool(independent), asynchronous=asynchronous,
    )  # fmt: skip


def Pipelined(
    start: Scalar, stop: Scalar = None, num_stages: int = 0, order: Sequence[int] | None = None,
    stage: Sequence[int] | None = None, sync: Sequence[Sequence[int]] | None = None,
    group: Sequence[Sequence[int]] | None = None, *, ping_pong: bool = False, annotations: Annotations = None,
) -> Loop:  # fmt: skip
    """A loop run in order whose copies may run `num_stages` iterations ahead; results do not depend on it.

    With `ping_pong`, of a loop of products, arithmetic and products again, warpgroups take turns in starting products
    (Hopper): while the products of one run, the others do their arithmetic. `sync`, `group` and `annotations` are hints
    of TileLang's without effect.
    """
    if not isinstance(num_stages, int) or num_stages < 0:
        fix = "give a non-negative integer"
        raise error("bad_argument", None, op="T.Pipelined", name="num_stages", why=f"is {num_stages!r}", fix=fix)
    given = {"order": tuple(order or ()), "stage": tuple(stage or ())}
    return _range(LoopKind.PIPELINED, start, stop, stages=num_stages, ping_pong=bool(ping_pong), **given)


def grid(*extents: Any) -> Any:
    """Nested serial loops over a box."""
    import itertools

    if all(is_number(e) for e in extents):
        return itertools.product(*(range(int(e)) for e in extents))
    raise error("bad_loop_range", None, what="T.grid", got="sizes known only at run time (nest T.serial loops instead)")
