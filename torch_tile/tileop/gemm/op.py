# SPDX-License-Identifier: Apache-2.0
"""T.gemm: C += op(A) op(B) on tiles, accumulated in C's type."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch_tile.diagnostics.errors import Diagnostic, InternalError, diagnose, error
from torch_tile.diagnostics.kernel_warnings import warn_of
from torch_tile.intrinsics.matrix import shape_for
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Call, Expr, const
from torch_tile.ir.node import equal, node_class
from torch_tile.ir.stmt import Alloc, Block, Do, If, Stmt
from torch_tile.tileop.base import (
    RegisteredOp,
    Tile,
    conjunction,
    describe,
    describe_tile,
    is_one,
    need_region,
    same_extents,
    tile_op,
    unproven_bounds,
)
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm import fma, mma, wgmma as gemm_wgmma
from torch_tile.tileop.threads import Demand, Layouts, ThreadContext

if TYPE_CHECKING:
    from torch_tile.ir.stmt import Env


class GemmImplementation(Protocol):
    """A module that lowers products to threads: why it refuses a product, which layouts it demands, and the code."""

    def refuses(self, op: Gemm, ctx: ThreadContext) -> str | None:
        """Return why the implementation does not take this product; None if it does."""

    def infer_layout(self, op: Gemm, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Return the layouts that the implementation demands, as far as they follow from the known ones."""

    def lower(self, op: Gemm, ctx: ThreadContext) -> Stmt:
        """Emit what one thread does."""


IMPLEMENTATIONS: tuple[GemmImplementation, ...] = (
    gemm_wgmma,
    mma,
    fma,
)  # the first that does not refuse takes the product
COPY_ONE = "copy one of them to a tile of the other's type"
WHOLE_WARPS = (32, 64, 128, 256)  # threads that share a product by tensor cores


class GemmWarpPolicy(enum.Enum):
    """The split of C's rows and columns among the warps of a block. It has no effect on results."""

    Square = "Square"
    FullRow = "FullRow"
    FullCol = "FullCol"

    def to_language(self) -> str:
        """Format the policy as an author writes it."""
        return f"T.GemmWarpPolicy.{self.value}"


