# SPDX-License-Identifier: Apache-2.0
"""Load the operands of a pipelined product's next step along K while the product of the current step runs.

The pass takes loops made by pipeline_loops that wait, start copies and multiply. It cuts them into the steps of the
instruction. The operands of each step are fragments, and two sets of fragments alternate. The first step of the next
iteration is loaded before the last products of the current one. The wait for its tiles and the barrier then no longer
leave the tensor cores idle. An author may write the same by hand, as copies from slices of shared tiles to fragments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from torch_tile.compiler.context import Build
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const, Expr, Var, const
from torch_tile.ir.idmap import IdMap
from torch_tile.ir.node import Rewriter, find, symbols
from torch_tile.ir.polynomial import structure
from torch_tile.ir.simplify import is_literal, simplify
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, Let, LoopKind, Program, Role, Stmt, calls
from torch_tile.lowering.analysis.clone import Instance
from torch_tile.tileop.copy.cp_async import AsyncCopy, AsyncLoop
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm import mma
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.threads import ThreadContext, role_context

MOST = 208  # 4-byte registers for accumulators and operands, of 255: the rest holds addresses


def prefetch_operands(program: Program, build: Build) -> Program:
    """Overlap the loads of pipelined products with the products; values do not change."""
    return _Overlap(build)(program)  # type: ignore[no-any-return]


class _Overlap(Rewriter):
    """Rewrite the loops of pipelined products, if registers can hold two sets of their operands."""

    def __init__(self, build: Build):
        self.build = build

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        thread = Var("thread", int32, "thread") if kernel.thread is None else kernel.thread
        self.ctx = ThreadContext(self.build, thread, math.prod(kernel.threads), Ranges())
        return self.children(kernel)

    def visit_Role(self, role: Role) -> Role:
        """Visit a role with its own threads, which may multiply by wgmma."""
        outer = self.ctx
        self.ctx = role_context(role, self.build, outer.thread, outer.ranges, {})
        new: Role = self.children(role)
        self.ctx = outer
        return new

    def visit_For(self, loop: For) -> Stmt:
        """Rewrite a loop of products if its steps and registers allow it, and report the decision."""
        new: For = self.children(loop)
        parts = _parts(new)
        if parts is None:
            return new
        products = parts[2]
        steps = {_steps(op, self.ctx) for op in products}
        count = steps.pop() if len(steps) == 1 else 0
        if count < 2 or count % 2:
            return new
        made = _Overlapped(new, *parts, count)
        needed = made.registers(self.ctx)
        span = products[0].span
        if needed > MOST:
            self.build.remark(
                span, "T.gemm", f"operands loaded in their own step: a step ahead takes {needed} registers"
            )
            return new
        self.build.remark(span, "T.gemm", "operands loaded a step of K ahead, also across the loop's barrier")
        return Block(tuple(made.stmts()), span=loop.span)


def _parts(loop: For) -> tuple[Stmt, tuple[Stmt, ...], tuple[Gemm, ...]] | None:
    """Split a loop into its wait, the start of copies and its products; return None if it has other parts."""
    stmts = loop.body.stmts
    count = len(stmts)
    while count and isinstance(stmts[count - 1], Gemm):
        count -= 1
    products = tuple(s for s in stmts[count:] if isinstance(s, Gemm))
    if loop.kind is not LoopKind.SERIAL or loop.step != 1 or not products or not count:
        return None
    if not calls(stmts[0], "cp_async_wait") or not all(map(_only_starts, stmts[1:count])):
        return None
    bound = {n.var for n in find(loop.body, Let)}
    regions = [r for op in products for r in (op.A, op.B, op.C)]
    named = any(not bound.isdisjoint(symbols(r)) for r in regions)
    return None if named else (stmts[0], stmts[1:count], products)


def _only_starts(one: Stmt) -> bool:
    """Return whether a statement only starts copies or closes their group."""
    if isinstance(one, If):
        return all(map(_only_starts, (*one.then.stmts, *one.otherwise.stmts)))
    return isinstance(one, AsyncCopy | AsyncLoop | Let) or calls(one, "cp_async_commit")


def _steps(op: Gemm, ctx: ThreadContext) -> int:
    """Count the steps along K into which a product can be cut; 0 if ldmatrix does not load its operands."""
    implementation, _ = op.implementation(ctx)
    types = mma.operand_types(op, ctx)
    sizes = mma.problem(op)
    if implementation is not mma or mma.widens(op) or types[0] == "tf32" or op.clear_accum or sizes is None:
        return 0
    for region, across in ((op.A, op.transpose_A), (op.B, not op.transpose_B)):
        bits = region.buffer.dtype.bits
        if region.buffer.scope != "shared" or bits > 16 or (across and bits != 16):
            return 0
    return sizes[2] // mma.step_of(op, ctx)


@dataclass(frozen=True)
class _Operand:
    """A tile in shared memory, its dimension along K, the size of a step, and two alternating fragments."""

    region: Region
    along: int
    size: int
    fragments: tuple[Buffer, Buffer]

    def load(self, step: int, iteration: Instance) -> Stmt:
        """Build the copy of a step into its fragment."""
        region = iteration(self.region)
        ranges = [replace(r, start=simplify(r.start)) for r in region.ranges]
        old = ranges[self.along]
        ranges[self.along] = replace(old, start=simplify(old.start + step * self.size), extent=const(self.size, int32))
        return Copy(replace(region, ranges=tuple(ranges)), self.part(step), span=region.span)

    def part(self, step: int) -> Region:
        """Return the fragment of a step."""
        fragment = self.fragments[step % 2]
        return Region(fragment, tuple(Range(const(0, int32), size) for size in fragment.shape))


class _Overlapped:
    """Rewrite a loop of `wait`, `starts` and `products`, with the products cut into `count` steps."""

    def __init__(self, loop: For, wait: Stmt, starts: tuple[Stmt, ...], products: tuple[Gemm, ...], count: int):
        self.loop, self.wait, self.starts, self.products, self.count = loop, wait, starts, products, count
        self.operands: dict[Hashable, _Operand] = {}
        for op in products:
            for key, region, along in _operands_along_k(op):
                if key not in self.operands:
                    self.operands[key] = self._operand(region, along)

    def _operand(self, region: Region, along: int) -> _Operand:
        """Make the two fragments of an operand."""
        shape = list(region.extents[-2:])
        whole = shape[along]
        assert isinstance(whole, Const)
        size = int(whole.value) // self.count
        shape[along] = const(size, int32)
        tile = region.buffer
        first, second = (Buffer(f"{tile.name}_{n}", tuple(shape), tile.dtype, "fragment") for n in range(2))
        return _Operand(region, along, size, (first, second))

    def registers(self, ctx: ThreadContext) -> int:
        """Count the 4-byte registers of each thread for all accumulators and operands."""
        total, seen = 0, set[Hashable]()
        for op in self.products:
            sums, *steps = mma.registers(op, ctx)
            total += sums
            for (key, _, _), step in zip(_operands_along_k(op), steps, strict=True):
                total += 0 if key in seen else 2 * step
                seen.add(key)
        return total

    def stmts(self) -> Iterator[Stmt]:
        """Yield the fragments, the loads of the first step, and the loop."""
        for operand in self.operands.values():
            yield from (Alloc(fragment, span=self.loop.span) for fragment in operand.fragments)
        yield self.wait
        yield self._load_first_step(self.loop.starts[0])
        yield replace(self.loop, body=Block(tuple(self._body())))

    def _body(self) -> Iterator[Stmt]:
        """Yield the loop's body: in each step, the loads of the next step and then the products."""
        yield from self.starts
        same = Instance(IdMap(), IdMap(), fresh=False)
        for step in range(self.count):
            if step + 1 < self.count:
                yield from (operand.load(step + 1, same) for operand in self.operands.values())
            else:
                yield self.wait
                yield self._load_first_step(simplify(self.loop.vars[0] + 1))
            yield from (self._product(op, step) for op in self.products)

    def _load_first_step(self, at: Expr) -> Stmt:
        """Load the first step of an iteration, if the loop has that iteration."""
        iteration = Instance(IdMap([(self.loop.vars[0], at)]), IdMap(), fresh=False)
        loads = Block(tuple(operand.load(0, iteration) for operand in self.operands.values()))
        has_it = simplify(at < self.loop.stops[0])
        return loads if is_literal(has_it, True) else If(has_it, loads, Block(()), span=self.loop.span)

    def _product(self, op: Gemm, step: int) -> Stmt:
        """Build the product of one step."""
        a, b = (self.operands[key].part(step) for key, _, _ in _operands_along_k(op))
        return replace(op, A=a, B=b)


def _operands_along_k(op: Gemm) -> Iterator[tuple[Hashable, Region, int]]:
    """Yield a key, the region and the dimension along K of A and of B.

    MMAs that read the same operand in the same layout have equal keys, so that one prefetched fragment serves all.
    """
    split = op.policy, structure(op.C.extents)
    for name, region, along in (("A", op.A, -2 if op.transpose_A else -1), ("B", op.B, -1 if op.transpose_B else -2)):
        yield (name, along, region.buffer, structure((*region.starts, *region.extents)), split), region, along
