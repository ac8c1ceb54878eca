# SPDX-License-Identifier: Apache-2.0
"""T.reduce_sum, reduce_max, ...: fold one dimension of a tile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from torch_tile import intrinsics
from torch_tile.diagnostics.errors import Diagnostic, diagnose, error
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Call, Const, Expr, Load, cast, const
from torch_tile.ir.node import node_class
from torch_tile.ir.stmt import Block, Stmt, Store
from torch_tile.tileop.base import (
    Annotations,
    RegisteredOp,
    Tile,
    describe,
    describe_tile,
    identity_of,
    indices_at,
    is_one,
    need_region,
    parallel,
    same_extents,
    serial,
    tile_op,
    unproven_bounds,
)  # fmt: skip
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.reduce.threads import ThreadReduce, folded_dims, result_layout, source_layout
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env


@node_class
class Reduce(RegisteredOp):
    """Fold one dimension: `dst = fold(src, dim)`; with clear=False the old content of dst is folded in too."""

    kind: ClassVar[str] = ""
    src: Region
    dst: Region
    dim: int = -1
    clear: bool = True

    @classmethod
    def build(
        cls,
        buffer: Tile,
        out: Tile,
        dim: int = -1,
        clear: bool = True,
        *,
        batch: int = 1,
        annotations: Annotations = None,
    ) -> Reduce:
        """Fold dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

        Without `clear`, what `out` holds is folded in, too. `batch` and `annotations` are hints of TileLang's without
        effect. Raises TileError for another dimension or shape.
        """
        check_batch(cls.op_name, batch)
        return cls(*cls.operands(buffer, out, dim), bool(clear))

    @classmethod
    def operands(cls, buffer: Tile, out: Tile, dim: int) -> tuple[Region, Region, int]:
        """Return source, result and the folded dimension, counted from 0."""
        a, b = need_region(buffer, cls.op_name, "buffer"), need_region(out, cls.op_name, "out")
        rank = len(a.tile_shape)
        if not (isinstance(dim, int) and -rank <= dim < rank):
            raise error("reduce_dim", None, op=cls.op_name, dim=dim, rank=rank)
        return a, b, dim % rank

    def check(self) -> list[Diagnostic]:
        """Check that the result is the source without the dimension, or with size 1 there."""
        shape, out = list(self.src.tile_shape), list(self.dst.tile_shape)
        dropped = shape[: self.dim] + shape[self.dim + 1 :]
        kept = [*shape[: self.dim], const(1, dt.int32), *shape[self.dim + 1 :]]
        found = []
        if not (same_extents(dropped, out) or same_extents(kept, out) or (not dropped and same_extents(out, kept))):
            wanted = describe(dropped or kept)
            others = (d for d in range(len(shape)) if d != self.dim and same_extents(shape[:d] + shape[d + 1 :], out))
            other = next(others, None)
            fix = "" if other is None else f"pass dim={other}, which gives it; or give a tile of the shape {wanted}"
            of, dst = f"{describe_tile(self.src)} reduced over dim {self.dim}", describe_tile(self.dst)
            found.append(diagnose("reduce_shape", self.span, op=self.op_name, of=of, dst=dst, wanted=wanted, fix=fix))
        of, into = self.src.buffer.dtype, self.dst.buffer
        if into.dtype.kind == "bool" and (of.is_float or self.kind in ("sum", "abssum")):
            found.append(diagnose("wrong_dtype_store", self.span, value=of, buffer=into.name, want=into.dtype))
        if self.kind.startswith("bit") and self.src.buffer.dtype.is_float:
            why = f"has dtype {self.src.buffer.dtype}"
            fix = "bitwise reductions take integers"
            found.append(diagnose("bad_argument", self.span, op=f"T.{self.op_name}", name="buffer", why=why, fix=fix))
        return found

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return the source (and the result unless cleared) as read, and the result as written."""
        return [self.src] + ([] if self.clear else [self.dst]), [self.dst]

    @property
    def fold(self) -> str:
        """Return the kind of fold for each source value, as `combine` takes it."""
        return self.kind

    @property
    def merging(self) -> str:
        """Return the kind of fold that joins two partial results, unchanged: sums of integers may have wrapped."""
        return self.fold.removeprefix("abs")

    @property
    def of_magnitudes(self) -> bool:
        """Return whether magnitudes are compared as signed integers. As in torch.abs, the least one stays negative."""
        return self.kind == "absmax" and self.src.buffer.dtype.kind == self.dst.buffer.dtype.kind == "int"

    def _points(self, outer: tuple[Expr, ...], inner: Expr) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """Return the indices of a source element and its result, for a point and an index along the dimension."""
        position = [*outer[: self.dim], inner, *outer[self.dim :]]
        kept = [r for r in self.dst.ranges if r.keep]
        slots = list(outer) if len(kept) == len(outer) else [*outer[: self.dim], const(0, dt.int32), *outer[self.dim :]]
        return indices_at(self.src, position), indices_at(self.dst, slots)

    def lower_cpu(self) -> Stmt:
        """Fold rows by a vector helper if the last dimension is folded, else by a serial loop around a nest."""
        shape = self.src.tile_shape
        outer = (*shape[: self.dim], *shape[self.dim + 1 :])
        target = self.dst.buffer
        last = self.src.ranges[-1].keep and self.dim == len(shape) - 1 and self.src.buffer.scope != "global"
        last = last and not self.of_magnitudes  # the helper folds in a wider type
        last = last and not unproven_bounds(self.src)[-1]  # rows are whole in the tile

        def row(point: tuple[Any, ...]) -> Stmt:
            """Build the fold of one row by the vector helper."""
            source, result = self._points(point, const(0, dt.int32))
            folded = Call("cpu_reduce", (Address(self.src.buffer, source), shape[self.dim]), target.dtype, (self.fold,))
            value = folded if self.clear else combine(self.merging, Load(target, result), folded)
            return Store(target, result, value)

        def element(point: tuple[Any, ...], k: Expr) -> Stmt:
            """Build the fold of one element into its result."""
            source, result = self._points(point, k)
            value = cast(Load(self.src.buffer, source), target.dtype)
            return Store(target, result, combine(self.fold, Load(target, result), value))

        if last:
            return _rows(outer, row)
        folding = serial(
            shape[self.dim], lambda k: parallel(outer, lambda p: element(p, k)) if outer else element((), k)
        )
        if not self.clear:
            return folding
        return Block((Fill(self.dst, identity_of(self.kind, target.dtype)).lower_cpu(), folding))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Prefer a result fragment in the threads of the source's rows, so that no element moves."""
        target, source = self.dst.buffer, self.src.buffer
        if target.scope != "fragment" or not self.dst.is_whole:
            return []
        layout = source_layout(self, known.get(source), ctx.count)
        if layout is None:
            return []
        folded = folded_dims(self) if source.scope == "fragment" else {self.dim}
        why = f"holds the rows of `{source.name}` reduced over dim {self.dim}"
        return [Demand(target, result_layout(self, layout, folded), False, why, self.span)]

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Fold in each thread, then over the lanes of a warp, then across warps (threads.py)."""
        return ThreadReduce(self, ctx, combine).statements()

    def evaluate(self, env: Env) -> None:
        """Fold in float64 (int64 for integers)."""
        wide = env.wide(self.dst.buffer.dtype)
        tile = env.read(self.src).reshape([env.size(e) for e in self.src.tile_shape]).to(wide)
        unsigned = self.src.buffer.dtype == dt.uint64
        if self.of_magnitudes:
            tile = dt.rounded_tensor(tile.abs(), self.dst.buffer.dtype).to(wide)
        folded = fold_tensor(self.merging if self.of_magnitudes else self.fold, tile, self.dim, unsigned)
        if not self.clear:
            import torch

            both = torch.stack([env.read(self.dst).to(wide).reshape(folded.shape), folded])
            folded = fold_tensor(self.merging, both, 0, self.dst.buffer.dtype == dt.uint64)
        env.write(self.dst, dt.rounded_tensor(folded, self.dst.buffer.dtype).reshape(env.extents(self.dst)))


def _rows(outer: tuple[Expr, ...], row: Any) -> Stmt:
    """Build serial loops over the rows: each row is vectorised by itself."""

    def nest(rest: tuple[Expr, ...], point: tuple[Expr, ...]) -> Stmt:
        """Build the loops over the remaining dimensions."""
        if not rest:
            return row(point)  # type: ignore[no-any-return]
        if is_one(rest[0]):
            return nest(rest[1:], (*point, const(0, dt.int32)))
        return serial(rest[0], lambda v: nest(rest[1:], (*point, v)), name="ijklmn"[len(point)])

    return nest(outer, ())


@node_class
class Extremum(Reduce):
    """Compute a maximum or minimum, which ignores NaN unless told to keep it."""

    nan_propagate: bool = False

    @classmethod
    def build(
        cls,
        buffer: Tile,
        out: Tile,
        dim: int = -1,
        clear: bool = True,
        *,
        batch: int = 1,
        nan_propagate: bool = False,
        annotations: Annotations = None,
    ) -> Extremum:
        """Reduce dimension `dim` of `buffer` into `out`, which lacks it or has size 1 there.

        Without `clear`, the old value of `out` takes part. NaN counts as no element. If all elements are NaN, the
        result is the neutral element, -inf for a maximum. With `nan_propagate` a NaN makes the result NaN. `batch` and
        `annotations` are hints of TileLang's without effect. Raises TileError for another dimension or shape.
        """
        check_batch(cls.op_name, batch)
        return cls(*cls.operands(buffer, out, dim), bool(clear), bool(nan_propagate))

    @property
    def fold(self) -> str:
        """Return the kind of fold, or its variant that ignores NaN."""
        floats = self.src.buffer.dtype.is_float or self.dst.buffer.dtype.is_float
        return self.kind if self.nan_propagate or not floats else WITHOUT_NAN[self.kind]


def check_batch(op: str, batch: object, out: Buffer | None = None) -> None:
    """Raise an author error unless the hint `batch` is a positive integer that divides the elements of `out`."""
    why, fix = "", "give an integer: batch must be >= 1"
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        why = f"is {batch!r}"
    elif out is not None and all(isinstance(n, Const) for n in out.shape):
        total = math.prod(int(n.value) for n in out.shape if isinstance(n, Const))
        if batch > total:
            why, fix = f"is {batch}, which exceeds total output elements, {total}", "give a smaller one"
        elif total % batch:
            why, fix = f"is {batch}, and must evenly divide the {total} output elements", "give a divisor of them"
    if why:
        raise error("bad_argument", None, op=f"T.{op}", name="batch", why=why, fix=fix)


WITHOUT_NAN = {"max": "fmax", "min": "fmin", "absmax": "absfmax"}


def combine(kind: str, a: Expr, b: Expr) -> Expr:
    """Apply one folding step. NaN stays in max and min, as in torch.amax; fmax and fmin leave it out, as C's do."""
    if kind in ("sum", "abssum"):
        return a + (magnitude(b) if kind == "abssum" else b)
    if kind in ("max", "absmax"):
        return intrinsics.call("maximum", a, magnitude(b) if kind == "absmax" else b)
    if kind in ("fmax", "absfmax"):
        return intrinsics.call("fmax", a, magnitude(b) if kind == "absfmax" else b)
    if kind in ("min", "fmin"):
        return intrinsics.call("minimum" if kind == "min" else "fmin", a, b)
    return {"bitand": a & b, "bitor": a | b, "bitxor": a ^ b}[kind]


