# SPDX-License-Identifier: Apache-2.0
"""Layouts from functions: the digits, and the swizzle, that place every element as the function does.

The function is evaluated at every element, so a layout that is returned is exactly the function; what no digits and no
swizzle express is refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir.layout import Digit, Layout, Swizzle, points

Place = tuple[int, ...]
FIX = "give sums of digits: i // 8, i % 8 and their multiples, each digit to one axis; for memory, an XOR of rows too"


def fit_memory(shape: Sequence[int], function: Callable[..., object]) -> Layout:
    """The layout of memory where element `(i, j, ...)` lies at offset `function(i, j, ...)`, or at the place that
    several results name, the last contiguous. Raises TileError (bad_layout) if there is none."""
    index = list(points(shape))
    raw = [_numbers(function(*p)) for p in index]
    if len({len(r) for r in raw}) != 1 or any(n < 0 for r in raw for n in r):
        raise refusal("gives places that are not natural numbers")
    sizes = [max(r[k] for r in raw) + 1 for k in range(len(raw[0]))]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    offsets = [sum(n * s for n, s in zip(r, strides, strict=True)) for r in raw]
    if len(set(offsets)) < len(offsets):
        raise refusal("puts two elements at one place")
    for swizzle in _swizzles(max(offsets)):
        plain = offsets if swizzle is None else [swizzle(x) for x in offsets]  # it is its own inverse
        dims = _fit(shape, "m", index, [(x,) for x in plain])
        if dims is not None:
            return Layout(dims, (), swizzle).canonical
    raise refusal("is not made of digits, nor of digits and a swizzle")


def fit_threads(
    shape: Sequence[int], thread: Callable[..., object], register: Callable[..., object] | None, replicas: int = 1
) -> Layout:
    """The layout of registers in which `(i, j, ...)` is `register(i, j, ...)` of `thread(i, j, ..., replica)`.

    The functions take the replica only if there are several. Without `register`, elements of a thread are counted in
    the order of their indices. Raises TileError (bad_layout) if there is none.
    """
    box = (*shape, *((replicas,) if replicas > 1 else ()))
    index = list(points(box))
    threads = [_number(thread(*p)) for p in index]
    if register is None:
        registers = _counted(threads)
    else:
        registers = [_number(register(*p[: len(shape)])) for p in index]
    places = list(zip(threads, registers, strict=True))
    if any(n < 0 for p in places for n in p):
        raise refusal("gives places that are not natural numbers")
    if len(set(places)) < len(places):
        raise refusal("puts two elements into one register")
    dims = _fit(box, "tr", index, places)
    if dims is None or any(d.axis != "t" for digits in dims[len(shape) :] for d in digits):
        raise refusal("is not made of digits of threads and registers")
    return Layout(dims[: len(shape)], tuple(d for digits in dims[len(shape) :] for d in digits)).canonical


def refusal(why: str) -> TileError:
    """The error for a function that no layout expresses."""
    return error("bad_layout", None, what="the function", why=f"it {why}", fix=FIX)


def _counted(threads: Sequence[int]) -> list[int]:
    held: dict[int, int] = {}
    found = []
    for t in threads:
        found.append(held.get(t, 0))
        held[t] = found[-1] + 1
    return found


def _swizzles(largest: int) -> Iterator[Swizzle | None]:
    yield None
    width = largest.bit_length()
    for bits in range(1, 6):
        for base in range(max(0, width - bits)):
            for shift in range(bits, width - base):
                yield Swizzle(bits, base, shift)


def _fit(
    shape: Sequence[int], axes: str, index: Sequence[Place], places: Sequence[Place]
) -> tuple[tuple[Digit, ...], ...] | None:
    """Digits of each dimension that place every element so; None if there are none."""
    if any(places[0]):
        return None
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    dims = []
    for n, stride in zip(shape, strides, strict=True):
        digits = _line([places[k * stride] for k in range(n)], axes)
        if digits is None:
            return None
        dims.append(digits)
    layout = Layout(tuple(dims))
    for point, place in zip(index, places, strict=True):
        found = layout.apply(point)
        if any(found[axis] != n for axis, n in zip(axes, place, strict=True)):
            return None
    return tuple(dims)


def _line(places: Sequence[Place], axes: str) -> tuple[Digit, ...] | None:
    """Digits of one dimension from the places along it."""
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
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else (_number(value),)


def _number(value: object) -> int:
    found = getattr(value, "value", value)  # a literal of the language, or Python's
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        raise refusal(f"gives {value!r}, which is no integer")
    return int(found)
