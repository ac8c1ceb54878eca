# SPDX-License-Identifier: Apache-2.0
"""Look at the sizes of a kernel's first calls, and warn once of what only sizes show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.stmt import Program, dimensions

MOST_SIZES = 8  # of one kernel, whose calls are looked at


class SizeCheck:
    """Check the sizes of a kernel's calls until a warning, or until enough were seen."""

    def __init__(self, program: Program, out_idx: Sequence[int]) -> None:
        self.program, self.out_idx = program, out_idx
        self.dims = dimensions(program)
        self.seen: set[tuple[Scalar | None, ...]] = set()
        spans = [kernel.span for kernel in program.kernels]
        is_ours = any(span is None or span.is_of_library for span in spans)
        self.is_done = is_ours or not (out_idx or self.dims)

    def __call__(self, sizes: Mapping[Var, Scalar]) -> None:
        """Look at the sizes of a call, unless they are known or enough was seen."""
        if self.is_done:
            return
        values = tuple(sizes.get(var) for var in self.dims)
        if values in self.seen:
            return
        from torch_tile.lowering.common.check_sizes import check_sizes  # not before: passes take time to import

        self.seen.add(values)
        found = check_sizes(self.program, sizes, self.out_idx)
        self.is_done = bool(found) or len(self.seen) == MOST_SIZES
        warn_of(found)


__all__ = ["MOST_SIZES", "SizeCheck"]
