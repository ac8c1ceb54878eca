# SPDX-License-Identifier: Apache-2.0
"""What one compilation carries along beside the program: the target, the author's options, and the schedule report."""

from __future__ import annotations

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
class PassOptions:
    """Switches of `jit`: `strict` makes every note with a `why_not` an error; `fast_math` allows approximate maths;
    `tf32` lets products of float32 round their operands to 11 significant bits, for the tensor cores."""

    strict: bool = False
    fast_math: bool = False
    tf32: bool = False


@dataclass
class Build:
    """One compilation. `notes` is the schedule report, in the order of the decisions."""

    target: Target
    options: PassOptions = field(default_factory=PassOptions)
    notes: list[Note] = field(default_factory=list)

    def note(self, span: Span | None, op: str, became: str, why_not: str = "") -> None:
        """Add a line to the schedule report."""
        self.notes.append(Note(span, op, became, why_not))
