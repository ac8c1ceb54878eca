# SPDX-License-Identifier: Apache-2.0
"""Where in the model a node of a graph comes from: its module, and the lines of Python that led to it."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Node

_OWN = str(Path(__file__).parents[1] / "report" / "explain.py")  # which calls the model, and is no part of it
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (.+))?')


@dataclass(frozen=True)
class Frame:
    """A line of the model, and the function that it stands in."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        """The line itself, empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def excerpt(self, around: int = 2) -> list[tuple[int, str]]:
        """The line and its neighbours, numbered, without the indentation that they share."""
        numbers = range(max(1, self.line - around), self.line + around + 1)
        lines = [(n, linecache.getline(self.file, n).rstrip().expandtabs(4)) for n in numbers]
        while lines and not lines[0][1]:
            lines.pop(0)
        while lines and not lines[-1][1]:
            lines.pop()
        shared = min((len(text) - len(text.lstrip()) for _, text in lines if text), default=0)
        return [(n, text[shared:]) for n, text in lines]


def frames_of(node: Node) -> tuple[Frame, ...]:
    """The calls that led to a node, outermost first; none if the graph does not know."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    return tuple(Frame(file, int(line), function.strip()) for file, line, function in found if file != _OWN)


def module_of(node: Node) -> str:
    """The path of the innermost module that a node belongs to, as `named_modules` has it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        name = re.sub(r"^L\['\w+'\]\.?|^L__\w+?__", "", str(path))
        name = re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda m: f".{m[1] or m[2]}", name)
        return re.sub(r"\.{2,}", ".", name).strip(".")
    return ""


def place(node: Node) -> str:
    """Module path and source line of a node, as far as the graph knows; else its name."""
    line = "".join(map(str, frames_of(node)[-1:]))
    return " ".join(part for part in (module_of(node), line) if part) or node.name
