# SPDX-License-Identifier: Apache-2.0
"""Operations on layouts: applied to expressions, printed, parsed, drawn, found from functions."""

from __future__ import annotations

import colorsys
import contextlib
import itertools
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.bits import BANKS, WORD
from torch_tile.ir.expr import Binary, Expr, binary, const
from torch_tile.ir.layout import Digit, Layout, Swizzle
from torch_tile.ir.mixed_radix import Digits, MixedRadix

if TYPE_CHECKING:
    from torch_tile.ir.bounds import Ranges


def offset_of(layout: Layout, axis: str, indices: Sequence[Expr], ranges: Ranges | None = None) -> Expr:
    """Return the offset along `axis` ("m" swizzled) of an element at `indices`, made smaller by `ranges`."""
    radix = MixedRadix(ranges)
    parts: list[tuple[Digit, Digits]] = []  # each digit along the axis and its value
    for index, digits, size in zip(indices, layout.dims, layout.shape, strict=True):
        value, weight = radix.below(radix.of(index), size), 1
        for place, digit in reversed(list(enumerate(digits))):
            if digit.axis == axis:
                part = radix.quotient(value, weight, None if place == 0 else digit.size)
                parts.append((digit, radix.below(part, digit.size)))
            weight *= digit.size
    if axis == "m" and layout.swizzle is not None:
        return _swizzled(layout.swizzle, parts, radix)
    return _total(parts).expr()


def _total(parts: Iterable[tuple[Digit, Digits]]) -> Digits:
    """Sum digits scaled by their strides."""
    return sum((value.scaled(digit.stride) for digit, value in parts), Digits())


def _swizzled(swizzle: Swizzle, parts: Sequence[tuple[Digit, Digits]], radix: MixedRadix) -> Expr:
    """Compute the swizzled offset `high + (chunk ^ row) * width + low`."""
    width, chunks = 1 << swizzle.base, 1 << swizzle.bits
    if not _divides(parts, [1 << n for n in (swizzle.base, swizzle.base + swizzle.bits)], swizzle.shift):
        size = sum(d.stride * (d.size - 1) for d, _ in parts) + 1
        parts = [(Digit(size, 1, "m"), radix.below(_total(parts), size))]

    def field(low: int, count: int | None) -> Digits:
        """Extract the bit field `(offset // low) % count`, digit by digit: they carry nothing over a boundary."""
        total = Digits()
        for digit, value in parts:
            reach = digit.stride * digit.size
            if reach > low and (count is None or digit.stride < low * count):
                cut = count if count is not None and reach > low * count else None
                total += radix.quotient(value.scaled(digit.stride), low, cut)
        return total

    chunk, row = field(width, chunks).expr(), field(width << swizzle.shift, chunks).expr()
    moved = radix.of(_xor(chunk, row)).scaled(width)
    rest = field(1, width) + field(width * chunks, None).scaled(width * chunks)
    return (Digits(moved.terms) + rest + Digits((), moved.constant)).expr()


def _divides(parts: Sequence[tuple[Digit, Digits]], boundaries: Sequence[int], shift: int) -> bool:
    """Return whether digits nest in one another and none straddles a boundary at a fraction of its steps."""
    ordered = sorted((digit for digit, _ in parts), key=lambda d: d.stride)
    nested = all(a.stride * a.size <= b.stride for a, b in itertools.pairwise(ordered))
    edges = [edge << k for edge in boundaries for k in (0, shift)]
    return nested and all(d.stride % e == 0 or e % d.stride == 0 for d in ordered for e in edges)


def _xor(a: Expr, b: Expr) -> Expr:
    """Build `a ^ b`, without the operation if one is zero."""
    zero = [getattr(e, "value", None) == 0 for e in (a, b)]
    return b if zero[0] else a if zero[1] else binary("^", a, b)


def owner_of(layout: Layout, thread: Expr) -> Expr | None:
    """Return the condition that `thread` holds first replicas; None if every thread does."""
    radix = MixedRadix()
    extent = layout.extent("t")
    source = radix.below(radix.of(thread), extent)
    condition: Expr | None = None
    for digit in layout.canonical.replicas:
        if digit.stride * digit.size >= extent:
            first: Expr = Binary("<", thread, const(digit.stride, thread.dtype))
        else:
            first = Binary("==", radix.quotient(source, digit.stride, digit.size).expr(), const(0, dt.int32))
        condition = first if condition is None else binary("and", condition, first)
    return condition


