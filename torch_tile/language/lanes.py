# SPDX-License-Identifier: Apache-2.0
"""Several neighbours at once: accesses of a given width (T.ldg128, T.sts64, ...), pairs (T.add2, ...), their values.

What an access of more than 32 bits gives is `Lanes`: words, which are uint32, or elements. Accesses are loops of
T.vectorized over neighbours, so that every target has them, and a GPU makes one instruction where addresses allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import error
from torch_tile.ir import bits, dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Const, Expr, Load, Var, binary, cast, const, is_number, select, to_expr, truth
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Alloc, Block, For, If, LoopKind, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.trace import let
from torch_tile.tileop.base import Scalar, Tile, region_of

WIDTHS = {"g": (32, 64, 128, 256), "s": (32, 64, 128)}  # bits, of global and shared memory
SCOPES = {"g": "global", "s": "shared"}
ZERO = const(0, dt.int32)


@dataclass(frozen=True, eq=False)
class Lanes:
    """A few values side by side, of one type. `v[n]` is one of them; a store writes them to neighbours."""

    values: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        """The type of each."""
        return self.values[0].dtype

    @property
    def lanes(self) -> int:
        """How many there are."""
        return len(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Expr]:
        return iter(self.values)

    def __getitem__(self, lane: Any) -> Expr:
        if not isinstance(lane, Expr):
            one: Expr = self.values[lane]
            return one
        found = self.values[-1]
        for n, value in reversed(list(enumerate(self.values[:-1]))):
            found = select(binary("==", lane, n), value, found)
        return found

    def write_to(self, place: Region) -> None:
        """`A[i : i + n] = lanes`, of as many neighbours along the last dimension."""
        at = in_kernel("an assignment")
        sizes = [e for e in place.extents if not (isinstance(e, Const) and e.value == 1)]
        if len(sizes) != 1 or not isinstance(sizes[0], Const) or sizes[0].value != len(self):
            why, fix = f"is `{place!r}`"[:80], f"assign to a slice of {len(self)} neighbours, A[i : i + {len(self)}]"
            raise error("bad_argument", None, op="an assignment", name="place", why=why, fix=fix)
        for n, element in enumerate(self):
            at.emit(Store(place.buffer, _moved(place, const(n, dt.int32)), cast(element, place.buffer.dtype)))

    def words(self) -> list[Expr]:
        """Their bits, 32 at a time, the first in the lowest."""
        size = self.dtype.bits
        if size == 64:
            wide = [bits.reinterpret(v, dt.uint64) for v in self.values]
            return [cast(w >> s if s else w, dt.uint32) for w in wide for s in (0, 32)]
        if size == 32:
            return [bits.reinterpret(v, dt.uint32) for v in self.values]
        count, own = 32 // size, dt.BY_NAME[f"uint{size}"]
        parts = [cast(bits.reinterpret(v, own), dt.uint32) for v in self.values]
        groups = [parts[n : n + count] for n in range(0, len(parts), count)]
        return [let("word", _joined(group, size)) for group in groups]


def _joined(parts: Sequence[Expr], size: int) -> Expr:
    total = parts[0]
    for n, part in enumerate(parts[1:], 1):
        total = total | (part << size * n)
    return total


def of_words(words: Sequence[Expr], dtype: DType) -> Lanes:
    """The values of a type whose bits these words are."""
    size = dtype.bits
    if size == 64:
        wide = [cast(word, dt.uint64) for word in words]
        whole = [low | (high << 32) for low, high in zip(wide[::2], wide[1::2], strict=True)]
        return Lanes(tuple(bits.reinterpret(w, dtype) for w in whole))
    if size == 32:
        return Lanes(tuple(bits.reinterpret(w, dtype) for w in words))
    own = dt.BY_NAME[f"uint{size}"]
    parts = [cast(w >> s if s else w, own) for w in words for s in range(0, 32, size)]
    return Lanes(tuple(bits.reinterpret(p, dtype) for p in parts))


# Accesses of a width.


def load(kind: str, width: int) -> Callable[..., Expr | Lanes]:
    """The language's function T.ld<kind><width>."""
    what = f"T.ld{kind}{width}"

    def apply(src: Tile, pred: Scalar = None) -> Expr | Lanes:
        region, count = _neighbours(what, "src", src, kind, width)
        own = _local(region.buffer.dtype, count)

        def value(n: Expr) -> Expr:
            found: Expr = Load(region.buffer, _moved(region, n))
            return found if pred is None else select(truth(pred), found, const(0, found.dtype))

        _loop(count, lambda n: Store(own, (n,), value(n)))
        found = Lanes(tuple(Load(own, (const(n, dt.int32),)) for n in range(count))).words()
        named = Lanes(tuple(let("word", w) for w in found))
        return named[0] if width == 32 else named

    def shared(src: Tile) -> Expr | Lanes:
        return apply(src)

    words = "a uint32" if width == 32 else f"{width // 32} words, each a uint32"
    only = "Where `pred` does not hold, nothing is read and it is 0. " if kind == "g" else ""
    found = apply if kind == "g" else shared
    found.__doc__ = f"""The {width} bits of {SCOPES[kind]} memory from an element, or the first of a slice, on: {words}.

    {only}Raises TileError for other memory, and where elements do not make {width} bits.
    """
    found.__name__ = found.__qualname__ = f"ld{kind}{width}"
    return found


