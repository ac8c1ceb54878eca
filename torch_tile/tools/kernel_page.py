# SPDX-License-Identifier: Apache-2.0
"""`torch_tile.show(kernel)`: a kernel for a GPU as one page of pictures, inline in notebooks or in a file.

The page has the schedule, the limits of the machine and a timeline. It also has the shared memory, the layout of each
tile and the text. It needs no GPU, no script and no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch_tile.compiler.context import Build, times
from torch_tile.compiler.cost_model import estimate
from torch_tile.diagnostics.arguments import names_parameters
from torch_tile.diagnostics.errors import error
from torch_tile.hardware import Target
from torch_tile.ir.dtype import to_dtype
from torch_tile.ir.layout_ops import svg_picture
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, Program
from torch_tile.language import PrimFunc
from torch_tile.tools.show import lowered, tiles
from torch_tile.tools.timeline import KINDS, events_of, picture

if TYPE_CHECKING:
    from torch_tile.kernel import JITKernel

ROWS, COLUMNS = 16, 32  # of a layout that are drawn
"""Rows and columns of the largest layout that is drawn cell by cell; of a larger one the page gives the formula."""


@names_parameters
def show(kernel: JITKernel | PrimFunc, target: str = "cuda:sm_90a") -> KernelPage:
    """Draw what the compiler made of a kernel for a GPU; in a notebook the result shows itself.

    Args:
        kernel: a compiled kernel, or a @T.prim_func. One for a GPU is shown as it is, any other is compiled for
            `target`.
        target: a GPU, "cuda:sm_80" to "cuda:sm_120a". None is needed in this machine.

    Returns:
        The page: `save("kernel.html")` writes it, `str()` is the schedule report.

    Raises:
        TileError: for anything but a kernel, or a target that is no GPU.
    """
    from torch_tile.jit import compile_program
    from torch_tile.kernel import JITKernel

    if isinstance(kernel, JITKernel) and kernel.target.kind == "cuda":
        return KernelPage(kernel)
    if not isinstance(kernel, JITKernel | PrimFunc):
        fix = "give a @T.prim_func or a compiled kernel; an eager kernel is compiled by f.compile(M=1024)"
        raise error("bad_argument", None, op="show", name="kernel", why=f"is {type(kernel).__name__}", fix=fix)
    if Target.of(target).kind != "cuda":
        why, fix = f"is {target!r}, and schedules and layouts are a GPU's", "give 'cuda:sm_80' or 'cuda:sm_90a'"
        raise error("bad_argument", None, op="show", name="target", why=why, fix=fix)
    return KernelPage(compile_program(kernel.program, (), target))


@dataclass(frozen=True)
class KernelPage:
    """The pictures of one kernel. Notebooks show it by `_repr_html_`."""

    kernel: JITKernel

    def __str__(self) -> str:
        """Return the schedule report."""
        return str(self.kernel.schedule)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame of its own, so that its style stays inside."""
        frame = 'width="100%" height="700" style="border:0" title="torch_tile.show"'
        return f'<iframe srcdoc="{escape(self.html())}" {frame}></iframe>'

    def html(self) -> str:
        """Return the whole page."""
        kernel = self.kernel
        build = Build(kernel.target, kernel.build.options)
        laid_out, flat, _ = lowered(kernel.program, build, [])
        title = escape(f"{kernel.__name__} for {kernel.target}")
        body = [
            f"<h1>{title}</h1>",
            f"<p><b>{escape(_verdict(kernel))}</b></p>",
            "<h2>Schedule</h2>", _schedule(kernel),
            "<h2>Roofline</h2>", _roofline(kernel),
            "<h2>Timeline</h2>", _timeline(kernel.program, flat, kernel.target),
            "<h2>Shared memory</h2>", _memory(flat),
            "<h2>Layouts</h2>", *_layouts(laid_out, build),
            f"<details><summary>CUDA text</summary><pre>{escape(kernel.source)}</pre></details>",
        ]  # fmt: skip
        head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        return "\n".join([f"{head}<style>{STYLE}</style></head><body>", *body, "</body></html>\n"])

    def save(self, path: str | Path) -> Path:
        """Write `html()` to a file; returns its path. Raises TileError for a name of another kind of file."""
        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            why, fix = f"ends in {path.suffix!r}", 'give a name that ends in ".html"'
            raise error("bad_argument", None, op="show", name="path", why=why, fix=fix)
        path.write_text(self.html(), encoding="utf-8")
        return path