# Pictures of layouts: a grid with one cell per element, as text, SVG or PNG.
#
# A cell of a register layout says thread and register, and threads have colours; a cell of a memory layout says the
# offset, and the 32 banks have colours. Dimensions before the last two are at index 0.

Color = tuple[int, int, int]


def text_picture(layout: Layout, rows: int = 16, columns: int = 16) -> str:
    """Draw the first rows and columns as text; `...` stands for the others."""
    height, width = _size(layout)
    cells = [[_label(layout, i, j) for j in range(min(width, columns))] for i in range(min(height, rows))]
    size = max(len(c) for row in cells for c in row)
    lines = ["  ".join(c.ljust(size) for c in row).rstrip() + ("  ..." if width > columns else "") for row in cells]
    return "\n".join([*lines, *(["..."] if height > rows else [])])


def svg_picture(layout: Layout, bits: int = 32, rows: int | None = None, columns: int | None = None) -> str:
    """Draw the grid, or its first `rows` and `columns`, as an SVG document with the indices beside it.

    `bits` of an element tell the bank of a memory layout.
    """
    cell = 34  # pixels
    height, width = (min(size, most or size) for size, most in zip(_size(layout), (rows, columns), strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * cell}" height="{height * cell}" '
        f'viewBox="{-cell} {-cell} {(width + 1) * cell} {(height + 1) * cell}" '
        'font-family="monospace" font-size="10" text-anchor="middle">',
        f"<title>{layout}</title>",
        f'<rect x="{-cell}" y="{-cell}" width="{(width + 1) * cell}" height="{(height + 1) * cell}" fill="white"/>',
    ]
    middle = cell // 2
    parts += [f'<text x="{j * cell + middle}" y="-8" fill="#667085">{j}</text>' for j in range(width)]
    parts += [f'<text x="{-middle}" y="{i * cell + middle + 3}" fill="#667085">{i}</text>' for i in range(height)]
    for i in range(height):
        for j in range(width):
            red, green, blue = _color(layout, i, j, bits)
            x, y = j * cell, i * cell
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="rgb({red},{green},{blue})" '
                f'stroke="white"/>{_words(_label(layout, i, j), x + middle, y + middle)}'
            )
    return "\n".join([*parts, "</svg>", ""])


def _words(label: str, x: int, y: int) -> str:
    """Write the words of a label below each other, around the middle of a cell."""
    words = label.split()
    first = y + 3 - 6 * (len(words) - 1)
    return "".join(f'<text x="{x}" y="{first + 12 * n}">{word}</text>' for n, word in enumerate(words))


def png_picture(layout: Layout, bits: int = 32, cell: int = 12) -> bytes:
    """Draw the whole grid as a PNG image, a coloured square per element."""
    height, width = _size(layout)
    border = bytes((255, 255, 255))
    rows = []
    for i in range(height):
        line = b"\0" + b"".join(bytes(_color(layout, i, j, bits)) * (cell - 1) + border for j in range(width))
        rows += [line] * (cell - 1) + [b"\0" + border * (cell * width)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width * cell, height * cell, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(b"".join(rows), 9)),
            (b"IEND", b""),
        )
    )


FORMATS: dict[str, Callable[[Layout, int], bytes]] = {
    "txt": lambda layout, bits: (text_picture(layout, *_size(layout)) + "\n").encode(),
    "svg": lambda layout, bits: svg_picture(layout, bits).encode(),
    "png": png_picture,
}


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Encode a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _size(layout: Layout) -> tuple[int, int]:
    """Return rows and columns of the last two dimensions."""
    shape = (1, 1, *layout.shape)
    return shape[-2], shape[-1]


def _place(layout: Layout, i: int, j: int) -> dict[str, int]:
    """Return the thread, register or address of element (i, j)."""
    return layout.apply((*(0,) * (layout.rank - 2), i, j)[-layout.rank :] if layout.rank else ())


def _label(layout: Layout, i: int, j: int) -> str:
    """Return the text of a cell: an address, or thread and register."""
    place = _place(layout, i, j)
    return str(place["m"]) if layout.digits("m") else f"T{place['t']} r{place['r']}"


def _color(layout: Layout, i: int, j: int, bits: int) -> Color:
    """Choose a cell's colour: neighbouring numbers get different hues; registers of one thread get darker."""
    place = _place(layout, i, j)
    if layout.digits("m"):
        hue, light = place["m"] * bits // (8 * WORD) % BANKS / BANKS, 0.8
    else:
        hue, light = place["t"] * 0.618034 % 1, 0.85 - 0.35 * place["r"] / layout.extent("r")
    return tuple(int(255 * c) for c in colorsys.hls_to_rgb(hue, light, 0.7))  # type: ignore[return-value]


