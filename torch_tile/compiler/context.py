# SPDX-License-Identifier: Apache-2.0
"""The context of one compilation: the target, the author's options, and the schedule report."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import Target


@dataclass(frozen=True)
class Remark:
    """One decision of the compiler: `op` as written, what it `became`, and `why_not` something faster, if so."""

    span: Span | None
    op: str
    became: str
    why_not: str = ""


@dataclass(frozen=True)
class Placement:
    """The layout of an on-chip buffer as printed, and the demand that decided it."""

    buffer: str
    scope: str
    layout: str
    why: str
    span: Span | None


@dataclass(frozen=True)
class PassOptions:
    """The compiler switches of `jit`.

    `strict` makes every note with a `why_not` an error. `fast_math` allows approximate maths. `tf32` lets products of
    float32 round their operands to 11 significant bits, for the tensor cores. `mma_sync` keeps wgmma for products whose
    operands a producer warp copies. `measured` keeps what the library's tilings were measured with: `mma_sync`, and one
    block of a warpgroup on a multiprocessor unless the kernel asks for more. `library_jit` sets it.
    """

    strict: bool = False
    fast_math: bool = False
    tf32: bool = False
    mma_sync: bool = False
    measured: bool = False


@dataclass
class Build:
    """The state of one compilation. `remarks` is the schedule report, `placements` the layouts, as decided.

    `sparing` says that the kernel did not fit into shared memory: what reductions exchange there is kept small.
    """

    target: Target
    options: PassOptions = field(default_factory=PassOptions)
    remarks: list[Remark] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    sparing: bool = False

    def remark(self, span: Span | None, op: str, became: str, why_not: str = "") -> None:
        """Add a line to the schedule report."""
        self.remarks.append(Remark(span, op, became, why_not))

    def schedule(self, name: str) -> Schedule:
        """Return the schedule report so far, for the kernel `name`."""
        return Schedule(name, self.target, tuple(self.remarks))


def is_watched() -> bool:
    """Return whether stages are dumped or verified, so that the passes must run."""
    return bool(os.environ.get("TORCH_TILE_DUMP")) or os.environ.get("TORCH_TILE_VERIFY", "0") != "0"


def times(count: int) -> str:
    """Format the count of a repeated row of the report; a count of 1 gives no text."""
    return f"{count} x " if count > 1 else ""


@dataclass(frozen=True, repr=False)
class Schedule:
    """A kernel's schedule report: what each operation became, and why nothing faster. It prints as a table."""

    name: str
    target: Target
    remarks: tuple[Remark, ...]

    @property
    def slow(self) -> tuple[Remark, ...]:
        """List the remarks on operations that could be faster."""
        return tuple(remark for remark in self.remarks if remark.why_not)

    @property
    def rows(self) -> tuple[tuple[Remark, int], ...]:
        """Return the distinct remarks in order, each with its count, because an op may be lowered many times."""
        return tuple(Counter(self.remarks).items())

    @property
    def title(self) -> str:
        """Return the title of the report: kernel, target, and the numbers of notes and of slow operations."""
        slow = sum(bool(remark.why_not) for remark, _ in self.rows)
        return f"{self.name} for {self.target}: {len(self.rows)} notes, {slow} of what could be faster"

    def __repr__(self) -> str:
        """Format the report as a table."""
        lines, remarks = [self.title], [remark for remark, _ in self.rows]
        places = [remark.span.place if remark.span else "-" for remark in remarks]
        place_width = max(map(len, places), default=0)
        op_width = max((len(remark.op) for remark in remarks), default=0)
        for place, (remark, count) in zip(places, self.rows, strict=True):
            lines.append(f"  {place:{place_width}}  {remark.op:{op_width}}  {times(count)}{remark.became}")
            if remark.why_not:
                lines.append(f"  {'':{place_width}}  {'':{op_width}}  why not faster: {remark.why_not}")
        return "\n".join(lines)
