# SPDX-License-Identifier: Apache-2.0
"""Check a kernel at the sizes of a call for what only sizes show: ends left out, indices in the wrong order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_tile.diagnostics.errors import Diagnostic
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Scalar, Var
from torch_tile.ir.fixed_sizes import fix_sizes
from torch_tile.ir.stmt import Program, dimensions
from torch_tile.lowering.common.narrow_sums import narrow_sums
from torch_tile.lowering.common.unread_tails import Ends
from torch_tile.lowering.common.unwritten_results import partly_written


def check_sizes(program: Program, sizes: Mapping[Var, Scalar], out_idx: Sequence[int] = ()) -> list[Diagnostic]:
    """Return warnings of probable mistakes at these sizes. `out_idx` names the parameters that are results."""
    is_sized = bool(dimensions(program))
    fixed = fix_sizes(program, sizes) if is_sized else program
    ends = Ends(fixed)
    made = [b for b in (fixed.params[n] for n in out_idx) if isinstance(b, Buffer) and b not in ends.cut]
    if not is_sized:  # all else is known, and was told, when the kernel was compiled
        return partly_written(fixed, made)
    return [*partly_written(fixed, [*fixed.outputs, *made]), *ends.diagnostics(), *narrow_sums(fixed)]
