# SPDX-License-Identifier: Apache-2.0
"""Check a kernel at the sizes of a call for what only sizes show: ends left out, indices in the wrong order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_tile.diagnostics.errors import Diagnostic
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.fixed_sizes import fix_sizes
from torch_tile.ir.stmt import Program, dimensions
from torch_tile.lowering.common.unread_tails import cut_tensors, outside_or_left_out
from torch_tile.lowering.common.unwritten_results import partly_written

MOST_SIZES = 8  # of one kernel, whose calls are looked at


def check_sizes(program: Program, sizes: Mapping[Var, Scalar], out_idx: Sequence[int] = ()) -> list[Diagnostic]:
    """Return what a program hardly means to do at these sizes; `out_idx` names parameters that are results."""
    is_sized = bool(dimensions(program))
    fixed = fix_sizes(program, sizes) if is_sized else program
    cut = cut_tensors(fixed)
    made = [b for b in (fixed.params[n] for n in out_idx) if isinstance(b, Buffer) and b not in cut]
    if not is_sized:  # all else is known, and was told, when the kernel was compiled
        return partly_written(fixed, made)
    return [*partly_written(fixed, [*fixed.outputs, *made]), *outside_or_left_out(fixed)]


class SizeCheck:
    """Check the sizes of a kernel's calls, and warn once."""

    def __init__(self, program: Program, out_idx: Sequence[int]) -> None:
        self.program, self.out_idx = program, out_idx
        self.dims = dimensions(program)
        self.seen: set[tuple[Scalar | None, ...]] = set()
        self.is_done = False

    def __call__(self, sizes: Mapping[Var, Scalar]) -> None:
        """Look at the sizes of a call, unless they are known or enough was seen."""
        values = tuple(sizes.get(var) for var in self.dims)
        if self.is_done or values in self.seen:
            return
        self.seen.add(values)
        found = check_sizes(self.program, sizes, self.out_idx)
        self.is_done = bool(found) or len(self.seen) == MOST_SIZES
        warn_of(found)


__all__ = ["SizeCheck", "check_sizes"]
