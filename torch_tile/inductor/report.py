# SPDX-License-Identifier: Apache-2.0
"""What the passes did: one row per subgraph found, replaced or not, with its place in the model.

Passes call `record`; whoever wants the rows opens `collect()` around a compile. Each row is also logged on the logger
`torch_tile.inductor` (`TORCH_LOGS="+torch_tile"`).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

log = logging.getLogger("torch_tile.inductor")

REPLACED, KEPT, MISSED = "replaced", "kept", "missed"


@dataclass(frozen=True)
class Row:
    """One subgraph. `status`: replaced; kept (Inductor's code was faster); missed (it did not match, see `reason`)."""

    family: str
    status: str
    what: str
    where: str
    reason: str = ""
    graph: str = "inference"
    fix: str = ""


@dataclass
class Report:
    """The rows of one or more compiles, in graph order. `str(report)` is a table."""

    rows: list[Row] = field(default_factory=list)
    graph_breaks: int = 0

    def select(self, family: str | None = None, status: str | None = None) -> list[Row]:
        """The rows of one family, one status, or both."""
        return [r for r in self.rows if family in (None, r.family) and status in (None, r.status)]

    def replaced(self, family: str | None = None) -> list[Row]:
        """Subgraphs that became tile kernels."""
        return self.select(family, REPLACED)

    def missed(self, family: str | None = None) -> list[Row]:
        """Subgraphs of a known family that did not match, each with its reason."""
        return self.select(family, MISSED)

    def __str__(self) -> str:
        """A table of rows, equal ones counted, and a line of totals."""
        counts = Counter((r.family, r.status, r.what, r.where, r.reason, r.graph) for r in self.rows)
        header = ("family", "status", "what", "where", "reason", "graph")
        cells = [header, *[(*key[:3], f"{key[3]} (x{n})" if n > 1 else key[3], *key[4:]) for key, n in counts.items()]]
        widths = [min(max(len(row[i]) for row in cells), 72) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        totals = ", ".join(f"{n} {s}" for s, n in sorted(Counter(r.status for r in self.rows).items()))
        breaks = f"; {self.graph_breaks} graph breaks" if self.graph_breaks else ""
        return "\n".join(
            [lines[0], "  ".join("-" * w for w in widths), *lines[1:], f"{totals or 'nothing found'}{breaks}"]
        )


_collectors: list[Report] = []


@contextlib.contextmanager
def collect() -> Iterator[Report]:
    """Gather the rows of every compile inside; cached compiles run no passes and give none."""
    report = Report()
    _collectors.append(report)
    try:
        yield report
    finally:
        _collectors[:] = [r for r in _collectors if r is not report]


def record(row: Row) -> None:
    """Log a row and hand it to every open collector."""
    log.info("%s: %s %s at %s%s", row.graph, row.status, row.what, row.where, f" ({row.reason})" if row.reason else "")
    for report in _collectors:
        report.rows.append(row)


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def place(node: Node) -> str:
    """Where in the model a node comes from: module path and source line, as far as the graph knows."""
    parts = [p for p in (_module(node.meta), _line(node.meta)) if p]
    return " ".join(parts) or node.name


def _module(meta: dict[str, Any]) -> str:
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        name = re.sub(r"^L\['\w+'\]\.?|^L__\w+?__", "", str(path))
        name = re.sub(r"_modules\['([^']+)'\]|\['?([^'\]]+)'?\]", lambda m: f".{m[1] or m[2]}", name)
        return re.sub(r"\.{2,}", ".", name).strip(".")
    return ""


def _line(meta: dict[str, Any]) -> str:
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
