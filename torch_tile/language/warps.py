# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the 32 lanes of a warp: shuffles, votes, sums. For GPUs only, as all names of threads.

All lanes of a warp come here. Each exchange is made where it is written, even if its result is used later or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.hardware import WARP
from torch_tile.intrinsics import memory
from torch_tile.ir import bits, dtype as dt
from torch_tile.ir.expr import Call, Expr, Load, binary, cast, is_number, select, to_expr, truth
from torch_tile.ir.stmt import Store
from torch_tile.language.asynchronous import get_lane_idx, in_kernel
from torch_tile.language.threads import thread_index
from torch_tile.language.trace import let
from torch_tile.tileop.base import Scalar, need_region
from torch_tile.tileop.reduce.op import combine

FULL = 0xFFFFFFFF  # all lanes


def shfl_sync(value: Scalar, lane: Scalar, width: int = WARP, mask: Scalar = FULL) -> Expr:
    """Return `value` of lane number `lane` in each group of `width` neighbouring lanes, a power of two up to 32."""
    value, lane, width = _operands("T.shfl_sync", value, lane, width, mask)
    source = lane if width == WARP else get_lane_idx() // width * width + lane % width
    return _exchange("T.shfl_sync", memory.shuffle(value, source))


def shfl_xor(value: Scalar, lane_mask: Scalar, width: int = WARP, mask: Scalar = FULL) -> Expr:
    """Return `value` of the lane whose number differs by `lane_mask`, in groups of `width`; else the own one."""
    value, bits, width = _operands("T.shfl_xor", value, lane_mask, width, mask)
    got = _exchange("T.shfl_xor", memory.shuffle_xor(value, bits))
    return got if width == WARP else select(bits < width, got, value)


def shfl_up(value: Scalar, delta: Scalar, width: int = WARP, mask: Scalar = FULL) -> Expr:
    """Return `value` of the lane `delta` below; the first `delta` of each `width` lanes keep their own."""
    value, delta, width = _operands("T.shfl_up", value, delta, width, mask)
    got = _exchange("T.shfl_up", memory.shuffle_up(value, delta))
    return got if width == WARP else select(get_lane_idx() % width >= delta, got, value)


def shfl_down(value: Scalar, delta: Scalar, width: int = WARP, mask: Scalar = FULL) -> Expr:
    """Return `value` of the lane `delta` above; the last `delta` of each `width` lanes keep their own."""
    value, delta, width = _operands("T.shfl_down", value, delta, width, mask)
    got = _exchange("T.shfl_down", memory.shuffle_down(value, delta))
    return got if width == WARP else select(get_lane_idx() % width + delta < width, got, value)


def tvm_warp_shuffle(mask: Scalar, value: Scalar, lane: Scalar, width: int = WARP, warp_size: int = WARP) -> Expr:
    """Emit T.shfl_sync of lane `lane` as TIR spells it, with groups of `width`; `warp_size` is 32."""
    return shfl_sync(value, lane, width, mask)


def tvm_warp_shuffle_up(mask: Scalar, value: Scalar, offset: Scalar, width: int = WARP, warp_size: int = WARP) -> Expr:
    """Emit T.shfl_up by `offset` as TIR spells it, with groups of `width`; `warp_size` is 32."""
    return shfl_up(value, offset, width, mask)


def tvm_warp_shuffle_down(
    mask: Scalar, value: Scalar, offset: Scalar, width: int = WARP, warp_size: int = WARP
) -> Expr:
    """Emit T.shfl_down by `offset` as TIR spells it, with groups of `width`; `warp_size` is 32."""
    return shfl_down(value, offset, width, mask)


def activemask() -> Expr:
    """Return a uint64 with a bit for each lane of the warp: all 32 are set, as whole warps come here."""
    return ballot_sync(True)


def any_sync(predicate: Scalar, mask: Scalar = FULL) -> Expr:
    """Return an int32, not 0 where `predicate` holds in any lane of the warp."""
    return cast(_exchange("T.any_sync", memory.vote_any(_vote_condition("T.any_sync", predicate, mask))), dt.int32)


def all_sync(predicate: Scalar, mask: Scalar = FULL) -> Expr:
    """Return an int32, not 0 where `predicate` holds in all lanes of the warp."""
    return cast(_exchange("T.all_sync", memory.vote_all(_vote_condition("T.all_sync", predicate, mask))), dt.int32)


def ballot_sync(predicate: Scalar, mask: Scalar = FULL) -> Expr:
    """Return a uint64 with a bit for each lane of the warp, set where `predicate` holds."""
    return cast(_exchange("T.ballot_sync", memory.ballot(_vote_condition("T.ballot_sync", predicate, mask))), dt.uint64)


def match_any_sync(value: Scalar, mask: Scalar = FULL) -> Expr:
    """Return a uint32 with a bit for each lane of the warp, set where `value` has this thread's bits."""
    own, total = _code("T.match_any_sync", value, mask), cast(0, dt.uint32)
    for lane in range(WARP):
        there = _exchange("T.match_any_sync", memory.shuffle(own, cast(lane, dt.int32)))
        total = total | select(binary("==", there, own), cast(1 << lane, dt.uint32), cast(0, dt.uint32))
    return let("lanes", total)


