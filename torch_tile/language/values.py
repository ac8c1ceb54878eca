# SPDX-License-Identifier: Apache-2.0
"""The author's handles on buffers, indexed and sliced like arrays, and the types of annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, ClassVar, Generic, TypeVar

from torch_tile.diagnostics.errors import Span, TileError, diagnose, error
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.diagnostics.spelling import nearest
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, NotAValue, Range, Region, Steps, used_as_value
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import (
    Const,
    Expr,
    Load,
    Vector,
    cast,
    const,
    constant_to_store,
    is_number,
    lanewise,
    to_expr,
    to_number,
)
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Stmt, Store
from torch_tile.language.lengths import settled
from torch_tile.language.trace import author_span, expand_names, let, tracer
from torch_tile.language.wrap_indices import lane_index
from torch_tile.tileop.base import (
    describe,
    describe_tile,
    may_overlap,
    no_region,
    parallel,
    region_of,
    same_extents,
    squeezed,
)
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tolerance import tolerant

Size = int | Expr
Given = TypeVar("Given")  # what a function of the language gives


class Handle(NotAValue):
    """A buffer in the author's hands. `A[i, j]` is an element, `A[a:b, :]` a region; assigning to either writes it."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the sizes: Python integers where known, expressions otherwise."""
        return tuple(_plain(s) for s in (self.buffer.shape[:-1] if self.buffer.lanes else self.buffer.shape))

    @property
    def strides(self) -> tuple[Size, ...]:
        """Return how many elements lie between neighbours, per dimension."""
        if self.buffer.strides is not None:
            return tuple(_plain(s) for s in self.buffer.strides)
        strides: list[Size] = []
        step: Size = 1
        for size in reversed(self.shape):
            strides.insert(0, step)
            step = step * size
        return tuple(strides)

    @property
    def dtype(self) -> DType:
        """Return the element type."""
        return dt.vector_of(self.buffer.dtype, self.buffer.lanes) if self.buffer.lanes else self.buffer.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def data(self) -> Handle:
        """Return the buffer itself, for T.Tensor(shape, dtype, A.data), which makes a view of it."""
        return self

    @property
    def name(self) -> str:
        """Return the buffer's name, as its author calls it."""
        return self.buffer.name

    def scope(self) -> str:
        """Return the memory it lives in: global, shared, fragment, local."""
        return self.buffer.scope

    def __repr__(self) -> str:
        return f"{self.name}: {self.buffer.scope} {self.dtype}{describe(self.buffer.shape)}"

    def __getitem__(self, key: Any) -> Any:
        return locate(self.buffer, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = locate(self.buffer, key)
        if isinstance(place, Region) and isinstance(value, Expr) and not isinstance(value, Const):
            _warn_of_missing_indices(self.buffer, key)
        if isinstance(place, Vector) or (isinstance(value, Vector) and isinstance(place, Region)):
            store_lanes(place, value)
        elif isinstance(place, Load):
            tracer("an assignment").emit(Store(self.buffer, place.indices, stored(value, self.buffer)))
        elif isinstance(place, Steps) or isinstance(value, Steps):
            filled = isinstance(place, Steps) and not isinstance(value, Region | Handle | Load | Steps)
            made = fill_strided(place, value) if filled else copy_strided(value, place)
            tracer("an assignment").emit(made)
        elif isinstance(value, Region | Handle | Load):
            tracer("an assignment").emit(settled(Copy.build(value, place)))
        else:
            if isinstance(value, list | tuple):
                fix = f"store each by itself: {self.name}[i, 0] = a, {self.name}[i, 1] = b"
                raise error("bad_operand", None, op="an assignment", got=f"a {type(value).__name__}", fix=fix)
            tracer("an assignment").emit(Fill.build(place, value))

    def __iter__(self) -> Any:
        part = f"{self.name}[i{', 0' * (self.ndim - 1)}]"
        what = "element" if self.ndim == 1 else "row"
        loop = f"loop over a size, `for i in T.serial({self.name}.shape[0])`: `{part}` is {what} i"
        raise used_as_value(
            self, f"{loop}; T.Parallel shares iterations among threads, T.reduce_sum and the like fold all"
        )

    def __eq__(self, other: object) -> bool:
        """Return whether both are one buffer. Refuse a comparison with a number: False would drop a branch."""
        if is_number(other) or isinstance(other, Expr):
            raise used_as_value(self)
        return self is other

    __hash__: ClassVar[Callable[..., int]] = object.__hash__


def _warn_of_missing_indices(buffer: Buffer, key: Any) -> None:
    """Warn of an element's value that is stored to several by fewer indices than dimensions, none of them a slice."""
    keys = key if isinstance(key, tuple) else (key,)
    is_one = all(isinstance(size, Const) and size.value == 1 for size in buffer.shape[len(keys) :])
    if not is_one and not any(k is ... or isinstance(k, slice) for k in keys):
        given = ", ".join(map(repr, keys))
        values: dict[str, Any] = {"buffer": buffer.name, "got": given, "want": buffer.rank, "count": len(keys)}
        warn_of([diagnose("missing_index", author_span(), **values)])


class Indices(tuple[Any, ...]):
    """The indices of several sizes under one name: to be unpacked, or to index as many dimensions; no numbers."""

    def __new__(cls, indices: Iterable[Any], made: Span | None = None) -> Indices:
        """Make the tuple; `made` is the line of the loop or T.Kernel that gives the indices."""
        self = super().__new__(cls, indices)
        self.made = made
        return self

    made: Span | None

    def _refuse(self, *_: object) -> Any:
        """Raise the error for a tuple that is used as an index."""
        raise self.misused()

    def misused(self) -> TileError:
        """Return the error for a use as one index; it names the line that gives the indices, too."""
        notes = [] if self.made is None else [(self.made, "one name for all of them is given here")]
        return error("tuple_as_index", None, notes, got=", ".join(map(repr, self)), count=len(self))

    __add__: ClassVar[Callable[..., Any]] = _refuse
    __radd__: ClassVar[Callable[..., Any]] = _refuse
    __sub__: ClassVar[Callable[..., Any]] = _refuse
    __rsub__: ClassVar[Callable[..., Any]] = _refuse
    __mul__: ClassVar[Callable[..., Any]] = _refuse
    __rmul__: ClassVar[Callable[..., Any]] = _refuse
    __floordiv__: ClassVar[Callable[..., Any]] = _refuse
    __rfloordiv__: ClassVar[Callable[..., Any]] = _refuse
    __truediv__: ClassVar[Callable[..., Any]] = _refuse
    __mod__: ClassVar[Callable[..., Any]] = _refuse
    __rmod__: ClassVar[Callable[..., Any]] = _refuse
    __neg__: ClassVar[Callable[..., Any]] = _refuse
    __lt__: ClassVar[Callable[..., Any]] = _refuse
    __le__: ClassVar[Callable[..., Any]] = _refuse
    __gt__: ClassVar[Callable[..., Any]] = _refuse
    __ge__: ClassVar[Callable[..., Any]] = _refuse


def locate(buffer: Buffer, key: Any) -> Load | Region | Steps | Vector:
    """Return `buffer[key]`: an element if every dimension has a plain index, else a region (missing dimensions are
    whole).

    An Ellipsis stands for all dimensions that are not given. Slices with steps give `Steps`.
    """
    keys = key if isinstance(key, tuple) else (key,)
    strange = next((k for k in (key, *keys) if isinstance(k, Indices)), None)
    if strange is not None and (strange is not key or len(strange) > buffer.rank):
        raise strange.misused()
    if any(isinstance(k, Vector) for k in keys):
        return _lanes(buffer, keys)
    if buffer.lanes and len(keys) == buffer.rank - 1 and not any(k is ... or isinstance(k, slice) for k in keys):
        point = tuple(_index(buffer, d, k) for d, k in enumerate(keys))
        return Vector([Load(buffer, (*point, const(n, dt.int32))) for n in range(buffer.lanes)])
    if (gaps := sum(k is ... for k in keys)) == 1:
        at = next(n for n, k in enumerate(keys) if k is ...)
        keys = (*keys[:at], *[slice(None)] * (buffer.rank - len(keys) + 1), *keys[at + 1 :])
    elif gaps:
        raise error("bad_index", None, got="... twice", buffer=buffer.name)
    if len(keys) > buffer.rank:
        shape = describe(buffer.shape)
        fix = _index_fix(None) if None in [k for k in keys if not isinstance(k, Expr)] else ""
        raise error("wrong_rank", None, buffer=buffer.name, want=buffer.rank, got=len(keys), shape=shape, fix=fix)
    if len(keys) == buffer.rank and not any(isinstance(k, slice) for k in keys):
        return Load(buffer, tuple(_index(buffer, d, k) for d, k in enumerate(keys)))
    keys = (*keys, *[slice(None)] * (buffer.rank - len(keys)))
    region = Region(buffer, tuple(_range(buffer, d, k) for d, k in enumerate(keys)))
    steps = tuple(_step(buffer, k) for k in keys)
    return region if all(step == 1 for step in steps) else Steps(region, steps)


def _lanes(buffer: Buffer, keys: tuple[Any, ...]) -> Vector:
    """Return elements by vectors of indices, such as T.Ramp(first, 1, 4)."""
    if len(keys) != buffer.rank or any(k is ... or isinstance(k, slice) for k in keys):
        raise error("bad_index", None, got="a vector beside slices", buffer=buffer.name)
    lanes = [isinstance(key, Vector) for key in keys]

    def at(dim: int, key: Any) -> Expr:
        index = _index(buffer, dim, key)
        return lane_index(index, buffer.shape[dim]) if lanes[dim] else index

    return lanewise(lambda *point: Load(buffer, tuple(at(d, k) for d, k in enumerate(point))), *keys)


def store_lanes(place: Vector | Region, value: Any) -> None:
    """Store each lane of `A[T.Ramp(i, 1, 4)] = value` or `A[i : i + 4] = value`; store a number to all lanes."""
    if isinstance(place, Region):
        extents = place.tile_shape
        count = extents[-1].value if extents and isinstance(extents[-1], Const) else 0
        if count != len(value) or any(not (isinstance(e, Const) and e.value == 1) for e in extents[:-1]):
            raise error("copy_shape", None, src=f"({len(value)})", dst=describe_tile(place, extents))
        *outer, last = place.starts
        places = [Load(place.buffer, (*outer, last + n)) for n in range(len(value))]
    else:
        places = [lane for lane in place.lanes if isinstance(lane, Load)]
    values = value.lanes if isinstance(value, Vector) else [value] * len(places)
    if len(values) != len(places):
        raise error("copy_shape", None, src=f"({len(values)})", dst=f"({len(places)})")
    at = tracer("an assignment")
    # Read before anything is written: A[T.Ramp(0, 1, 2)] = T.Shuffle([A[T.Ramp(0, 1, 2)]], [1, 0]).
    values = [let("lane", stored(one, where.buffer)) for one, where in zip(values, places, strict=True)]
    for one, where in zip(values, places, strict=True):
        at.emit(Store(where.buffer, where.indices, one))


def sized(shape: tuple[Expr, ...], dtype: DType) -> tuple[tuple[Expr, ...], DType, int]:
    """Return shape, element type and lanes of a buffer whose elements the author sees as `dtype`."""
    lanes = dtype.lanes if dtype.lanes > 1 else 0
    return (*shape, const(lanes, dt.int32)) if lanes else shape, dtype.element, lanes


def _index(buffer: Buffer, dim: int, key: Any) -> Expr:
    """Convert an author's index to an expression."""
    if isinstance(key, Handle | Region) or not (is_number(key) or isinstance(key, Expr)):
        raise error("bad_index", None, got=repr(key)[:60], buffer=buffer.name, fix=_index_fix(key))
    index = to_expr(key)
    if not index.dtype.is_integer:
        note = "`//` divides integers, and T.cast(x, 'int32') cuts a float"
        raise error("bad_index", None, ((None, note),), got=repr(index), buffer=buffer.name)
    if isinstance(index, Const) and index.value < 0:  # Python's negative index
        return simplify(buffer.shape[dim] + index)
    return index


def _index_fix(key: Any) -> str:
    """Return what to write in place of a key that torch and NumPy take, and buffers do not; "" for other keys."""
    if key is None:
        return "leave None out: `tile[i]` in `for i, j in T.Parallel(m, n)` repeats; T.view(X, (1, n)) adds a dimension"
    if isinstance(key, list | tuple | range) or hasattr(key, "tolist") or isinstance(key, Handle | Region):
        return "read one place at a time: `for i in T.Parallel(n): Y[i] = X[order[i]]`, with `order` a tensor of int32"
    return ""


def _range(buffer: Buffer, dim: int, key: Any) -> Range:
    """Convert an author's index or slice to a range."""
    if not isinstance(key, slice):
        return Range(_index(buffer, dim, key), const(1, dt.int32), keep=False)
    start = const(0, dt.int32) if key.start is None else _index(buffer, dim, key.start)
    stop = buffer.shape[dim] if key.stop is None else _index(buffer, dim, key.stop)
    extent = simplify(stop - start)
    if not isinstance(extent, Const):  # names, of which one may be defined by the other
        expanded = simplify(expand_names(stop - start))
        extent = expanded if isinstance(expanded, Const) else extent
    step = _step(buffer, key)
    if step > 1:
        extent = simplify((extent + (step - 1)) // step)
    if isinstance(extent, Const) and extent.value <= 0:
        raise error("bad_slice", None, buffer=buffer.name, why=f"is empty ({extent.value} elements in dimension {dim})")
    return Range(start, extent)


def _step(buffer: Buffer, key: Any) -> int:
    """Return the step of a slice."""
    step = key.step if isinstance(key, slice) else None
    if isinstance(step, Const):
        step = step.value
    if step is None:
        return 1
    if not is_number(step) or not isinstance(to_number(step), int) or step < 1:
        back = is_number(step) and to_number(step) < 0
        fix = "count backwards in a loop: `for i in T.Parallel(n): Y[i] = X[n - 1 - i]`" if back else ""
        raise error("bad_slice", None, buffer=buffer.name, why=f"has step {key.step}", fix=fix)
    return int(step)


def copy_strided(src: Any, dst: Any, **hints: Any) -> Stmt:
    """Record T.copy with a stepped side, as a nest of moves."""
    if isinstance(src, Load) and isinstance(dst, Steps):
        src = Copy.regions(src, dst.region)[0]
    if isinstance(dst, Load) and isinstance(src, Steps):
        dst = Copy.regions(src.region, dst)[1]
    sides = [side if isinstance(side, Steps) else region_of(side) for side in (src, dst)]
    for value, side, what in zip((src, dst), sides, ("the source", "the destination"), strict=True):
        if side is None:
            raise no_region(what, value)
    a, b = (side if isinstance(side, Steps) else Steps(side, (1,) * side.buffer.rank) for side in sides if side)
    extents = squeezed(b.region)
    if not same_extents(squeezed(a.region), extents):
        of, to = (describe_tile(side.region, side.region.extents) for side in (a, b))
        raise error("copy_shape", None, src=of, dst=to)
    if may_overlap(a.region, b.region) and a.region.buffer is b.region.buffer:
        why = "is the source of a copy inside the buffer"
        raise error("bad_slice", None, [(None, "copy to another buffer first")], buffer=b.region.buffer.name, why=why)

    def move(point: tuple[Expr, ...]) -> Stmt:
        value = Load(a.region.buffer, a.at(point))
        return Store(b.region.buffer, b.at(point), cast(value, b.region.buffer.dtype))

    return parallel(extents, move) if extents else move(())


def fill_strided(buffer: Any, value: Any) -> Stmt:
    """Record T.fill of a stepped region, as a nest of stores."""
    region, extents = buffer.region, squeezed(buffer.region)
    put = Fill.build(region, value).value
    if not extents:
        return Store(region.buffer, buffer.at(()), put)
    return parallel(extents, lambda point: Store(region.buffer, buffer.at(point), put))


def stored(value: Any, buffer: Buffer) -> Expr:
    """Convert `value` to the type of `buffer`. Narrowing within a kind is silent, float into integer is an error.

    In files written for TileLang, which cuts such values off, it is a warning.
    """
    if isinstance(value, Region | Handle):
        raise used_as_value(value)
    if value is None:
        fix = "store what has a value; T.atomic_add(place, x, return_prev=True) gives what stood there before"
        raise error("python_value", None, problem="None is stored, as what was called gives no value", fix=fix)
    expr = constant_to_store(value, buffer.dtype, "a store")
    if expr.dtype.is_float and not buffer.dtype.is_float:
        problem = error("wrong_dtype_store", None, value=expr.dtype, buffer=buffer.name, want=buffer.dtype)
        if not tolerant() or buffer.dtype.kind == "bool":
            raise problem
        (found,) = problem.diagnostics
        warn_of([replace(found, message=f"{found.message}: the fraction is cut off here")])
    return cast(expr, buffer.dtype)


def store_variable(target: Load, value: Any) -> None:
    """Record `v = value` for a T.alloc_var."""
    tracer().emit(Store(target.buffer, target.indices, stored(value, target.buffer)))


def _plain(size: Expr) -> Size:
    """Return a constant size as an int."""
    return int(size.value) if isinstance(size, Const) else size


def dtype_of(value: object) -> DType:
    """Convert `value` to a dtype; an author error if it is none."""
    try:
        return dt.to_dtype(value)
    except ValueError:
        if value == "handle" or repr(value) == "T.ptr":
            return dt.int64  # an address, which T.make_tensor takes
        if isinstance(value, int | float) and not isinstance(value, bool):
            fix = "give the shape as one tuple and the dtype behind it: (shape, dtype); of a T.alloc_var, (dtype, init)"
            raise error("bad_dtype", author_span(), got=value, fix=fix) from None
        near = nearest(value, dt.BY_NAME) if isinstance(value, str) else ""
        meant = [(None, f"did you mean '{near}'?")] if near else []
        raise error("bad_dtype", author_span(), meant, got=value) from None


def shape_of(shape: Any, what: str) -> tuple[Expr, ...]:
    """Convert a shape given as an integer, an expression or a sequence of them."""
    sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    found = []
    for size in sizes:
        if isinstance(size, Expr) and size.dtype.is_integer:
            found.append(size)
        elif is_number(size) and isinstance(to_number(size), int) and to_number(size) >= 0:
            found.append(to_expr(size))
        else:
            below = is_number(size) and isinstance(to_number(size), int)
            want = "integers, none below 0" if below else "a tuple of integers"
            fix = ""
            if isinstance(size, Expr) or (is_number(size) and not below):
                fix = "`/` gives a float: write `n // m`, or T.ceildiv(n, m), which rounds up"
            elif isinstance(size, list | tuple) and len(sizes) == 1:
                want, fix = "integers side by side", f"give the sizes one by one: {', '.join(map(repr, size))}"
            elif isinstance(size, str) and size in dt.BY_NAME:
                fix = f"the shape comes first, and the dtype behind it: (64, 64), {size!r}"
            elif isinstance(size, str) and size.isidentifier():
                fix = (
                    f"name the size first, and write no quotes here: {size} = T.const({size!r}), or T.dynamic({size!r})"
                )
            raise error("bad_shape", author_span(), what=what, want=want, got=repr(shape)[:60], fix=fix)
    return tuple(found)


@dataclass(frozen=True)
class TensorType:
    """An annotation `T.Tensor(shape, dtype)`: a row-major array in global memory, or one with given strides."""

    shape: tuple[Expr, ...]
    dtype: DType
    strides: tuple[Expr, ...] | None = None
    align: int | None = None

    def buffer(self, name: str, origin: str = "param") -> Buffer:
        """Make a global buffer of this type."""
        shape, element, lanes = sized(self.shape, self.dtype)
        strides = (*(s * lanes for s in self.strides), const(1, dt.int32)) if lanes and self.strides else self.strides
        return Buffer(name, shape, element, "global", strides, origin, align=self.align, lanes=lanes)


@dataclass(frozen=True)
class AssignedType(TensorType):
    """A type that an author gave a name by `=`: an alias for annotations, or a mistake for a declaration."""

    name: str = ""
    span: Span | None = None

    def _refuse(self, *_: object) -> Any:
        """Raise the error for a type that is used as a tensor."""
        raise error("type_as_tensor", self.span, name=self.name)

    __getitem__ = __setitem__ = _refuse


class Annotation(Generic[Given]):
    """A function of the language that annotations also subscript: `T.Tensor[(M, N), dtype]` is a call of `T.Tensor`.

    Sizes alone need no tuple: `T.Tensor[M, N]` is `T.Tensor((M, N))`.
    """

    def __init__(self, function: Callable[..., Given]):
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Given:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __getitem__(self, given: Any) -> Given:
        """Call the function with the arguments in brackets."""
        if not isinstance(given, tuple) or all(is_number(size) or isinstance(size, Expr) for size in given):
            return self.function(given)
        return self.function(*given)

    def __repr__(self) -> str:
        return f"T.{self.function.__name__}"
