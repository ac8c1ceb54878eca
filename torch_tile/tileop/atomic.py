# SPDX-License-Identifier: Apache-2.0
"""T.atomic_add, atomic_max, atomic_or, atomic_store, ...: updates of memory that several blocks may make at once.

A region takes a region or a scalar; each element is one atomic update. An update orders nothing else, unless its author
asks for that: fences before and after it then keep what others see in order.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from torch_tile.diagnostics.errors import Diagnostic, diagnose, error
from torch_tile.intrinsics import memory
from torch_tile.intrinsics.memory import ORDERS, STORE_ORDERS, atomic, memory_fence
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, binary, cast, const, is_number, to_expr
from torch_tile.ir.node import node_class
from torch_tile.ir.stmt import Block, Do, If, Stmt, Store
from torch_tile.tileop.base import (
    RegisteredOp,
    Scalar,
    Tile,
    describe_tile,
    need_region,
    parallel,
    region_of,
    same_extents,
    scalar,
    spread,
    squeezed,
    tile_op,
)
from torch_tile.tileop.copy.op import extend_head
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env


@node_class
class Atomic(RegisteredOp):
    """Update each element of `dst` by `dst = fold(dst, value)`, indivisibly and in a memory order of ORDERS."""

    kind: ClassVar[str] = ""
    dst: Region
    value: Region | Expr
    memory_order: str = "relaxed"
    use_tma: bool = False  # whether the author asked for a TMA, which not every target has

    @classmethod
    def build(cls, dst: Tile, value: Tile | Scalar, memory_order: str | None = None, use_tma: bool = False) -> Atomic:
        """Build the op. `dst` is an element, slice or buffer; `value` is a scalar, or a region of its shape."""
        known = STORE_ORDERS if cls.kind == "exchange" else ORDERS
        order = check_order(f"T.{cls.op_name}", memory_order or "relaxed", known)
        target = region_of(dst)
        if target is None:
            raise error("atomic_target", None, op=cls.op_name, got=type(dst).__name__)
        source = None if isinstance(value, Expr) or is_number(value) else region_of(value)
        if source is None:
            return cls(target, scalar(value, f"T.{cls.op_name}", target.buffer), order, use_tma)
        if isinstance(dst, Load):
            target = extend_head(target, source)
        return cls(target, source, order, use_tma)

    def check(self) -> list[Diagnostic]:
        """Check that a region value has the destination's extents, and that bitwise updates are integers."""
        dtype = self.dst.buffer.dtype
        if self.kind in BITWISE and dtype.is_float:
            why, fix = f"has dtype {dtype}", "bitwise updates take integers"
            return [diagnose("bad_argument", self.span, op=f"T.{self.op_name}", name="dst", why=why, fix=fix)]
        if self.kind == "add" and dtype.kind == "bool":
            why, fix = f"has dtype {dtype}", "count in an integer type, or set elements by T.atomic_or"
            return [diagnose("bad_argument", self.span, op=f"T.{self.op_name}", name="dst", why=why, fix=fix)]
        given = self.value.dtype if isinstance(self.value, Expr) else self.value.buffer.dtype
        if given.is_float and not dtype.is_float:
            return [diagnose("wrong_dtype_store", self.span, value=given, buffer=self.dst.buffer.name, want=dtype)]
        if isinstance(self.value, Expr) or same_extents(squeezed(self.dst), squeezed(self.value)):
            return []
        src, dst = (describe_tile(side, side.extents) for side in (self.value, self.dst))
        return [diagnose("copy_shape", self.span, src=src, dst=dst)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the destination as read and written, and a region value as read."""
        return [self.dst] + ([] if isinstance(self.value, Expr) else [self.value]), [self.dst]

    def lower_cpu(self) -> Stmt:
        """Emit one atomic operation per element."""
        self._need_tma("cpu", False)
        return self._each()

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand no layout: each thread updates memory with the elements of a value fragment that it holds."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit one atomic operation per element."""
        self._need_tma(str(ctx.target), ctx.target.has_tma)
        return self._each()

    def _need_tma(self, target: str, has_tma: bool) -> None:
        """Raise an author error if the author asked for a TMA, and the target has none."""
        if self.use_tma and not has_tma:
            why = f"is True: TMA atomic add requires a CUDA target with TMA support (SM90+), and {target} has none"
            raise error("bad_argument", self.span, op=f"T.{self.op_name}", name="use_tma", why=why, fix="leave it out")

    def _each(self) -> Stmt:
        """Return a parallel nest that updates every element."""
        target = self.dst.buffer

        def one(point: tuple[Any, ...]) -> Stmt:
            """Emit the update of one element."""
            value = self.value
            if not isinstance(value, Expr):
                value = cast(Load(value.buffer, spread(value, point)), target.dtype)
            return Do(atomic(Address(target, spread(self.dst, point)), value, self.kind))

        extents = squeezed(self.dst)
        return ordered(parallel(extents, one) if extents else one(()), self.memory_order)

    def evaluate(self, env: Env) -> None:
        """Update the region in float64 or int64. Blocks run one after another, so plain updates are atomic."""

        old = env.read(self.dst)
        if isinstance(self.value, Expr):
            new = env.full(env.extents(self.dst), env.value(self.value), self.dst.buffer.dtype)
        else:
            new = env.read(self.value).to(old.dtype).reshape(old.shape)
        wide = env.wide(self.dst.buffer.dtype)
        env.write(self.dst, folded(self.kind, old.to(wide), new.to(wide), self.dst.buffer.dtype).to(old.dtype))


def folded(kind: str, old: Any, new: Any, dtype: dt.DType) -> Any:
    """Apply an update to two tensors in float64 or int64, which hold values of `dtype`."""
    if kind in ("max", "min") and dtype.name == "uint64":  # held as two's complement
        top = -(2**63)
        return folds()[kind](old ^ top, new ^ top) ^ top
    return folds()[kind](old, new)


def folds() -> dict[str, Any]:
    """Return the function of each kind of update, from the old value and the operand (tensors of one type)."""
    import torch

    return {
        "add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and,
        "or": torch.bitwise_or, "xor": torch.bitwise_xor, "exchange": lambda old, new: new,
    }  # fmt: skip


def check_order(what: str, memory_order: Any, known: Collection[str] = ORDERS) -> str:
    """Return the memory order of this name; raise an author error for a name that is not among `known`."""
    if memory_order not in known:
        why = f"is {memory_order!r}"
        fix = f"{what} does not support memory_order {memory_order!r}; give one of {', '.join(known)}"
        raise error("bad_argument", None, op=what, name="memory_order", why=why, fix=fix)
    return str(memory_order)


def ordered(update: Stmt, memory_order: str) -> Stmt:
    """Put an update between the fences of its memory order."""
    before, after = ORDERS[memory_order]
    if not before and not after:
        return update
    return Block((*[memory_fence()] * before, update, *[memory_fence()] * after))


def _declare(name: str, kind: str) -> type[Atomic]:
    """Declare the tile op of one kind of atomic update."""
    cls = type(f"Atomic{name.capitalize()}", (Atomic,), {"kind": kind, "__doc__": Atomic.__doc__})
    return tile_op(f"atomic_{name}")(node_class(cls))


BITWISE = ("and", "or", "xor")
ATOMICS = {k: _declare(k, k) for k in ("add", "max", "min", *BITWISE)} | {"store": _declare("store", "exchange")}
globals().update({cls.__name__: cls for cls in ATOMICS.values()})  # where pickle looks for them


# T.arrive_last: this block arrives at a counter in global memory, and learns whether it is the last of so many.
#
# What blocks wrote to global memory before they arrived, the last one sees after it. The last one sets the counter
# back to 0, so that it serves every launch.

_ONE_AT_A_TIME = threading.Lock()  # blocks of a cluster run side by side in the interpreter of tiles


@tile_op("arrive_last")
@node_class
class ArriveLast(RegisteredOp):
    """Set `flag` to 1 in the last of `count` blocks that arrive, else to 0; `counter` counts arrivals from 0."""

    counter: Region
    count: Expr
    flag: Region

    @classmethod
    def build(cls, counter: Any, count: Any, flag: Any) -> ArriveLast:
        """Build the op.

        `counter` is an element of a global int32 tensor, `count` an integer, `flag` an int32 in shared memory.
        """
        where = region_of(counter)
        if where is None or any(r.keep for r in where.ranges):
            _refuse("counter", "is no element of a tensor")
        assert where is not None
        tensor = where.buffer
        if tensor.scope != "global" or tensor.dtype != dt.int32:
            _refuse("counter", f"is an element of `{tensor.name}`, {tensor.dtype} in {tensor.scope} memory")
        if tensor.origin != "param":
            _refuse("counter", f"is an element of `{tensor.name}`, which nobody sets to 0 before a launch")
        number = to_expr(count) if isinstance(count, Expr) or is_number(count) else None
        if number is None or not number.dtype.is_integer or (isinstance(number, Const) and number.value < 1):
            why = f"is {count!r}"[:80] if number is None or isinstance(number, Const) else f"is a {number.dtype}"
            fix = "give how many blocks arrive, an integer of at least 1"
            raise error("bad_argument", None, op="T.arrive_last", name="count", why=why, fix=fix)
        return cls(where, cast(number, dt.int32), need_region(flag, "arrive_last", "flag"))

    def check(self) -> list[Diagnostic]:
        """Return no diagnostics: `build` checks all arguments."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the counter as read and written, and the flag as written."""
        return [self.counter], [self.counter, self.flag]

    def lower_cpu(self) -> Stmt:
        """Emit one helper call, as one thread runs a block."""
        return self._store(Call("cpu_arrive_last", (self._where, self.count), dt.int32))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand no layout, as the op touches no fragment."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Synchronize the block, let one thread arrive for the writes of all threads, and share the flag."""
        first = binary("==", ctx.thread, const(0, dt.int32))
        arrival = self._store(memory.arrive_last(self._where, self.count))
        return Block((memory.barrier(), If(first, Block((arrival,)), Block(()))))

    @property
    def _where(self) -> Address:
        """Return the address of the counter."""
        return Address(self.counter.buffer, self.counter.starts)

    def _store(self, last: Expr) -> Store:
        """Build the store of the flag."""
        return Store(self.flag.buffer, self.flag.starts, last)

    def evaluate(self, env: Env) -> None:
        """Count the arrival. Blocks run one after another in the interpreter, or hold a lock."""
        import torch

        with _ONE_AT_A_TIME:
            old, final = env.read(self.counter), env.value(self.count) - 1
            env.write(self.counter, torch.where(old >= final, torch.zeros_like(old), old + 1))
        env.write(self.flag, (old == final).to(torch.int32).reshape(env.extents(self.flag)))


def _refuse(name: str, why: str) -> None:
    """Raise the error for a wrong argument of T.arrive_last."""
    fix = "give an element of an int32 tensor that is a parameter of the kernel, as in counters[row]"
    raise error("bad_argument", None, op="T.arrive_last", name=name, why=why, fix=fix)
