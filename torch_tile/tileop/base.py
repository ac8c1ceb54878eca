# SPDX-License-Identifier: Apache-2.0
"""Define the interface of a tile op, and the registry that turns a tile op into `T.<name>`.

A new op is one file: a frozen dataclass with `build` (from the author's arguments), `check`, `accesses`, `evaluate`
(its meaning on whole tiles) and `lower_cpu`. The language, the interpreter, the passes and the printer find it through
`tile_ops()`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from torch_tile.diagnostics.arguments import shown
from torch_tile.diagnostics.errors import Diagnostic, TileError, error
from torch_tile.diagnostics.spelling import nearest
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Const, Expr, Load, Var, binary, const
from torch_tile.ir.layout import row_major
from torch_tile.ir.node import equal, node_class
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Block, For, LoopKind, Stmt, TileOp

if TYPE_CHECKING:
    from torch_tile.tileop.threads import Demand, Layouts, ThreadContext


# Types of authors' arguments, in signatures. Any value of Python may come, so each operation checks its own.
Tile: TypeAlias = Any  # a buffer, a region A[a:b, :] or an element A[i, j], from which on the other side's shape counts
Scalar: TypeAlias = Any  # a number or an expression
Annotations: TypeAlias = Mapping[str, Any] | None  # TileLang's hints by name, which change no result here


@node_class
class RegisteredOp(TileOp):
    """A tile op with its name in the language."""

    op_name: ClassVar[str] = ""

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> TileOp:
        """Build the op from the arguments of `T.<op_name>(...)`."""
        raise NotImplementedError

    def recorded(self) -> tuple[Stmt, ...]:
        """Return the statements that an author's call of the op stands for."""
        return (self,)

    def check(self) -> list[Diagnostic]:
        """Return a diagnostic for each wrong operand."""
        raise NotImplementedError

    def warnings(self) -> list[Diagnostic]:
        """Return a diagnostic for what is right, and hardly meant."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the regions that the op reads, and those that it writes."""
        raise NotImplementedError

    def lower_cpu(self) -> Stmt:
        """Lower the op to loops, stores and calls of CPU helpers, for one thread that runs the whole block."""
        raise self._lacks("lower_cpu", "the CPU")

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Return the demands on the op's buffers by `known`; called again as more layouts become known."""
        raise self._lacks("infer_layout", "GPUs")

    def as_loop(self) -> For | None:
        """Return the op as a T.Parallel loop, if it is one; such an op may choose the layouts of its fragments."""
        return None

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Lower the op to the statements of each thread, which may hold T.Parallel loops over fragments and memory."""
        raise self._lacks("lower_cuda", "GPUs")

    def _lacks(self, method: str, target: str) -> TileError:
        """Build the error for an op without a lowering for a target."""
        return error(
            "no_lowering", self.span, name=self.op_name, target=target, owner=type(self).__name__, method=method
        )


_OPS: dict[str, type[RegisteredOp]] = {}
C = TypeVar("C", bound=type[RegisteredOp])


def tile_op(name: str) -> Callable[[C], C]:
    """Make the decorated op class available as `T.<name>`."""

    def register(cls: C) -> C:
        """Add a class to the registry under its name."""
        cls.op_name = name
        if name in _OPS:
            raise ValueError(f"tile op {name} is declared twice")
        _OPS[name] = cls
        return cls

    return register


def tile_ops() -> dict[str, type[RegisteredOp]]:
    """Return all tile ops by their name in the language."""
    return dict(_OPS)


def is_per_thread(regions: Sequence[Region]) -> bool:
    """Return whether each thread performs the operation for itself: on its own memory, or on single elements."""
    own = any(region.buffer.scope in ("local", "var") for region in regions)
    return own or all(isinstance(r.extent, Const) and r.extent.value == 1 for region in regions for r in region.ranges)


def region_of(value: Any) -> Region | None:
    """Return the region that an argument names: a whole buffer, a slice, or one element; None for other values."""
    value = getattr(value, "buffer", value) if not isinstance(value, Region | Load) else value
    if isinstance(value, Region):
        return value
    if isinstance(value, Buffer):
        return Region(value, tuple(Range(const(0, dt.int32), size) for size in value.shape))
    if isinstance(value, Load):
        return Region(value.buffer, tuple(Range(i, const(1, dt.int32), keep=False) for i in value.indices))
    return None


def no_region(what: str, value: Any) -> TileError:
    """Return the author's error for a side of T.copy, `what`, that names no region."""
    is_outside = type(value).__module__.partition(".")[0] in ("torch", "numpy") and hasattr(value, "shape")
    fix = "T.alloc_shared or T.alloc_fragment makes a tile; a tensor from outside is a parameter of the kernel"
    got = f"{what} ({type(value).__name__})"
    if value is None:
        fix = "what was called gives no value: T's functions and macros write into the tile that they are given"
    return error("copy_values", None, what=got, fix=fix if value is None or (is_outside and value.ndim) else "")


