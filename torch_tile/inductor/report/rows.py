# SPDX-License-Identifier: Apache-2.0
"""Record the results of the passes: one row per subgraph found, replaced or not, with its place in the model.

Passes call `record`. To get the rows, open `collect()` around a compile. Each row is also logged on the logger
`torch_tile.inductor` (`TORCH_LOGS="torch_tile"`).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.inductor.report import KEPT as KEPT, MISSED as MISSED, REPLACED as REPLACED
from torch_tile.inductor.report.html import page
from torch_tile.inductor.report.row import (
    LARGE as LARGE,
    LEAN_WORTH as LEAN_WORTH,
    WORTH as WORTH,
    Outcome as Outcome,
    Row as Row,
)
from torch_tile.inductor.settings import FAMILIES
from torch_tile.kernels.epilogue.program import in_words

log: logging.Logger = logging.getLogger("torch_tile.inductor")


_NUMBER = re.compile(r"(?:(?<=^)|(?<=\.))\d+(?=[. ]|$)")  # of a layer: in `layers.3.mlp model.py:7` the 3


def together(places: Sequence[str]) -> str:
    """Return one text for places that differ in numbers of layers: `layers.0-2.mlp model.py:7`."""
    numbers = [sorted({int(n) for n in column}) for column in zip(*map(_NUMBER.findall, places), strict=True)]
    ranges = iter([_ranges(column) for column in numbers])
    return _NUMBER.sub(lambda _: next(ranges), places[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges, as "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass
class Report:
    """The rows of one or more compiles, in graph order. `str(report)` is a table, and so is what a prompt shows.

    `asked` is the backend's option `select`. `of_eval` is whether the model is in eval mode.
    """

    rows: list[Row] = field(default_factory=list)
    graph_breaks: int = 0
    asked: str = "tile"
    of_eval: bool = False

    @names_parameters
    def select(self, family: str | None = None, status: str | None = None) -> list[Row]:
        """Return the rows of one family, one status, or both. Raises ValueError for an unknown family."""
        if family is not None and family not in {*FAMILIES, *(r.family for r in self.rows)}:
            raise ValueError(f"Report: family is {family!r}; expected one of {', '.join(FAMILIES)}")
        return [r for r in self.rows if family in (None, r.family) and status in (None, r.status)]

    @names_parameters
    def replaced(self, family: str | None = None) -> list[Row]:
        """Return the rows of subgraphs that became tile kernels."""
        return self.select(family, REPLACED)

    @names_parameters
    def missed(self, family: str | None = None) -> list[Row]:
        """Return the rows of subgraphs of a known family that did not match, each with its reason."""
        return self.select(family, MISSED)

    def __str__(self) -> str:
        """Return the verdict, a table of rows with counts, the remedies of missed rows, and a line of totals."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for r in self.rows:
            key = (r.family, r.status, in_words(r.what), _NUMBER.sub("*", r.where), r.reason, r.graph, self._advice(r))
            groups.setdefault(key, []).append(r)
        header = ("family", "status", "what", "where", "reason", "graph")
        places = {key: together([r.where for r in rows]) for key, rows in groups.items()}
        named = {key: f"{places[key]} (x{len(rows)})" if len(rows) > 1 else places[key] for key, rows in groups.items()}
        cells = [header, *[(*key[:3], named[key], *key[4:6]) for key in groups]]
        widths = [min(max(len(row[i]) for row in cells), 72) for i in range(len(header))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * w for w in widths))
        advice = dict.fromkeys(f"  {places[key]}: {key[6]}" for key in groups if key[6])
        advised = ["to make them match:", *advice] if advice else []
        return "\n".join([self.verdict(), *lines, *advised, self.totals()])

    __repr__ = __str__

    def verdict(self) -> str:
        """Return one line: training or inference, how much runs in tile kernels, and what that is expected to save."""
        if not self.rows:
            return "Nothing of a family that we know was found: everything stays Inductor's."
        kind = "Inference" if {r.graph for r in self.rows} <= {"inference"} else "Training"
        replaced = self.replaced()
        text = f"{kind}: {len(replaced)} of {len(self.rows)} subgraphs found run as tile kernels"
        costs = [r.cost.flops for r in self.rows if r.cost is not None]
        if sum(costs):
            ours = sum(r.cost.flops for r in replaced if r.cost is not None)
            text += f", {100 * ours / sum(costs):.0f} % of their arithmetic"
        timed = [r.times for r in self.rows if r.times is not None]
        before, after = sum(t.inductor for t in timed), sum(min(t.tile, t.inductor) for t in timed)
        if kind == "Training" and self.of_eval:
            text += " (the model is in eval mode: explain it under torch.no_grad() for inference)"
        if not before and self.asked == "fastest":
            return f"{text}. Nothing was timed: no replacement here is worth a contest."
        if not before:
            return f'{text}. Not timed: select="fastest" says what it saves.'
        share = sum(r.times.tile for r in replaced if r.times is not None) / after if after else 0.0
        gain = f"expected gain {before / after:.2f}x, {before:.0f} us to {after:.0f} us" if after else "no gain"
        return (
            f"{text}. Of the {len(timed)} that were timed, {100 * share:.0f} % of the time is in tile kernels; {gain}."
        )

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame of its own, so that its style stays inside."""
        height = min(900, 260 + 40 * len(self.rows))
        frame = f'width="100%" height="{height}" style="border:0" title="torch_tile.explain"'
        return f'<iframe srcdoc="{escape(self.html())}" {frame}></iframe>'

    @staticmethod
    def _advice(row: Row) -> str:
        """Return the remedy of a row, with the line that it applies to if that is not the row's own."""
        elsewhere = row.fix and row.cause is not None and row.cause != row.source
        return f"{row.fix} ({row.cause})" if elsewhere else row.fix

    def totals(self) -> str:
        """Return the number of subgraphs per status, as text."""
        totals = ", ".join(f"{n} {s}" for s, n in sorted(Counter(r.status for r in self.rows).items()))
        return f"{totals or 'nothing found'}{f'; {self.graph_breaks} graph breaks' if self.graph_breaks else ''}"

    def html(self, title: str = "torch_tile.explain") -> str:
        """Return the report as one self-contained HTML page: source lines, times, schedules, reasons."""
        return page(self.rows, self.verdict(), self.graph_breaks, title)

    @names_parameters
    def save(self, path: str | Path) -> Path:
        """Write `html()` to a file; returns its path. Raises ValueError for a name of another kind of file."""
        path = Path(path)
        if path.is_dir() or not path.absolute().parent.is_dir():
            why = "is a folder; give a file in it" if path.is_dir() else "is in a folder that is not there"
            raise ValueError(f"Report.save: path {path} {why}")
        if path.suffix.lower() not in (".html", ".htm", ""):
            raise ValueError(f"Report.save: path ends in {path.suffix!r}, and the page is HTML; expected '.html'")
        path.write_text(self.html(), encoding="utf-8")
        return path


_collectors: list[Report] = []


@contextlib.contextmanager
def collect() -> Iterator[Report]:
    """Collect the rows of every compile inside. Cached compiles run no passes and give no rows."""
    report = Report()
    _collectors.append(report)
    try:
        yield report
    finally:
        _collectors[:] = [r for r in _collectors if r is not report]


def record(row: Row) -> None:
    """Log a row and hand it to every open collector."""
    more = "".join([f" ({row.reason})" if row.reason else "", f"; to make it match, {row.fix}" if row.fix else ""])
    log.info("%s: %s %s at %s%s", row.graph, row.status, row.what, row.where, more)
    for report in _collectors:
        report.rows.append(row)
