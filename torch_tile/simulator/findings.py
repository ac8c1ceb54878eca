# SPDX-License-Identifier: Apache-2.0
"""Collect the findings of the thread interpreter: mistakes with the author's line, and counts of bank conflicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_tile.diagnostics.errors import Diagnostic, Span

# Kind of a finding -> the general fault, and its fix.
KINDS = {
    "race": ("threads meet at the same place of memory with no barrier between", "place a barrier between"),
    "missing_wait": ("asynchronous work may still be in flight", "wait for it, then place a barrier if others need it"),
    "missing_fence": ("ordinary and asynchronous accesses have no order", "place the fence after the ordinary ones"),
    "unwritten": ("a tile is read where nothing was written", "write or clear it first"),
    "out_of_bounds": ("an access lies outside its buffer", "guard it, or correct the index"),
    "misaligned": ("an access does not start at a multiple of what it needs", "align it, or use a narrower access"),
    "barrier": ("a barrier is not used as it was set up", "count who arrives, and how many bytes come"),
    "deadlock": (
        "threads wait for others that do not come",
        "let all that a barrier counts come to it, in each iteration",
    ),
    "endless": ("a loop does not end", "let its condition become false"),
    "assertion": ("an assertion of the kernel fails", "see its message"),
}


BETWEEN_BLOCKS = (
    "blocks meet at the same place of memory, and nothing orders blocks",
    "update it in one step, T.atomic_add(A[i], x), or give each block a place of its own and join these in a "
    "second T.Kernel; blocks of a cluster meet by T.cluster_sync()",
)
"""The same of a race with another block."""


@dataclass
class Finding:
    """One mistake: its first place, and the number of thread accesses that showed it."""

    kind: str
    span: Span | None
    message: str
    block: tuple[int, ...]
    count: int = 1
    between_blocks: bool = False

    def render(self) -> str:
        """Format the finding as text, with the author's line."""
        what, fix = BETWEEN_BLOCKS if self.between_blocks else KINDS[self.kind]
        where = f"first in block {self.block}, {self.count} accesses"
        return Diagnostic(self.kind, self.span, f"{what}: {self.message} ({where})", fix).render()


@dataclass
class Banks:
    """Bank conflicts of one line: `phases` counts the phases it took, `ideal` those of conflict-free accesses."""

    accesses: int = 0
    phases: int = 0
    ideal: int = 0
    worst: float = 1.0

    @property
    def ways(self) -> float:
        """Return the mean number of phases per ideal phase; 1 means no conflicts."""
        return self.phases / max(1, self.ideal)


@dataclass
class Findings:
    """The result of a run: true if the run found a mistake. `outputs` are the tensors that the kernel returns."""

    found: dict[tuple[str, Span | None, str], Finding] = field(default_factory=dict)
    banks: dict[tuple[Span | None, str], Banks] = field(default_factory=dict)
    outputs: tuple[object, ...] = ()
    block: tuple[int, ...] = ()
    barriers: int = 0

    def add(self, kind: str, span: Span | None, message: str, count: int = 1, *, between_blocks: bool = False) -> None:
        """Record a mistake, or count it again if the same mistake was found at the same place."""
        key = kind, span, message.split(";")[0]
        known = self.found.get(key)
        if known is None:
            self.found[key] = Finding(kind, span, message, self.block, count, between_blocks)
        else:
            known.count += count

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found.values())

    def __len__(self) -> int:
        return len(self.found)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds of mistakes that were found."""
        return {f.kind for f in self}

    def report(self) -> str:
        """Format all mistakes, then the lines with bank conflicts."""
        lines = [f.render() for f in self]
        for (span, what), banks in self.banks.items():
            if banks.ways > 1:
                place = f"{span}" if span else "a line of the compiler"
                lines.append(
                    f"note: {what} at {place}: {banks.ways:.2f} ways of bank conflict, at worst {banks.worst:.0f}"
                )
        return "\n".join(lines) or "nothing found"