def need_region(value: Any, op: str, name: str) -> Region:
    """Return the region as `region_of` does; raise an author error if `value` names no region."""
    region = region_of(value)
    if region is None:
        kind = f"the value `{value}`"[:60] if isinstance(value, Expr) else type(value).__name__
        raise error(
            "bad_argument", None, op=f"T.{op}", name=name, why=f"is {kind}, not a buffer or region",
            fix="pass a buffer, a slice A[a:b, :] or an element A[i, j]",
        )  # fmt: skip
    return region


def need_choice(op: str, name: str, value: Any, known: Sequence[Any]) -> None:
    """Raise an author error unless `value` is one of `known`."""
    if value not in known:
        near = nearest(str(value), [str(k) for k in known])
        fix = f"did you mean {near!r}?" if near else f"give one of {', '.join(repr(k) for k in known)}"
        raise error("bad_argument", None, op=f"T.{op}", name=name, why=f"is {shown(value)}", fix=fix)


def is_one(extent: Expr) -> bool:
    """Return whether an extent is the literal 1."""
    return isinstance(extent, Const) and extent.value == 1


def number_of(extent: Expr) -> int:
    """Return the value of a literal extent or index."""
    assert isinstance(extent, Const)
    return int(extent.value)


def squeezed(region: Region) -> tuple[Expr, ...]:
    """Return the region's extents without those that are 1."""
    return tuple(e for e in region.extents if not is_one(e))


def conditions_inside(region: Region) -> list[Expr]:
    """Return the conditions that a region lies inside its buffer."""
    found = []
    for start, extent, size in zip(region.starts, region.extents, region.buffer.shape, strict=True):
        found += [binary("<=", 0, start), binary("<=", binary("+", start, extent), size)]
    return found


def unproven_bounds(region: Region) -> list[list[Expr]]:
    """Return the conditions of `conditions_inside` that are not always true, dimension by dimension."""
    conditions = [simplify(condition) for condition in conditions_inside(region)]
    pairs = zip(conditions[::2], conditions[1::2], strict=True)
    return [[condition for condition in pair if not is_literal(condition, True)] for pair in pairs]


def same_extents(a: Sequence[Expr], b: Sequence[Expr]) -> bool:
    """Return whether two extent lists agree as written (symbolic extents must be the same expression)."""
    return len(a) == len(b) and all(
        (isinstance(x, Const) and isinstance(y, Const) and x.value == y.value) or equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def may_overlap(a: Region, b: Region) -> bool:
    """Return whether two regions may share an element; False only where a dimension or their memory separates them."""
    if a.buffer is not b.buffer:
        return (a.buffer.base or a.buffer) is (b.buffer.base or b.buffer)
    for x, y in zip(a.ranges, b.ranges, strict=True):
        between = simplify(binary("-", y.start, x.start))
        if not isinstance(between, Const):
            continue
        ahead, room = (x.extent, between.value) if between.value > 0 else (y.extent, -between.value)
        if isinstance(ahead, Const) and ahead.value <= room:
            return False
    return True


def describe(extents: Iterable[Expr]) -> str:
    """Format extents as the author would write them."""
    return "(" + ", ".join(str(e.value) if isinstance(e, Const) else repr(e) for e in extents) + ")"


def describe_tile(region: Region, extents: Iterable[Expr] | None = None) -> str:
    """Format a region by its buffer's name and its extents, those of its tile by default: `a` (32, 64)."""
    return f"`{region.buffer.name}` {describe(region.tile_shape if extents is None else extents)}"


def parallel(extents: Sequence[Expr], body: Callable[[tuple[Var, ...]], Stmt]) -> Stmt:
    """Build a T.Parallel nest over `extents` (at least one)."""
    loop_vars = tuple(Var("ijklmn"[d], dt.int32, "loop") for d in range(len(extents)))
    zeros = tuple(const(0, dt.int32) for _ in extents)
    return For(LoopKind.PARALLEL, loop_vars, zeros, tuple(extents), Block((body(loop_vars),)))


def serial(extent: Expr, body: Callable[[Var], Stmt], name: str = "k") -> Stmt:
    """Build a T.serial loop from 0."""
    var = Var(name, dt.int32, "loop")
    return For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (extent,), Block((body(var),)))


