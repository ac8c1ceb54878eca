# SPDX-License-Identifier: Apache-2.0
"""Random statements of threads on shared memory: with the barriers that insert_barriers adds, nothing is out of order.

TORCH_TILE_FUZZ=10000 runs that many programs instead of 300, TORCH_TILE_FUZZ_SEED=n starts from a given seed.
"""

import os
import random

import pytest
import torch

from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics import memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Load, Var, cast, const, select
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    Do,
    For,
    If,
    Kernel,
    LoopKind,
    Program,
    Store,
)
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.sync.insert_barriers import Walk, insert_barriers
from torch_tile.lowering.threads.allocate_shared import allocate_shared
from torch_tile.simulator.simt.interpreter import run_threads

COUNT = int(os.environ.get("TORCH_TILE_FUZZ", "150"))
THREADS = 64


class Threads:
    """A random program of stage THREAD: stores, loads and asynchronous copies of versions of shared tiles in loops."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.t, self.count = Var("t", dt.int32, "thread"), 0
        n = const(4 * THREADS, dt.int32)
        self.x = Buffer("x", (n,), dt.float32, "global", None, "param")
        self.y = Buffer("y", (n,), dt.float32, "global", None, "param")
        self.total = Buffer("total", (), dt.float32, "var")
        self.pair = Buffer("pair", (const(2, dt.int32),), dt.float32, "local")
        versions = [self.pick(1, 2, 3) for _ in range(self.pick(1, 2, 3))]
        sizes = [(const(v, dt.int32), const(2 * THREADS, dt.int32)) for v in versions]
        self.tiles = [Buffer(f"s{k}", size, dt.float32, "shared") for k, size in enumerate(sizes)]
        self.loops = []

    def pick(self, *options):
        return self.random.choice(options)

    def program(self):
        """Every tile is written first; what is read is added up and written in the end."""
        first = [Alloc(self.total, const(0.0, dt.float32)), Alloc(self.pair), *map(Alloc, self.tiles)]
        for tile in self.tiles:
            for v in range(tile.shape[0].value):
                for half in range(2):
                    first.append(Store(tile, (const(v, dt.int32), self.t + half * THREADS), self.input()))
        last = Store(self.y, (self.t,), Load(self.total, ()))
        body = Block((*first, *self.block(0), Do(tm.cp_async_wait(0).call), last))
        kernel = Kernel((const(1, dt.int32),), (Var("bx", dt.int32, "block"),), (THREADS,), body, None, self.t)
        return Program("made", (self.x, self.y), (kernel,), (), ())

    def input(self):
        return Load(self.x, (self.t + self.pick(0, 1, 5, THREADS),))

    def version(self, tile):
        """Which version of a tile: a number, or one that turns with a loop."""
        n = tile.shape[0].value
        if n == 1 or not self.loops or self.random.random() < 0.3:
            return const(self.random.randrange(n), dt.int32)
        return (self.pick(*self.loops) + self.random.randrange(2 * n)) % n

    def place(self):
        """Which element a thread touches; a permutation of the threads or not."""
        t = self.t
        return self.pick(
            t, t, t, t ^ 1, t ^ 33, THREADS - 1 - t, (t + 1) % THREADS, t // 32 * 32 + (t + 1) % 32, t // 2
        )

    def block(self, depth):
        made = []
        for _ in range(self.random.randint(1, 4)):
            kinds = [self.load, self.load, self.store, self.copy, self.wide, self.atomic, self.wait] + (
                [self.loop, self.branch] * (depth < 2) + [self.leave] * bool(self.loops)
            )
            made += self.pick(*kinds)(depth)
        return made

    def load(self, depth):
        tile = self.pick(*self.tiles)
        value = Load(tile, (self.version(tile), self.place()))
        if self.random.random() < 0.3:
            return [Store(self.y, (self.t + THREADS,), value)]
        return [Store(self.total, (), Load(self.total, ()) + value)]

    def store(self, depth):
        tile = self.pick(*self.tiles)
        place = self.place()
        if self.random.random() < 0.2:
            place, value = const(3, dt.int32), cast(const(1, dt.int32), dt.float32)  # all threads write the same
            return [If(self.t == 0, Block((Store(tile, (self.version(tile), place), value),)), Block(()))]
        half = place is not None and "//" in repr(place)
        store = Store(tile, (self.version(tile), place), self.input())
        return [If(self.t % 2 == 0, Block((store,)), Block(()))] if half else [store]

    def copy(self, depth):
        tile = self.pick(*self.tiles)
        source = Address(self.x, (self.t,))
        start = tm.cp_async(Address(tile, (self.version(tile), self.t)), source, const(4, dt.int32), 4)
        return [start, tm.cp_async_commit(), tm.cp_async_wait(0)]

    def wide(self, depth):
        """Two elements at a time."""
        tile = self.pick(*self.tiles)
        place, pair = self.pick(self.t, self.t ^ 1, THREADS - 1 - self.t), Address(self.pair, (const(0, dt.int32),))
        memory = Address(tile, (self.version(tile), place * 2))
        if self.random.random() < 0.5:
            return [tm.vector_copy(pair, memory, 8)]
        made = [Store(self.pair, (const(n, dt.int32),), self.input()) for n in range(2)]
        return [*made, tm.vector_copy(memory, pair, 8)]

    def atomic(self, depth):
        tile = self.pick(*self.tiles)
        address = Address(tile, (self.version(tile), self.place()))
        return [Do(tm.atomic(address, const(1.0, dt.float32), "add"))]

    def wait(self, depth):
        return [tm.cp_async_commit(), tm.cp_async_wait(self.pick(0, 1))]

    def loop(self, depth):
        self.count += 1
        var = Var(f"k{self.count}", dt.int32, "loop")
        self.loops.append(var)
        body = Block(tuple(self.block(depth + 1)))
        self.loops.pop()
        stop = const(self.pick(1, 2, 3, 5), dt.int32)
        return [For(LoopKind.SERIAL, (var,), (const(0, dt.int32),), (stop,), body)]

    def leave(self, depth):
        """All threads leave the iteration, or the loop."""
        condition = self.loops[-1] % 3 == self.pick(0, 1, 2)
        return [If(condition, Block((self.pick(Break, Continue)(),)), Block(()))]

    def branch(self, depth):
        loop = self.pick(*self.loops) if self.loops else const(1, dt.int32)
        condition = select(loop > 0, loop % 2, 1) == self.pick(0, 1)
        other = Block(tuple(self.block(2))) if self.random.random() < 0.3 else Block(())
        return [If(condition, Block(tuple(self.block(depth + 1))), other)]


def lowered(program):
    """With places, barriers and flat buffers."""
    build = Build(Target.of("cuda:sm_80"))
    verify(program, Stage.THREAD)
    flat = flatten(insert_barriers(allocate_shared(program, build)))
    verify(flat, Stage.FLAT)
    return flat


def findings_of(flat):
    tensors = [torch.randn(4 * THREADS) for _ in flat.params]
    return run_threads(flat, dict(zip(flat.params, tensors, strict=True)), {})


@pytest.mark.slow
def test_barriers_order_random_threads(seed):
    first = int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed))
    for number in range(first, first + COUNT):
        flat = lowered(Threads(number).program())
        findings = findings_of(flat)
        text = f"TORCH_TILE_FUZZ_SEED={number} TORCH_TILE_FUZZ=1: {findings.report()}\n{flat!r}"
        assert not findings, text


@pytest.mark.slow
def test_a_loop_is_walked_once_for_each_state(seed, monkeypatch):
    """The same barriers are placed if each walk of the loops around walks the loops inside anew."""
    first = int(os.environ.get("TORCH_TILE_FUZZ_SEED", seed))
    build = Build(Target.of("cuda:sm_80"))
    for number in range(first, first + COUNT // 3):
        program = allocate_shared(Threads(number).program(), build)
        once = insert_barriers(program)
        with monkeypatch.context() as patched:
            patched.setattr(Walk, "_loop", Walk._cheapest)
            assert repr(insert_barriers(program)) == repr(once), f"TORCH_TILE_FUZZ_SEED={number}"
