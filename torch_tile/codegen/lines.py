# SPDX-License-Identifier: Apache-2.0
"""Generated text, line by line: scopes are indented, and lines end with the author's line that they come from."""

from __future__ import annotations

from torch_tile.codegen.c_text import comment
from torch_tile.diagnostics.errors import Span


class Lines:
    """Collects text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str, span: Span | None = None) -> None:
        """A line of text, with the author's line that it comes from."""
        where = f"  // {comment(place(span))}" if span else ""
        self.lines.append("  " * self.depth + text + where)

    def open(self, text: str = "", span: Span | None = None) -> None:
        """A line that opens a scope."""
        self.line(f"{text} {{".lstrip(), span)
        self.depth += 1

    def close(self, text: str = "}") -> None:
        """The end of a scope."""
        self.depth -= 1
        self.line(text)

    def otherwise(self, text: str = "") -> None:
        """The end of a branch, and the start of the other one, under the condition `text` if there is one."""
        self.close(f"}} else {text} {{" if text else "} else {")
        self.depth += 1


def place(span: Span) -> str:
    """The author's file and line."""
    return f"{span.file.rsplit('/', 1)[-1]}:{span.line}"