@tile_op("gemm")
@node_class
class Gemm(RegisteredOp):
    """Multiply: A is (M, K), or (K, M) with transpose_A; B is (K, N), or (N, K) with transpose_B; C is (M, N).

    A product by wgmma ends with a wait for all but the `wg_wait` youngest groups of products; -1 is none. With `wgmma`
    it goes so or not at all. In the rows of the running warpgroup (T.own_rows), columns of A from `used` on are zeros.
    A product by wgmma may leave its second half out then, and is two groups.
    """

    A: Region
    B: Region
    C: Region
    transpose_A: bool = False
    transpose_B: bool = False
    policy: GemmWarpPolicy = GemmWarpPolicy.Square
    clear_accum: bool = False
    wg_wait: int = 0
    wgmma: bool = False
    used: Expr | None = None

    @classmethod
    def build(
        cls,
        A: Tile,
        B: Tile,
        C: Tile,
        transpose_A: bool = False,
        transpose_B: bool = False,
        policy: GemmWarpPolicy = GemmWarpPolicy.Square,
        clear_accum: bool = False,
        *,
        wg_wait: int = 0,
        wgmma: bool = False,
        used: Expr | None = None,
    ) -> Gemm:
        """Build the op. Operands are buffers or slices; asynchronous.py has what an author may write."""
        if not isinstance(policy, GemmWarpPolicy):
            why, fix = f"is {policy!r}"[:80], f"give one of {', '.join(p.to_language() for p in GemmWarpPolicy)}"
            raise error("bad_argument", None, op="T.gemm", name="policy", why=why, fix=fix)
        a, b, c = (need_region(x, "gemm", name) for x, name in ((A, "A"), (B, "B"), (C, "C")))
        made = cls(a, b, c, bool(transpose_A), bool(transpose_B), policy, bool(clear_accum), int(wg_wait), bool(wgmma))
        return made if used is None or wg_wait else replace(made, used=used)

    def started(self, pending: int = -1) -> Gemm:
        """Return the product with a wait for all but `pending` groups. These count, so it is one group and whole."""
        return replace(self, wg_wait=pending, used=None)

    def check(self) -> list[Diagnostic]:
        """Check that shapes fit, operands are on chip, and the types have a product."""
        found = []
        for region, operand in ((self.A, "A"), (self.B, "B"), (self.C, "C")):
            if region.buffer.scope == "global":
                found.append(
                    diagnose("gemm_scope", self.span, operand=operand, buffer=region.buffer.name, scope="global")
                )
        sizes = [_matrix(r) for r in (self.A, self.B, self.C)]
        if any(s is None for s in sizes) or not self._fits(*[s for s in sizes if s is not None]):
            a, b, c = (describe_tile(r) for r in (self.A, self.B, self.C))
            a, b = a + ("^T" if self.transpose_A else ""), b + ("^T" if self.transpose_B else "")
            return [*found, diagnose("gemm_shape", self.span, a=a, b=b, c=c, fix=self._fitting(sizes))]
        for region, operand in ((self.A, "A"), (self.B, "B")):
            if region.buffer is self.C.buffer and all(map(equal, region.starts, self.C.starts)):
                why, fix = f"is also operand {operand}, `{region.buffer.name}`", "give the sums a tile of their own"
                found.append(diagnose("bad_argument", self.span, op="T.gemm", name="C", why=why, fix=fix))
        types = [r.buffer.dtype for r in (self.A, self.B, self.C)]
        if fix := _refuses(*types):
            a, b, c = (str(t) for t in types)
            found.append(diagnose("gemm_dtype", self.span, a=a, b=b, c=c, fix=fix))
        return found

    def _fits(self, a: tuple[Expr, Expr], b: tuple[Expr, Expr], c: tuple[Expr, Expr]) -> bool:
        """Return whether the shapes of A, B and C agree."""
        m, k = a[::-1] if self.transpose_A else a
        k2, n = b[::-1] if self.transpose_B else b
        return same_extents((m, n, k), (*c, k2))

    def _fitting(self, sizes: Sequence[tuple[Expr, Expr] | None]) -> str:
        """Name the transposes, or the shape of C, with which the shapes would agree; empty if there are none."""
        known = [s for s in sizes if s is not None]
        if len(known) < len(sizes):
            return ""
        for a, b in ((False, True), (True, False), (True, True), (False, False)):
            other = replace(self, transpose_A=a, transpose_B=b)
            if other._fits(*known):
                return f"they fit with transpose_A={a}, transpose_B={b}"
        (m, k), (k2, n) = known[0][:: -1 if self.transpose_A else 1], known[1][:: -1 if self.transpose_B else 1]
        if same_extents((k,), (k2,)):
            return f"give `{self.C.buffer.name}` the shape {describe((m, n))}, the M and N of this product"
        return ""

    def accesses(self) -> tuple[list[Region], list[Region]]:
        """Return A, B and (unless cleared) C as read, and C as written."""
        return [self.A, self.B] + ([] if self.clear_accum else [self.C]), [self.C]

    def lower_cpu(self) -> Stmt:
        """Call the register-blocked micro-kernel once, after a clear if asked."""
        a, b, c = (_matrix(r) for r in (self.A, self.B, self.C))
        assert a and b and c
        m, n = c
        k = a[0] if self.transpose_A else a[1]

        def product(*regions: Region) -> Stmt:
            operands = [x for r in regions for x in (Address(r.buffer, r.starts), _leading(r))]
            return Do(Call("cpu_gemm", (*operands, m, n, k), dt.int32, (self.transpose_A, self.transpose_B)))

        made = product(self.A, self.B, self.C)
        tiles = [r for r in (self.A, self.B, self.C) if r.buffer.scope != "global"]
        unsure = [c for r in tiles for of_dim in unproven_bounds(r) for c in of_dim]
        if unsure:
            made = If(conjunction(unsure), Block((made,)), self._staged(product), span=self.span)
        if not self.clear_accum:
            return made
        return Block((Fill(self.C, const(0, self.C.buffer.dtype)).lower_cpu(), made))

    def _staged(self, product: Callable[..., Stmt]) -> Block:
        """Multiply copies of the operands, which hold 0 for what lies outside of a tile."""
        regions = self.A, self.B, self.C
        tiles = [Buffer(f"{r.buffer.name}_part", r.extents, r.buffer.dtype, "shared") for r in regions]
        copies = [need_region(t, "gemm", "part") for t in tiles]
        put = [Copy(r, t).lower_cpu() for r, t in zip(regions, copies, strict=True)]
        return Block((*map(Alloc, tiles), *put, product(*copies), Copy(copies[-1], self.C).lower_cpu()))

    def infer_layout(self, known: Layouts, ctx: ThreadContext) -> list[Demand]:
        """Return the layouts that the implementation of this product demands."""
        return self.implementation(ctx)[0].infer_layout(self, known, ctx)

    def lower_cuda(self, ctx: ThreadContext) -> Stmt:
        """Lower by the first implementation that does not refuse; report why each earlier one refused."""
        implementation, reasons = self.implementation(ctx)
        if self.wgmma and implementation is not gemm_wgmma:
            raise error("no_wgmma", self.span, why=reasons[0])
        reasons = [r for r in reasons if r != gemm_wgmma.NO_BULK_COPIES]
        if implementation is mma and ctx.asynchronous and reasons:
            ctx.build.remark(self.span, "T.gemm", "mma.sync", reasons[0])
        if implementation is fma:
            a, b = self.A.buffer.dtype, self.B.buffer.dtype
            exact, mixed = mma.has_product(self, ctx), a != b and a.is_float and b.is_float
            became = "multiply-adds of single elements" + ("" if exact or mixed else f" ({'; '.join(reasons)})")
            cast_one = f"A is {a} and B {b}: {COPY_ONE}"
            ctx.build.remark(self.span, "T.gemm", became, cast_one if mixed else "; ".join(reasons) if exact else "")
            fitting = [n for n in WHOLE_WARPS if exact and mma.refuses(self, replace(ctx, count=n)) is None]
            if mixed and any(shape_for(each.name, each.name, self.C.buffer.dtype.name, ctx.target) for each in (a, b)):
                warn_of([diagnose("slow_product", self.span, why=f"A is {a} and B {b}", fix=COPY_ONE)])
            elif fitting:
                nearest = min(fitting, key=lambda n: abs(n - ctx.count))
                fix = f"give the block, or the role around, another number of threads: threads={nearest}"
                warn_of([diagnose("slow_product", self.span, why=reasons[-1], fix=fix)])
        return implementation.lower(self, ctx)

    def implementation(self, ctx: ThreadContext) -> tuple[GemmImplementation, list[str]]:
        """Return the implementation, and why each one before it refused."""
        reasons: list[str] = []
        for implementation in IMPLEMENTATIONS:
            why_not = implementation.refuses(self, ctx)
            if why_not is None:
                return implementation, reasons
            reasons.append(why_not)
        raise InternalError("no implementation takes this product", self.span)

    def evaluate(self, env: Env) -> None:
        """Multiply in float64 (int64 for integers) and add in the accumulator's type."""
        wide = env.wide(self.C.buffer.dtype)
        a, b, *c = (env.read(r).reshape([env.size(x) for x in _matrix(r) or ()]) for r in self.accesses()[0])
        a = a.to(wide).T if self.transpose_A else a.to(wide)
        b = b.to(wide).T if self.transpose_B else b.to(wide)
        total = a @ b + c[0].to(wide) if c else a @ b
        env.write(self.C, dt.rounded_tensor(total, self.C.buffer.dtype).reshape(env.extents(self.C)))


def _matrix(region: Region) -> tuple[Expr, Expr] | None:
    """Return the two extents of a region used as a matrix: leading dimensions must have size 1."""
    extents = region.extents
    if len(extents) < 2 or not all(is_one(e) for e in extents[:-2]):
        return None
    return extents[-2], extents[-1]


def _leading(region: Region) -> Expr:
    """Return the elements from one row of the matrix to the next."""
    return region.buffer.strides[-2] if region.buffer.strides else region.buffer.shape[-1]


def _refuses(a: dt.DType, b: dt.DType, c: dt.DType) -> str:
    """Return why these types have no product, as the fix; empty if they have one."""
    if a.is_float != b.is_float or "bool" in (a.kind, b.kind):
        return "give A and B of one kind: both floating or both integer"
    if a.is_float and not c.is_float:
        return "accumulate floating products in float32"
    if not a.is_float and c != dt.int32:
        return "accumulate integer products in int32"
    if a.is_float and c.bits < max(16, a.bits, b.bits):
        return f"accumulate in float{max(32, a.bits, b.bits)}"
    return ""
