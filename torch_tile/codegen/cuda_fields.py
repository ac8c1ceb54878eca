# SPDX-License-Identifier: Apache-2.0
"""Two neighbouring numbers of 4 bits widened together: a third of the instructions that one after the other takes.

Applies to `nibble(word, byte, upper)`, less a small number, which is exact in 16 bits; and to that less or times a
number of the type wanted, which is rounded once there, as floats are where they are narrowed. What was rounded may go
on.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_tile.codegen.c_text import storage
from torch_tile.codegen.cuda_text import CudaText
from torch_tile.ir import dtype as dt
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Binary, Call, Cast, Const, Expr
from torch_tile.ir.node import equal
from torch_tile.ir.simplify import simplify

LARGEST = 64  # number taken off a field that csrc/fields.h has room for beside it in a mantissa
Order = Callable[[Expr, Expr], bool | None]  # of neighbours' operands `upper`: whether the first is 1, if they differ


def field_pair(first: Expr, second: Expr, to: DType, order: Order, text: CudaText) -> str | None:
    """C++ text of both values as one register of two `to`; None if they are no such neighbours."""
    if to not in (dt.float16, dt.bfloat16):
        return None
    found = _Pair(to, order, text).of(_inner(first, to), _inner(second, to))
    if found is not None:
        text.headers.add("fields.h")
    return found


class _Pair:
    def __init__(self, to: DType, order: Order, text: CudaText):
        self.to, self.order, self.text = to, order, text

    def of(self, a: Expr, b: Expr) -> str | None:
        """Text of the values `a` and `b`, rounded once."""
        if not (isinstance(a, Binary) and isinstance(b, Binary)) or a.op != b.op or a.op not in ("-", "*"):
            return self.fields(a, b)
        other = self.common(a.b, b.b)
        if other is None:
            return self.fields(a, b)
        rounded = [_inner(x.a, self.to) if isinstance(x, Cast) and x.type == dt.float32 else None for x in (a.a, b.a)]
        if rounded[0] is not None and rounded[1] is not None:
            inner = self.of(rounded[0], rounded[1])
        else:
            inner = self.fields(a.a, b.a)
        name = "pair_less" if a.op == "-" else "pair_times"
        return None if inner is None else f"tile::{name}<{storage(self.to)}>({inner}, {other})"

    def common(self, a: Expr, b: Expr) -> str | None:
        """Text of what is a number of the type wanted as it lies in memory, and the same in both."""
        a, b = (x.a if isinstance(x, Cast) and x.type == dt.float32 else x for x in (a, b))
        return self.text.unchanged(a) if a.dtype == self.to and equal(a, b) else None

    def fields(self, a: Expr, b: Expr) -> str | None:
        """Text of the two numbers of one byte, or of both less a small number."""
        surplus: int | None = 0
        if isinstance(a, Binary) and isinstance(b, Binary) and a.op == b.op == "-":
            surplus = _small(a.b) if equal(a.b, b.b) else None
            a, b = a.a, b.a
        if surplus is None or not (isinstance(a, Call) and isinstance(b, Call) and a.name == b.name == "nibble"):
            return None
        same = all(equal(simplify(x), simplify(y)) for x, y in zip(a.args[:2], b.args[:2], strict=True))
        if not same or (upper_first := self.order(a.args[2], b.args[2])) is None:
            return None
        options = f"{storage(self.to)}, {surplus}, {str(upper_first).lower()}"
        return f"tile::nibble_pair<{options}>({self.text.value(a.args[0])}, {self.text.value(a.args[1])})"


def _inner(expr: Expr, to: DType) -> Expr:
    """What is narrowed."""
    return expr.a if isinstance(expr, Cast) and expr.type == to else expr


def _small(expr: Expr) -> int | None:
    """A small natural number that is written down."""
    if isinstance(expr, Const) and float(expr.value).is_integer() and 0 <= expr.value <= LARGEST:
        return int(expr.value)
    return None
