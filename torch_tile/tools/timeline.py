# SPDX-License-Identifier: Apache-2.0
"""Draw what the roles of one block do beside its copies and products, by the thread simulator's clocks."""

from __future__ import annotations

import math
from html import escape

import torch

from torch_tile.compiler.binding import size_of
from torch_tile.diagnostics.errors import InternalError, TileError
from torch_tile.hardware import Target
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.stmt import Program, dimensions
from torch_tile.simulator.simt.interpreter import run_threads
from torch_tile.simulator.simt.timeline import COPIES, PRODUCTS, EnoughEvents, Event, Timeline

UNKNOWN_SIZE = 1024  # of a dimension known only at run time
MOST_BYTES = 1 << 31  # of made-up tensors
ROW = 22  # points of height of a bar
KINDS = {"copy": "copy", "product": "product", "wait": "waits", "compute": "computes"}


def events_of(program: Program, flat: Program, target: Target) -> list[Event]:
    """Collect the events of the middle block of the last kernel's grid, run on zeros until the picture is full.

    `flat` is the stage FLAT of `program`. Scalars are 1, sizes known only at run time `UNKNOWN_SIZE`. Returns no events
    where that is no valid call, or its tensors are too large to be made up.
    """
    sizes: dict[Var, Scalar] = {v: -(-UNKNOWN_SIZE // v.multiple) * v.multiple for v in dimensions(program)}
    timeline = Timeline(target, target.rates)
    try:
        values = dict(sizes)
        shapes: dict[Buffer, tuple[list[int], torch.dtype]] = {}
        originals = (*program.params, *program.workspaces, *program.outputs)
        for old, new in zip(originals, (*flat.params, *flat.workspaces, *flat.outputs), strict=True):
            if isinstance(old, Buffer) and isinstance(new, Buffer):
                shapes[new] = [size_of(s, sizes, old.name) for s in old.shape], old.dtype.as_torch()
            elif isinstance(new, Var):
                values[new] = 1.0 if new.dtype.is_float else 1
        if sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()) > MOST_BYTES:
            return []
        tensors = {buffer: torch.zeros(shape, dtype=dtype) for buffer, (shape, dtype) in shapes.items()}
        grid = [int(evaluate(n, values)) for n in flat.kernels[-1].grid]
        run_threads(flat, tensors, values, [tuple(n // 2 for n in grid)], timeline)
    except EnoughEvents:
        pass
    except (TileError, InternalError, KeyError, ArithmeticError):
        return []
    return timeline.events


def picture(events: list[Event]) -> str:
    """Draw events as bars, a row for each role and engine, with lines as bars overlap; "" without events."""
    if not events:
        return ""
    end = max(e.end for e in events)
    scale, digits, unit = (1e6, ".2f", "us") if end > 2e-6 else (1e9, ".0f", "ns")
    roles = sorted({e.by for e in events}, key=lambda row: (len(row), row))
    loads, multiplies = ({e.by for e in events if e.kind == kind} for kind in ("copy", "product"))
    names = {r: f"{r}, producer" for r in loads - multiplies} | {r: f"{r}, consumer" for r in multiplies - loads}
    rows = [row for row in (COPIES, *roles, PRODUCTS) if any(e.row == row for e in events)]
    width, left = max(640, 4 * len(events)), 160
    y, parts = 0, []
    for row in rows:
        lines: list[float] = []  # where the last bar of each line ends
        for event in sorted((e for e in events if e.row == row), key=lambda e: e.start):
            line = next((n for n, last in enumerate(lines) if last <= event.start * (1 + 1e-9)), len(lines))
            lines[line : line + 1] = [event.end]
            x, wide = left + width * event.start / end, max(width * (event.end - event.start) / end - 0.5, 0.5)
            place = f"line {event.span.line}: " if event.span else ""
            when = f"{event.start * scale:{digits}} to {event.end * scale:{digits}} {unit}"
            words = f"{place}{KINDS[event.kind]} {event.what if event.kind != 'compute' else ''}".strip()
            parts.append(
                f'<rect class="{event.kind}" x="{x:.1f}" y="{y + ROW * line}" width="{wide:.1f}" height="{ROW - 4}">'
                f"<title>{escape(words)}, {when}</title></rect>"
            )
        parts.append(f'<text x="0" y="{y + 14}">{escape(names.get(row, row))}</text>')
        y += ROW * len(lines) + 8
    for part in (0, 0.25, 0.5, 0.75, 1):
        place = f'x="{left + width * part:.0f}" y="{y + 12}" text-anchor="{"end" if part == 1 else "middle"}"'
        parts.append(f"<text {place}>{end * part * scale:{digits}} {unit}</text>")
    size = f'width="{left + width + 40}" height="{y + 20}"'
    return f'<svg class="timeline" {size} font-size="12">{"".join(parts)}</svg>'
