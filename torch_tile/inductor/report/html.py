# SPDX-License-Identifier: Apache-2.0
"""Write a report as one HTML page: no script, no network access, light or dark as the reader's system.

Equal subgraphs, as the layers of a model have them, share an entry. Whatever comes from the user is escaped; what is
not known is said to be unknown.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import torch

from torch_tile.compiler.context import times
from torch_tile.inductor.report import KEPT, MISSED, REPLACED
from torch_tile.inductor.select.roofline import peak_of
from torch_tile.kernels.epilogue.program import in_words

if TYPE_CHECKING:
    from torch_tile.compiler.context import Remark
    from torch_tile.inductor.graph.nodes import Frame
    from torch_tile.inductor.report.row import Row
    from torch_tile.kernel import JITKernel


MEANING = {
    REPLACED: "runs as a tile kernel",
    KEPT: "left to Inductor, whose code is faster",
    MISSED: "of a family that we know, but not matched",
}


def page(rows: Sequence[Row], verdict: str, graph_breaks: int, title: str) -> str:
    """Return the whole HTML page of a report's rows."""
    groups = list(_groups(rows))
    body = [
        _summary(rows, verdict, graph_breaks),
        _contents(groups),
        *(_entry(n, group) for n, group in enumerate(groups)),
    ]
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        "</body></html>\n",
    ])  # fmt: skip


def _groups(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Group rows that differ only in their module, in the order of the first row of each group."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        key = (row.family, row.status, row.what, row.frames, row.reason, row.graph, row.fix, row.times, row.cost)
        found.setdefault(key, []).append(row)
    return found.values()


def _summary(rows: Sequence[Row], verdict: str, graph_breaks: int) -> str:
    """Write the totals, the machine, and the time saved where both sides were timed."""
    counts = Counter(row.status for row in rows)
    tiles = "".join(
        f'<div class="tile {status}"><b>{counts[status]}</b> {status}<small>{meaning}</small></div>'
        for status, meaning in MEANING.items()
    )
    if graph_breaks:
        tiles += f'<div class="tile"><b>{graph_breaks}</b> graph breaks<small>nothing is matched across</small></div>'
    told = f'<p class="verdict"><b>{escape(verdict)}</b></p>'
    machines = escape(_machines(rows))
    return f'{told}<div class="tiles">{tiles}</div>\n<p>{machines}. {escape(_gain(rows))}</p>'


def _machines(rows: Iterable[Row]) -> str:
    """Write the versions, and the devices that the subgraphs run on."""
    devices = dict.fromkeys(row.device for row in rows if row.device is not None)
    names = dict.fromkeys(
        torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else _cpu(device)
        for device in devices
    )
    return f"torch {torch.__version__}, {', '.join(names) or 'no device'}"


def _cpu(device: torch.device) -> str:
    """Name a device; for the CPU with its number of threads."""
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def _gain(rows: Iterable[Row]) -> str:
    """Write the sum of the times, if there are any."""
    times = [row.times for row in rows if row.times is not None]
    if not times:
        return 'Nothing was timed: explain(..., select="fastest") times each subgraph both ways.'
    before, after = sum(t.inductor for t in times), sum(min(t.tile, t.inductor) for t in times)
    return (
        f"{len(times)} subgraphs were timed, one by one: {before:.1f} us by Inductor alone, {after:.1f} us by the "
        "faster of both."
    )


def _contents(groups: list[list[Row]]) -> str:
    """Write the table of entries."""
    lines = [
        f'<tr><td><a href="#row{n}">{escape(in_words(row.what))}</a></td><td>{_badge(row.status)}</td>'
        f"<td>{escape(row.family)}</td><td>{escape(row.where)}{_times_more(rows)}</td><td>{escape(row.graph)}</td></tr>"
        for n, rows in enumerate(groups)
        for row in rows[:1]
    ]
    head = "".join(f"<th>{name}</th>" for name in ("subgraph", "status", "family", "where", "graph"))
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>'
    )


