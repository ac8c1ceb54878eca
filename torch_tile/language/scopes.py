# SPDX-License-Identifier: Apache-2.0
"""Kernels and memory of the language: T.Kernel, roles of warps, T.alloc_*, T.empty, dimensions, annotations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ..diagnostics import Span, error
from ..ir import dtype as dt
from ..ir.buffer import SPELLINGS, Buffer
from ..ir.expr import Expr, Load, Var, cast, is_number, to_expr
from ..ir.stmt import Alloc, Kernel as KernelNode, Role
from .layout import request
from .trace import Tracer, author_span, close_body, make_variable, tracer, with_span
from .values import Handle, TensorType, dtype_of, shape_of


class Kernel:
    """`with T.Kernel(*blocks, threads=128) as (bx, by)`: the body runs once per block of the grid.

    `blocks` are up to three sizes, x first; sizes may be symbolic. `threads` is an integer or up to three integers.
    """

    def __init__(self, *blocks: Any, threads: Any = None, **hints: Any):
        at = tracer("T.Kernel")
        if at.scopes:
            raise error("nested_kernel", None)
        if not 1 <= len(blocks) <= 3:
            raise error("bad_shape", None, what="T.Kernel's grid", want="one to three sizes", got=repr(blocks)[:60])
        self.grid = shape_of(blocks, "T.Kernel's grid")
        given = (128,) if threads is None else threads if isinstance(threads, tuple | list) else (threads,)
        if not given or not all(isinstance(t, int) and t > 0 for t in given):
            raise error("bad_shape", None, what="threads", want="one to three positive integers", got=repr(threads))
        self.threads = tuple(int(t) for t in given)
        self.names: tuple[str | None, ...] = ("bx", "by", "bz")
        self.shared_bytes = int(hints.get("shared_bytes", 0))  # of printed kernels
        self.span = author_span()

    def take_names(self, names: tuple[str | None, ...]) -> None:
        """The author's names for the block indices."""
        if len(names) == len(self.grid):
            self.names = names

    def __enter__(self) -> Any:
        at = tracer()
        at.swizzle = None
        at.launch = self
        self.scope = at.open("kernel")
        self.opened = self.scope.__enter__()
        self.blocks = tuple(Var(n or "b", dt.int32, "block") for n, _ in zip(self.names, self.grid, strict=False))
        self.thread = Var("thread", dt.int32, "thread")
        self.uses_thread = False
        for var in (*self.blocks, self.thread):
            at.own(var)
        return self.blocks if len(self.blocks) > 1 else self.blocks[0]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.scope.__exit__(kind, value, trace)
        if kind is None:
            at = tracer()
            made = KernelNode(
                self.grid, self.blocks, self.threads, close_body(self.opened), at.swizzle,
                self.thread if self.uses_thread else None, self.shared_bytes,
            )  # fmt: skip
            at.kernels.append(with_span(made, self.span))


def _outermost(what: str) -> Tracer:
    """The tracer, in the body of a kernel itself."""
    at = tracer(what)
    if not at.scopes:
        raise error("not_in_kernel", None, what=what)
    if len(at.scopes) > 1:
        raise error("not_outermost", None, what=what, region=at.scopes[-1].what)
    return at


def role(first: int, count: int, registers: int = 0) -> contextlib.AbstractContextManager[None]:
    """`with T.role(first, count):` threads `first` to `first + count - 1` of the block run the body, whole warps.

    Roles that follow each other run at the same time. `registers` is how many each of their threads may use, if not an
    equal share: a multiple of 8 from 24 to 256, for whole warpgroups of 128 threads.
    """
    at, unit = _outermost("T.role"), 128 if registers else 32
    fix = f"give multiples of {unit} within the {at.threads} threads of the block"
    for name, value, good in (
        ("first", first, isinstance(first, int) and 0 <= first < at.threads and first % unit == 0),
        ("count", count, isinstance(count, int) and 0 < count <= at.threads - first and count % unit == 0),
    ):
        if not good:
            raise error("bad_argument", None, op="T.role", name=name, why=f"is {value!r}", fix=fix)
    if registers and not (registers % 8 == 0 and 24 <= registers <= 256):
        fix = "give a multiple of 8 from 24 to 256"
        raise error("bad_argument", None, op="T.role", name="registers", why=f"is {registers!r}", fix=fix)
    return _recorded(at, first, count, registers, author_span())


@contextlib.contextmanager
def _recorded(at: Tracer, first: int, count: int, registers: int, span: Span | None) -> Iterator[None]:
    at.crew = count
    with at.open("role") as scope:
        yield
    at.crew = 0
    at.emit(with_span(Role(first, count, close_body(scope), registers), span))


def ws(*groups: int) -> contextlib.AbstractContextManager[None]:
    """`with T.ws(0, 1):` these warpgroups of 128 threads, which follow each other, run the body."""
    ordered = sorted(groups)
    if not ordered or ordered != list(range(ordered[0], ordered[0] + len(ordered))):
        fix = "give numbers that follow each other, or several roles"
        raise error("bad_argument", None, op="T.ws", name="groups", why=f"is {groups!r}", fix=fix)
    return role(128 * ordered[0], 128 * len(ordered))


