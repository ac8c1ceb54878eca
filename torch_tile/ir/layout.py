# SPDX-License-Identifier: Apache-2.0
"""Layouts of tiles: the thread and register, or the place in memory, of each element.

Each dimension of the tile is split into digits, major to minor; each digit has a size and a stride along one axis: "t"
thread, "r" register (of a loop: step), "m" memory element. Layouts that place elements alike are equal.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_tile.diagnostics.errors import InternalError, error
from torch_tile.ir.bits import passes

AXES = ("t", "r", "m")


@dataclass(frozen=True)
class Digit:
    """One digit of an index: `size` values, each step of it `stride` further along `axis`."""

    size: int
    stride: int
    axis: str


@dataclass(frozen=True)
class Swizzle:
    """An XOR of address bits: offset `x` becomes `x ^ ((x >> shift) & mask)`, the mask being `bits` ones from bit
    `base` on.
    """

    bits: int
    base: int
    shift: int

    def __call__(self, x: int) -> int:
        """Return the swizzled offset of element offset `x`."""
        return x ^ ((x >> self.shift) & (((1 << self.bits) - 1) << self.base))

    @property
    def span(self) -> int:
        """Number of elements after which the pattern repeats."""
        return 1 << (self.bits + self.base + self.shift)


# The printed form of layouts, which parses back: `[64:64m | 64:1m] ^(3,3,3)`, `[2:2r 8:4t | 4:1t 2:1r] x[4:32t]`.
#
# Dimensions stand between bars, each with its digits `size:stride axis`, major to minor; `1` is a dimension of one
# element. `x[...]` holds the replicas, `^(bits,base,shift)` the swizzle.

_FORM = re.compile(r"\s*\[(?P<dims>[^\]]*)\]\s*(x\[(?P<replicas>[^\]]*)\])?\s*(\^\((?P<swizzle>[^)]*)\))?\s*")
FIX = (
    "write it like [2:2r 8:4t | 4:1t 2:1r] x[4:32t], or [64:64m | 64:1m] ^(3,3,3) for memory; "
    "T.make_swizzled_layout(tile) avoids bank conflicts"
)
_DIGIT = re.compile(r"(\d+):(\d+)([trm])")


Dims = tuple[tuple[Digit, ...], ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """A layout by digits of each dimension, major to minor; `replicas` are thread digits along which elements are
    repeated.

    A layout with threads covers all threads of its group: those that hold nothing new hold replicas.
    """

    dims: Dims
    replicas: tuple[Digit, ...] = ()
    swizzle: Swizzle | None = None

    # Facts.

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the size of each dimension. A tile that threads do not divide evenly has less."""
        return tuple(math.prod(d.size for d in digits) for digits in self.dims)

    def digits(self, axis: str) -> list[Digit]:
        """Return all digits along `axis`, replicas included, largest stride first."""
        found = [d for digits in (*self.dims, self.replicas) for d in digits if d.axis == axis and d.size > 1]
        return sorted(found, key=lambda d: -d.stride)

    def extent(self, axis: str) -> int:
        """Number of threads, registers or memory elements, holes included."""
        size = 1 + sum((d.size - 1) * d.stride for d in self.digits(axis))
        if axis == "m" and self.swizzle is not None:
            span = 1 << (self.swizzle.bits + self.swizzle.base)
            size = -(-size // span) * span
        return size

    def padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the registers in which no thread holds an element of a tile of `shape`."""
        found = {0}
        for size, digits in zip(shape, self.dims, strict=True):
            one = Layout((digits,))
            own = {one.apply((index,))["r"] for index in range(size)}
            found = {a + b for a in found for b in own}
        return tuple(r for r in range(self.extent("r")) if r not in found)

    def vector_width(self) -> int:
        """Return how many neighbours of the last dimension are contiguous in registers or memory, in aligned runs."""
        digits = self.canonical.dims[-1] if self.rank else ()
        if not digits or digits[-1].axis == "t" or digits[-1].stride != 1:
            return 1
        size = digits[-1].size
        return size if self.swizzle is None else math.gcd(size, 1 << self.swizzle.base)

    def conflicts(self, lanes: Sequence[Sequence[int]], bits: int, width: int = 0) -> int:
        """Count the passes that one access of a warp takes (1 is free of bank conflicts).

        Lane `k` touches `width` bytes (default: one element of `bits` bits) from the element `lanes[k]` on.
        """
        return passes([self.apply(index)["m"] * bits // 8 for index in lanes], width or max(1, bits // 8))

    # Equality up to the form.

    @functools.cached_property
    def canonical(self) -> Layout:
        """Return the one form of all equal layouts: without digits of size 1, with continuing neighbours joined."""
        replicas = _joined(sorted(self.replicas, key=lambda d: -d.stride))
        swizzle = None if self.swizzle is None or self.swizzle.bits == 0 else self.swizzle
        return Layout(tuple(_joined(digits) for digits in self.dims), replicas, swizzle)

    def _parts(self) -> tuple[object, ...]:
        """Return the parts that decide equality."""
        form = self.canonical
        return form.dims, form.replicas, form.swizzle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def is_equal(self, other: object) -> bool:
        """Return whether `other` places every element alike; TileLang's name of `==`."""
        return self == other

    # Both ways between indices and places.

    def apply(self, indices: Sequence[int]) -> dict[str, int]:
        """Return the offsets along "t", "r" and "m" of one element (of its first replica)."""
        found = dict.fromkeys(AXES, 0)
        for index, digits in zip(indices, self.dims, strict=True):
            for digit in reversed(digits):
                index, value = divmod(index, digit.size)
                found[digit.axis] += value * digit.stride
        if self.swizzle is not None:
            found["m"] = self.swizzle(found["m"])
        return found

    # Layouts from layouts.

    def __mul__(self, inner: Layout) -> Layout:
        """Lay out tiles as `self`, each tile inside as `inner`."""
        if self.rank != inner.rank or self.swizzle is not None:
            raise InternalError(f"layouts {self} and {inner} do not compose")
        if inner.swizzle is not None and self.digits("m") and inner.extent("m") % inner.swizzle.span:
            raise InternalError(f"tiles of {inner} are smaller than its swizzle pattern")
        scale = {axis: inner.extent(axis) for axis in AXES}

        def scaled(digits: Iterable[Digit]) -> tuple[Digit, ...]:
            return tuple(replace(d, stride=d.stride * scale[d.axis]) for d in digits)

        dims = tuple((*scaled(outer), *digits) for outer, digits in zip(self.dims, inner.dims, strict=True))
        return Layout(dims, (*scaled(self.replicas), *inner.replicas), inner.swizzle).canonical

    def expand(self, leading_shape: int | Sequence[int]) -> Layout:
        """Lay out copies of this memory one after another, counted by more indices in front; TileLang's method."""
        leading = (leading_shape,) if isinstance(leading_shape, int) else tuple(leading_shape)
        outer = row_major((*leading, *(1 for _ in self.dims)))
        return outer * replace(self, dims=(*(() for _ in leading), *self.dims))

    def drop(self, dim: int) -> Layout:
        """Remove dimension `dim` as a reduction does: its threads hold replicas, its registers are gone."""
        dim %= self.rank
        gone = self.dims[dim]
        kept = (*self.dims[:dim], *self.dims[dim + 1 :])
        replicas = (*self.replicas, *(d for d in gone if d.axis == "t"))
        return Layout(_compact(_compact(kept, "r"), "m"), replicas).canonical

    def permute(self, order: Sequence[int]) -> Layout:
        """Return the layout of the transposed tile: its dimension `k` is dimension `order[k]` of this one."""
        return replace(self, dims=tuple(self.dims[k] for k in order))

    def __str__(self) -> str:
        form = self.canonical
        text = f"[{' | '.join(_digits(d) or '1' for d in form.dims)}]"
        if form.replicas:
            text += f" x[{_digits(form.replicas)}]"
        if form.swizzle:
            text += f" ^({form.swizzle.bits},{form.swizzle.base},{form.swizzle.shift})"
        return text

    @staticmethod
    def parse(text: str) -> Layout:
        """Parse the layout that prints as `text`. Raises TileError where the text is none."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise error("bad_layout", None, what=f"`{text}`", why="it has no dimensions in brackets", fix=FIX)
        dims = found["dims"].split("|") if found["dims"].strip() else []
        swizzle = None
        if found["swizzle"] is not None:
            numbers = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*", found["swizzle"])
            if numbers is None:
                raise error("bad_layout", None, what=f"`{text}`", why="its swizzle is not three numbers", fix=FIX)
            swizzle = Swizzle(*map(int, numbers.groups()))
        return Layout(
            tuple(_parse_digits(d, text) for d in dims), _parse_digits(found["replicas"] or "1", text), swizzle
        )


def _digits(digits: Iterable[Digit]) -> str:
    """Format digits as text."""
    return " ".join(f"{d.size}:{d.stride}{d.axis}" for d in digits)


def _parse_digits(part: str, text: str) -> tuple[Digit, ...]:
    """Parse the digits of a dimension."""
    if part.strip() == "1":
        return ()
    digits = [_DIGIT.fullmatch(word) for word in part.split()]
    if not digits or None in digits:
        raise error("bad_layout", None, what=f"`{text}`", why=f"`{part.strip()}` is not digits like 8:4t", fix=FIX)
    return tuple(Digit(int(d[1]), int(d[2]), d[3]) for d in digits if d)


def _joined(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Join digits that continue each other and leave out digits of size 1."""
    found: list[Digit] = []
    for d in digits:
        last = found[-1] if found else None
        if last is not None and d.size > 1 and last.axis == d.axis and last.stride == d.size * d.stride:
            found[-1] = Digit(last.size * d.size, d.stride, d.axis)
        elif d.size > 1:
            found.append(d)
    return tuple(found)


def _compact(dims: Dims, axis: str) -> Dims:
    """Renumber `axis` without holes, in the same order."""
    strides: dict[int, int] = {}
    total = 1
    for d in sorted((d for digits in dims for d in digits if d.axis == axis and d.size > 1), key=lambda d: d.stride):
        strides[d.stride] = total
        total *= d.size
    return tuple(
        tuple(replace(d, stride=strides[d.stride]) if d.axis == axis and d.size > 1 else d for d in digits)
        for digits in dims
    )


# Layouts by name.


def _nested(shape: Sequence[int], axis: str) -> Layout:
    """Return the row-major layout of a shape over one axis."""
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return Layout(tuple((Digit(n, s, axis),) for n, s in zip(shape, strides, strict=True))).canonical


def row_major(shape: Sequence[int]) -> Layout:
    """Return the layout of memory with the last dimension contiguous."""
    return _nested(shape, "m")


def local(*shape: int) -> Layout:
    """Return the row-major layout of a tile in the registers of one thread."""
    return _nested(shape, "r")


def replicated(shape: Sequence[int], threads: int) -> Layout:
    """Return the layout of the whole tile in the registers of every thread."""
    return replace(_nested(shape, "r"), replicas=(Digit(threads, 1, "t"),)).canonical


def shared_tile(shape: Sequence[int], bits: int, span: int = 128) -> Layout:
    """Lay out an operand tile in shared memory free of bank conflicts, as TMA and wgmma require.

    The last dimension is cut into panels of 128 bytes (64 or 32 if it is narrower), one after another. In a panel,
    16-byte chunk `c` of row `r` lies at `c ^ (r % 8)` (`c ^ (r // 2 % 4)`, `c ^ (r // 4 % 2)`). Rows are padded to a
    multiple of 8. Dimensions before the last two are outer. The layout is row-major if no panel fits. `span` is the
    widest panel in bytes.
    """
    return _shared_tile(tuple(shape), bits, span)


@functools.lru_cache(maxsize=4096)
def _shared_tile(shape: tuple[int, ...], bits: int, span: int) -> Layout:
    """Return the default layout of a shared tile: row-major, swizzled where rows allow it."""
    row = shape[-1] * bits if len(shape) > 1 else 0
    log = next((k for k in (3, 2, 1) if 16 << k <= span and row and row % (128 << k) == 0), 0)
    if not log or 128 % bits or math.prod(shape[:-1]) == 0:
        return row_major(shape)
    rows, panel = -(-shape[-2] // 8) * 8, (128 << log) // bits
    panels = shape[-1] // panel
    outer = row_major(shape[:-2])
    size = rows * shape[-1]
    dims = tuple(tuple(replace(d, stride=d.stride * size) for d in digits) for digits in outer.dims)
    tile = ((Digit(shape[-2], panel, "m"),), (Digit(panels, rows * panel, "m"), Digit(panel, 1, "m")))
    return Layout((*dims, *tile), (), Swizzle(log, (128 // bits).bit_length() - 1, 3)).canonical


def spread(shape: Sequence[int], threads: int, vector: int) -> Layout:
    """Lay out loops and copies by default: neighbouring threads take neighbouring elements of the last dimension.

    `vector` consecutive elements of it are one thread's. Padded where it does not divide evenly; threads for which
    nothing is left hold replicas.
    """
    if not shape:
        return Layout((), (Digit(threads, 1, "t"),)).canonical
    counts = (*shape[:-1], -(-shape[-1] // vector))
    lanes = _partition(counts, threads, True)[1]
    steps = [-(-n // t) for n, t in zip(counts, lanes, strict=True)]
    step, lane = vector, 1
    dims: list[tuple[Digit, ...]] = []
    for n, t in zip(reversed(steps), reversed(lanes), strict=True):
        dims.append((Digit(n, step, "r"), Digit(t, lane, "t")))
        step, lane = step * n, lane * t
    dims[0] = (*dims[0], Digit(vector, 1, "r"))
    return Layout(tuple(reversed(dims)), (Digit(threads // lane, lane, "t"),)).canonical


@functools.lru_cache(maxsize=4096)
def _partition(counts: tuple[int, ...], threads: int, last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split threads over dimensions: return (steps, elements with padding), and threads per dimension."""
    *outer, n = counts
    divisors = [t for t in range(1, threads + 1) if threads % t == 0]
    widest = max(t for t in divisors if t <= max(n, 1))
    options: list[tuple[int, tuple[int, int], tuple[int, ...]]] = []
    for t in divisors:
        (steps, padded), lanes = _partition(tuple(outer), threads // t, False) if outer else ((1, 1), ())
        mine = -(-n // t)
        options.append((t, (steps * mine, padded * mine * t), (*lanes, t)))
    allowed = [o for o in options if not last or o[0] >= min(widest, 8)]  # eight vectors of 16 bytes are a cache line
    best = min(allowed, key=lambda o: (o[1], -o[0]))
    return best[1], best[2]


def points(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Iterate over all indices of a box, the last fastest."""
    total = math.prod(shape)
    for k in range(total):
        index = []
        for n in reversed(shape):
            k, value = divmod(k, n)
            index.append(value)
        yield tuple(reversed(index))
