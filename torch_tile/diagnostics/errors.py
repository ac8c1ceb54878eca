# SPDX-License-Identifier: Apache-2.0
"""Errors with a code, the author's line and columns, the fault, and its fix.

Author errors (`TileError`), our own bugs (`InternalError`) and bad arguments at a launch (`LaunchError`) are different
types. Every message an author can meet stands in `CATALOGUE`; the key is the stable code.
"""

from __future__ import annotations

import linecache
import os
import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from torch_tile.diagnostics.catalog import CATALOGUE

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Span:
    """A place in the author's source: 1-based lines, 0-based half-open columns."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column + 1}"

    @property
    def is_of_library(self) -> bool:
        """Return whether the place is in torch_tile itself, whose kernels and macros no user changes."""
        return self.file.startswith(_PACKAGE)

    @property
    def place(self) -> str:
        """Return the name of the file without its folder, and the line."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    def source(self) -> str:
        """Return the author's text of the first line of the span."""
        return linecache.getline(self.file, self.line).rstrip("\n")


@dataclass(frozen=True)
class Diagnostic:
    """One finding: a catalogue code with its text filled in, where it is, and related places."""

    code: str
    span: Span | None
    message: str
    fix: str
    notes: tuple[tuple[Span | None, str], ...] = ()

    def render(self) -> str:
        """Format the finding with the author's line and a caret line beneath it."""
        lines = [f"error[{self.code}]: {self.message}"]
        lines += _excerpt(self.span, "")
        for span, text in self.notes:
            lines += _excerpt(span, text)
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def diagnose(
    code: str, span: Span | None, notes: Iterable[tuple[Span | None, str]] = (), **values: object
) -> Diagnostic:
    """Fill the catalogue's template `code` with `values`; `fix` among them replaces the catalogue's."""
    message, fix = CATALOGUE[code]
    given = values.get("fix")
    return Diagnostic(code, span, message.format(**values), str(given) if given else fix.format(**values), tuple(notes))


def fields_of(code: str) -> set[str]:
    """Return the names that the template of `code` wants filled in."""
    return {name for text in CATALOGUE[code] for _, name, _, _ in string.Formatter().parse(text) if name}


TYPE_ERRORS = (
    "bad_call",
    "unknown_keyword",
    "bad_kernel_call",
    "bad_function",
    "only_floats",
    "float_predicate",
)  # codes of what Python itself calls a TypeError


class TileError(ValueError):
    """A kernel that its author can mend. Holds every finding of the check that failed.

    It is a ValueError, and a TypeError as well for arguments that a function does not have.
    """

    def __new__(cls, *diagnostics: Diagnostic) -> TileError:
        """Make an error of the class that the first finding's code asks for."""
        is_type_error = bool(diagnostics) and getattr(diagnostics[0], "code", "") in TYPE_ERRORS
        return super().__new__(TileTypeError if cls is TileError and is_type_error else cls, *diagnostics)

    def __init__(self, *diagnostics: Diagnostic):
        self.diagnostics: tuple[Diagnostic, ...] = diagnostics
        super().__init__("\n" + "\n".join(d.render() for d in diagnostics))

    def add_places(self, notes: Iterable[tuple[Span | None, str]]) -> None:
        """Add places to the first finding, such as the line that calls the function in which it is."""
        first, *rest = self.diagnostics
        self.diagnostics = (replace(first, notes=(*first.notes, *notes)), *rest)
        self.args = ("\n" + "\n".join(d.render() for d in self.diagnostics),)

    @property
    def code(self) -> str:
        """Return the catalogue code of the first finding."""
        return self.diagnostics[0].code

    @property
    def span(self) -> Span | None:
        """Return the place of the first finding."""
        return self.diagnostics[0].span


class TileTypeError(TileError, TypeError):
    """A call with arguments that the function does not have."""


class TileAssertionError(TileError, AssertionError):
    """Raised for arguments for which TileLang raises an AssertionError."""


class LaunchError(ValueError, RuntimeError):
    """A compiled kernel was called with arguments that it cannot take; the message names the argument."""


class InternalError(RuntimeError):
    """A bug of torch_tile, not of the kernel's author."""

    def __init__(self, message: str, span: Span | None = None):
        place = f" (while compiling {span})" if span else ""
        super().__init__(
            f"{message}{place}. This is a bug in torch_tile; please report it with the kernel. "
            "TORCH_TILE_DUMP=<folder> writes every stage of the compilation there."
        )


@contextmanager
def assertions_as_bugs(what: str) -> Iterator[None]:
    """Raise InternalError, with the author's line, where an assertion of the compiler's own fails in `what`."""
    try:
        yield
    except AssertionError as failed:
        text = f"an assertion fails in {what}" + (f": {failed}" if str(failed) else "")
        raise InternalError(text, _compiled_span(failed.__traceback__)) from failed


def _compiled_span(trace: TracebackType | None) -> Span | None:
    """Return the span of the last statement or expression that a function of the trace works on."""
    found = None
    while trace is not None:
        spans = [getattr(value, "span", None) for value in trace.tb_frame.f_locals.values()]
        found = next((span for span in spans if isinstance(span, Span)), found)
        trace = trace.tb_next
    return found


FOREIGN = "// The author's own text, as it stands."
"""The line of generated text that an author's own follows."""


class ForeignTextError(RuntimeError):
    """A compiler refuses a text with an author's own in it, and says why."""


# While a kernel is traced, tells where its author is; set by torch_tile.language.trace.
span_source: list[Callable[[], Span | None]] = []


def current_span() -> Span | None:
    """Return the author's position in the kernel being traced, or None outside tracing."""
    return span_source[-1]() if span_source else None


def error(code: str, span: Span | None, notes: Iterable[tuple[Span | None, str]] = (), **values: object) -> TileError:
    """Build a `TileError` with one finding, to be raised by the caller; without a span it points at the traced line."""
    return TileError(diagnose(code, span or current_span(), notes, **values))


def _excerpt(span: Span | None, text: str) -> list[str]:
    """Format the author's line of a span, with a text beside it."""
    if span is None:
        return [f"  note: {text}"] if text else []
    lines = [f"  --> {span}  {text}".rstrip()]
    source = span.source()
    if source:
        end = span.end_column if span.end_line == span.line else len(source)
        lines += [f"   | {source}", f"   | {' ' * span.column}{'^' * max(1, end - span.column)}"]
    return lines
