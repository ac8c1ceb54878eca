# SPDX-License-Identifier: Apache-2.0
"""T.Persistent and T.PersistentTileScheduler: a block that takes tile after tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tile.diagnostics.errors import error
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Expr, Load, cast, is_number, to_expr
from torch_tile.ir.stmt import LoopKind
from torch_tile.language.asynchronous import in_kernel
from torch_tile.language.loops import Loop, index_bound
from torch_tile.language.math import ceildiv, max as larger, min as smaller
from torch_tile.language.threads import get_block_extent
from torch_tile.language.trace import let, make_variable
from torch_tile.language.values import store_variable


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


class _Cell:
    """A variable of a scheduler, read as `cell[0]`."""

    def __init__(self, name: str):
        self._variable = make_variable(name, dt.int32, None)

    def __getitem__(self, key: int) -> Load:
        if key != 0:
            fix = "read it as [0]: it is one number"
            raise error("bad_argument", None, op="T.PersistentTileScheduler", name="index", why=f"is {key!r}", fix=fix)
        return self._variable

    def set(self, value: Any) -> None:
        """Store a number."""
        store_variable(self._variable, cast(to_expr(value), dt.int32))


class PersistentTileScheduler:
    """Tiles `(m_idx[0], n_idx[0])` that this block takes, one after the other.

    `scheduler.init(block)`, then `while scheduler.valid():` with `scheduler.next_tile()` at the end: the tiles numbered
    `block`, `block + num_workers`, ... of `num_m_tiles` by `num_n_tiles`, each of which some block takes. `num_workers`
    is by default the number of blocks along x, of clusters where `cluster_size` blocks along M work together: `m_idx`
    then counts clusters. Tiles follow each other along M, along N unless `column_major`, in panels of `swizzle_size`
    along the other. `current_iter[0]` counts from 0. With `stateful=False` there is only `coord(number)`.
    """

    def __init__(
        self, prefix: str, num_m_tiles: Any, num_n_tiles: Any, num_workers: Any = None, swizzle_size: int = 1,
        column_major: bool = True, cluster_size: int = 1, stateful: bool = True,
    ):  # fmt: skip
        what = "T.PersistentTileScheduler"
        in_kernel(what)
        for name, value in (("swizzle_size", swizzle_size), ("cluster_size", cluster_size)):
            if not isinstance(value, int) or value < 1:
                fix = "give a positive integer"
                raise error("bad_argument", None, op=what, name=name, why=f"is {value!r}", fix=fix)
        for value in (num_m_tiles, num_n_tiles):
            index_bound(value, what)
        self.num_workers = get_block_extent(0) // cluster_size if num_workers is None else num_workers
        index_bound(self.num_workers, what)
        rows = ceildiv(num_m_tiles, cluster_size)
        self._column_major = column_major
        domain = (rows, num_n_tiles) if column_major else (num_n_tiles, rows)
        self._tiles = Tiles(LoopKind.SERIAL, (), (), domain=domain, group_size=swizzle_size)
        self._count = rows * num_n_tiles
        if stateful:
            names = ("m_idx", "n_idx", "linear_idx", "current_iter")
            self.m_idx, self.n_idx, self.linear_idx, self.current_iter = (_Cell(f"{prefix}_{n}") for n in names)

    def coord(self, tile_id: Any) -> tuple[Expr, Expr]:
        """The coordinates (m, n) of tile number `tile_id`."""
        fast, slow = self._tiles.place(to_expr(tile_id))
        return (fast, slow) if self._column_major else (slow, fast)

    def init(self, worker_id: Any) -> None:
        """Begin with the first tile of a worker."""
        self.current_iter.set(0)
        self._take(worker_id)

    def next_tile(self) -> None:
        """Go on to the worker's next tile."""
        self.current_iter.set(self.current_iter[0] + 1)
        self._take(self.linear_idx[0] + self.num_workers)

    def valid(self) -> Expr:
        """Whether there is such a tile."""
        holds: Expr = self.linear_idx[0] < self._count
        return holds

    def _take(self, number: Any) -> None:
        self.linear_idx.set(number)
        m, n = self.coord(self.linear_idx[0])
        self.m_idx.set(m)
        self.n_idx.set(n)
