# SPDX-License-Identifier: Apache-2.0
"""Replace each tile op by the plain IR that its own `lower_cpu` gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch_tile.diagnostics.errors import Span, error
from torch_tile.intrinsics import lookup
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Call, Expr, Load, Var, unary
from torch_tile.ir.idmap import IdSet
from torch_tile.ir.node import Rewriter, contains, equal, find, walk, with_fields
from torch_tile.ir.stmt import (
    Assert,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    LoopKind,
    Print,
    Program,
    Role,
    Stmt,
    Store,
    While,
)
from torch_tile.lowering.analysis.clone import place_at
from torch_tile.tileop import RegisteredOp
from torch_tile.tileop.base import conditions_inside, conjunction, is_one, serial, spread, squeezed
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.gemm.op import Gemm
from torch_tile.tileop.parallel.nest import carried_vars


def lower_tile_ops(program: Program) -> Program:
    """Replace every tile op. Afterwards only loops, stores and helper calls remain (stage LOOPS)."""
    return _Lower()(program)  # type: ignore[no-any-return]


def _first_use(kernel: Kernel, symbol: Var) -> Span | None:
    """Return where the first statement that uses a symbol stands, or the kernel's place."""
    whole = Block | For | If | While | Role  # they hold the statement
    uses = (s for s in find(kernel.body, Stmt) if not isinstance(s, whole) and any(n is symbol for n in walk(s)))
    return next((s.span for s in uses if s.span), kernel.span)


class _Lower(Rewriter):
    """Replace tile ops, and refuse operations that only GPUs have."""

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Refuse a kernel that names its thread: a CPU runs a block as one thread."""
        if kernel.thread is not None:
            fix = "write T.Parallel, or choose a CUDA target; give T.rng_init its `seq`, such as the element's number"
            what = "the index of the running thread (T.get_thread_binding)"
            raise error("unsupported_on_target", _first_use(kernel, kernel.thread), what=what, target="cpu", fix=fix)
        return self.children(kernel)

    def visit_Role(self, role: Role) -> Role:
        """Refuse roles: a block on a CPU has no threads to give them to."""
        fix = "choose a CUDA target, or let all threads do the same"
        raise error(
            "unsupported_on_target", role.span, what="T.ws" if role.by_hand else "T.role", target="cpu", fix=fix
        )

    def visit_Call(self, call: Call) -> Expr:
        """Refuse access to another block's memory: blocks run one after another."""
        if what := {"at_rank": "T.at_rank", "store_at_rank": "T.copy_cluster(dst_block=)"}.get(call.name):
            fix = "choose a CUDA target from sm_90 on"
            raise error("unsupported_on_target", call.span, what=what, target="cpu", fix=fix)
        return self.children(call)

    def visit_Do(self, node: Do) -> Stmt:
        """Drop barriers and waits, as earlier statements are already done; refuse other calls of GPUs."""
        if not isinstance(node.call, Call):
            return node
        if lookup(node.call.name).idle:
            return Block(())
        if lookup(node.call.name).header and not lookup(node.call.name).cpu:
            fix = "choose a CUDA target, or leave the order of threads to the compiler"
            raise error("unsupported_on_target", node.span, what=f"`{node.call.name}`", target="cpu", fix=fix)
        return node

    def visit_RegisteredOp(self, op: RegisteredOp) -> Stmt:
        return place_at(op, op.lower_cpu())

    def visit_Print(self, node: Print) -> Stmt:
        """Print a region element by element."""
        region = node.value
        if not isinstance(region, Region):
            return node
        message = f"{node.message} {region.buffer.name}".strip()

        def nest(rest: tuple[Expr, ...], point: tuple[Expr, ...]) -> Stmt:
            if not rest:
                return Print(message, Load(region.buffer, spread(region, point)))
            return serial(rest[0], lambda v: nest(rest[1:], (*point, v)), name="ijklmn"[len(point)])

        return place_at(node, nest(squeezed(region), ()))


# Splitting of T.Parallel nests into single loops, each with the order that it needs.
#
# A loop whose iterations are independent may be a vector loop. A loop that carries a value runs in order: it
# accumulates into a place that does not move with the loop variable, or reads what another iteration writes.


def split_parallel(program: Program) -> Program:
    """Replace PARALLEL loops by SERIAL and VECTOR loops of one variable; only innermost ones become VECTOR."""
    return _Split()(program)  # type: ignore[no-any-return]


