# SPDX-License-Identifier: Apache-2.0
"""Copy the names of a loop as its first iteration has them, without what is known there."""

from __future__ import annotations

from torch_tile.ir.bounds import Ranges
from torch_tile.ir.dtype import bool_
from torch_tile.ir.expr import Const, const, unary
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Let
from torch_tile.lowering.analysis.clone import Instance


class FirstIteration:
    """Copies names one after the other. `copies` holds the values of loop variables, and `ranges` is what is known."""

    def __init__(self, copies: Instance, ranges: Ranges):
        self.copies, self.ranges = copies, ranges

    def named(self, let: Let) -> list[Let]:
        """Return the copy of a name; nothing if its value is a number, by which later copies replace it."""
        value = simplify(self.copies(let.value))
        if let.var.type == bool_:
            known = [const(n, bool_) for n, test in ((1, value), (0, unary("not", value))) if self.ranges.prove(test)]
            value = known[0] if known else value
        if isinstance(value, Const):
            self.copies.values[let.var] = value
            return []
        new: Let = self.copies(Let(let.var, value, span=let.span))
        self.ranges = self.ranges.define(new.var, value)
        return [new]