def store(kind: str, width: int) -> Callable[..., None]:
    """The language's function T.st<kind><width>."""
    what = f"T.st{kind}{width}"

    def apply(dst: Tile, value: Lanes | Scalar, pred: Scalar = None) -> None:
        region, count = _neighbours(what, "dst", dst, kind, width)
        given = list(value) if isinstance(value, Lanes) else [to_expr(value, dt.uint32, what)]
        lanes = Lanes(tuple(given))
        if lanes.dtype.bits * len(lanes) != width:
            why, fix = f"has {lanes.dtype.bits * len(lanes)} bits", f"give {width} bits, as T.ld{kind}{width} does"
            raise error("bad_argument", None, op=what, name="value", why=why, fix=fix)
        own = _local(region.buffer.dtype, count)
        at = in_kernel(what)
        for n, element in enumerate(of_words(lanes.words(), region.buffer.dtype)):
            at.emit(Store(own, (const(n, dt.int32),), element))

        def write() -> None:
            _loop(count, lambda n: Store(region.buffer, _moved(region, n), Load(own, (n,))))

        if pred is None:
            write()
            return
        with at.open("if") as scope:
            write()
        at.emit(If(truth(pred), Block(tuple(scope.stmts)), Block(())))

    def shared(dst: Tile, value: Lanes | Scalar) -> None:
        apply(dst, value)

    found = apply if kind == "g" else shared
    only = "Where `pred` does not hold, nothing is written. " if kind == "g" else ""
    found.__doc__ = f"""Write {width} bits to {SCOPES[kind]} memory from an element, or the first of a slice, on.

    `value` is what T.ld{kind}{width} gives, or values of as many bits. {only}Raises TileError as that does.
    """
    found.__name__ = found.__qualname__ = f"st{kind}{width}"
    return found


def ldg(load_or_buf: Tile, index: Scalar = None) -> Expr:
    """The element `A[i]`, or element `index` of a tensor of one dimension; tensors that are only read are cached so."""
    region = region_of(load_or_buf)
    if isinstance(load_or_buf, Load) and index is None:
        return load_or_buf
    if region is None or region.buffer.rank != 1 or index is None:
        why, fix = f"is {load_or_buf!r}"[:80], "give an element A[i], or a tensor of one dimension and an index"
        raise error("bad_argument", None, op="T.__ldg", name="load_or_buf", why=why, fix=fix)
    return Load(region.buffer, (to_expr(index),))


