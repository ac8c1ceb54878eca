# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of one or several neighbours, which return the previous values, and atomic loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_tile.diagnostics.errors import TileError, error
from torch_tile.intrinsics import memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Expr, Load, Var, Vector, binary, const
from torch_tile.ir.stmt import Alloc, Block, For, LoopKind, Store
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.effects import acts
from torch_tile.language.trace import Tracer, make_variable
from torch_tile.language.values import Handle
from torch_tile.tileop.atomic import ATOMICS, ArriveLast, Atomic, check_order
from torch_tile.tileop.base import Scalar, Tile, is_one, need_region, region_of

TMA_ADDS = "float16", "bfloat16", "float32", "int32", "uint32", "uint64"  # of cp.reduce.async.bulk


def update(name: str) -> Callable[..., Expr | None]:
    """Build the language's function T.atomic_<name>."""
    what = f"T.atomic_{name}"

    def apply(
        dst: Tile, value: Tile | Scalar, memory_order: str | None = None, return_prev: bool = False
    ) -> Expr | None:
        return record(dst, value, memory_order, return_prev)

    def record(dst: Any, value: Any, memory_order: str | None, return_prev: bool, use_tma: bool = False) -> Expr | None:
        """Record the update, or give the previous value."""
        at = in_kernel(what)
        op = ATOMICS[name].build(dst, value, memory_order, use_tma)
        if return_prev:
            return _previous(at, what, op)
        at.emit(op)
        return None

    def add(
        dst: Tile,
        value: Tile | Scalar,
        memory_order: str | None = None,
        return_prev: bool = False,
        use_tma: bool = False,
    ) -> Expr | None:
        if use_tma and (dtype := Handle(need_region(dst, "atomic_add", "dst").buffer).dtype) not in TMA_ADDS:
            known = ", ".join(TMA_ADDS)
            why = f"is True: TMA atomic add does not support dtype {dtype}; supported scalar dtypes are {known}"
            raise error("bad_argument", None, op=what, name="use_tma", why=why, fix="leave it out")
        if use_tma and return_prev:
            why, fix = "is True, and a TMA gives no previous value", "leave it or return_prev out"
            raise error("bad_argument", None, op=what, name="use_tma", why=why, fix=fix)
        return record(dst, value, memory_order, return_prev, bool(use_tma))

    apply.__name__ = apply.__qualname__ = add.__name__ = add.__qualname__ = f"atomic_{name}"
    apply.__doc__ = f"""Update `dst`, an element or each element of a region, in one step that nobody divides: {name}.

    With `return_prev`, of one element, gives the value that stood there before: to the thread that makes the update,
    and where all threads of the block come by together, in which case it is made once, to all of them. `memory_order`
    is "relaxed" (others may see what was written before and after it in any order), "acquire", "release", "acq_rel" or
    "seq_cst". Bitwise updates take integers and bool.
    """
    tma = """`use_tma` is a hint. Raises TileError for types that a TMA does not add, with `return_prev`, and on targets
    without a TMA."""
    add.__doc__ = f"{apply.__doc__}{tma}\n    "
    return add if name == "add" else apply


def _previous(at: Tracer, what: str, op: Atomic) -> Expr:
    """Record an atomic update that returns the previous value."""
    why, fix = "", "ask for it of one element, in a line before"
    if at.doubtful:
        why = f"is wanted only if {at.doubtful} asks for it"
    elif isinstance(op.value, Region) or not all(is_one(e) for e in op.dst.extents):
        why = "is asked for of more than one element"
    elif problems := op.check():
        raise TileError(*problems)
    if why:
        raise error("bad_argument", None, op=what, name="return_prev", why=why, fix=fix)
    assert isinstance(op.value, Expr)
    previous = make_variable("previous", op.dst.buffer.dtype, None)
    before, after = memory.ORDERS[op.memory_order]
    if before:
        at.emit(memory.memory_fence())
    place = Address(op.dst.buffer, op.dst.starts)
    at.emit(Store(previous.buffer, (), memory.atomic(place, op.value, op.kind)))
    if after:
        at.emit(memory.memory_fence())
    return previous


