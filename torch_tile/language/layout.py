# SPDX-License-Identifier: Apache-2.0
"""Layouts that an author gives: functions of indices, swizzles by name, printed layouts.

A request is kept on the buffer or loop, and layout inference takes it as required. CPU tiles are always row-major: a
layout never changes a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr
from torch_tile.ir.layout import Digit, Layout as IRLayout, row_major, shared_tile
from torch_tile.ir.layout_ops import fit_memory, fit_threads, same_places
from torch_tile.ir.node import equal
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle, shape_of
from torch_tile.tileop.base import describe

FIX = "give one that covers the shape, or leave the choice to the compiler"


MOST_ELEMENTS = 1 << 20  # of tiles on a chip; functions over larger shapes are for tensors, and are not evaluated


@dataclass(frozen=True)
class FreeLayout:
    """A layout that this compiler cannot express, or one for a tensor: it is kept as a hint only.

    The compiler places the elements of the tile itself. Results do not depend on it.
    """

    shape: tuple[Expr, ...]
    function: Callable[..., Any]
    register: Callable[..., Any] | None = None  # of a fragment whose `function` gives threads
    replicate: int = 1

    def is_equal(self, other: Any) -> bool:
        """Return whether another layout has this shape and places every element alike."""
        if not isinstance(other, FreeLayout) or len(self.shape) != len(other.shape):
            return False
        if self.replicate != other.replicate or not all(map(equal, self.shape, other.shape)):
            return False
        sizes = [int(n.value) for n in self.shape if isinstance(n, Const)]
        if len(sizes) < len(self.shape) or math.prod(sizes) > MOST_ELEMENTS:
            return (self.function, self.register) == (other.function, other.register)
        replicas = (self.replicate,) if self.replicate > 1 else ()
        return same_places(self.function, other.function, (*sizes, *replicas)) and (
            self.register is other.register
            or (None not in (self.register, other.register) and same_places(self.register, other.register, sizes))
        )

    def __repr__(self) -> str:
        return f"T.Layout({describe(self.shape)}, a function without digits)"


def Layout(shape: Any, forward_fn: Callable[..., Any]) -> IRLayout | FreeLayout:
    """Build a memory layout: `forward_fn(i, j)` is an offset, or several indices, the last one contiguous.

    Sums of digits and an XOR swizzle are kept as asked. Other functions, such as permutations, are hints, and so are
    those over more than a million elements. Raises TileError (bad_layout) for two elements at one place.
    """
    given = shape_of(shape, "a layout's shape")
    if all(isinstance(n, Const) for n in given) and math.prod(sizes := _sizes(shape)) <= MOST_ELEMENTS:
        return fit_memory(sizes, forward_fn) or FreeLayout(given, forward_fn)
    return FreeLayout(given, forward_fn)


def Fragment(
    shape: Any, forward_fn: Callable[..., Any] | None = None, forward_thread_fn: Callable[..., Any] | None = None,
    replicate: int = 1, forward_index_fn: Callable[..., Any] | None = None,
) -> IRLayout | FreeLayout:  # fmt: skip
    """Build a register layout: `forward_fn(i, j)` is (thread, register), or each has a function of its own.

    With `replicate` above 1 the functions for threads take the number of the replica as well. Sums of digits are kept
    as asked, other functions are hints. Raises TileError (bad_layout) for two elements in one register.
    """
    if forward_fn is None and forward_thread_fn is None:
        fix = "give forward_fn or forward_thread_fn"
        raise error("bad_argument", None, op="T.Fragment", name="forward_fn", why="is missing", fix=fix)
    sizes, thread, register = _sizes(shape), forward_thread_fn, forward_index_fn
    if thread is None:
        both = forward_fn

        def thread(*index: int) -> Any:
            return both(*index)[0]  # type: ignore[misc]

        def register(*index: int) -> Any:
            return both(*index, *((0,) if replicate > 1 else ()))[1]  # type: ignore[misc]

    found = fit_threads(sizes, thread, register, replicate)
    return found or FreeLayout(shape_of(shape, "a layout's shape"), thread, register, replicate)


def _sizes(shape: Any) -> tuple[int, ...]:
    """Check a shape and return its constant sizes."""
    given = shape_of(shape, "a layout's shape")
    sizes = tuple(int(s.value) for s in given if isinstance(s, Const) and s.value > 0)
    if len(sizes) < len(given):
        raise error("bad_shape", None, what="a layout's shape", want="positive integers", got=repr(shape)[:60])
    return sizes


def make_full_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """Memory in panels of 128 bytes (or fewer) whose 16-byte chunks are XORed with their row.

    `k_major` and `allow_pad` are hints of TileLang's without effect: panels fit either order of a product's operands.
    """
    return shared_tile(_sizes(buffer.shape), buffer.dtype.bits, 128)


def make_half_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """`make_full_bank_swizzled_layout` in panels of 64 bytes."""
    return shared_tile(_sizes(buffer.shape), buffer.dtype.bits, 64)


def make_quarter_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """`make_full_bank_swizzled_layout` in panels of 32 bytes."""
    return shared_tile(_sizes(buffer.shape), buffer.dtype.bits, 32)


make_swizzled_layout = make_wgmma_swizzled_layout = make_volta_swizzled_layout = make_full_bank_swizzled_layout


def make_fully_replicated_layout_fragment(buffer: Handle, threads: int) -> IRLayout | FreeLayout:
    """Return the layout in which each of `threads` threads holds all elements of the fragment, row by row."""
    sizes = _sizes(buffer.shape)
    places = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]

    def register(*index: Any) -> Any:
        return sum(i * place for i, place in zip(index, places, strict=False))

    return Fragment(sizes, None, lambda *index: index[-1], int(threads), register)


def make_linear_layout(buffer: Handle) -> IRLayout:
    """Return the row-major layout."""
    return row_major(_sizes(buffer.shape))


def annotate_layout(layouts: dict[Any, Any]) -> None:
    """Set the layout of buffers: `{A_shared: T.make_swizzled_layout(A_shared), p: T.Fragment(...)}`.

    A value is a layout, a printed one, or a function of the indices, as T.Layout (shared memory) and T.Fragment take.
    For a tensor in global memory it is a hint of TileLang's without effect.
    """
    at = tracer("T.annotate_layout")
    for handle, wanted in layouts.items():
        if not isinstance(handle, Handle):
            raise error(
                "bad_argument", None, op="T.annotate_layout", name="layouts", why=f"has the key {handle!r}",
                fix="keys are buffers",
            )  # fmt: skip
        if handle.buffer.scope == "global":
            hint(handle.buffer, wanted)
        else:
            request(handle.buffer, wanted, at.threads)


def hint(buffer: Buffer, wanted: Any) -> None:
    """Keep an author's layout of a tensor as a hint: the caller's memory decides how the tensor lies."""
    if wanted is not None and not callable(wanted):
        layout_of(wanted, (), True)


def request(buffer: Buffer, wanted: Any, threads: int) -> None:
    """Store an author's layout on the buffer."""
    shape = buffer.static_shape
    if wanted is None or shape is None:  # a tile of unknown size is an error of its own
        return
    layout = layout_of(wanted, shape, buffer.scope == "shared")
    if isinstance(layout, FreeLayout):
        covers(layout, shape, f"`{buffer.name}`")
        return
    layout = layout if buffer.scope == "shared" else on_threads(layout, threads)
    foreign = {"shared": ("t", "r"), "fragment": ("m",)}.get(buffer.scope, ("t", "r", "m"))
    if any(layout.digits(axis) for axis in foreign):
        why = f"it does not fit {buffer.scope} memory"
        raise error("bad_layout", None, what=f"`{layout}` for `{buffer.name}`", why=why, fix=FIX)
    covers(layout, shape, f"`{buffer.name}`")
    object.__setattr__(buffer, "layout", layout)


