# SPDX-License-Identifier: Apache-2.0
"""Map the dimensions of a tensor to index symbols (index_expr.py) of attention's scores."""

from __future__ import annotations

from typing import Any

import sympy

from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import Axis, Group, leaves
from torch_tile.inductor.graph.index_expr import K, Q
from torch_tile.inductor.graph.nodes import expression


class Places:
    """Index symbols for the axes of attention's dimensions: batch, heads, queries and keys."""

    def __init__(self, batch: Group, queries: Group, keys: Group, heads: Group | None = None) -> None:
        self._named = [
            (leaves(batch), index_expr.B),
            (leaves(heads or []), index_expr.H),
            (leaves(queries), Q),
            (leaves(keys), K),
        ]
        self._axes: dict[Axis, Any] = {}

    def index(self, groups: list[Group]) -> index_expr.Index:
        """Return the symbolic index of a tensor whose dimensions are `groups`."""
        return tuple(self._index_of(leaves(g)) for g in groups)

    def group(self, place: Any) -> Group | None:
        """Return the axes that an index counts; None if the index is no single symbol."""
        if place == 0:
            return []
        axis = next(([axis] for axis, symbol in self._axes.items() if symbol == place), None)
        return next((named for named, symbol in self._named if symbol == place), axis)

    def _index_of(self, group: Group) -> Any:
        """Return the symbolic index of one dimension; row-major over its axes."""
        if not group:
            return sympy.Integer(0)
        for named, symbol in self._named:
            if named == group:
                return symbol
        total: Any = sympy.Integer(0)
        for axis in group:
            alone = next((symbol for named, symbol in self._named if named == [axis]), None)
            place = alone or self._axes.setdefault(axis, index_expr.symbol(f"axis{len(self._axes)}"))
            total = total * expression(axis.size) + place
        return total