def _neighbours(what: str, name: str, tile: Any, kind: str, width: int) -> tuple[Region, int]:
    """The region whose first element an access begins at, and how many elements it takes."""
    region = region_of(tile)
    if region is None or region.buffer.scope != SCOPES[kind]:
        why, fix = f"is {tile!r}"[:80], f"give an element or slice of {SCOPES[kind]} memory"
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    dtype = region.buffer.dtype
    extent = region.extents[-1]
    whole = isinstance(tile, Load) or not isinstance(extent, Const) or int(extent.value) * dtype.bits == width
    if width % dtype.bits or dtype.kind == "bool" or not whole:
        why, fix = f"has elements of {dtype.bits} bits", f"give what makes {width} bits, an element or a slice"
        raise error("bad_argument", None, op=what, name=name, why=why, fix=fix)
    return region, width // dtype.bits


def _moved(region: Region, n: Expr) -> tuple[Expr, ...]:
    *outer, last = region.starts
    return (*outer, simplify(binary("+", last, n)))


def _local(dtype: DType, count: int) -> Buffer:
    """An array of the thread."""
    at, own = in_kernel("an access"), Buffer("held", (const(count, dt.int32),), dtype, "local")
    at.emit(Alloc(own))
    at.own(own)
    return own


def _loop(count: int, body: Callable[[Expr], Store]) -> None:
    var = Var("n", dt.int32, "loop")
    at = in_kernel("an access")
    at.emit(For(LoopKind.VECTOR, (var,), (ZERO,), (const(count, dt.int32),), Block((body(var),))))


# Pairs.


def pairs(name: str, arity: int, of_each: Callable[..., Any], doc: str) -> Callable[..., Lanes]:
    """The language's function T.<name>."""

    def apply(operands: Sequence[Any]) -> Lanes:
        given = [_pair(f"T.{name}", x) for x in operands]
        if len({(x.dtype, len(x)) for x in given}) > 1:
            why, fix = f"are of {', '.join(str(x.dtype) for x in given)}", "give pairs of one type"
            raise error("bad_argument", None, op=f"T.{name}", name="x", why=why, fix=fix)
        return Lanes(tuple(let("pair", to_expr(of_each(*each))) for each in zip(*given, strict=True)))

    def of_one(x: Any) -> Lanes:
        return apply((x,))

    def of_two(x: Any, y: Any) -> Lanes:
        return apply((x, y))

    def of_three(x: Any, y: Any, z: Any) -> Lanes:
        return apply((x, y, z))

    found: Any = (of_one, of_two, of_three)[arity - 1]
    found.__name__ = found.__qualname__ = name
    found.__doc__ = f"""{doc} of two neighbours: slices `A[i : i + 2]`, or pairs that such functions give.

    The types are float32, float16 and bfloat16. Gives a pair: `B[i : i + 2] = T.{name}(...)`.
    """
    return found  # type: ignore[no-any-return]


def _pair(what: str, given: Any) -> Lanes:
    if isinstance(given, Lanes):
        return given
    region = None if is_number(given) or isinstance(given, Expr) else region_of(given)
    extents = [e for e in region.extents if not (isinstance(e, Const) and e.value == 1)] if region else []
    if region is None or len(extents) != 1 or not isinstance(extents[0], Const) or extents[0].value != 2:
        why, fix = f"is {given!r}"[:80], "give a slice of two neighbours, A[i : i + 2], or a pair of T.add2 and others"
        raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    if not region.buffer.dtype.is_float:
        why, fix = f"is of {region.buffer.dtype}", "give float32, float16 or bfloat16"
        raise error("bad_argument", None, op=what, name="x", why=why, fix=fix)
    return Lanes(tuple(Load(region.buffer, _moved(region, const(n, dt.int32))) for n in range(2)))


def _call(name: str) -> Callable[..., Expr]:
    return lambda *operands: intrinsics.call(name, *operands)


PAIRS = {
    "add2": (2, lambda x, y: x + y, "`x + y`"), "sub2": (2, lambda x, y: x - y, "`x - y`"),
    "mul2": (2, lambda x, y: x * y, "`x * y`"), "fma2": (3, _call("fma"), "`x * y + z`, rounded once,"),
    "max2": (2, _call("maximum"), "The larger"), "min2": (2, _call("minimum"), "The smaller"),
    "abs2": (1, _call("abs"), "The magnitude"),
}  # fmt: skip


__all__ = ["PAIRS", "WIDTHS", "Lanes", "ldg", "load", "of_words", "pairs", "store"]
