# SPDX-License-Identifier: Apache-2.0
"""Decide which bulk loads the blocks of a cluster share: each block loads a part of the tile and sends it to all.

Blocks share a load along an axis of the cluster if the load does not depend on their place there. This covers its
source, its conditions and its count. The blocks then make the load in the same iterations. The decision comes before
specialize_warps takes loads apart. There each load is still one statement below all statements that decide on it. The
number of arrivals that release a stage follows from it. Each block makes its other loads itself, and the schedule
report says why.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from torch_tile.compiler.context import Build
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const, Expr, Var, binary, const
from torch_tile.ir.idmap import IdMap, mentions
from torch_tile.ir.simplify import simplify
from torch_tile.ir.stmt import Kernel
from torch_tile.lowering.hopper.plan_tma_loads import Body, Loads, Survey, decisive
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import refuses_shares

AXES = "xyz"
ONE = const(1, int32)


@dataclass(frozen=True)
class Sharers:
    """The blocks that receive one block's load.

    Each set of axes spans a part of the cluster around a block. The sharers are the blocks of all parts: `count` of
    them, with `blocks` as their bits, by rank.
    """

    kernel: Kernel
    axes: frozenset[tuple[int, ...]]

    @property
    def count(self) -> int:
        """Return the number of blocks, this one included."""
        return len({place for axes in self.axes for place in _other_places(self.kernel, axes)})

    @property
    def blocks(self) -> Expr:
        """Return a bit mask of the blocks, one bit for each block of the cluster."""
        masks = (self._mask(axes) for axes in sorted(self.axes))
        return functools.reduce(lambda a, b: binary("|", a, b), masks)

    @property
    def number(self) -> Expr:
        """Return the index of this block among the blocks along the axes."""
        (axes,) = self.axes
        return self._sum(axes, [self.kernel.cluster[a] for a in axes])

    def include(self, rank: Expr) -> Expr:
        """Return the condition that the block of rank `rank` is one of the sharers."""
        blocks = self.blocks
        if isinstance(blocks, Const) and blocks.value == (1 << self.count) - 1:
            return binary("<", rank, const(self.count, int32))
        return binary("!=", binary("&", binary(">>", blocks, rank), ONE), const(0, int32))

    def union(self, other: Sharers) -> Sharers:
        """Return the union of two sets of sharers; a part that lies inside another is dropped."""
        axes = self.axes | other.axes
        return Sharers(self.kernel, frozenset(a for a in axes if not any(set(a) < set(b) for b in axes)))

    def _mask(self, axes: tuple[int, ...]) -> Expr:
        """Compute the bit mask of the blocks that `axes` span around this block."""
        cluster = self.kernel.cluster
        steps = (1, cluster[0], cluster[0] * cluster[1])
        pattern = sum(
            1 << sum(p * s for p, s in zip(place, steps, strict=True)) for place in _other_places(self.kernel, axes)
        )
        rest = [a for a in range(len(self.kernel.blocks)) if a not in axes and cluster[a] > 1]
        if not rest:
            return const(pattern, int32)
        first = functools.reduce(lambda a, b: a + b, (self._rank(a) * steps[a] for a in rest))
        return binary("<<", const(pattern, int32), simplify(first))

    def _sum(self, axes: Sequence[int], sizes: Sequence[int]) -> Expr:
        """Compute this block's row-major index along `axes`."""
        found, step = self._rank(axes[0]), 1
        for axis, size in zip(axes[1:], sizes, strict=False):
            step *= size
            found = found + self._rank(axis) * step
        return simplify(found)

    def _rank(self, axis: int) -> Expr:
        """Return this block's index along an axis of its cluster."""
        return binary("%", self.kernel.blocks[axis], const(self.kernel.cluster[axis], int32))


def multicast_loads(kernel: Kernel, loads: Loads, survey: Survey, build: Build) -> IdMap[Copy, Sharers]:
    """Map each shared load (by identity) to the blocks that share it; loads of one block alone are missing."""
    found: IdMap[Copy, Sharers] = IdMap()
    axes = [n for n, size in enumerate(kernel.cluster) if size > 1]
    if not axes:
        return found
    for body in IdMap((g.body, g.body) for g in loads.groups).values():
        for copy in (c for c in body.loads if c in loads.copies):
            reasons = {axis: _depends(copy, body, kernel, axis, survey) for axis in axes}
            free = [axis for axis in axes if not reasons[axis]]
            among, why = _largest(copy, free, kernel)
            text = "; ".join(dict.fromkeys(f"along {AXES[n]} {r}" for n, r in reasons.items() if r))
            if among is None:
                became = "each block of a cluster loads its own"
                build.remark(copy.span, "T.copy", f"{became}: {text}" if text else became, why)
                continue
            found[copy] = among
            (mine,) = among.axes
            became = f"loaded once for {among.count} blocks of a cluster, along {' and '.join(AXES[n] for n in mine)}"
            build.remark(copy.span, "T.copy", f"{became}; {text}" if text else became, why)
    return found


def _depends(copy: Copy, body: Body, kernel: Kernel, axis: int, survey: Survey) -> str:
    """Name the property of a copy that depends on the block's place along an axis of its cluster, or ""."""
    block, size, extent = kernel.blocks[axis], kernel.cluster[axis], kernel.grid[axis]
    if isinstance(extent, Const) and int(extent.value) % size:
        return f"{extent.value} blocks are no clusters of {size}"
    cluster, rank = Var("cluster", int32, "block"), Var("rank", int32, "block")
    ranges = Ranges().loop(rank, 0, size).loop(cluster, 0, binary("//", extent, const(size, int32)))
    place = Substitute({block: cluster * size + rank})
    for expr, what in decisive(copy, body):
        if not what and expr.dtype.is_integer:
            continue  # the value of a name, at its use
        if mentions(simplify(place(survey.values(expr)), ranges), rank):
            return f"{what or 'what it reads'} depends on `{block.name}`"
    return ""


def _largest(copy: Copy, free: Sequence[int], kernel: Kernel) -> tuple[Sharers | None, str]:
    """Choose the axes with the most blocks that can each load a part of the tile. Say why not more."""
    why = ""
    for axes in _subsets(free, kernel):
        among = Sharers(kernel, frozenset((axes,)))
        refused = refuses_shares(copy, among.count)
        if refused is None:
            return among, why
        why = why or refused
    return None, why


def _subsets(axes: Sequence[int], kernel: Kernel) -> list[tuple[int, ...]]:
    """List the sets of axes, those with the most blocks first."""
    found = [some for count in range(1, len(axes) + 1) for some in combinations(axes, count)]
    return sorted(found, key=lambda some: -len(list(_other_places(kernel, some))))


def _other_places(kernel: Kernel, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places of a cluster that differ from its first place along `axes` only."""
    yield from product(*(range(size if n in axes else 1) for n, size in enumerate(kernel.cluster)))
