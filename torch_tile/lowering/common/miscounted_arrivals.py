# SPDX-License-Identifier: Apache-2.0
"""Find mbarriers that expect another number of arrivals than their threads make.

Only certain counts are looked at. All arrivals at the mbarrier, and some wait, stand in loops of equal counts. Around
them are conditions of threads only. Then each iteration must complete a whole number of phases: at least one, and no
more than it waits for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Const, Expr
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import equal
from torch_tile.ir.polynomial import structure
from torch_tile.ir.stmt import For

Path = tuple[Hashable, ...]  # the counts of the loops around a statement


class BarrierUse(NamedTuple):
    """One statement that arrives at an mbarrier or waits for it: the loops around, its element, and its threads."""

    path: Path
    place: tuple[Expr, ...]
    threads: int
    span: Span | None


class Arrivals:
    """The arrivals and waits of one kernel at each of its mbarriers."""

    def __init__(self) -> None:
        self.arrivals: IdMap[Buffer, list[BarrierUse]] = IdMap()
        self.waits: IdMap[Buffer, list[BarrierUse]] = IdMap()
        self.unknown: IdSet[Buffer] = IdSet()

    def arrive(self, at: Address, loops: Sequence[For | None], threads: int | None, span: Span | None) -> None:
        """Add an arrival of `threads` threads; None if their number is unknown."""
        self._add(self.arrivals, at, loops, threads, span)

    def wait(self, at: Address, loops: Sequence[For | None], threads: int | None, span: Span | None) -> None:
        """Add a wait."""
        self._add(self.waits, at, loops, threads, span)

    def _add(
        self,
        table: IdMap[Buffer, list[BarrierUse]],
        at: Address,
        loops: Sequence[For | None],
        threads: int | None,
        span: Span | None,
    ) -> None:
        """Add a statement, unless it depends on what is not known here; None among the loops is a `while`."""
        if threads is None or any(loop is None for loop in loops):
            self.unknown.add(at.buffer)
            return
        path = tuple(
            structure(bound) for loop in loops if loop is not None for bound in (*loop.starts, *loop.stops)
        )  # fmt: skip
        if threads:
            table.setdefault(at.buffer, []).append(BarrierUse(path, at.indices, threads, span))

    def diagnostics(self, counts: Mapping[Buffer, Span | None]) -> list[Diagnostic]:
        """Return a diagnostic for each mbarrier that waits for another number; `counts` says where each was made."""
        return [found for buffer, span in counts.items() if (found := self._misfit(buffer, span)) is not None]

    def _misfit(self, buffer: Buffer, span: Span | None) -> Diagnostic | None:
        """Return a diagnostic if an mbarrier's number cannot be right."""
        if buffer in self.unknown:
            return None
        arrivals, waits = self.arrivals.get(buffer, []), self.waits.get(buffer, [])
        if waits and not arrivals:  # bulk copies bring bytes, and do not arrive
            return diagnose("miscounted", waits[0].span, buffer=buffer.name, count=buffer.arrivals, come=0)
        places = {structure(index) for each in (*arrivals, *waits) for index in each.place}
        if len(buffer.shape) > 1 or not (buffer.static_shape == (1,) or _one_element(arrivals)) or not places:
            return None
        waits = [each for each in waits if buffer.static_shape == (1,) or not _are_disjoint(arrivals[0], each)]
        if not arrivals or not waits or {each.path for each in (*arrivals, *waits)} != {arrivals[0].path}:
            return None
        come = sum(each.threads for each in arrivals)
        phases, rest = divmod(come, buffer.arrivals)
        if rest == 0 and 1 <= phases <= len(waits):
            return None
        notes = [(each.span, f"{each.threads} arrive here") for each in arrivals[:3]]
        return diagnose("miscounted", span, notes, buffer=buffer.name, count=buffer.arrivals, come=come)


def _one_element(arrivals: Sequence[BarrierUse]) -> bool:
    """Return whether all arrivals are at one element of an array, in each iteration."""
    return bool(arrivals) and all(equal(arrivals[0].place, each.place) for each in arrivals)


def _are_disjoint(one: BarrierUse, other: BarrierUse) -> bool:
    """Return whether two statements name different elements by numbers."""
    pairs = zip(one.place, other.place, strict=True)
    return any(isinstance(a, Const) and isinstance(b, Const) and a.value != b.value for a, b in pairs)


__all__ = ["Arrivals"]