def of_each(extents: Sequence[Expr], body: Callable[[tuple[Var, ...]], Stmt]) -> Stmt:
    """Build loops over `extents` (at least one) that each thread runs by itself, with wide accesses."""
    loop_vars = tuple(Var("ijklmn"[d], dt.int32, "loop") for d in range(len(extents)))
    made = body(loop_vars)
    for d in range(len(extents) - 1, -1, -1):
        kind = LoopKind.VECTOR if d == len(extents) - 1 else LoopKind.UNROLLED  # so that arrays stay in registers
        if not isinstance(extents[d], Const):
            kind = LoopKind.SERIAL
        made = For(kind, (loop_vars[d],), (const(0, dt.int32),), (extents[d],), Block((made,)))
    return made


def spread(region: Region, loop_vars: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the buffer indices for a point of the squeezed region."""
    point = iter(loop_vars)
    return tuple(r.start if is_one(r.extent) else r.start + next(point) for r in region.ranges)


def indices_at(region: Region, point: Iterable[Expr]) -> tuple[Expr, ...]:
    """Return the buffer indices of a point of the region, which has one coordinate for each kept dimension."""
    steps = iter(point)
    return tuple(r.start + next(steps) if r.keep else r.start for r in region.ranges)


def identity_of(op: str, dtype: dt.DType) -> Const:
    """Return the neutral element of a reduction in `dtype`."""
    if op == "absmax" and dtype.kind == "int":
        return const(dt.limits(dtype)[0], dtype)
    if op in ("sum", "abssum", "bitor", "bitxor", "absmax"):
        return const(0, dtype)
    if op == "bitand":
        return const(-1, dtype)
    lowest = op == "max"
    if dtype.kind == "bool":
        return const(not lowest, dtype)
    if dtype.is_float:
        if dtype.name == "float8_e4m3fn":
            return const(-448.0 if lowest else 448.0, dtype)
        return const(-math.inf if lowest else math.inf, dtype)
    return const(dt.limits(dtype)[not lowest], dtype)


def scalar(value: Any, op: str, buffer: Buffer) -> Expr:
    """Convert a scalar argument of `op` to the dtype of `buffer`. Raises TileError for a fraction as an integer."""
    from torch_tile.ir.expr import cast, constant_to_store

    given = constant_to_store(value, buffer.dtype, op)
    if given.dtype.is_float and buffer.dtype.is_integer:
        raise error("wrong_dtype_store", None, value=given.dtype, buffer=buffer.name, want=buffer.dtype)
    return cast(given, buffer.dtype)


def conjunction(conditions: Sequence[Expr]) -> Expr:
    """Join at least one condition by "and"."""
    return functools.reduce(lambda a, b: binary("and", a, b), conditions)


# Runs of neighbouring elements that a buffer keeps together, aligned to their own length; and its strides.


def aligned_run(buffer: Buffer) -> int:
    """Return a length of runs along the last dimension of an on-chip buffer, each aligned and contiguous."""
    layout = buffer.layout
    if layout is None:
        shape = buffer.static_shape
        if shape is None:
            return 1
        layout = row_major(shape)
    layout = layout.canonical
    strides = [d.stride for digits in layout.dims for d in digits if d.axis == "m" and d.stride > 1]
    return math.gcd(layout.vector_width(), *strides)


def strides_of(buffer: Buffer) -> tuple[Expr, ...]:
    """Return the stride of each dimension, in elements."""
    if buffer.strides is not None:
        return buffer.strides
    steps: list[Expr] = []
    step: Expr = const(1, dt.int32)
    for size in reversed(buffer.shape):
        steps.insert(0, step)
        step = binary("*", step, size)
    return tuple(steps)