class _Split(Rewriter):
    """Split the parallel loops of a program."""

    def visit_For(self, loop: For) -> Stmt:
        """Split a parallel loop into nested loops, from the innermost on."""
        if loop.kind not in (LoopKind.PARALLEL, LoopKind.VECTOR):
            return self.children(loop)
        carried = carried_vars(loop)
        new = self.children(loop)
        body: Block = new.body
        for depth in reversed(range(len(new.vars))):
            var = new.vars[depth]
            innermost = depth == len(new.vars) - 1
            independent = not any(var is c for c in carried)
            kind = LoopKind.VECTOR if innermost and independent and is_straight(body) else LoopKind.SERIAL
            if new.kind is kind:
                return new
            made = For(kind, (var,), (new.starts[depth],), (new.stops[depth],), body, span=loop.span)
            body = Block((made,))
        return body.stmts[0]


def is_straight(body: Block) -> bool:
    """Return whether a loop body has no inner loop and nothing that a vector loop cannot hold."""
    updates = any(call.name == "atomic" for call in find(body, Call))
    return not updates and not contains(body, For, While, Break, Continue, Do, Print, Assert)


# Right operands that T.gemm packs are packed from global memory, not from a tile that stages them. If a tile is only
# copied from global memory and multiplied by, the CPU's product reads the source instead. That needs the block's part
# of the source to be within its bounds. Otherwise the copy fills the tile, with zeros beyond them.

NOTHING = Block(())


def elide_staging(program: Program) -> Program:
    """Let products read right operands from global memory if the results are the same."""
    return _InPlace()(program)  # type: ignore[no-any-return]


class _InPlace(Rewriter):
    """Find staged right operands, and read them from their source."""

    def visit_Kernel(self, kernel: Kernel) -> Kernel:
        """Count the reads and writes of each buffer, then rewrite the kernel."""
        ops = list(find(kernel.body, RegisteredOp))
        accesses = [op.accesses() for op in ops]
        self.reads = Counter(r.buffer for reads, _ in accesses for r in reads)
        self.writes = Counter(r.buffer for _, writes in accesses for r in writes)
        single = list(find(kernel.body, Load, Store, Address))
        self.elements = IdSet(n.buffer for n in single)
        self.stored = IdSet(n.buffer for n in single if not isinstance(n, Load))
        return self.children(kernel)

    def visit_Block(self, block: Block) -> Block:
        """Replace the copies of a block that stage a right operand."""
        new = self.children(block)
        stmts = list(new.stmts)
        for at, one in enumerate(new.stmts):
            if isinstance(one, Copy) and self.may_stay(one):
                product = _next_product(new.stmts[at + 1 :], one.dst.buffer)
                if product is not None:
                    _read_source_directly(stmts, at, stmts.index(product), one, product)
        return with_fields(new, stmts=tuple(stmts))

    def may_stay(self, copy: Copy) -> bool:
        """Return whether a copy is the only source of a tile with one reader, from memory that does not change."""
        source, tile = copy.src.buffer, copy.dst.buffer
        if source.scope != "global" or tile.scope == "global" or source.dtype != tile.dtype:
            return False
        if self.writes[source] or source in self.stored or (source.strides and not is_one(source.strides[-1])):
            return False
        alone = self.writes[tile] == self.reads[tile] == 1 and tile not in self.elements
        return alone and copy.dst.is_whole and _is_matrix(copy.src, copy.dst)


def _is_matrix(source: Region, tile: Region) -> bool:
    """Return whether the last two dimensions of a source are the tile's dimensions."""
    matrix = len(tile.ranges) == 2 and len(source.ranges) >= 2 and all(map(is_one, source.extents[:-2]))
    return matrix and all(map(equal, source.extents[-2:], tile.extents))


def _next_product(following: Sequence[Stmt], tile: Buffer) -> Gemm | None:
    """Return the product with a tile as its right operand, if no statement before it may write global memory."""
    for one in following:
        if isinstance(one, Gemm) and one.B.buffer is tile:
            packed = one.transpose_B or tile.dtype.bits < 32
            return one if packed and one.B.is_whole and one.A.buffer is not tile else None
        if not isinstance(one, Copy | Gemm) or one.accesses()[1][0].buffer.scope == "global":
            return None
    return None


def _read_source_directly(stmts: list[Stmt], at: int, product_at: int, copy: Copy, product: Gemm) -> None:
    """Let the product read the copy's source where that lies in its buffer; elsewhere copy, and read the tile."""
    fits = conjunction(conditions_inside(copy.src))
    direct = replace(product, B=copy.src)
    stmts[at] = If(unary("not", fits), Block((copy,)), NOTHING, span=copy.span)
    stmts[product_at] = If(fits, Block((direct,)), Block((product,)), span=product.span)