def _times_more(rows: list[Row]) -> str:
    """Say how many further rows are equal."""
    return f" and {len(rows) - 1} more" if len(rows) > 1 else ""


def _badge(status: str) -> str:
    """Write a coloured status."""
    return f'<span class="badge {escape(status)}">{escape(status)}</span>'


def _entry(number: int, rows: list[Row]) -> str:
    """Write all known facts about equal subgraphs."""
    row = rows[0]
    modules = [r.module for r in rows if r.module]
    parts = [
        f'<section id="row{number}"><h2>{_badge(row.status)} {escape(in_words(row.what))}</h2>',
        f'<div class="where">{escape(row.family)}, {escape(row.graph)} graph{_modules(modules)}</div>',
        _source(row),
        _why_not(row),
        _bars(row),
        _roofline(row),
        "".join(map(_schedule, dict.fromkeys([kernel for r in rows for kernel in r.kernels]))),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _modules(names: list[str]) -> str:
    """Write the names of modules, the first in full."""
    if not names:
        return ""
    first, rest = names[0], names[1:]
    text = f", in <code>{escape(first)}</code>"
    if not rest:
        return text
    others = ", ".join(f"<code>{escape(name)}</code>" for name in rest)
    return f"{text} <details><summary>and {len(rest)} more</summary>{others}</details>"


def _source(row: Row) -> str:
    """Write the line of the model with its neighbours, and its callers."""
    if row.source is None:
        return '<p class="unknown">source line unknown</p>'
    text = _excerpt(row.source)
    if len(row.frames) > 1:
        outer = "".join(_excerpt(frame, 0) for frame in row.frames[:-1])
        text += f"<details><summary>called from</summary>{outer}</details>"
    return text


def _excerpt(frame: Frame, around: int = 2) -> str:
    """Write the lines around a line of the model."""
    lines = "".join(
        f'<span class="{"here" if n == frame.line else "near"}"><i>{n:5}</i>  {escape(text)}\n</span>'
        for n, text in frame.excerpt(around)
    )
    function = f" in {frame.function}" if frame.function else ""
    return f'<p class="file">{escape(f"{frame.file}:{frame.line}{function}")}</p><pre>{lines}</pre>'


def _why_not(row: Row) -> str:
    """Write the reason of a miss with its remedy and the line at fault, or why Inductor's code was kept."""
    if row.status == KEPT and row.times is None:
        return f'<p class="why"><b>Left to Inductor:</b> {escape(row.reason)}.</p>'
    if row.status != MISSED:
        return ""
    text = f'<p class="why"><b>Not matched:</b> {escape(row.reason)}.</p>'
    if row.fix:
        text += f'<p class="fix"><b>To make it match:</b> {escape(row.fix)}.</p>'
    if row.cause is not None and row.cause != row.source:
        text += _excerpt(row.cause, 1)
    return text


def _bars(row: Row) -> str:
    """Draw both times to one scale."""
    if row.times is None:
        return ""
    pairs = (("tile kernel", row.times.tile, "tile-bar"), (row.times.rival, row.times.inductor, "inductor-bar"))
    longest = max(time for _, time, _ in pairs) or 1.0
    return "".join(
        f'<div class="row"><span>{name}</span><div class="track"><div class="{style}" '
        f'style="width:{100 * time / longest:.1f}%"></div></div><span>{time:.1f} us</span></div>'
        for name, time, style in pairs
    )


def _roofline(row: Row) -> str:
    """Write the work, and the reached share of the machine's peak."""
    if row.cost is None:
        return '<p class="unknown">operations and bytes: unknown</p>' if row.status != MISSED else ""
    dtype = str(row.cost.dtype).removeprefix("torch.")
    products = f"{_scaled(row.cost.flops, 'FLOP')} in products, " if row.cost.flops else ""
    work = f"{products}{_scaled(row.cost.bytes, 'B')} moved at least ({dtype})"
    return f'<p class="work">{work}; share of the roofline: {_share(row)}</p>'


def _share(row: Row) -> str:
    """Write the share of the roofline that the tile kernel reaches, fused operations included, or why not."""
    peak = peak_of(row.device)
    best = peak.seconds(row.cost) if peak and row.cost else None
    if row.cost is None or peak is None or best is None:
        return "unknown (no known peak for this machine and dtype)"
    least = f"at best {best * 1e6:.1f} us, by {peak.limit(row.cost)}"
    if row.times is None:
        return f"unknown (not timed; {least})"
    share = best * 1e6 / row.times.tile
    return f"at least {100 * share:.0f} % ({least}{'; what is read lies in a cache' if share > 1 else ''})"


def _scaled(count: int, unit: str) -> str:
    """Format a number with a unit prefix."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}{unit}"
    return f"{count} {unit}"


def _schedule(kernel: JITKernel) -> str:
    """Write the schedule report of one kernel."""
    schedule = kernel.schedule
    if not schedule.remarks:
        return f'<p class="work">kernel <code>{escape(kernel.__name__)}</code> for {escape(str(kernel.target))}</p>'
    lines = "\n".join(_note(*row) for row in schedule.rows)
    head = "<tr><th>line</th><th>operation</th><th>became</th><th>why not faster</th></tr>"
    return (
        f"<details><summary>schedule of {escape(schedule.title)}</summary>"
        f'<div class="wide"><table><thead>{head}</thead><tbody>\n{lines}\n</tbody></table></div></details>'
    )


def _note(note: Remark, count: int) -> str:
    """Write one line of a schedule report."""
    place = note.span.place if note.span else ""
    cells = place, note.op, times(count) + note.became, note.why_not
    return f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in cells)}</tr>"


# The style sheet of `explain`'s page.

STYLE = """
:root { --ink: #1d2330; --dim: #667085; --paper: #ffffff; --panel: #f4f6fa; --line: #d9dee8;
  --good: #18794e; --plain: #3b5bdb; --bad: #b54708; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --dim: #98a2b3; --paper: #14171f; --panel: #1d222d;
  --line: #343b49; --good: #4cc38a; --plain: #8da2fb; --bad: #f5a524; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.05rem; margin: 0; overflow-wrap: anywhere; }
a { color: var(--plain); overflow-wrap: anywhere; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--panel); padding: .6rem 0; margin: .3rem 0; border-radius: 6px; overflow-x: auto; }
pre span { display: block; padding: 0 .8rem; color: var(--dim); }
pre .here { color: var(--ink); background: color-mix(in srgb, var(--plain) 18%, transparent); }
pre i { color: var(--dim); font-style: normal; user-select: none; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.wide { overflow-x: auto; }
td a { display: inline-block; min-width: 12rem; }
section { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0; }
details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--plain); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem; }
.tile b { font-size: 1.4rem; }
.tile small { display: block; color: var(--dim); }
.replaced b, .badge.replaced { color: var(--good); }
.kept b, .badge.kept { color: var(--plain); }
.missed b, .badge.missed { color: var(--bad); }
.badge { border: 1px solid; border-radius: 99px; padding: 0 .5rem; font-size: 12px; font-weight: 600; }
.where, .file, .work, .unknown { color: var(--dim); margin: .3rem 0; font-size: 13px; overflow-wrap: anywhere; }
.why, .fix { margin: .3rem 0; }
.why b { color: var(--bad); }
.fix b { color: var(--good); }
.row { display: grid; grid-template-columns: 7rem 1fr 7rem; gap: .6rem; align-items: center; margin: .2rem 0; }
.track { background: var(--panel); border-radius: 4px; }
.tile-bar, .inductor-bar { height: .8rem; border-radius: 4px; background: var(--good); }
.inductor-bar { background: var(--plain); }
"""
