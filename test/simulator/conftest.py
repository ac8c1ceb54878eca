# SPDX-License-Identifier: Apache-2.0
"""Thread-level programs made by hand, and those of the library's kernels."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from shared_kernels import modules_of_kernels

from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import Span
from torch_tile.hardware import Target
from torch_tile.intrinsics import bulk, memory
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Expr, Load, Var, cast, const, to_expr, truth
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, LoopKind, Program, Role, Store
from torch_tile.ir.verify import Stage, verify
from torch_tile.kernels.common import Machine
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.simt.interpreter import run_threads


class Builder:
    """Statements of one kernel; lines are numbered in the order of `at`."""

    def __init__(self, threads=64, grid=(1,), cluster=(1, 1, 1)):
        self.cluster = cluster
        self.thread = Var("t", dt.int32, "thread")
        self.blocks = tuple(Var(n, dt.int32, "block") for n in ("bx", "by", "bz")[: len(grid)])
        self.grid, self.threads = grid, threads
        self.params, self.tensors, self.allocs, self.offset = [], [], [], 0

    def tensor(self, name, data):
        """A global buffer holding `data`."""
        found = Buffer(name, (const(data.numel(), dt.int32),), dt.to_dtype(data.dtype), "global", None, "param")
        self.params.append(found)
        self.tensors.append(data)
        return found

    def shared(self, name, size, dtype="float32", offset=None):
        offset = self.offset if offset is None else offset
        return self._alloc(Buffer(name, (const(size, dt.int32),), dt.to_dtype(dtype), "shared", offset=offset))

    def local(self, name, size, dtype="float32"):
        return self._alloc(Buffer(name, (const(size, dt.int32),), dt.to_dtype(dtype), "local"))

    def var(self, name, dtype="int32", init=0):
        buffer = Buffer(name, (), dt.to_dtype(dtype), "var")
        self.allocs.append(Alloc(buffer, const(init, buffer.dtype)))
        return buffer

    def barrier(self, name, count, arrivals):
        """An array of mbarriers; `ready` goes before their use."""
        size = (const(count, dt.int32),)
        return self._alloc(Buffer(name, size, dt.uint64, "barrier", offset=self.offset, arrivals=arrivals))

    def ready(self, *barriers):
        """What init_mbarriers places."""
        places = [(b, n) for b in barriers for n in range(int(b.shape[0].value))]
        made = [bulk.mbarrier_init(self.address(b, n), b.arrivals) for b, n in places]
        return self.when(self.thread == 0, *made, bulk.fence_barrier_init()), memory.barrier()

    @staticmethod
    def map(tensor, sizes, box, swizzle=0):
        """A dense tensor of these sizes as bulk copies see it."""
        strides = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
        numbers = (tuple(const(n, dt.int32) for n in x) for x in (sizes, strides))
        return TensorMap(tensor, *numbers, tuple(box), swizzle)

    @staticmethod
    def role(first, count, *body):
        return Role(first, count, Block(tuple(body)))

    def _alloc(self, buffer):
        if buffer.scope in ("shared", "barrier"):
            self.offset = max(self.offset, buffer.offset + int(buffer.shape[0].value) * buffer.dtype.itemsize + 1023)
            self.offset = self.offset // 1024 * 1024
        self.allocs.append(Alloc(buffer))
        return buffer

    def program(self, *stmts):
        kernel = Kernel(
            tuple(const(n, dt.int32) for n in self.grid), self.blocks, (self.threads,),
            Block((*self.allocs, *stmts)), None, self.thread, self.offset, self.cluster,
        )  # fmt: skip
        made = Program("made", tuple(self.params), (kernel,), (), ())
        verify(made, Stage.FLAT)
        return made

    def run(self, *stmts, blocks=None):
        """Findings of the statements; tensors are changed in place."""
        program = self.program(*stmts)
        tensors = dict(zip(self.params, self.tensors, strict=True))
        return run_threads(program, tensors, {}, blocks)

    @staticmethod
    def lines(findings):
        """Kind and line of each finding; all of them can be shown."""
        assert len(findings.report().splitlines()) >= len(findings)
        return [(f.kind, f.span.line if f.span else 0) for f in findings]

    # Expressions and statements.

    @staticmethod
    def load(buffer, at=None):
        return Load(buffer, () if at is None else (to_expr(at),))

    @staticmethod
    def store(buffer, at, value, line=0):
        """`buffer[at] = value`, written on `line` of kernel.py."""
        value = cast(value, buffer.dtype) if isinstance(value, Expr) else const(value, buffer.dtype)
        return Store(buffer, () if at is None else (to_expr(at),), value, span=place(line))

    @staticmethod
    def address(buffer, at):
        return Address(buffer, (to_expr(at),))

    @staticmethod
    def when(condition, *then, otherwise=()):
        return If(truth(condition), Block(tuple(then)), Block(tuple(otherwise)))

    @staticmethod
    def loop(var, start, stop, *body):
        return For(LoopKind.SERIAL, (var,), (to_expr(start),), (to_expr(stop),), Block(tuple(body)))

    @staticmethod
    def at(line, do):
        """The statement, written on `line`."""
        return replace(do, span=place(line), call=replace(do.call, span=place(line)))


def place(line):
    return Span("kernel.py", line, line, 0, 1) if line else None


@pytest.fixture
def build():
    """`build(threads, grid)`: a Builder."""
    return Builder


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@dataclass
class Launch:
    """A kernel of the library as it was launched on the interpreter: its program, flat form and arguments."""

    program: Program
    flat: Program
    args: list

    def run(self, flat=None):
        """Findings on copies of the arguments."""
        return interpret(flat or self.flat, self.program, [a.clone() if hasattr(a, "clone") else a for a in self.args])


@pytest.fixture
def on_gpu(monkeypatch):
    """Kernels of the library run as on a GPU of 2 SMs, thread by thread; a list of the launches."""
    launches = []

    class Interpreted(Machine):
        def kernel(self, function):
            def compiled(*config):
                program = function.function(*config).program
                flat = lower(program, cuda_passes(Build(self.target)))

                def launch(*args):
                    before = [a.clone() if hasattr(a, "clone") else a for a in args]
                    launches.append(Launch(program, flat, before))
                    findings = interpret(flat, program, args)
                    assert not findings, findings.report()

                return launch

            return compiled

    machine = Interpreted(Target.of("cuda:sm_90"), 2)
    for module in modules_of_kernels():
        monkeypatch.setattr(module, "machine_of", lambda x: machine)
    return launches