def _verdict(kernel: JITKernel) -> str:
    """Say in a line what the kernel takes, and whether anything could be faster."""
    slow = len(kernel.schedule.slow)
    text = f"{kernel.n_regs} registers a thread" if kernel.n_regs else "registers are not known"
    text += f", {kernel.n_spills} bytes spilled" if kernel.n_spills else ""
    count = len(kernel.schedule.rows)
    return f"{text}; {slow or 'none'} of the {count} decisions below {'have' if slow > 1 else 'has'} a faster way"


def _schedule(kernel: JITKernel) -> str:
    """Write the schedule report as a table."""
    head = "line", "operation", "became", "why not faster"
    rows = [
        (note.span.place if note.span else "", note.op, times(count) + note.became, note.why_not)
        for note, count in kernel.schedule.rows
    ]
    shown = 4 if any(row[3] for row in rows) else 3
    lines = [f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row[:shown])}</tr>" for row in rows]
    columns = "".join(f"<th>{each}</th>" for each in head[:shown])
    return f'<div class="wide"><table><tr>{columns}</tr>{"".join(lines)}</table></div>'


def _roofline(kernel: JITKernel) -> str:
    """Draw the machine's limits over operations for each byte, and where the cost model sees the kernel."""
    sms, rates = kernel.target.sms, kernel.target.rates
    work = estimate(kernel.program, kernel.target, sms)
    peak, memory = rates.product * sms, rates.memory
    if not work.bytes or not work.flops:
        return "<p>The kernel moves nothing, or computes nothing.</p>"
    reached, ridge = work.flops / work.bytes, peak / memory
    low, high = min(ridge, reached) / 16, max(ridge, reached) * 16

    def x_of(intensity: float) -> float:
        """Return the x coordinate, in pixels, of an arithmetic intensity in operations for each byte."""
        return 60 + 560 * math.log(intensity / low) / math.log(high / low)

    def y_of(rate: float) -> float:
        """Return the y coordinate, in pixels, of a rate in operations for each second."""
        return 190 - 160 * math.log(rate / (memory * low)) / math.log(peak / (memory * low) * 2)

    limit = min(peak, memory * reached)
    by = "memory" if reached < ridge else "arithmetic"
    corners = (low, memory * low), (ridge, peak), (high, peak)
    path = "M " + " L ".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in corners)
    words = (
        f"{_scaled(work.flops)}FLOP, {_scaled(work.bytes)}B: {reached:.3g} operations a byte, limited by {by} to "
        f"{_scaled(limit)}FLOP/s; the model expects {work.seconds * 1e6:.3g} us"
    )
    return (
        f'<p>{escape(words)}</p><div class="wide"><svg width="640" height="220" font-size="12">'
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="2"/>'
        f'<line x1="{x_of(reached):.1f}" x2="{x_of(reached):.1f}" y1="{y_of(limit):.1f}" y2="190" class="drop"/>'
        f'<circle cx="{x_of(reached):.1f}" cy="{y_of(limit):.1f}" r="6" class="mark"/>'
        f'<text x="60" y="212">operations for each byte of memory, from {low:.2g} to {high:.0f}</text>'
        f'<text x="{x_of(ridge) - 8:.1f}" y="{y_of(peak) - 10:.1f}">{_scaled(peak)}FLOP/s</text></svg></div>'
    )


