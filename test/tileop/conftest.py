# SPDX-License-Identifier: Apache-2.0
"""Every op runs twice, by its meaning and by what it becomes on the CPU, and is compared with plain torch.

For GPUs an op is lowered alone and run by the thread interpreter: `OnThreads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import torch_tile as tilelang
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.intrinsics.memory import barrier
from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.dtype import DType
from torch_tile.ir.expr import Expr, Load, Var, const
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, LoopKind, Program, Stmt, Store, TileOp
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.common.guard_bounds import guard_bounds
from torch_tile.lowering.common.simplify import simplify_program
from torch_tile.lowering.threads.allocate_shared import allocate_shared
from torch_tile.simulator.findings import Findings
from torch_tile.simulator.simt.interpreter import run_threads
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.threads import Layouts, ThreadContext

ZERO = const(0, dt.int32)


class OnThreads:
    """`count` threads run one op in the thread interpreter, laid out and lowered by its own methods.

    Fragments and shared tiles get their contents from tensors and give them back.
    """

    @staticmethod
    def buffer(
        name: str, shape: Sequence[int | Expr], dtype: DType, scope: str, layout: Layout | None = None
    ) -> Buffer:
        """A buffer; sizes may be variables."""
        sizes = tuple(n if isinstance(n, Expr) else const(n, dt.int32) for n in shape)
        return Buffer(name, sizes, dtype, scope, layout=layout, origin="param" if scope == "global" else "tile")

    @staticmethod
    def box(of: Buffer, *ranges: tuple[int, int] | None) -> Region:
        """A region by (start, extent) per dimension, the leading ones; None and what is missing is whole."""
        made = []
        for dim, size in enumerate(of.shape):
            chosen = ranges[dim] if dim < len(ranges) else None
            made.append(Range(ZERO, size) if chosen is None else Range(*(const(x, dt.int32) for x in chosen)))
        return Region(of, tuple(made))

    def __init__(self, count: int, target: str = "sm_90", **options: bool):
        self.thread = Var("t", dt.int32, "thread")
        self.count = count
        ranges = Ranges().loop(self.thread, ZERO, count)
        self.ctx = ThreadContext(Build(Target.of(target), PassOptions(**options)), self.thread, count, ranges)

    def laid_out(self, make: Callable[[Sequence[Buffer]], object], buffers: Sequence[Buffer]) -> list[Buffer]:
        """The buffers with the layouts that the op asks for."""
        known = Layouts()
        for demand in make(buffers).infer_layout(known, self.ctx):  # type: ignore[attr-defined]
            known.decide(demand)
        return [b if b.scope == "global" else replace(b, layout=known.get(b)) for b in buffers]

    def run(
        self,
        body: Stmt,
        buffers: Sequence[Buffer],
        tensors: Sequence[torch.Tensor],
        sizes: dict[Var, int] | None = None,
    ) -> tuple[list[torch.Tensor], Findings]:
        """The tensors afterwards. Fragments and shared tiles are `[*buffer.shape]` tensors of the buffer's dtype."""
        params, before, after = [], [], []
        data: list[torch.Tensor] = []
        for b, x in zip(buffers, tensors, strict=True):
            if b.scope == "global":
                params.append(b)
                data.append(x.clone())
                continue
            copy = Buffer(b.name + "_data", b.shape, b.dtype, "global", None, "param")
            if b.scope == "fragment":
                copy = self._fragment(b, x, before, after, data)
            else:
                before.append(Alloc(b))
                before.append(self._all(b, lambda i, b=b, c=copy: Store(b, i, Load(c, i))))
                after.append(self._all(b, lambda i, b=b, c=copy: Store(c, i, Load(b, i))))
                data.append(x.clone())
            params.append(copy)
        kernel = Kernel(
            (const(1, dt.int32),), (Var("bx", dt.int32, "block"),), (self.count,),
            Block((*before, barrier(), body, barrier(), *after)), None, self.thread,
        )  # fmt: skip
        program = Program("made", tuple(params), (kernel,), (), ())
        program = flatten(allocate_shared(simplify_program(guard_bounds(program)), self.ctx.build))
        findings = run_threads(program, dict(zip(program.params, data, strict=True)), sizes or {})
        return [self._gathered(b, x) for b, x in zip(buffers, data, strict=True)], findings

    def _fragment(self, b: Buffer, x: torch.Tensor, before: list, after: list, data: list) -> Buffer:
        """Registers as a tensor `[threads, registers]`."""
        registers = self.ctx.registers(b)
        size = registers.shape[0]
        copy = Buffer(b.name + "_data", (const(self.count, dt.int32), size), b.dtype, "global", None, "param")
        v = Var("v", dt.int32, "loop")
        at = (self.thread, v)
        for place, move in (
            (before, Store(registers, (v,), Load(copy, at))), (after, Store(copy, at, Load(registers, (v,)))),
        ):  # fmt: skip
            if place is before:
                place.append(Alloc(registers))
            place.append(For(LoopKind.UNROLLED, (v,), (ZERO,), (size,), Block((move,))))
        data.append(x[tuple(self._points(b))].clone())
        return copy

    def _all(self, b: Buffer, move: Callable[[tuple[Expr, ...]], Stmt]) -> Stmt:
        """A move of every element, spread over the threads."""
        total = 1
        for size in b.static_shape or ():
            total *= size
        e = Var("e", dt.int32, "loop")
        place = e * self.count + self.thread
        index, rest = [], place
        for size in reversed(b.static_shape or ()):
            index.append(rest % size)
            rest = rest // size
        one = If(place < total, Block((move(tuple(reversed(index))),)), Block(()))
        turns = const(-(-total // self.count), dt.int32)
        return For(LoopKind.SERIAL, (e,), (ZERO,), (turns,), Block((one,)))

    def _points(self, b: Buffer) -> list[torch.Tensor]:
        """The element in each register of each thread."""
        assert b.layout is not None
        registers = b.layout.extent("r")
        thread, register = torch.meshgrid(torch.arange(self.count), torch.arange(registers), indexing="ij")
        found = []
        for digits in b.layout.dims:
            index = torch.zeros_like(thread)
            for d in digits:
                index = index * d.size + (thread if d.axis == "t" else register) // d.stride % d.size
            found.append(index)
        return found

    def _gathered(self, b: Buffer, x: torch.Tensor) -> torch.Tensor:
        """The tile that registers hold, all replicas of which must agree."""
        if b.scope != "fragment":
            return x
        tile = torch.zeros(b.static_shape, dtype=x.dtype)
        points = tuple(self._points(b))
        tile[points] = x
        torch.testing.assert_close(tile[points], x, rtol=0, atol=0, equal_nan=True)
        return tile


@pytest.fixture
def on_threads():
    """The class above."""
    return OnThreads


@pytest.fixture(params=["evaluate", "cpu"])
def launch(request):
    """`launch(kernel, *args)` runs a @T.prim_func on its arguments in place."""
    if request.param == "evaluate":
        return evaluate
    return lambda kernel, *args: tilelang.compile(kernel)(*args)


@pytest.fixture
def findings():
    """`findings(kernel)` gives what the `check` methods of its tile ops complain of."""

    def collect(kernel):
        return [d for n in walk(kernel.program) if isinstance(n, TileOp) for d in n.check()]

    return collect


@pytest.fixture
def complaint(findings):
    """`complaint(kernel, code)` asserts a single finding at the statement marked `# here`, and gives its message."""

    def single(kernel, code):
        (found,) = findings(kernel)
        assert found.code == code
        assert "# here" in found.span.source()
        return found.message

    return single
