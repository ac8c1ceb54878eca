# SPDX-License-Identifier: Apache-2.0
"""T.copy: move a tile between any two memories, converting its type; ragged edges read 0 and drop writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..diagnostics import Diagnostic, diagnose, error
from ..ir.buffer import Region
from ..ir.expr import Load, cast
from ..ir.stmt import Stmt, Store
from .base import RegisteredOp, describe, is_one, parallel, region_of, same_extents, spread, squeezed, tile_op

if TYPE_CHECKING:
    from ..interp.env import Env


@tile_op("copy")
@dataclass(frozen=True, eq=False, repr=False)
class Copy(RegisteredOp):
    """`dst = src`, element by element in row-major order of both regions, dimensions of size 1 ignored.

    The scheduling hints say how a GPU moves the data; they never change the result.
    """

    src: Region
    dst: Region
    coalesced_width: int | None = None
    disable_tma: bool = False
    eviction_policy: str | None = None
    prefer_instruction: str | None = None

    @classmethod
    def build(cls, src: Any, dst: Any, **hints: Any) -> Copy:
        """Regions from buffers, slices or head addresses; a head address takes the other side's extents."""
        a, b = region_of(src), region_of(dst)
        for value, region, what in ((src, a, "the source"), (dst, b, "the destination")):
            if region is None:
                raise error("copy_values", None, what=f"{what} ({type(value).__name__})")
        assert a is not None and b is not None
        a_head, b_head = isinstance(src, Load), isinstance(dst, Load)
        if a_head and not b_head:
            a = _extend(a, b)
        elif b_head and not a_head:
            b = _extend(b, a)
        return cls(a, b, **{k: v for k, v in hints.items() if k not in ("annotations", "loop_layout")})

    def check(self) -> list[Diagnostic]:
        """Extents must agree once dimensions of size 1 are dropped."""
        if same_extents(squeezed(self.src), squeezed(self.dst)):
            return []
        src, dst = describe(self.src.extents), describe(self.dst.extents)
        return [diagnose("copy_shape", self.span, src=src, dst=dst)]

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Reads the source, writes the destination."""
        return [self.src], [self.dst]

    def lower_cpu(self) -> Stmt:
        """A parallel nest of element moves."""

        def move(point: tuple[Any, ...]) -> Stmt:
            value = Load(self.src.buffer, spread(self.src, point))
            return Store(self.dst.buffer, spread(self.dst, point), cast(value, self.dst.buffer.dtype))

        extents = squeezed(self.dst)
        return parallel(extents, move) if extents else move(())

    def evaluate(self, env: Env) -> None:
        """Read the box, convert, write the box."""
        tile = env.read(self.src)
        env.write(self.dst, tile.to(self.dst.buffer.dtype.as_torch()).reshape(env.extents(self.dst)))


def _extend(head: Region, other: Region) -> Region:
    """A head address given the extents of `other`, right-aligned."""
    extents = [e for r in other.ranges if r.keep for e in (r.extent,)]
    while len(extents) > len(head.ranges) and is_one(extents[0]):
        extents = extents[1:]
    if len(extents) > len(head.ranges):
        return head
    skip = len(head.ranges) - len(extents)
    kept = [replace(r, extent=e, keep=True) for r, e in zip(head.ranges[skip:], extents, strict=True)]
    return replace(head, ranges=(*head.ranges[:skip], *kept))
