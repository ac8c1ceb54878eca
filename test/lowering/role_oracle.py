# SPDX-License-Identifier: Apache-2.0
"""Runs a tile program as warps that take turns in a random order: which copies does every statement read?

A tile holds boxes of global tensors. A bulk copy tears its tile when it starts and fills it when it lands, at any time
before the phase of its mbarrier completes. A product that is in flight must find its tiles unchanged at its wait.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer, Region
from torch_tile.ir.expr import Address, Expr, Load, Var, const
from torch_tile.ir.node import Rewriter, walk
from torch_tile.ir.stmt import Alloc, Block, Do, For, If, Kernel, Let, LoopKind, Role, Stmt, Store
from torch_tile.tileop.base import RegisteredOp
from torch_tile.tileop.copy.op import Copy
from torch_tile.tileop.copy.tma import TmaCopy
from torch_tile.tileop.gemm.op import Gemm

Box = tuple[int, ...]
TORN = "torn"


@dataclass
class Barrier:
    """An mbarrier: `phase` counts completed ones."""

    arrivals: int
    left: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        """The phase completes once all have come."""
        assert self.left >= 0, "more arrivals than the phase waits for"
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.arrivals


class Tables(Rewriter):
    """Replaces names by their values, and elements of variables and of integer tensors by theirs."""

    def __init__(self, names: dict[int, int], loads: Callable[[str, Box], int | None], vars: dict[int, int]):
        self.names, self.loads, self.vars = names, loads, vars

    def visit_Var(self, var: Var) -> Expr:
        value = self.names.get(var)
        return var if value is None else const(value, var.dtype)

    def visit_Load(self, load: Load) -> Expr:
        if load.buffer.scope == "var":
            return const(self.vars[load.buffer], load.dtype)
        at = tuple(int(evaluate(self(i), {})) for i in load.indices)
        value = self.loads(load.buffer.name, at) if load.buffer.scope == "global" else None
        return load if value is None else const(value, load.dtype)


@dataclass
class Run:
    """One block of a kernel."""

    tables: dict[str, Callable[[Box], int]]
    rng: random.Random
    tiles: dict[int, str] = field(default_factory=dict)  # passed, by identity
    held: dict[tuple[str, int], dict[Box, object]] = field(default_factory=lambda: defaultdict(dict))
    barriers: dict[tuple[int, int], Barrier] = field(default_factory=dict)
    flying: list[Callable[[], None]] = field(default_factory=list)
    reads: dict[object, list[object]] = field(default_factory=lambda: defaultdict(list))

    def kernel(self, kernel: Kernel, names: dict[int, int]) -> dict[object, list[object]]:
        """What each statement, by its place in the source, reads of tiles, in order."""
        shared = [s for s in kernel.body.stmts if not isinstance(s, Role)]
        roles = [s for s in kernel.body.stmts if isinstance(s, Role)]
        for one in shared if roles else []:
            assert isinstance(one, Alloc), one
            self._alloc(one)
        if not roles:
            roles = [Role(0, 32, kernel.body)]  # all threads take each step together
        running = []
        for role in roles:
            for warp in range(role.first, role.first + role.count, 32):
                running.append(Walker(self, role, warp, kernel.thread).block(role.body, dict(names)))
        waiting: list[Callable[[], bool] | None] = [None] * len(running)
        while running or self.flying:
            ready = [n for n, w in enumerate(waiting) if w is None or w()]
            moves = [*ready, *["land"] * bool(self.flying)]
            assert moves, "all roles wait"
            move = self.rng.choice(moves)
            if move == "land":
                self.flying.pop(self.rng.randrange(len(self.flying)))()
                continue
            for _ in range(self.rng.choice([1, 1, 5, 100])):
                waiting[move] = next(running[move], done)
                if waiting[move] is not None:
                    break
            if waiting[move] is done:
                del running[move], waiting[move]
        assert all(b.bytes == 0 for b in self.barriers.values())
        return dict(self.reads)

    def _alloc(self, one: Alloc) -> None:
        if one.buffer.scope == "barrier":
            for n in range(one.buffer.static_shape[0]):
                self.barriers[one.buffer, n] = Barrier(one.buffer.arrivals, one.buffer.arrivals)


def done() -> bool:
    return False


class Walker:
    """One warp of a role: a generator that yields None after each statement, and a condition where it waits."""

    def __init__(self, run: Run, role: Role, warp: int, thread: Var | None):
        self.run, self.role, self.warp, self.thread = run, role, warp, thread
        self.active = list(range(warp, warp + 32))
        self.chosen: dict[tuple[int, int], list[int]] = {}
        self.vars: dict[int, int] = {}
        self.under_way: list[list[tuple[tuple[str, int], object]]] = []
        self.open: list[tuple[tuple[str, int], object]] = []

    def value(self, e: Expr, names: dict[int, int]) -> int:
        def load(name: str, at: Box) -> int | None:
            table = self.run.tables.get(name)
            return None if table is None else table(at)

        return int(evaluate(Tables(names, load, self.vars)(e), {}))

    def block(self, block: Block, names: dict[int, int]) -> Iterator[Callable[[], bool] | None]:
        for one in block.stmts:
            yield from self.stmt(one, names)
            yield None

    def stmt(self, one: Stmt, names: dict[int, int]) -> Iterator[Callable[[], bool] | None]:
        if isinstance(one, Let):
            self.record(one, names)
            try:
                names[one.var] = self.value(one.value, names)
            except ValueError:  # computed from a tile
                names.pop(one.var, None)
        elif isinstance(one, Alloc):
            self.run._alloc(one)
            if one.init is not None:
                self.vars[one.buffer] = self.value(one.init, names)
        elif isinstance(one, Store) and one.buffer.scope == "var":
            self.vars[one.buffer] = self.value(one.value, names)
        elif isinstance(one, If):
            if any(n is self.thread for n in walk(one.condition)):
                outer, self.active = self.active, self.those(one, names)
                if self.active:
                    yield from self.block(one.then, dict(names))
                self.active = outer
            else:
                yield from self.block(one.then if self.value(one.condition, names) else one.otherwise, dict(names))
        elif isinstance(one, For) and one.kind is not LoopKind.PARALLEL:
            for i in range(self.value(one.starts[0], names), self.value(one.stops[0], names), one.step):
                yield from self.block(one.body, {**names, one.vars[0]: i})
        elif isinstance(one, Do):
            yield from self.call(one, names)
        elif isinstance(one, Copy) and (one.src.buffer.scope, one.dst.buffer.scope) == ("global", "shared"):
            self.load(one, names)
        else:
            self.record(one, names)

    def those(self, one: If, names: dict[int, int]) -> list[int]:
        """The threads for which a condition holds."""
        assert not one.otherwise.stmts
        key = one, len(self.active)  # conditions are on the thread alone
        if key not in self.chosen:
            thread = self.thread
            self.chosen[key] = [t for t in self.active if self.value(one.condition, {**names, thread: t})]
        return self.chosen[key]

    def call(self, one: Do, names: dict[int, int]) -> Iterator[Callable[[], bool]]:
        name, args = one.call.name, one.call.args
        if name == "wgmma_wait":
            self.wait(one.call.options[0])
        elif not args or not isinstance(args[0], Address) or args[0].buffer.scope != "barrier":
            self.record(one, names)
        else:
            barrier = self.run.barriers[args[0].buffer, self.value(args[0].indices[0], names)]
            if name == "mbarrier_wait":
                parity = self.value(args[1], names)
                yield lambda: barrier.phase % 2 != parity
            else:
                barrier.left -= len(self.active) // {"mbarrier_arrive": 1, "warp_arrive": 32}[name]
                barrier.settle()

    def place(self, region: Region, names: dict[int, int]) -> tuple[tuple[str, int], Box]:
        starts = tuple(self.value(s, names) for s in region.starts)
        versioned = region.buffer in self.run.tiles
        return (region.buffer.name, starts[0] if versioned else 0), starts[1:] if versioned else starts

    def load(self, one: Copy, names: dict[int, int]) -> None:
        tile, inside = self.place(one.dst, names)
        source = one.src.buffer.name, *(self.value(s, names) for s in one.src.starts)
        if not isinstance(one, TmaCopy):
            self.run.held[tile][inside] = source
            return
        if self.role.first + one.by not in self.active:
            return
        size = one.dst.buffer.dtype.itemsize
        for extent in one.src.extents:
            size *= extent.value
        barrier = self.run.barriers[one.barrier.buffer, self.value(one.barrier.indices[0], names)]
        barrier.bytes += size
        phase = barrier.phase
        self.run.held[tile][inside] = TORN

        def land() -> None:
            assert barrier.phase == phase, "a phase completes before its bytes have come"
            self.run.held[tile][inside] = source
            barrier.bytes -= size
            barrier.settle()

        self.run.flying.append(land)

    def reads(self, one: Stmt, names: dict[int, int]) -> Iterator[tuple[tuple[str, int], object]]:
        """Tiles that a statement reads, and what they hold."""
        if isinstance(one, RegisteredOp):
            regions = [r for r in one.accesses()[0] if r.buffer.scope == "shared"]
            found = {self.place(r, names)[0] for r in regions}
        else:
            loads = [n for n in walk(one) if isinstance(n, Load) and n.buffer.scope == "shared"]
            found = {(n.buffer.name, self.version(n, names)) for n in loads}
        for tile in sorted(found):
            yield tile, frozenset(self.run.held[tile].items())

    def version(self, load: Load, names: dict[int, int]) -> int:
        return self.value(load.indices[0], names) if load.buffer in self.run.tiles else 0

    def record(self, one: Stmt, names: dict[int, int]) -> None:
        reads = list(self.reads(one, names))
        handed = [(tile[0], content) for tile, content in reads if content]
        if handed:
            where = (one.span.line, one.span.column) if one.span else None
            self.run.reads[type(one).__name__, where, self.warp].append(tuple(handed))
        if isinstance(one, Gemm):
            self.open += reads
            if one.wg_wait >= 0 or one.wg_wait == -1:
                self.under_way.append(self.open)
                self.open = []
            if one.wg_wait >= 0:
                self.wait(one.wg_wait)

    def wait(self, pending: int) -> None:
        while len(self.under_way) > pending:
            for tile, content in self.under_way.pop(0):
                now = frozenset(self.run.held[tile].items())
                assert now == content, f"{tile} changed while a product was reading it"


def tiles_of(kernel: Kernel) -> dict[int, Buffer]:
    """What bulk copies fill."""
    return {n.dst.buffer: n.dst.buffer for n in walk(kernel) if isinstance(n, TmaCopy) and n.barrier is not None}


def same_reads(before: Kernel, after: Kernel, names: Callable[[Kernel], dict[int, int]], tables=None, seeds=range(8)):
    """Asserts that in every warp every statement reads the same boxes as before, in whatever order warps run."""
    names_of = {b.name for b in tiles_of(after).values()}
    (consumers,) = (s for s in after.body.stmts if isinstance(s, Role) and s.first == 0)

    def kept(found, warp):
        lines = {
            key[:2]: [tuple(x for x in one if x[0] in names_of) for one in all]
            for key, all in found.items()
            if key[2] == warp
        }
        return {key: [x for x in all if x] for key, all in lines.items() if any(all)}

    want = kept(Run(tables or {}, random.Random(0)).kernel(before, names(before)), 0)
    assert want, "nothing is read"
    for seed in seeds:
        run = Run(tables or {}, random.Random(seed), {i: b.name for i, b in tiles_of(after).items()})
        found = run.kernel(after, names(after))
        for warp in range(0, consumers.count, 32):
            got = kept(found, warp)
            assert got.keys() == want.keys()
            for key, reads in want.items():
                for turn, (mine, theirs) in enumerate(zip(got[key], reads, strict=True)):
                    assert mine == theirs, f"{key}, turn {turn}, seed {seed}"
