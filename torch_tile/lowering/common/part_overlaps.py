# SPDX-License-Identifier: Apache-2.0
"""Stage copies with overlapping sides in a fragment, so that every element is read before any write.

Afterwards the order in which a copy moves its elements does not matter.
"""

from __future__ import annotations

from torch_tile.diagnostics.errors import error
from torch_tile.intrinsics import memory
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.node import Rewriter, equal
from torch_tile.ir.stmt import Alloc, Block, Program, Stmt
from torch_tile.tileop.base import may_overlap, region_of
from torch_tile.tileop.copy.op import Copy


def part_overlaps(program: Program) -> Program:
    """Stage the copies that may overwrite their source. Each other copy stays the same object."""
    return _Part()(program)  # type: ignore[no-any-return]


class _Part(Rewriter):
    """Split each overlapping copy into two."""

    def visit_Copy(self, op: Copy) -> Stmt:
        """Copy the source into a fragment, and the fragment into the destination."""
        same = op.src.buffer is op.dst.buffer and equal(op.src.ranges, op.dst.ranges)
        if same or not may_overlap(op.src, op.dst):
            return op
        stage = stage_of(op.src)
        whole = region_of(stage)
        assert whole is not None
        fetched, stored = Copy(op.src, whole, span=op.span), Copy(whole, op.dst, span=op.span)
        between = (memory.barrier(),) if op.src.buffer.scope == "global" else ()
        return Block((Alloc(stage), fetched, *between, stored))


def stage_of(source: Region) -> Buffer:
    """Make the fragment that stages `source`. Raises TileError if the size is not constant."""
    stage = Buffer(f"{source.buffer.name}_before", source.extents, source.buffer.dtype, "fragment")
    if stage.static_shape is None:
        why, fix = "may overlap the source, whose size is not constant", "go by way of another tensor"
        raise error("bad_argument", None, op="T.copy", name="dst", why=why, fix=fix)
    return stage