# Layouts from functions: find digits and a swizzle that place every element as the function does. The function is
# evaluated at every element, so a layout that is returned is exactly the function.

Place = tuple[int, ...]
FIX_OF_FUNCTION = "give each element a place of its own, counted from 0"


def fit_memory(shape: Sequence[int], function: Callable[..., object]) -> Layout | None:
    """Find the memory layout that places element `(i, j, ...)` at offset `function(i, j, ...)`.

    Several results of the function are indices, the last one contiguous. Return None if digits and a swizzle do not
    express the function. Raises TileError (bad_layout) for places below 0 and for two elements at one place.
    """
    import numpy as np

    raw = _evaluated(function, _grid(shape))
    if any(part.min() < 0 for part in raw):
        raise refusal("gives places that are not natural numbers")
    sizes = [int(part.max()) + 1 for part in raw]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    offsets = sum(part * stride for part, stride in zip(raw, strides, strict=True))
    if len(np.unique(offsets)) < offsets.size:
        raise refusal("puts two elements at one place")
    for swizzle in _swizzles(int(offsets.max())):
        plain = offsets if swizzle is None else swizzle(offsets)  # it is its own inverse
        dims = _digits_that_place(shape, "m", [plain])
        if dims is not None:
            return Layout(dims, (), swizzle).canonical
    return None


def fit_threads(
    shape: Sequence[int], thread: Callable[..., object], register: Callable[..., object] | None, replicas: int = 1
) -> Layout | None:
    """Find the register layout with `(i, j, ...)` in `register(i, j, ...)` of `thread(i, j, ..., replica)`.

    The functions take the replica only if there are several. Without `register`, elements of a thread are counted in
    the order of their indices. Return None if digits do not express it. Raises TileError (bad_layout) for a function
    that is no layout.
    """
    import numpy as np

    box = (*shape, *((replicas,) if replicas > 1 else ()))
    grid = _grid(box)
    (threads,) = _evaluated(thread, grid, 1)
    (registers,) = [_counted(threads)] if register is None else _evaluated(register, grid[: len(shape)], 1)
    if threads.min() < 0 or registers.min() < 0:
        raise refusal("gives places that are not natural numbers")
    if len(np.unique(threads * (int(registers.max()) + 1) + registers)) < threads.size:
        raise refusal("puts two elements into one register")
    dims = _digits_that_place(box, "tr", [threads, registers])
    if dims is None or any(d.axis != "t" for digits in dims[len(shape) :] for d in digits):
        return None
    return Layout(dims[: len(shape)], tuple(d for digits in dims[len(shape) :] for d in digits)).canonical


def shares_places(shape: Sequence[int], *functions: Callable[..., object]) -> bool:
    """Return whether two elements of `shape` have equal results of all `functions`."""
    import numpy as np

    found = np.stack([part for function in functions for part in _evaluated(function, _grid(shape))])
    return bool(np.unique(found, axis=1).shape[1] < found.shape[1])


