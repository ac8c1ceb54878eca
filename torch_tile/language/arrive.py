# SPDX-License-Identifier: Apache-2.0
"""T.arrive_last: blocks that leave parts of a result in global memory, and the last one that joins them."""

from __future__ import annotations

from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Load, binary, const
from torch_tile.ir.stmt import Alloc
from torch_tile.language.asynchronous import in_kernel
from torch_tile.tileop.arrive import ArriveLast
from torch_tile.tileop.base import need_region


def arrive_last(counter: Any, count: Any, flag: Any = None) -> Expr:
    """This block arrives; gives whether it is the last of `count` blocks to arrive, the same for all its threads.

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