def covers(layout: IRLayout | FreeLayout, shape: Sequence[int], what: str) -> None:
    """Raise bad_layout unless every element of `shape` has its place."""
    sizes = (
        layout.shape if isinstance(layout, IRLayout) else tuple(s.value for s in layout.shape if isinstance(s, Const))
    )
    if len(sizes) != len(shape) or any(a < b for a, b in zip(sizes, shape, strict=True)):
        why = f"its shape is {sizes}, not {tuple(shape)}"
        raise error("bad_layout", None, what=f"`{layout}` for {what}", why=why, fix=FIX)


def layout_of(wanted: Any, shape: Sequence[int], memory: bool) -> IRLayout | FreeLayout:
    """Convert whatever an author gives into a layout."""
    if isinstance(wanted, IRLayout | FreeLayout):
        return wanted
    if isinstance(wanted, str):
        return IRLayout.parse(wanted)
    if callable(wanted):
        return Layout(shape, wanted) if memory else Fragment(shape, wanted)
    fix = "give T.Layout, T.Fragment or a function of the indices"
    raise error("bad_layout", None, what=f"{wanted!r}"[:60], why="it is not made of digits", fix=fix)


def on_threads(layout: IRLayout, threads: int) -> IRLayout:
    """Extend a layout to all `threads` of the block. Unmentioned threads hold replicas."""
    if layout.digits("m"):
        return layout
    used = layout.extent("t")
    if threads % used:
        why = f"it is for {used} threads, and the block has {threads}"
        raise error("bad_layout", None, what=f"`{layout}`", why=why, fix="launch a multiple of its threads")
    extra = (Digit(threads // used, used, "t"),)
    return IRLayout(layout.dims, (*extra, *layout.replicas), layout.swizzle).canonical


def loop_layout(wanted: Any, extents: Sequence[Any], threads: int) -> IRLayout | None:
    """Return the layout asked for a T.Parallel loop."""
    if wanted is None:
        return None
    sizes = _sizes(tuple(extents))
    given = layout_of(wanted, sizes, False)
    if isinstance(given, FreeLayout):
        covers(given, sizes, "the loop")
        return None
    layout = on_threads(given, threads)
    if layout.digits("m"):
        raise error("bad_layout", None, what=f"`{layout}` for the loop", why="it places memory", fix=FIX)
    covers(layout, sizes, "the loop")
    return layout
