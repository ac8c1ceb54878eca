# SPDX-License-Identifier: Apache-2.0
"""What one compilation carries along beside the program: the target, the author's options, and the schedule report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .diagnostics import Span
from .target import Target


@dataclass(frozen=True)
class Note:
    """What one operation of the author's became: `op` (as written), `became`, and `why_not` something faster, if so."""

    span: Span | None
    op: str
    became: str
    why_not: str = ""


@dataclass(frozen=True)
class Placement:
    """Where an on-chip buffer's elements lie, as printed, and which demand decided it."""

    buffer: str
    scope: str
    layout: str
    why: str
    span: Span | None


@dataclass(frozen=True)
class PassOptions:
    """Switches of `jit`: `strict` makes every note with a `why_not` an error; `fast_math` allows approximate maths;
    `tf32` lets products of float32 round their operands to 11 significant bits, for the tensor cores."""

    strict: bool = False
    fast_math: bool = False
    tf32: bool = False


@dataclass
class Build:
    """One compilation. `notes` is the schedule report, `placements` the layouts, in the order of the decisions."""

    target: Target
    options: PassOptions = field(default_factory=PassOptions)
    notes: list[Note] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def note(self, span: Span | None, op: str, became: str, why_not: str = "") -> None:
        """Add a line to the schedule report."""
        self.notes.append(Note(span, op, became, why_not))

    def schedule(self, name: str) -> Schedule:
        """The report so far, of the kernel `name`."""
        return Schedule(name, self.target, tuple(self.notes))


def is_watched() -> bool:
    """Whether the stages of a compilation are written down or checked, so that the passes have to run."""
    return bool(os.environ.get("TORCH_TILE_DUMP")) or os.environ.get("TORCH_TILE_VERIFY", "0") != "0"


@dataclass(frozen=True, repr=False)
class Schedule:
    """A kernel's schedule report: what each operation became, and why nothing faster. Prints as a table."""

    name: str
    target: Target
    notes: tuple[Note, ...]

    @property
    def slow(self) -> tuple[Note, ...]:
        """The notes on what could be faster."""
        return tuple(note for note in self.notes if note.why_not)

    def __repr__(self) -> str:
        lines = [f"{self.name} for {self.target}: {len(self.notes)} notes, {len(self.slow)} of what could be faster"]
        places = [f"{note.span.file.rsplit('/', 1)[-1]}:{note.span.line}" if note.span else "-" for note in self.notes]
        place_width = max(map(len, places), default=0)
        op_width = max((len(note.op) for note in self.notes), default=0)
        for place, note in zip(places, self.notes, strict=True):
            lines.append(f"  {place:{place_width}}  {note.op:{op_width}}  {note.became}")
            if note.why_not:
                lines.append(f"  {'':{place_width}}  {'':{op_width}}  why not faster: {note.why_not}")
        return "\n".join(lines)