def add_neighbours(count: int) -> Callable[..., Vector | None]:
    """Build the language's function T.atomic_addx<count>."""
    what = f"T.atomic_addx{count}"

    def apply(
        dst: Tile, value: Tile | Vector, return_prev: bool = False, memory_order: str | None = None
    ) -> Vector | None:
        at = in_kernel(what)
        given = list[Any]()
        targets = _named_elements(dst, what, count)
        if isinstance(value, Vector):
            given += value.lanes
        else:
            source = need_region(value, f"atomic_addx{count}", "value")
            if not isinstance(dst, Vector) and not return_prev:
                at.emit(_added_in_a_loop(need_region(dst, what, "dst"), source, count, memory_order))
                return None
            given += [_neighbour(source, n) for n in range(count)]
        if len(given) != count:
            why, fix = f"has {len(given)} values", f"give {count}"
            raise error("bad_argument", None, op=what, name="value", why=why, fix=fix)
        ops = []
        for n, one in enumerate(given):
            added = one if isinstance(value, Vector) or return_prev else region_of(one)
            ops.append(ATOMICS["add"].build(targets[n], added, memory_order))
        if return_prev:
            return Vector([_previous(at, what, op) for op in ops])
        for op in ops:
            at.emit(op)
        return None

    apply.__name__ = apply.__qualname__ = f"atomic_addx{count}"
    apply.__doc__ = f"""Add {count} neighbours along the last dimension, from an element on, each in one step.

    `dst` and `value` name the first of them: `T.atomic_addx{count}(A[i, j], tile[k, l])`, or all by a slice or a
    T.Ramp; a value may also be what T.add2 and others give. With `return_prev`, gives what stood there before, as
    T.atomic_add does: `v[0]`, `v[1]`, ...
    """
    return apply


def _named_elements(dst: Any, what: str, count: int) -> list[Load]:
    """Return the elements that a place names: by its first one, or as the lanes of `A[T.Ramp(i, 1, count)]`."""
    if not isinstance(dst, Vector):
        target = need_region(dst, what.removeprefix("T."), "dst")
        return [_neighbour(target, n) for n in range(count)]
    found = [lane for lane in dst.lanes if isinstance(lane, Load)]
    if len(found) != count or len(dst.lanes) != count:
        why, fix = f"names {len(found)} elements", f"give {count}, A[i : i + {count}]"
        raise error("bad_argument", None, op=what, name="dst", why=why, fix=fix)
    return found


def _added_in_a_loop(target: Region, source: Region, count: int, memory_order: str | None) -> For:
    """Return the vector loop that adds neighbours of one buffer to those of another."""
    n = Var("n", dt.int32, "loop")
    op = ATOMICS["add"].build(_neighbour(target, n), region_of(_neighbour(source, n)), memory_order)
    return For(LoopKind.VECTOR, (n,), (const(0, dt.int32),), (const(count, dt.int32),), Block((op,)))


def _neighbour(region: Region, n: Expr | int) -> Load:
    """Load the element `n` places after the start of a region."""
    *outer, last = region.starts
    return Load(region.buffer, (*outer, last if isinstance(n, int) and n == 0 else binary("+", last, n)))


def atomic_load(src: Tile, memory_order: str = "seq_cst") -> Expr:
    """Load the element `src` atomically. The load is repeated each time, as other threads may change the element.

    `memory_order` is "relaxed", "acquire" or "seq_cst", which also show what was written before the value was.
    """
    in_kernel("T.atomic_load")
    order = {"consume": "acquire"}.get(memory_order) or check_order("T.atomic_load", memory_order, memory.LOAD_ORDERS)
    region = need_region(src, "atomic_load", "src")
    if not all(is_one(e) for e in region.extents) or region.buffer.scope not in ("global", "shared"):
        why, fix = "is no element of global or shared memory", "give one element, A[i, j]"
        raise error("bad_argument", None, op="T.atomic_load", name="src", why=why, fix=fix)
    return memory.atomic_load(Address(region.buffer, region.starts), order)


# T.arrive_last: blocks leave partial results in global memory, and the last block combines them.


@acts
def arrive_last(counter: Any, count: Any, flag: Any = None) -> Expr:
    """Count this block as arrived, and return whether it is the last of `count` blocks. All its threads get the same
    answer.

    `counter`, an element of an int32 tensor, is 0 before the first arrival and again after the last one. The last block
    sees what the others wrote to global memory before they arrived. `count` is the same for all threads of the block.
    All threads come here, outside T.Parallel. `flag`, one int32 of shared memory, is for printed kernels.
    """
    at = in_kernel("T.arrive_last")
    if at.doubtful:
        why, fix = f"is counted only if {at.doubtful} asks for it", "name it in a line before, under an `if` of its own"
        raise error("bad_argument", None, op="T.arrive_last", name="counter", why=why, fix=fix)
    if flag is None:
        one = Buffer("arrived_last", (const(1, dt.int32),), dt.int32, "shared")
        op = ArriveLast.build(counter, count, one)
        at.emit(Alloc(one))
        at.own(one)
    else:
        op = ArriveLast.build(counter, count, need_region(flag, "arrive_last", "flag"))
    at.emit(op)
    return binary("!=", Load(op.flag.buffer, op.flag.starts), const(0, dt.int32))
