# SPDX-License-Identifier: Apache-2.0
"""Enlarge fragments whose elements are all equal and which loops access beyond their shape.

TileLang's own examples write `sinks[i] = Sinks[head]` at 64 places of a fragment of fewer elements, and read it there.
Such a program has one meaning: each place holds the value. The fragment gets the places, with a warning.
Other accesses beyond a shape stay errors of the check.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch_tile.diagnostics.errors import Span, diagnose
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Call, Expr, Load, Var, const
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Rewriter, children, contents, find, rebuilt, walk
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Alloc, Program, Store

OUTSIDE = ("dim", "param", "block")  # roles of variables that have one value in all threads of a block
ELEMENTS = Alloc, Load, Store
MOST = 1024  # places along a dimension


def enlarge_equal(program: Program) -> Program:
    """Return the program with the places that equal elements are accessed at, and warn of each such fragment."""
    tiles = [a.buffer for a in find(program, Alloc) if a.buffer.scope == "fragment" and a.buffer.static_shape]
    if not tiles:
        return program
    places = _Places(tiles)
    places(program)
    wide = [tile for tile in tiles if places.leaves(tile)]
    others = (node for node in walk(program) if not isinstance(node, ELEMENTS)) if wide else ()
    held = [child for node in others for child in children(node)]
    larger = IdMap[Buffer, Buffer]()
    for tile in wide:
        if any(tile is one for one in held):  # a tile op, a layout or an address takes the shape
            continue
        shape = tile.static_shape or ()
        grown = tuple(max(n, size) for n, size in zip(places.reach[tile], shape, strict=True))
        larger[tile] = replace(tile, shape=tuple(const(n, dt.int32) for n in grown))
        warn_of([diagnose("equal_elements", places.spans[tile], buffer=tile.name, shape=shape, places=grown)])
    return _Enlarge(larger)(program) if len(larger) else program


class _Places(Known):
    """Collect the places at which elements of fragments are accessed; exclude those whose elements may differ."""

    def __init__(self, tiles: Iterable[Buffer]):
        super().__init__()
        self.reach = IdMap[Buffer, tuple[int, ...]]()
        self.spans = IdMap[Buffer, Span | None]()
        self.excluded: IdSet[Buffer] = IdSet()
        self.tiles: IdSet[Buffer] = IdSet()
        self.tiles.update(tiles)

    def __call__(self, node: Any) -> Any:
        """Skip values that read no memory."""
        if isinstance(node, Expr) and not contents(node) & Load.bit:
            return node
        return super().__call__(node)

    def leaves(self, tile: Buffer) -> bool:
        """Return whether a fragment of equal elements is accessed beyond its shape."""
        reach = () if tile in self.excluded else self.reach.get(tile, ())
        return any(map(operator.gt, reach, tile.static_shape or ()))

    def visit_Load(self, load: Load) -> Expr:
        """Note the places of a read."""
        self._note(load.buffer, load.indices, load.span)
        return self.children(load)

    def visit_Store(self, store: Store) -> Store:
        """Note the places of a write. Exclude the tile unless all threads write one value at all places."""
        if store.buffer in self.tiles:
            moving = {var for index in store.indices for var in find(index, Var)}
            self._note(store.buffer, store.indices, store.span)
            if not _is_equal_everywhere(store.value, moving):
                self.excluded.add(store.buffer)
        return self.children(store)

    def _note(self, buffer: Buffer, indices: tuple[Expr, ...], span: Span | None) -> None:
        if buffer not in self.tiles:
            return
        found = [self.ranges.interval(index) for index in indices]
        if not all(each.low >= 0 and each.high < MOST for each in found):
            self.excluded.add(buffer)
            return
        before = self.reach.get(buffer, (0,) * len(found))
        self.reach[buffer] = tuple(max(n, int(each.high) + 1) for n, each in zip(before, found, strict=True))
        if self.reach[buffer] != before:
            self.spans[buffer] = span


def _is_equal_everywhere(value: Expr, moving: set[Var]) -> bool:
    """Return whether a value is the same for all places: from tensors and what does not move with the index."""
    names = set(find(value, Var))
    if names & moving or any(var.role not in OUTSIDE for var in names):
        return False
    return not any(True for _ in find(value, Call)) and all(n.buffer.scope == "global" for n in find(value, Load))


class _Enlarge(Rewriter):
    """Put larger fragments in the places of others."""

    def __init__(self, larger: IdMap[Buffer, Buffer]):
        self.larger = larger

    def visit_Alloc(self, node: Alloc) -> Alloc:
        """Allocate the larger fragment."""
        new = self.larger.get(node.buffer)
        return node if new is None else rebuilt(node, buffer=new)

    def visit_Load(self, node: Load) -> Load:
        """Read the larger fragment."""
        new, at = self.larger.get(node.buffer), self.children(node)
        return at if new is None else rebuilt(at, buffer=new)

    def visit_Store(self, node: Store) -> Store:
        """Write the larger fragment."""
        new, at = self.larger.get(node.buffer), self.children(node)
        return at if new is None else rebuilt(at, buffer=new)


__all__ = ["enlarge_equal"]
