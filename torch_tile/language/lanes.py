# SPDX-License-Identifier: Apache-2.0
"""Accesses of several neighbours at once (T.ldg128, T.sts64, ...), and arithmetic on pairs (T.add2, ...).

An access of 32 bits gives a uint32, a wider one a vector of them. Accesses are loops of T.vectorized over neighbours,
so every target has them. A GPU makes one instruction where addresses allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import bits, dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Const, Expr, Load, Var, Vector, binary, const, is_number, select, to_expr, truth
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, For, LoopKind, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.trace import let, when
from torch_tile.tileop.base import Scalar, Tile, is_one, region_of

WIDTHS = {"g": (32, 64, 128, 256), "s": (32, 64, 128)}  # bits, of global and shared memory
SCOPES = {"g": "global", "s": "shared"}
ZERO = const(0, dt.int32)


# Accesses of a width.


def load(kind: str, width: int) -> Callable[..., Expr | Vector]:
    """Build the language's function T.ld<kind><width>, a wide load."""
    what = f"T.ld{kind}{width}"

    def apply(src: Tile, pred: Scalar = None) -> Expr | Vector:
        region, count = _neighbours(what, "src", src, kind, width)
        own = _local(region.buffer.dtype, count)

        def value(n: Expr) -> Expr:
            found: Expr = Load(region.buffer, _indices_after(region, n))
            return found if pred is None else select(truth(pred), found, const(0, found.dtype))

        _loop(count, lambda n: Store(own, (n,), value(n)))
        words = dt.uint32 if width == 32 else dt.vector_of(dt.uint32, width // 32)
        found = bits.reinterpreted(Vector([Load(own, (const(n, dt.int32),)) for n in range(count)]), words)
        return found.map(lambda word: let("word", word)) if isinstance(found, Vector) else let("word", found)

    def shared(src: Tile) -> Expr | Vector:
        return apply(src)

    words = "a uint32" if width == 32 else f"a vector of {width // 32} uint32"
    only = "Where `pred` does not hold, nothing is read and it is 0. " if kind == "g" else ""
    found = apply if kind == "g" else shared
    found.__doc__ = f"""The {width} bits of {SCOPES[kind]} memory from `src` on: {words}.

    `src` is an element, or a slice that begins with it.

    {only}Raises TileError for other memory, and where elements do not make {width} bits.
    """
    found.__name__ = found.__qualname__ = f"ld{kind}{width}"
    return found


def store(kind: str, width: int) -> Callable[..., None]:
    """Build the language's function T.st<kind><width>, a wide store."""
    what = f"T.st{kind}{width}"

    def apply(dst: Tile, value: Vector | Scalar, pred: Scalar = None) -> None:
        region, count = _neighbours(what, "dst", dst, kind, width)
        given = value if isinstance(value, Vector) else to_expr(value, dt.uint32, what)
        if given.dtype.bits * given.dtype.lanes != width:
            why = f"has {given.dtype.bits * given.dtype.lanes} bits"
            raise error("bad_argument", None, op=what, name="value", why=why, fix=f"give {width}, as T.ld{kind}{width}")
        dtype = region.buffer.dtype
        elements = bits.reinterpreted(given, dt.vector_of(dtype, count) if count > 1 else dtype)
        own, at = _local(dtype, count), in_kernel(what)
        for n, element in enumerate(elements.lanes if isinstance(elements, Vector) else [elements]):
            at.emit(Store(own, (const(n, dt.int32),), element))

        def write() -> None:
            _loop(count, lambda n: Store(region.buffer, _indices_after(region, n), Load(own, (n,))))

        if pred is None:
            write()
            return
        with when(truth(pred)):
            write()

    def shared(dst: Tile, value: Vector | Scalar) -> None:
        apply(dst, value)

    found = apply if kind == "g" else shared
    only = "Where `pred` does not hold, nothing is written. " if kind == "g" else ""
    found.__doc__ = f"""Write {width} bits to {SCOPES[kind]} memory from `dst`, an element or the first of a slice, on.

    `value` is what T.ld{kind}{width} gives, or values of as many bits. {only}Raises TileError as that does.
    """
    found.__name__ = found.__qualname__ = f"st{kind}{width}"
    return found


def ldg(load_or_buf: Tile, index: Scalar = None) -> Expr:
    """Load the element `A[i]`, or element `index` of a tensor of one dimension, through the read-only cache."""
    region = region_of(load_or_buf)
    if isinstance(load_or_buf, Load) and index is None:
        return load_or_buf
    if region is None or region.buffer.rank != 1 or index is None:
        why, fix = f"is {load_or_buf!r}"[:80], "give an element A[i], or a tensor of one dimension and an index"
        raise error("bad_argument", None, op="T.__ldg", name="load_or_buf", why=why, fix=fix)
    return Load(region.buffer, (to_expr(index),))


def _neighbours(what: str, name: str, tile: Any, kind: str, width: int) -> tuple[Region, int]:
    """Return the region at whose first element an access begins, and its number of elements."""
    head = tile.lanes[0] if isinstance(tile, Vector) else tile  # an element of several lanes
    region = region_of(head) if isinstance(head, Load) or not isinstance(head, Expr) else None
    if region is None or region.buffer.scope != SCOPES[kind]:
        why, fix = f"is {tile!r}"[:80], f"give an element or slice of {SCOPES[kind]} memory"
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    dtype = region.buffer.dtype
    extent = region.extents[-1]
    whole = isinstance(head, Load) or not isinstance(extent, Const) or int(extent.value) * dtype.bits == width
    if width % dtype.bits or dtype.kind == "bool" or not whole:
        why, fix = f"has elements of {dtype.bits} bits", f"give what makes {width} bits, an element or a slice"
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    return region, width // dtype.bits


def _indices_after(region: Region, n: Expr) -> tuple[Expr, ...]:
    """Return the indices `n` elements after the start of a region."""
    *outer, last = region.starts
    return (*outer, simplify(binary("+", last, n)))


def _local(dtype: DType, count: int) -> Buffer:
    """Allocate an array of the thread."""
    at, own = in_kernel("an access"), Buffer("held", (const(count, dt.int32),), dtype, "local")
    at.emit(Alloc(own))
    at.own(own)
    return own


def _loop(count: int, body: Callable[[Expr], Store]) -> None:
    """Record a vector loop of `count` elements."""
    var = Var("n", dt.int32, "loop")
    at = in_kernel("an access")
    at.emit(For(LoopKind.VECTOR, (var,), (ZERO,), (const(count, dt.int32),), Block((body(var),))))


# Pairs.


def pairs(name: str, arity: int, of_each: Callable[..., Any], doc: str) -> Callable[..., Vector]:
    """Build the language's function T.<name> on vectors of two lanes."""

    def apply(operands: Sequence[Any]) -> Vector:
        given = [_pair(f"T.{name}", x) for x in operands]
        if len({x.dtype for x in given}) > 1:
            why, fix = f"are of {', '.join(str(x.dtype) for x in given)}", "give pairs of the same dtype"
            raise error("bad_argument", None, op=f"T.{name}", name="x", why=why, fix=fix)
        return Vector([let("pair", to_expr(of_each(*each))) for each in zip(*given, strict=True)])

    def of_one(x: Any) -> Vector:
        return apply((x,))

    def of_two(x: Any, y: Any) -> Vector:
        return apply((x, y))

    def of_three(x: Any, y: Any, z: Any) -> Vector:
        return apply((x, y, z))

    found: Any = (of_one, of_two, of_three)[arity - 1]
    found.__name__ = found.__qualname__ = name
    found.__doc__ = f"""{doc} of two neighbours: slices `A[i : i + 2]` or vectors of two lanes, of floats.

    Gives a vector of two lanes: `B[i : i + 2] = T.{name}(...)`.
    """
    return found  # type: ignore[no-any-return]


def _pair(what: str, given: Any) -> Vector:
    """Return two neighbours of a slice, or a vector of two lanes."""
    found = given if isinstance(given, Vector) else None
    region = None if found is not None or is_number(given) or isinstance(given, Expr) else region_of(given)
    if region is not None:
        extents = [e for e in region.extents if not is_one(e)]
        if len(extents) == 1 and isinstance(extents[0], Const) and extents[0].value == 2:
            found = Vector([Load(region.buffer, _indices_after(region, const(n, dt.int32))) for n in range(2)])
    if found is None or len(found) != 2 or not found.dtype.element.is_float:
        why, fix = f"is {given!r}"[:80], "give two neighbouring floats, A[i : i + 2], or a vector such as T.float32x2"
        raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    return found


def _call(name: str) -> Callable[..., Expr]:
    """Return a function that builds a call of an intrinsic."""
    return lambda *operands: intrinsics.call(name, *operands)


PAIRS = {
    "add2": (2, lambda x, y: x + y, "`x + y`"), "sub2": (2, lambda x, y: x - y, "`x - y`"),
    "mul2": (2, lambda x, y: x * y, "`x * y`"), "fma2": (3, _call("fma"), "`x * y + z`, rounded once,"),
    "max2": (2, _call("maximum"), "The larger"), "min2": (2, _call("minimum"), "The smaller"),
    "abs2": (1, _call("abs"), "The magnitude"),
}  # fmt: skip


__all__ = ["PAIRS", "WIDTHS", "ldg", "load", "pairs", "store"]
