# SPDX-License-Identifier: Apache-2.0
"""T.arrive_last: this block arrives at a counter in global memory, and learns whether it is the last of so many.

What blocks wrote to global memory before they arrived, the last one sees after it. The last one sets the counter back
to 0, so that it serves every launch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, error
from torch_tile.intrinsics import memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Address, Call, Const, Expr, binary, cast, const, is_number, to_expr
from torch_tile.ir.stmt import Block, If, Stmt, Store
from torch_tile.tileop.base import RegisteredOp, need_region, region_of, tile_op
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.simulator.tile.env import Env

_ONE_AT_A_TIME = threading.Lock()  # blocks of a cluster run side by side in the interpreter of tiles


@tile_op("arrive_last")
@dataclass(frozen=True, eq=False, repr=False)
class ArriveLast(RegisteredOp):
    """`flag` becomes 1 in the last of `count` blocks that come here, else 0; `counter` counts them from 0."""

    counter: Region
    count: Expr
    flag: Region

    @classmethod
    def build(cls, counter: Any, count: Any, flag: Any) -> ArriveLast:
        """`counter` is an element of a global int32 tensor, `count` an integer, `flag` an int32 in shared memory."""
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
        """Nothing more can be wrong."""
        return []

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Changes the counter, writes the flag."""
        return [self.counter], [self.counter, self.flag]

    def lower_cpu(self) -> Stmt:
        """One helper call: a block is one thread."""
        return self._store(Call("cpu_arrive_last", (self._where, self.count), dt.int32))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """No fragment is touched."""
        return []

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """All threads meet, so that one of them arrives for what each has written; it tells the others."""
        first = binary("==", ctx.thread, const(0, dt.int32))
        arrival = self._store(memory.arrive_last(self._where, self.count))
        return Block((memory.barrier(), If(first, Block((arrival,)), Block(()))))

    @property
    def _where(self) -> Address:
        return Address(self.counter.buffer, self.counter.starts)

    def _store(self, last: Expr) -> Store:
        return Store(self.flag.buffer, self.flag.starts, last)

    def evaluate(self, env: Env) -> None:
        """Blocks run one after another, or hold a lock."""
        import torch

        with _ONE_AT_A_TIME:
            old, final = env.read(self.counter), env.value(self.count) - 1
            env.write(self.counter, torch.where(old >= final, torch.zeros_like(old), old + 1))
        env.write(self.flag, (old == final).to(torch.int32).reshape(env.extents(self.flag)))


def _refuse(name: str, why: str) -> None:
    fix = "give an element of an int32 tensor that is a parameter of the kernel, as in counters[row]"
    raise error("bad_argument", None, op="T.arrive_last", name=name, why=why, fix=fix)