def match_all_sync(value: Scalar, mask: Scalar = FULL) -> Expr:
    """Return a uint32: all bits set if `value` has the same bits in all lanes of the warp, else 0."""
    own = _code("T.match_all_sync", value, mask)
    first = _exchange("T.match_all_sync", memory.shuffle(own, cast(0, dt.int32)))
    same = _exchange("T.match_all_sync", memory.vote_all(binary("==", first, own)))
    return select(same, cast(FULL, dt.uint32), cast(0, dt.uint32))


def _code(what: str, value: Any, mask: Any) -> Expr:
    """Reinterpret a value as an integer of 32 or 64 bits."""
    if is_number(value) and value == FULL and not is_number(mask):
        value, mask = mask, value
    _require_all_lanes(what, mask)
    own = to_expr(value, op=what)
    if own.dtype.is_float:
        own = bits.reinterpret(own, dt.BY_NAME[f"uint{own.dtype.bits}"])
    return let("own", own if own.dtype.bits == 64 else cast(own, dt.int32))


def warp_reduce(kind: str) -> Callable[[Any], Expr]:
    """Build the language's function T.warp_reduce_<kind>."""
    what = f"T.warp_reduce_{kind}"

    def apply(value: Any) -> Expr:
        total = to_expr(value, op=what)
        if kind.startswith("bit") and total.dtype.is_float:
            why, fix = f"is a {total.dtype}", "bitwise reductions take integers"
            raise error("bad_argument", None, op=what, name="value", why=why, fix=fix)
        for step in (16, 8, 4, 2, 1):
            total = let("total", total)
            total = let("total", combine(kind, total, _exchange(what, memory.shuffle_xor(total, step))))
        return total

    apply.__name__ = apply.__qualname__ = f"warp_reduce_{kind}"
    apply.__doc__ = f"The {kind} of a value over the 32 lanes of a warp, the same bits in each of them."
    return apply


def dp4a(a: Any, b: Any, c: Any) -> None:
    """Add `a[0] * b[0] + ... + a[3] * b[3]` to the int32 `c`: four int8 neighbours from elements `a` and `b` on.

    Products and sums, which any target has.
    """
    first, second, total = (need_region(x, "dp4a", n) for x, n in ((a, "a"), (b, "b"), (c, "c")))
    for name, region, dtype in (("a", first, dt.int8), ("b", second, dt.int8), ("c", total, dt.int32)):
        if region.buffer.dtype != dtype:
            why, fix = f"is of {region.buffer.dtype}", "T.dp4a requires int8 for a and b, and int32 for c"
            raise error("bad_argument", None, op="T.dp4a", name=name, why=why, fix=fix)
    at = in_kernel("T.dp4a")
    found: Expr = Load(total.buffer, total.starts)
    for n in range(4):
        x, y = (cast(Load(r.buffer, (*r.starts[:-1], r.starts[-1] + n)), dt.int32) for r in (first, second))
        found = binary("+", found, x * y)
    at.emit(Store(total.buffer, total.starts, found))


def _operands(what: str, value: Any, other: Any, width: Any, mask: Any) -> tuple[Expr, Expr, int]:
    """Return value, lane and width of a warp shuffle, whose mask may come first, as CUDA's does."""
    if is_number(value) and value == FULL:  # the mask in front, as older kernels and CUDA have it
        value, other, width, mask = other, width, WARP, value
    if not isinstance(width, int) or width not in (1, 2, 4, 8, 16, WARP):
        raise error(
            "bad_argument", None, op=what, name="width", why=f"is {width!r}", fix="give a power of two up to 32"
        )
    _require_all_lanes(what, mask)
    return to_expr(value, op=what), cast(to_expr(other), dt.int32), width


def _vote_condition(what: str, predicate: Any, mask: Any) -> Expr:
    """Return the condition of a warp vote; the mask may be given before it."""
    if is_number(predicate) and predicate == FULL:
        predicate, mask = mask, predicate
    _require_all_lanes(what, mask)
    return predicate_of(what, predicate)


def predicate_of(what: str, value: Any) -> Expr:
    """Return the condition that a vote asks for. Raises TileTypeError for floats, which CUDA would cut to integers."""
    found = to_expr(value, op=what)
    if found.dtype.is_float:
        raise error("float_predicate", None, op=what, dtype=found.dtype)
    return truth(found)


def _require_all_lanes(what: str, mask: Any) -> None:
    """Check that a lane mask names all 32 lanes."""
    mask = getattr(mask, "value", mask)
    if mask not in (FULL, -1):
        fix = "leave it out: all 32 lanes of a warp take part"
        raise error("bad_argument", None, op=what, name="mask", why=f"is {mask!r}", fix=fix)


def _exchange(what: str, exchange: Expr) -> Expr:
    """Record a shuffle or vote in a statement of its own, since not all lanes may use its result."""
    at = in_kernel(what)
    if at.doubtful or at.in_nest:
        why = "is asked for inside T.Parallel" if at.in_nest else f"is wanted only if {at.doubtful} asks for it"
        fix = "write it in a line before" if at.doubtful else "write it outside, where it is known which thread runs"
        raise error("bad_argument", None, op=what, name="value", why=why, fix=fix)
    assert isinstance(exchange, Call)
    thread_index()  # the kernel is one of threads
    return let("exchanged", exchange)
