# SPDX-License-Identifier: Apache-2.0
"""Where in attention's scores an element of a tensor stands, as symbols of lift.py."""

from __future__ import annotations

from typing import Any

import sympy

from torch_tile.inductor.passes import lift
from torch_tile.inductor.passes.lift import K, Q
from torch_tile.inductor.passes.sizes import expression
from torch_tile.inductor.passes.views import Axis, Group, leaves


class Places:
    """The symbols of the axes of attention's dimensions: where in it an element of a mask stands."""

    def __init__(self, batch: Group, queries: Group, keys: Group, heads: Group | None = None) -> None:
        self._named = [(leaves(batch), lift.B), (leaves(heads or []), lift.H), (leaves(queries), Q), (leaves(keys), K)]
        self._axes: dict[Axis, Any] = {}

    def index(self, groups: list[Group]) -> lift.Index:
        """The index of a tensor whose dimensions are `groups`."""
        return tuple(self._of(leaves(g)) for g in groups)

    def group(self, place: Any) -> Group | None:
        """The axes that a place counts; None if it counts none alone."""
        if place == 0:
            return []
        axis = next(([axis] for axis, symbol in self._axes.items() if symbol == place), None)
        return next((named for named, symbol in self._named if symbol == place), axis)

    def _of(self, group: Group) -> Any:
        if not group:
            return sympy.Integer(0)
        for named, symbol in self._named:
            if named == group:
                return symbol
        total: Any = sympy.Integer(0)
        for axis in group:
            alone = next((symbol for named, symbol in self._named if named == [axis]), None)
            place = alone or self._axes.setdefault(axis, lift.symbol(f"axis{len(self._axes)}"))
            total = total * expression(axis.size) + place
        return total
