# SPDX-License-Identifier: Apache-2.0
"""Find accesses whose indices stand in the wrong order, as `B[column, row]`: outside, reads give 0 and writes are lost.

Only tensors of known sizes count, where two indices that change places reach both ends with their last tile. As
written, some index begins behind the end; or some tile leaves the tensor, and after the change none does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch_tile.diagnostics.errors import Diagnostic, Span, diagnose
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Const, Expr
from torch_tile.ir.stmt import LoopKind
from torch_tile.lowering.common.written_boxes import InOrder


def swapped_indices(
    span: Span | None, buffer: Buffer, starts: Sequence[Expr], extents: Sequence[Expr], around: InOrder
) -> Diagnostic | None:
    """Return a diagnostic for an access to a tensor if its indices fit in another order alone."""
    sizes, wide = buffer.static_shape, [int(n.value) for n in extents if isinstance(n, Const)]
    if sizes is None or not 1 < len(sizes) == len(wide) or not all(map(around.is_exact, starts)):
        return None
    known = around.outer.ranges
    ends = [known.interval(start).high + n for start, n in zip(starts, wide, strict=True)]
    if math.inf in ends:
        return None
    # The iterations of T.Parallel are a tile, whose first element begins where their variables do.
    first = {
        var: low for loop in around.outer.loops if loop.kind is LoopKind.PARALLEL
        for var, low in zip(loop.vars, loop.starts, strict=True)
    }  # fmt: skip
    last = [
        known.interval(Substitute(first)(start)).high if first else end - n
        for start, end, n in zip(starts, ends, wide, strict=True)
    ]
    wide = [int(end - at) for end, at in zip(ends, last, strict=True)]
    for a, b in itertools.combinations(range(len(sizes)), 2):
        is_behind = last[a] >= sizes[a] or last[b] >= sizes[b]
        if all(last[n] + wide[n] <= sizes[n] for n in (a, b)):  # they stay inside as they are
            continue
        # With these indices swapped: tiles of a copy keep their extents, slices take them along.
        orders = ((last[b], wide[a]), (last[a], wide[b])), ((last[b], wide[b]), (last[a], wide[a]))
        is_guarded = _is_guarded_swapped(known, (starts[a], starts[b]), (sizes[a], sizes[b]))
        if is_guarded or any(_fit(order, (sizes[a], sizes[b]), is_behind) for order in orders):
            reach = tuple(int(known.interval(start).high) for start in starts)
            return diagnose("swapped_indices", span, buffer=buffer.name, sizes=tuple(sizes), last=reach, a=a, b=b)
    return None


def _is_guarded_swapped(known: Ranges, indices: tuple[Expr, Expr], sizes: tuple[int, int]) -> bool:
    """Return whether conditions around keep two indices below each other's sizes, to the number."""
    return sizes[0] != sizes[1] and all(
        known.prove(index < size) and not known.prove(index < size - 1)
        for index, size in zip(indices, reversed(sizes), strict=True)
    )


def _fit(ends: Sequence[tuple[float, int]], sizes: Sequence[int], is_behind: bool) -> bool:
    """Return whether last tiles, each its begin and extent, reach the ends of sizes; to the number, unless some begin
    behind an end as they are written."""
    return all(
        (at < size if is_behind else at + n == size) and at + n >= size
        for (at, n), size in zip(ends, sizes, strict=True)
    )
