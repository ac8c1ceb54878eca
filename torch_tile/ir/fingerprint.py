# SPDX-License-Identifier: Apache-2.0
"""Digest a program; the digest is equal in every process that traces the same source, wherever its files lie.

Symbols are numbered by first appearance. All other nodes count by their fields, with spans, since reports and generated
text name the author's lines. Sharing of nodes in memory does not matter.
"""

from __future__ import annotations

import hashlib
import os

from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Node, field_names


def fingerprint(node: Node, files: dict[str, int] | None = None) -> str:
    """Return the SHA-256 of `node` and everything below it, as hexadecimal digits.

    `files` is filled with the author's files, numbered by first appearance: their folders are no part of the digest.
    """
    writer = _Writer({} if files is None else files)
    writer.visit(node)
    return hashlib.sha256("\n".join(writer.lines).encode()).hexdigest()


class _Writer:
    """Number each different node, and describe it by a line in terms of earlier numbers."""

    def __init__(self, files: dict[str, int]) -> None:
        self.files = files
        self.lines: dict[str, int] = {}
        self.numbers: dict[Node, str] = {}
        self.spans: IdMap[Span, str] = IdMap()  # which is faster than a comparison of their content
        self.texts: IdMap[object, str] = IdMap()  # 1, 1.0 and True are equal
        self.symbols = 0

    def visit(self, node: Node) -> str:
        """Number a `node` that has no number yet; return the number as text."""
        parts = [type(node).__name__]
        parts += [self.field(getattr(node, name)) for name in field_names(node)]
        if node.is_symbol:  # two symbols are two, however alike
            self.symbols += 1
            parts.append(f"symbol {self.symbols}")
        if node.span is not None:
            parts.append(self.place(node.span))
        line = " ".join(parts)
        number = self.numbers[node] = f"#{self.lines.setdefault(line, len(self.lines))}"
        return number

    def field(self, value: object) -> str:
        """Return the text of a node's field."""
        if isinstance(value, Node):
            return self.numbers.get(value) or self.visit(value)
        if isinstance(value, tuple):
            return f"({','.join(map(self.field, value))})"
        text = self.texts.get(value)
        if text is None:
            text = self.texts[value] = repr(value)
            if " at 0x" in text:
                raise InternalError(f"{text} is not the same in every process")
        return text

    def place(self, span: Span) -> str:
        """Return the text of a place in the author's source."""
        found = self.spans.get(span)
        if found is None:
            number = self.files.setdefault(span.file, len(self.files))
            found = (
                f"{number} {os.path.basename(span.file)}:{span.line}:{span.column}:{span.end_line}:{span.end_column}"
            )
            self.spans[span] = found
        return found