def meeting_elements(function: Callable[..., object], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return two elements of `shape` that a function puts at one place, and the place."""
    import numpy as np

    found = np.stack(_evaluated(function, _grid(shape)))
    _, first, place = np.unique(found, axis=1, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    other = int(np.flatnonzero(first[place] != np.arange(place.size))[0])
    pair = [tuple(map(int, np.unravel_index(n, tuple(shape)))) for n in (int(first[place[other]]), other)]
    return pair[0], pair[1], tuple(map(int, found[:, other]))


def largest_places(function: Callable[..., object], shape: Sequence[int]) -> list[int]:
    """Return the largest value of each result of a function of the indices of `shape`."""
    return [int(part.max()) for part in _evaluated(function, _grid(shape))]


def inverted(
    function: Callable[..., object], shape: Sequence[int], places: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    """Return the function from indices of a box `places` to those of `shape`, else TileError (bad_layout)."""
    import numpy as np

    raw = np.ravel_multi_index(_evaluated(function, _grid(shape)), tuple(places))
    if len(np.unique(raw)) != math.prod(places) or raw.size != math.prod(places):
        raise refusal("has no inverse: some place has no element, or two")
    table = np.argsort(raw)

    def indices(*place: Any) -> tuple[Any, ...]:
        return tuple(np.unravel_index(table[np.ravel_multi_index(place, tuple(places))], tuple(shape)))

    return indices


def same_places(first: Any, second: Any, shape: Sequence[int]) -> bool:
    """Return whether two functions of indices have equal results at every element of `shape`."""
    import numpy as np

    a, b = (_evaluated(function, _grid(shape)) for function in (first, second))
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def _grid(shape: Sequence[int]) -> list[Any]:
    """Return the indices of all elements of a box, the last fastest: an array for each dimension."""
    import numpy as np

    return [each.reshape(-1) for each in np.indices(tuple(shape), dtype=np.int64)]


def _evaluated(function: Callable[..., object], grid: Sequence[Any], parts: int = 0) -> list[Any]:
    """Evaluate a function for all elements, at once where it accepts arrays, as an array for each result."""
    import numpy as np

    count = grid[0].size if grid else 1
    some = range(0, count, max(1, count // 16))
    samples = [_numbers(function(*(int(axis[k]) for axis in grid))) for k in some]
    with contextlib.suppress(Exception):  # the function is written for numbers, and may do anything with arrays
        given = function(*grid)
        found = [np.broadcast_to(part, count) for part in (given if isinstance(given, tuple | list) else (given,))]
        whole = all(np.issubdtype(part.dtype, np.integer) for part in found)
        if whole and [tuple(int(part[k]) for part in found) for k in some] == samples:
            return [part.astype(np.int64) for part in found]
    rows = [_numbers(function(*map(int, point))) for point in zip(*grid, strict=True)] if grid else samples
    if len({len(row) for row in rows}) != 1 or (parts and len(rows[0]) != parts):
        raise refusal("gives places that are not natural numbers")
    return list(np.array(rows, dtype=np.int64).T)


def refusal(why: str) -> TileError:
    """Return the error for a function that no layout expresses."""
    return error("bad_layout", None, what="the function", why=f"it {why}", fix=FIX_OF_FUNCTION)


def _counted(threads: Any) -> Any:
    """Count for each element the elements of its thread that come before it."""
    import numpy as np

    order = np.argsort(threads, kind="stable")
    runs = threads[order]
    first = np.searchsorted(runs, runs)
    found = np.empty_like(threads)
    found[order] = np.arange(threads.size) - first
    return found


def _swizzles(largest: int) -> Iterator[Swizzle | None]:
    """Yield the swizzles to try for a layout."""
    yield None
    width = largest.bit_length()
    for bits in range(1, 6):
        for base in range(max(0, width - bits)):
            for shift in range(bits, width - base):
                yield Swizzle(bits, base, shift)


def _digits_that_place(shape: Sequence[int], axes: str, places: Sequence[Any]) -> tuple[tuple[Digit, ...], ...] | None:
    """Find digits of each dimension that place every element as given; None if there are none.

    `places` has an array of all elements' places for each of the `axes`.
    """
    import numpy as np

    if any(int(axis[0]) for axis in places):
        return None
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    dims = []
    for n, stride in zip(shape, strides, strict=True):
        line = zip(*(axis[: n * stride : stride].tolist() for axis in places), strict=True)
        digits = _line(list(line), axes)
        if digits is None:
            return None
        dims.append(digits)
    found = Layout(tuple(dims)).apply(_grid(shape))
    if any(not np.array_equal(np.broadcast_to(found[axis], n.shape), n) for axis, n in zip(axes, places, strict=True)):
        return None
    return tuple(dims)


def _line(places: Sequence[Place], axes: str) -> tuple[Digit, ...] | None:
    """Find digits of one dimension from the places along it."""
    digits: list[Digit] = []
    weight = 1
    while weight < len(places):
        step = places[weight]
        moved = [k for k, n in enumerate(step) if n]
        if len(moved) != 1 or step[moved[0]] < 0 or len(places) % weight:
            return None
        most = len(places) // weight
        run = next(
            (k for k in range(most) if places[k * weight] != tuple(n * k for n in step)), most
        )  # how long steps stay equal
        size = max((k for k in range(2, run + 1) if most % k == 0), default=1)
        if size == 1:
            return None
        digits.insert(0, Digit(size, step[moved[0]], axes[moved[0]]))
        weight *= size
    return tuple(digits)


def _numbers(value: object) -> tuple[int, ...]:
    """Convert what an author's function returned to a tuple of integers."""
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else (_number(value),)


def _number(value: object) -> int:
    """Convert a value to an integer. Raises an error for other values."""
    found = getattr(value, "value", value)  # a literal of the language, or Python's
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        raise refusal(f"gives {value!r}, which is no integer")
    return int(found)
