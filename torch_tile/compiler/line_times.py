# SPDX-License-Identifier: Apache-2.0
"""Share the time of a kernel out among its lines, by the cost model's work of each statement.

The whole is measured where the kernel's device is there. What the statements of a line take of it is an estimate: units
of a multiprocessor work side by side, and the model adds up what each line would take alone.
"""

from __future__ import annotations

import linecache
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch_tile.compiler.cost_model import (
    UNKNOWN_TRIPS,
    Work,
    WorkCounter,
    estimate,
    number,
    typical_work,
)
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Rates, Target
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.node import Node, find
from torch_tile.ir.stmt import Kernel, Let, Program, Store
from torch_tile.tileop import RegisteredOp


@dataclass(frozen=True, repr=False)
class LineTimes:
    """The milliseconds of a kernel and of its lines: (file, line) to ms. `measured` tells if the whole was timed."""

    name: str
    total: float
    measured: bool
    lines: dict[tuple[str, int], float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Format the lines as a table, in the order of the text."""
        how = "measured" if self.measured else "by the cost model"
        rows = [f"{self.name}: {self.total:.4g} ms {how}; what each line takes of it is estimated"]
        for (file, line), ms in sorted(self.lines.items()):
            share = 100 * ms / self.total if self.total else 0.0
            text = linecache.getline(file, line).strip()
            rows.append(f"{line:6}  {share:3.0f} %  {ms:10.4g} ms  {text}".rstrip())
        return "\n".join(rows)


def line_times(
    program: Program, target: Target, sizes: Mapping[str, int] | None, measure: Callable[[], float] | None
) -> LineTimes:
    """Return the times of a program's lines. `measure` gives the milliseconds of the whole; without it the model does.

    `sizes` has sizes known only at run time, by name. Raises LaunchError where one is missing and `measure` is given.
    """
    given = sizes or {}
    shapes = [buffer.shape for buffer in program.params if isinstance(buffer, Buffer)]
    names = dict.fromkeys(extent.name for shape in shapes for extent in shape if isinstance(extent, Var))
    for name, value in given.items():
        if name not in names:
            text = f"its sizes are {', '.join(names)}" if names else "all its sizes are known"
            raise LaunchError(f"profile: sizes has {name!r}, which is no size of {program.name}; {text}")
        if not isinstance(value, int) or value < 0:
            raise LaunchError(f"profile: the size {name!r} is {value!r}; expected an integer of 0 or more")
    known: dict[Var, Scalar] = {var: given[var.name] for var in find(program, Var) if var.name in given}
    rates, alone = target.rates, defaultdict[tuple[str, int], float](float)
    for launch in program.kernels:
        values = dict(known)
        grid = [max(1, number(extent, values, UNKNOWN_TRIPS)) for extent in launch.grid]
        typical_work(launch, grid, values, target)
        counter = _LineCounter(launch, values, target)
        counter.visit(launch.body, 1.0)
        for place, work in counter.lines.items():
            alone[place] += math.prod(grid) * _seconds(work, rates)
    if measure is not None:
        for buffer in program.params:
            for size in buffer.shape if isinstance(buffer, Buffer) else ():
                if isinstance(size, Var) and size.name not in given:
                    raise LaunchError(
                        f"profile: the size `{size.name}` is known only at run time; give sizes={{{size.name!r}: 1024}}"
                    )
    cores = target.sms if target.kind == "cuda" else 1
    total = measure() if measure is not None else 1e3 * estimate(program, target, cores, known).seconds
    scale = total / (sum(alone.values()) or 1.0)
    lines = {place: each * scale for place, each in alone.items()}
    return LineTimes(program.name, total, measure is not None, lines)


def _seconds(work: Work, rates: Rates) -> float:
    """Return the seconds that one multiprocessor takes for the work of a line, were it alone."""
    return work.products / rates.product + work.scalars / rates.scalar + work.bytes / rates.traffic


class _LineCounter(WorkCounter):
    """Count the work of each line of the author's text."""

    def __init__(self, kernel: Kernel, values: dict[Var, Scalar], target: Target):
        super().__init__(kernel, values, target)
        self.lines: dict[tuple[str, int], Work] = {}

    def visit(self, node: Node, times: float) -> None:
        """Count a statement for its line."""
        span = getattr(node, "span", None)
        if span is None or not isinstance(node, RegisteredOp | Store | Let):
            super().visit(node, times)
            return
        whole, self.work = self.work, self.lines.setdefault((span.file, span.line), Work())
        try:
            super().visit(node, times)
        finally:
            self.work = whole
