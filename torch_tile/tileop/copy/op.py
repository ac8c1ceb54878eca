# SPDX-License-Identifier: Apache-2.0
"""T.copy: move a tile between any two memories, converting its type; ragged edges read 0 and drop writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_tile.diagnostics.errors import Diagnostic, diagnose
from torch_tile.ir.buffer import Region
from torch_tile.ir.dtype import converted
from torch_tile.ir.expr import Const, Load, cast, is_zero
from torch_tile.ir.layout import shared_tile
from torch_tile.ir.node import equal, find, node_class
from torch_tile.ir.stmt import For, Stmt, Store
from torch_tile.tileop.base import (
    Annotations,
    RegisteredOp,
    Tile,
    describe,
    describe_tile,
    is_one,
    need_choice,
    no_region,
    of_each,
    parallel,
    region_of,
    same_extents,
    spread,
    squeezed,
    tile_op,
)
from torch_tile.tileop.copy import ldmatrix
from torch_tile.tileop.parallel import op as parallel_loops
from torch_tile.tileop.parallel.nest import is_static
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env

POLICIES = (None, "evict_normal", "evict_first", "evict_last", "no_allocate")  # how caches keep lines that are read
INSTRUCTIONS = (None, "tma", "cp_async", "sync")


@tile_op("copy")
@node_class
class Copy(RegisteredOp):
    """Copy `src` to `dst`, element by element in row-major order; scheduling hints never change the result."""

    src: Region
    dst: Region
    coalesced_width: int | None = None
    disable_tma: bool = False
    eviction_policy: str | None = None
    prefer_instruction: str | None = None

    @classmethod
    def build(
        cls,
        src: Tile,
        dst: Tile,
        *,
        coalesced_width: int | None = None,
        disable_tma: bool = False,
        eviction_policy: str | None = None,
        prefer_instruction: str | None = None,
        annotations: Annotations = None,
        loop_layout: Any = None,
    ) -> Copy:
        """Copy `src` to `dst`, converted to dst's dtype; a bool says whether the number is not 0.

        Operands are buffers or regions; an element takes the other operand's shape.

        Dimensions of size 1 are ignored. What lies outside a tensor reads as 0 and is not written.

        The rest says how a GPU moves the data and changes no result. `eviction_policy` says how its caches keep what is
        read from a tensor: "evict_normal", "evict_first" or "evict_last", or "no_allocate" for what is read once and
        needs no room in the L1 cache. `prefer_instruction` is "tma", "cp_async" or "sync"; `coalesced_width`,
        `disable_tma`, `annotations` and `loop_layout` are TileLang's. Raises TileError where the shapes differ.
        """
        need_choice(cls.op_name, "prefer_instruction", prefer_instruction, INSTRUCTIONS)
        policy = policy_of(cls.op_name, eviction_policy)
        a, b = cls.regions(src, dst)
        return cls(a, b, coalesced_width, bool(disable_tma), policy, prefer_instruction)

    @staticmethod
    def regions(src: Tile, dst: Tile) -> tuple[Region, Region]:
        """Return the regions of buffers, slices or head addresses; a head address takes the other side's extents."""
        a, b = region_of(src), region_of(dst)
        for value, region, what in ((src, a, "the source"), (dst, b, "the destination")):
            if region is None:
                raise no_region(what, value)
        assert a is not None and b is not None
        a_head, b_head = isinstance(src, Load), isinstance(dst, Load)
        if a_head and not b_head:
            a = extend_head(a, b)
        elif b_head and not a_head:
            b = extend_head(b, a)
        return a, b

    def check(self) -> list[Diagnostic]:
        """Check that extents agree once dimensions of size 1 are dropped."""
        if same_extents(squeezed(self.src), squeezed(self.dst)):
            return []
        src, dst = (describe_tile(side, side.extents) for side in (self.src, self.dst))
        return [diagnose("copy_shape", self.span, src=src, dst=dst, fix=self._fitting())]

    def warnings(self) -> list[Diagnostic]:
        """Warn of floats that become bools."""
        dtype, to = self.src.buffer.dtype, self.dst.buffer
        if to.dtype != "bool" or not dtype.is_float:
            return []
        return [diagnose("float_to_bool", self.span, dtype=dtype, buffer=to.name)]

    def _fitting(self) -> str:
        """Suggest what would make the extents agree; empty if nothing obvious does."""
        a, b = squeezed(self.src), squeezed(self.dst)
        if len(a) > 1 and same_extents([*a[:-2], a[-1], a[-2]], b):
            return "T.transpose(src, dst) swaps the last two dimensions"
        sizes, wide = self.src.buffer.shape, [r.extent for r in self.dst.ranges]
        if len(wide) == len(sizes) <= 4 and all(is_one(n) or equal(n, w) for n, w in zip(sizes, wide, strict=True)):
            names = "ijkl"[: len(wide)]
            place = ", ".join("0" if is_one(n) else name for n, name in zip(sizes, names, strict=True))
            loop = f"for {', '.join(names)} in T.Parallel({', '.join(map(repr, wide))})"
            return f"T.copy repeats nothing: `{loop}` reads `{self.src.buffer.name}[{place}]` for each"
        for side in (self.src, self.dst):
            named = next((n for n, r in enumerate(side.ranges) if r.keep), len(side.ranges))
            rest = zip(side.ranges[named:], side.buffer.shape[named:], strict=True)
            whole = all(is_zero(r.start) and equal(r.extent, n) for r, n in rest)
            if 0 < named < len(side.ranges) and whole:
                head = f"{side.buffer.name}[{', '.join('ijkl'[:named])}{', 0' * (len(side.ranges) - named)}]"
                given = "one index names" if named == 1 else f"{named} indices name"
                return f"{given} one row: `{head}` begins there and takes the extents of the tile"
        for side, other in ((self.src, self.dst), (self.dst, self.src)):
            more = len(side.ranges) - len(other.ranges)
            if more > 0 and side.is_whole and same_extents(side.buffer.shape[more:], other.tile_shape):
                leading = ", ".join("ijkl"[:more])
                head = f"{side.buffer.name}[{leading}{', 0' * len(other.ranges)}]"
                return f"name the part that the tile holds by its indices in front: `{head}`"
        for side, other in ((self.src, self.dst), (self.dst, self.src)):
            tile = side.is_whole and side.buffer.scope in ("shared", "fragment")
            if tile and len(a) == len(b) and all(isinstance(n, Const) for n in other.tile_shape):
                part = "read" if side is self.dst else "write"
                return (
                    f"give `{side.buffer.name}` the shape {describe(other.tile_shape)}, or {part} a part of "
                    f"`{other.buffer.name}` that has the shape {describe(side.tile_shape)}"
                )
        return ""

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the source as read and the destination as written."""
        return [self.src], [self.dst]

    def lower_cpu(self) -> Stmt:
        """Emit a parallel nest of element moves."""
        return self._moves()

    def as_loop(self) -> For | None:
        """Return the parallel nest, or None for the copy of a single element and for those of each thread."""
        moves = None if self._is_of_each else self._moves()
        return moves if isinstance(moves, For) else None

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Demand equal layouts of fragments on both sides, and conflict-free shared memory beside a fragment."""
        found = []
        for shared, other in ((self.src.buffer, self.dst.buffer), (self.dst.buffer, self.src.buffer)):
            sizes = shared.static_shape
            if shared.scope == "shared" and other.scope == "fragment" and sizes and known.get(other) is not None:
                why = "swizzled against bank conflicts of the copy"
                found.append(Demand(shared, shared_tile(sizes, shared.dtype.bits), False, why, self.span))
        used = [n.buffer for side in (self.src, self.dst) for n in find(side, Load, Region)]
        if all(b.scope != "fragment" or known.get(b) is not None for b in used):
            return found  # no fragment is open
        loop = self.as_loop()
        if loop is None or not is_static(loop):
            return found
        return [*found, *parallel_loops.infer(loop, known, ctx)]

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Emit ldmatrix or stmatrix where the fragment's layout allows it; else a parallel nest of wide moves."""
        remark_on_policy(self, ctx)
        if self._is_of_each:
            return self._moves(of_each)
        if ldmatrix.refuses(self, ctx) is None:
            return ldmatrix.lower(self, ctx)
        return self._moves()

    @property
    def _is_of_each(self) -> bool:
        """Return whether each thread copies its own array to memory, all of it."""
        return self.src.buffer.scope in ("local", "var") and self.dst.buffer.scope in ("global", "shared")

    def _moves(self, nest: Callable[..., Stmt] = parallel) -> Stmt:
        """Build the nest that moves the elements, or one store for a single element."""
        policy = self.eviction_policy or "" if self.src.buffer.scope == "global" else ""

        def move(point: tuple[Any, ...]) -> Stmt:
            """Build the move of one element."""
            value = Load(self.src.buffer, spread(self.src, point), policy)
            return Store(self.dst.buffer, spread(self.dst, point), cast(value, self.dst.buffer.dtype))

        extents = squeezed(self.dst)
        return nest(extents, move) if extents else move(())

    def evaluate(self, env: Env) -> None:
        """Read the box, convert it and write it."""
        tile = env.read(self.src)
        env.write(self.dst, converted(tile, self.dst.buffer.dtype).reshape(env.extents(self.dst)))


def policy_of(op: str, eviction_policy: str | None) -> str | None:
    """Return the policy of caches that a name means; None is the normal policy."""
    need_choice(op, "eviction_policy", eviction_policy, POLICIES)
    return None if eviction_policy == "evict_normal" else eviction_policy


def remark_on_policy(op: Copy, ctx: ThreadContext) -> None:
    """Report a policy without effect to the author: that of a copy that reads no tensor."""
    if op.eviction_policy and op.src.buffer.scope != "global":
        ctx.build.remark(op.span, "T.copy", "without its eviction_policy", f"`{op.src.buffer.name}` is no tensor")


def extend_head(head: Region, other: Region) -> Region:
    """Give a head address the extents of `other`, right-aligned."""
    extents = [e for r in other.ranges if r.keep for e in (r.extent,)]
    while len(extents) > len(head.ranges) and is_one(extents[0]):
        extents = extents[1:]
    if len(extents) > len(head.ranges):
        return head
    skip = len(head.ranges) - len(extents)
    kept = [replace(r, extent=e, keep=True) for r, e in zip(head.ranges[skip:], extents, strict=True)]
    return replace(head, ranges=(*head.ranges[:skip], *kept))
