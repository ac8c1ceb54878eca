# SPDX-License-Identifier: Apache-2.0
"""Tell the int32 and int64 values that never wrap from those that do.

Arithmetic of indices and sizes is exact: targets compute it in 64 bits where it may leave 32. Arithmetic of elements
and variables alone wraps after each operation, as that of torch's tensors does.
"""

from __future__ import annotations

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import children

SIGNED = (dt.int32, dt.int64)  # types of indices and sizes
ROLES = ("loop", "block", "thread", "dim", "param")  # of variables that are indices or sizes


class IndexValues:
    """Tell which values are computed from indices and sizes. `names` are the names of such values."""

    def __init__(self, names: IdSet[Var] | None = None):
        self.names = IdSet[Var]() if names is None else names
        self.known: IdMap[Expr, bool] = IdMap()

    def __call__(self, expr: Expr) -> bool:
        """Return whether a signed integer is computed from indices or sizes, so that its arithmetic never wraps."""
        found = self.known.get(expr)
        if found is None:
            found = self.known[expr] = self._find(expr)
        return found

    def _find(self, expr: Expr) -> bool:
        """Search an expression for indices and sizes."""
        if expr.dtype not in SIGNED or isinstance(expr, Load):
            return False
        if isinstance(expr, Var):
            return expr.role in ROLES or expr in self.names
        return any(isinstance(c, Expr) and self(c) for c in children(expr))