def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
    """Visit the blocks in panels, for better reuse in the L2 cache; results do not depend on it."""
    if enable:
        tracer("T.use_swizzle").swizzle = (int(panel_size), {"col": "column"}.get(order, order))


def _alloc(scope: str, shape: Any, dtype: Any, what: str, layout: Any = None, offset: int | None = None) -> Handle:
    at = tracer(what)
    buffer = Buffer("", shape_of(shape, f"{what}'s shape"), dtype_of(dtype), scope, offset=offset)
    request(buffer, layout, at.threads)
    at.emit(Alloc(buffer))
    at.own(buffer)
    return Handle(buffer)


def alloc_shared(
    shape: Any, dtype: Any = "float32", scope: str = "shared.dyn", layout: Any = None, offset: int | None = None
) -> Handle:
    """A tile in memory shared by the threads of a block. Content is undefined until written.

    `layout` is as for T.annotate_layout; `offset`, the first byte, is for printed kernels: the compiler finds it.
    """
    if scope not in SPELLINGS:
        raise error("bad_scope", None, got=scope, known=", ".join(sorted(SPELLINGS)))
    return _alloc(SPELLINGS[scope], shape, dtype, "T.alloc_shared", layout, offset)


def alloc_fragment(shape: Any, dtype: Any = "float32", scope: str = "local.fragment", layout: Any = None) -> Handle:
    """A tile in the registers of a block, spread over its threads by layout inference, or by `layout`."""
    if scope not in SPELLINGS:
        raise error("bad_scope", None, got=scope, known=", ".join(sorted(SPELLINGS)))
    return _alloc(SPELLINGS[scope], shape, dtype, "T.alloc_fragment", layout)


def alloc_local(shape: Any, dtype: Any = "float32", scope: str = "local") -> Handle:
    """An array of each thread by itself."""
    if scope not in SPELLINGS:
        raise error("bad_scope", None, got=scope, known=", ".join(sorted(SPELLINGS)))
    return _alloc(SPELLINGS[scope], shape, dtype, "T.alloc_local")


def alloc_barrier(arrivals: int, shape: Any = (1,), offset: int | None = None) -> Handle:
    """An array of mbarriers in shared memory, each of whose phases waits for `arrivals` threads or warps."""
    at = _outermost("T.alloc_barrier")
    if not isinstance(arrivals, int) or not 0 < arrivals < 2**20:
        fix = "give a number from 1 to 2^20 - 1"
        raise error("bad_argument", None, op="T.alloc_barrier", name="arrivals", why=f"is {arrivals!r}", fix=fix)
    sizes = shape_of(shape, "T.alloc_barrier's shape")
    buffer = Buffer("", sizes, dt.uint64, "barrier", offset=offset, arrivals=arrivals)
    at.emit(Alloc(buffer))
    at.own(buffer)
    return Handle(buffer)


def alloc_var(dtype: Any, init: Any = None, scope: str = "local.var") -> Load:
    """A mutable scalar; `v = e` and `v += e` inside the kernel write it."""
    if isinstance(init, str):  # alloc_var(dtype, "local.var")
        init, scope = None, init
    if SPELLINGS.get(scope) != "var":
        raise error("bad_scope", None, got=scope, known="local.var")
    to = dtype_of(dtype)
    return make_variable("", to, None if init is None else cast(to_expr(init, to), to))


def empty(*shape: Any, dtype: Any = "float32") -> Handle:
    """A tensor allocated at the launch, which the kernel may return: T.empty((M, N), dtype)."""
    sizes: Any = shape
    if len(shape) == 2 and not is_number(shape[1]) and not isinstance(shape[1], Expr):
        sizes, dtype = shape
    elif len(shape) == 1:
        sizes = shape[0]
    at = tracer("T.empty")
    handle = Handle(TensorType(shape_of(sizes, "T.empty's shape"), dtype_of(dtype)).buffer("", "empty"))
    at.made.append(handle.buffer)
    return handle


def alloc_global(shape: Any, dtype: Any = "float32") -> Handle:
    """Scratch memory in global memory, shared by all kernels of the program and freed after it."""
    at = tracer("T.alloc_global")
    handle = Handle(TensorType(shape_of(shape, "T.alloc_global's shape"), dtype_of(dtype)).buffer("", "workspace"))
    at.made.append(handle.buffer)
    return handle


def dynamic(names: str, dtype: Any = "int32", multiple_of: int = 1) -> Any:
    """Dimensions known only at run time: `m = T.dynamic("m")`, `m, n = T.dynamic("m, n")`.

    `multiple_of` divides all their values: launches check it, and GPU kernels access memory in wider pieces for it.
    """
    found = tuple(Var(n.strip(), dtype_of(dtype), "dim", multiple_of) for n in names.split(","))
    return found if len(found) > 1 else found[0]


symbolic = dynamic


def const(names: str) -> Any:
    """Dimensions that an eager kernel learns from its arguments, compiled for each value: `M, N = T.const("M, N")`."""
    return tracer("T.const").consts(names)
