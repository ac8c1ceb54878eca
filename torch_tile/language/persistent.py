# SPDX-License-Identifier: Apache-2.0
"""T.Persistent: a block that takes tile after tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..diagnostics import error
from ..ir.expr import Expr, is_number
from ..ir.stmt import LoopKind
from .loops import Loop, index_bound
from .math import ceildiv, max as larger, min as smaller
from .trace import let


@dataclass(frozen=True)
class Tiles(Loop):
    """The loop over turns; in each, `index + turn * wave_size` is the number of a tile of the domain."""

    domain: tuple[Any, ...] = ()
    wave_size: Any = 1
    index: Any = 0
    group_size: int = 1

    def iterate(self, names: Any = None) -> Iterator[Any]:
        """Record the body with the coordinates of a tile."""
        given = names if isinstance(names, tuple) else (names,)
        given = given if len(given) == len(self.domain) else (None,) * len(self.domain)
        for turn in Loop.iterate(self, "turn"):
            found = self.place(let("tile", self.index + turn * self.wave_size))
            named = tuple(let(n or "xyz"[d % 3], c) for d, (n, c) in enumerate(zip(given, found, strict=True)))
            yield named if isinstance(names, tuple) or len(named) > 1 else named[0]

    def place(self, tile: Expr) -> tuple[Expr, ...]:
        """Panels of `group_size` tiles of the last dimension, one after the other; in each, rows of the others."""
        *outer, last = self.domain
        if not outer:
            return (tile,)
        each = math.prod(outer) * self.group_size
        panel, inside = tile // each, tile % each
        width: Any = self.group_size
        if not is_number(last) or last % width:
            width = larger(smaller(last - panel * width, width), 1)  # of the last panel
        row, found = inside // width, [panel * self.group_size + inside % width]
        for size in reversed(outer[1:]):
            found.insert(0, row % size)
            row = row // size
        return (row, *found)


def Persistent(domain: Sequence[Any], wave_size: Any, index: Any, group_size: int = 8) -> Loop:
    """All tiles of `domain`, each once, shared by `wave_size` blocks: this one takes those that come at `index`,
    `index + wave_size`, and so on.

    `for x, y in T.Persistent([rows, columns], blocks, block)` gives the coordinates of a tile; with one dimension its
    number. Tiles that follow each other lie in panels of `group_size` along the last dimension, so that what they read
    stays in cache.
    """
    if not isinstance(domain, list | tuple) or not domain:
        fix = "give a list of sizes, such as [T.ceildiv(M, 128), T.ceildiv(N, 128)]"
        raise error("bad_argument", None, op="T.Persistent", name="domain", why=f"is {domain!r}", fix=fix)
    if not isinstance(group_size, int) or group_size < 1:
        fix = "give a positive integer"
        raise error("bad_argument", None, op="T.Persistent", name="group_size", why=f"is {group_size!r}", fix=fix)
    for value in (*domain, wave_size, index):
        index_bound(value, "T.Persistent")
    turns = ceildiv(math.prod(domain) - index, wave_size)
    bounds = (index_bound(0, "T.Persistent"),), (index_bound(turns, "T.Persistent"),)
    return Tiles(
        LoopKind.SERIAL, *bounds, domain=tuple(domain), wave_size=wave_size, index=index, group_size=group_size
    )