def _scaled(count: float) -> str:
    """Format a number, ready for its unit."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "


def _timeline(program: Program, flat: Program, target: Target) -> str:
    """Draw what roles, copies and products of one block do at the same time."""
    drawn = picture(events_of(program, flat, target))
    if not drawn:
        return "<p>No call could be made up that the simulator runs.</p>"
    legend = " ".join(f'<span class="key {kind}"></span> {word}' for kind, word in KINDS.items())
    model = (
        "The block in the middle of the grid runs in the simulator, on zeros. Copies and products take the time of the "
        "cost model, other statements that of their instructions; ordinary loads have no latency."
    )
    return f'<p>{legend}</p><div class="wide">{drawn}</div><p>{model}</p>'


def _memory(flat: Program) -> str:
    """Draw where each tile lies in the shared memory of a block. Tiles that reuse bytes have rows of their own."""
    parts = []
    for kernel in flat.kernels:
        held = [n.buffer for n in find(kernel, Alloc) if n.buffer.scope in ("shared", "barrier")]
        total = max(kernel.shared_bytes, 1)
        rows: list[int] = []  # the end of the last tile of each row
        drawn = []
        for buffer in sorted(held, key=lambda each: each.offset or 0):
            first = buffer.offset or 0
            size = math.prod(buffer.static_shape or (0,)) * buffer.dtype.itemsize
            row = next((n for n, end in enumerate(rows) if end <= first), len(rows))
            rows[row : row + 1] = [first + size]
            x, width = 640 * first / total, max(640 * size / total, 2.0)
            label = escape(f"{buffer.name} {buffer.dtype} {size} B")
            inside = f'<text x="{x + 6:.1f}" y="{row * 40 + 24}">{label}</text>' if width > 7 * len(label) else ""
            drawn.append(
                f'<g class="{buffer.scope}"><title>{label}, from byte {first}</title><rect x="{x:.1f}" y="{row * 40}" '
                f'width="{width:.1f}" height="36"/>{inside}</g>'
            )
        picture = f'<svg width="640" height="{40 * len(rows)}" font-size="12">{"".join(drawn)}</svg>'
        parts.append(f'<p>{total} bytes of a block</p><div class="wide">{picture}</div>' if drawn else "<p>none</p>")
    return "".join(parts)


def _layouts(laid_out: Program, build: Build) -> list[str]:
    """Write for each tile its layout, who decided it, and a picture to unfold."""
    why = {place.buffer: place.why for place in build.placements}
    parts = []
    for buffer in tiles(laid_out):
        if buffer.layout is None:
            continue
        formula = f"<code>{escape(str(buffer.layout))}</code>"
        name = f"<code>{escape(buffer.name)}</code>, {buffer.scope} {buffer.dtype}, {formula}"
        reason = escape(why.get(buffer.name, ""))
        rows, columns = (1, 1, *buffer.layout.shape)[-2:]
        part = f"; its first {ROWS} rows and {COLUMNS} columns" if rows > ROWS or columns > COLUMNS else ""
        picture = svg_picture(buffer.layout, to_dtype(buffer.dtype).bits, rows=ROWS, columns=COLUMNS)
        parts.append(f'<details><summary>{name}: {reason}{part}</summary><div class="wide">{picture}</div></details>')
    return parts


STYLE = """
:root { color-scheme: light dark; --line: #d9dee8; --mark: #3b5bdb; --dim: #667085; }
@media (prefers-color-scheme: dark) { :root { --line: #343b49; --mark: #8da2fb; --dim: #98a2b3; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre, .wide { overflow-x: auto; }
summary { cursor: pointer; } details { margin: .4rem 0; }
svg text { fill: currentColor; } details .wide svg text { fill: #1d2330; }
.copy { fill: #2b8a3e; background: #2b8a3e; } .product { fill: var(--mark); background: var(--mark); }
.wait { fill: #e8590c; background: #e8590c; } .compute { fill: var(--dim); background: var(--dim); }
.key { display: inline-block; width: .8em; height: .8em; }
svg .shared rect { fill: var(--mark); fill-opacity: .25; stroke: var(--mark); }
svg .barrier rect { fill: var(--dim); } .mark { fill: var(--mark); }
.drop { stroke: var(--dim); stroke-dasharray: 4 4; }
"""