def magnitude(x: Expr) -> Expr:
    """Return |x|, folded for literals."""
    return Const(abs(x.value), x.dtype) if isinstance(x, Const) else abs(x)


def ordered(bits: Any) -> Any:
    """Map int64 that hold the bits of uint64 to int64 in the order of those uint64; the map is its own inverse."""
    return bits ^ -(2**63)


def fold_tensor(kind: str, tile: Any, dim: int, unsigned: bool = False) -> Any:
    """Fold a torch tensor along `dim`, of int64 that hold the bits of uint64 if `unsigned`."""
    if unsigned and not tile.is_floating_point():
        kind = {"absmax": "max", "abssum": "sum"}.get(kind, kind)
        if kind in ("max", "min"):
            return ordered(fold_tensor(kind, ordered(tile), dim))
    if kind in ("sum", "abssum"):
        return (tile.abs() if kind == "abssum" else tile).sum(dim)
    if kind in ("max", "absmax"):
        return (tile.abs() if kind == "absmax" else tile).amax(dim)
    if kind == "min":
        return tile.amin(dim)
    if kind in WITHOUT_NAN.values():
        import torch

        tile = tile.abs() if kind == "absfmax" else tile
        without = torch.where(tile.isnan(), {"fmax": -torch.inf, "fmin": torch.inf, "absfmax": 0.0}[kind], tile)
        return without.amin(dim) if kind == "fmin" else without.amax(dim)
    steps = tile.unbind(dim)
    total = steps[0]
    for step in steps[1:]:
        total = {"bitand": total & step, "bitor": total | step, "bitxor": total ^ step}[kind]
    return total


def _declare(kind: str) -> type[Reduce]:
    """Declare the tile op of one kind of reduction."""
    base = Extremum if kind in WITHOUT_NAN else Reduce
    cls = type(f"Reduce{kind.capitalize()}", (base,), {"kind": kind, "__doc__": base.__doc__})
    return tile_op(f"reduce_{kind}")(node_class(cls))


REDUCTIONS = {k: _declare(k) for k in ("sum", "max", "min", "absmax", "abssum", "bitand", "bitor", "bitxor")}
globals().update({cls.__name__: cls for cls in REDUCTIONS.values()})  # where pickle looks for them
