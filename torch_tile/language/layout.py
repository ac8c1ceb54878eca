# SPDX-License-Identifier: Apache-2.0
"""Layouts that an author gives: functions of indices, swizzles by name, printed layouts.

A request is kept on the buffer or loop, and layout inference takes it as required. CPU tiles are always row-major: a
layout never changes a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const
from torch_tile.ir.layout import Digit, Layout as IRLayout, row_major, shared_tile
from torch_tile.ir.layout_ops import fit_threads, meeting_elements, refusal, shares_places
from torch_tile.language.layout_functions import FreeLayout, MemoryLayout, PartialLayout, constant_sizes, memory_layout
from torch_tile.language.trace import tracer
from torch_tile.language.values import Handle, shape_of

FIX = "give one that covers the shape, or leave the choice to the compiler"


def Layout(shape: Any, forward_fn: Callable[..., Any]) -> IRLayout | FreeLayout:
    """Build a memory layout: `forward_fn(i, j)` is an offset, or several indices, the last one contiguous.

    Sums of digits and an XOR swizzle are kept as asked. Other functions, such as permutations, are hints, and so are
    those over more than a million elements. A function may put two elements at one place, as `i // 8` does, to be
    asked and compared; T.annotate_layout refuses it. Raises TileError (bad_layout) for places below 0.
    """
    return memory_layout(shape, forward_fn)


def Fragment(
    shape: Any,
    forward_fn: Callable[..., Any] | None = None,
    forward_thread_fn: Callable[..., Any] | None = None,
    replicate: int = 1,
    forward_index_fn: Callable[..., Any] | None = None,
) -> IRLayout | FreeLayout:
    """Build a register layout: `forward_fn(i, j)` is (thread, register).

    `forward_thread_fn` and `forward_index_fn` give each of them by itself.

    With `replicate` above 1 the functions for threads take the number of the replica as well. Sums of digits are kept
    as asked, other functions are hints. T.annotate_layout refuses one that puts two elements into one register.
    """
    if forward_fn is None and forward_thread_fn is None:
        fix = "give forward_fn or forward_thread_fn"
        raise error("bad_argument", None, op="T.Fragment", name="forward_fn", why="is missing", fix=fix)
    sizes, thread, register = constant_sizes(shape), forward_thread_fn, forward_index_fn
    if thread is None:
        both = forward_fn

        def thread(*index: int) -> Any:
            return both(*index)[0]  # type: ignore[misc]

        def register(*index: int) -> Any:
            return both(*index, *((0,) if replicate > 1 else ()))[1]  # type: ignore[misc]

    given, box = shape_of(shape, "a layout's shape"), (*sizes, *((replicate,) if replicate > 1 else ()))
    if register is not None and shares_places(box, thread, lambda *index: register(*index[: len(sizes)])):
        return FreeLayout(given, thread, register, replicate, "puts two elements into one register")
    return fit_threads(sizes, thread, register, replicate) or FreeLayout(given, thread, register, replicate)


def make_gemm_fragment_8x8() -> IRLayout | FreeLayout:
    """Return the layout of 8 x 8 elements that a warp's MMAs accumulate: two neighbours of a row in each thread."""
    return Fragment((8, 8), lambda i, j: (i * 4 + j // 2, j % 2))


def make_gemm_fragment_8x8_transposed() -> IRLayout | FreeLayout:
    """Return the layout of 8 x 8 elements of a transposed MMA: two neighbours of a column in each thread."""
    return Fragment((8, 8), lambda i, j: (j * 4 + i // 2, i % 2))


def PartialFragment(
    shape: Any,
    forward_fn: Callable[..., Any] | None = None,
    forward_thread_fn: Callable[..., Any] | None = None,
    replicate: int = 1,
    forward_index_fn: Callable[..., Any] | None = None,
    combine: int | None = None,
) -> PartialLayout:
    """Build the layout of a reducer's partial sums, for T.annotate_layout: as T.Fragment, with addends as replicas.

    `forward_fn`, `forward_thread_fn` and `forward_index_fn` take the number of the replica last.

    Of `replicate` copies of an element, each run of `combine` are addends; None takes all of them. It is a hint: the
    compiler chooses itself how many threads add up an element, and the result does not depend on it. Raises TileError
    (bad_argument) unless `combine` divides `replicate`.
    """
    addends = replicate if combine is None else combine
    if addends < 1 or replicate % addends:
        why, fix = f"is {combine}, which does not divide the {replicate} replicas", "give a divisor of `replicate`"
        raise error("bad_argument", None, op="T.PartialFragment", name="combine", why=why, fix=fix)
    plan = Fragment(shape, forward_fn, forward_thread_fn, replicate, forward_index_fn)
    if isinstance(plan, FreeLayout) and plan.fault:
        raise refusal(plan.fault)
    given = shape_of(shape, "a layout's shape")
    thread = forward_fn if forward_thread_fn is None else forward_thread_fn
    assert thread is not None  # T.Fragment asked for one of both
    return PartialLayout(given, thread, forward_index_fn, replicate, combine_size=addends)


def make_full_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """Return a layout of memory in panels of 128 bytes (or fewer) whose 16-byte chunks are XORed with their row.

    `k_major` and `allow_pad` are hints of TileLang's without effect: panels fit either order of a product's operands.
    """
    return shared_tile(constant_sizes(buffer.shape), buffer.dtype.bits, 128)


def make_half_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """Return what `make_full_bank_swizzled_layout` does, in panels of 64 bytes.

    `k_major` and `allow_pad` are as there.
    """
    return shared_tile(constant_sizes(buffer.shape), buffer.dtype.bits, 64)


def make_quarter_bank_swizzled_layout(buffer: Handle, k_major: bool = True, allow_pad: bool = True) -> IRLayout:
    """Return what `make_full_bank_swizzled_layout` does, in panels of 32 bytes.

    `k_major` and `allow_pad` are as there.
    """
    return shared_tile(constant_sizes(buffer.shape), buffer.dtype.bits, 32)


make_swizzled_layout = make_wgmma_swizzled_layout = make_volta_swizzled_layout = make_full_bank_swizzled_layout


def make_fully_replicated_layout_fragment(buffer: Handle, threads: int) -> IRLayout | FreeLayout:
    """Return the layout in which each of `threads` threads holds all elements of the fragment, row by row."""
    sizes = constant_sizes(buffer.shape)
    places = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]

    def register(*index: Any) -> Any:
        return sum(i * place for i, place in zip(index, places, strict=False))

    return Fragment(sizes, None, lambda *index: index[-1], int(threads), register)


def make_linear_layout(buffer: Handle) -> IRLayout:
    """Return the row-major layout."""
    return row_major(constant_sizes(buffer.shape))


def annotate_layout(layouts: dict[Any, Any]) -> None:
    """Set the `layouts` of buffers: `{A_shared: T.make_swizzled_layout(A_shared), p: T.Fragment(...)}`.

    A value is a layout, a printed one, or a function of the indices. T.Layout (shared memory) and T.Fragment take such
    functions. For a tensor in global memory it is a hint of TileLang's without effect.
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
        elif handle.buffer in at.reducers:
            partial_sums(handle.buffer, wanted)
        else:
            request(handle.buffer, wanted, at.threads)


def hint(buffer: Buffer, wanted: Any) -> None:
    """Keep an author's layout of a tensor as a hint: the caller's memory decides how the tensor lies."""
    if wanted is not None and not callable(wanted):
        layout_of(wanted, (), True)


def partial_sums(buffer: Buffer, wanted: Any) -> None:
    """Check an author's layout of a reducer's partial sums, which is a hint."""
    if not isinstance(wanted, PartialLayout):
        why = f"gives the reducer `{buffer.name}` a layout of finished values"
        fix = "give T.PartialFragment, whose replicas are addends, or leave the choice to the compiler"
        raise error("bad_argument", None, op="T.annotate_layout", name="layouts", why=why, fix=fix)
    covers(wanted, buffer.static_shape or (), f"`{buffer.name}`")


def _not_injective(layout: FreeLayout, shape: Sequence[int], buffer: Buffer) -> TileError:
    """Make the error for a layout that puts two elements at one place, and name both."""
    one, other, place = meeting_elements(layout.function, shape)
    why = f"it must be injective: elements {one} and {other} both map to physical coordinates {place}"
    return error("bad_layout", None, what=f"the function for {buffer.scope} buffer `{buffer.name}`", why=why, fix=FIX)


def request(buffer: Buffer, wanted: Any, threads: int) -> None:
    """Store an author's layout on the buffer."""
    shape = buffer.static_shape
    if wanted is None or shape is None:  # a tile of unknown size is an error of its own
        return
    layout = layout_of(wanted, shape, buffer.scope == "shared")
    if isinstance(layout, FreeLayout):
        if layout.fault:
            raise _not_injective(layout, shape, buffer) if buffer.scope == "shared" else refusal(layout.fault)
        if isinstance(layout, PartialLayout):
            why, fix = "is a T.PartialFragment, of partial sums", f"give T.Fragment: `{buffer.name}` is no reducer"
            raise error("bad_argument", None, op="T.annotate_layout", name="layouts", why=why, fix=fix)
        covers(layout, shape, f"`{buffer.name}`")
        return
    layout = layout.plain if isinstance(layout, MemoryLayout) else layout
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
    sizes = constant_sizes(tuple(extents))
    given = layout_of(wanted, sizes, False)
    if isinstance(given, FreeLayout):
        if given.fault:
            raise refusal(given.fault)
        covers(given, sizes, "the loop")
        return None
    layout = on_threads(given, threads)
    if layout.digits("m"):
        raise error("bad_layout", None, what=f"`{layout}` for the loop", why="it places memory", fix=FIX)
    covers(layout, sizes, "the loop")
    return layout
