# SPDX-License-Identifier: Apache-2.0
"""Loops count stages and parities of rings. All waits, arrivals and values stay those of the closed forms."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import torch_tile
import torch_tile.language as T
from test.emulate import emulate
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Binary, Const, Load
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, For, LoopKind, Program, Store
from torch_tile.kernels.common import dynamic
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.analysis.run_waits import run_waits
from torch_tile.lowering.analysis.wait_events import list_events
from torch_tile.lowering.pipelining.count_stages import count_stages

HOPPER = "cuda:sm_90a"
H, F = T.float16, T.float32
DEPTH = dynamic("k", 8)
MOST = 2000  # events of a list


def products(stages: int, tiles: int = 1, scaled: bool = False, warpgroups: int = 2) -> Any:
    """A product of run-time depth, by one block that makes tiles one after the other; its parts may be scaled."""
    rows = 64 * warpgroups

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, DEPTH), H),
        B: T.Tensor((64 * tiles, DEPTH), H),
        C: T.Tensor((rows, 64 * tiles), F),
    ):
        with T.Kernel(1, threads=rows * 2) as _:
            for tile in T.serial(tiles):
                a, b = T.alloc_shared((rows, 64), H), T.alloc_shared((64, 64), H)
                c, part = (T.alloc_fragment((rows, 64), F) for _ in range(2))
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(DEPTH, 64), num_stages=stages):
                    T.copy(A[0, step * 64], a)
                    T.copy(B[tile * 64, step * 64], b)
                    if scaled:
                        T.gemm(a, b, part, transpose_B=True, clear_accum=True)
                        for i, j in T.Parallel(rows, 64):
                            c[i, j] += part[i, j] * 0.5
                    else:
                        T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[0, tile * 64])

    return kernel


def two_rings(first: int, second: int, tiles: int) -> Any:
    """Two loops of one tile with rings of their own, of which the second one is as long as the tile's number says."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, DEPTH), H),
        B: T.Tensor((64, DEPTH), H),
        D: T.Tensor((64, 64 * tiles), H),
        C: T.Tensor((64, 64 * tiles), F),
    ):
        with T.Kernel(1, threads=128) as _:
            for tile in T.serial(tiles):
                a, b = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
                d, e = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
                c = T.alloc_fragment((64, 64), F)
                T.clear(c)
                for step in T.Pipelined(T.ceildiv(DEPTH, 64), num_stages=first):
                    T.copy(A[0, step * 64], a)
                    T.copy(B[0, step * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                for step in T.Pipelined(tile, num_stages=second):
                    T.copy(D[0, step * 64], d)
                    T.copy(B[0, step * 64], e)
                    T.gemm(d, e, c, transpose_B=True)
                T.copy(c, C[0, tile * 64])

    return kernel


def lowered(kernel: Any, target: str = HOPPER) -> tuple[Program, Program]:
    """The program in front of the pass and behind it."""
    build = Build(Target.of(target))
    steps = cuda_passes(build)
    place = next(n for n, (step, _) in enumerate(steps) if step is count_stages)
    before = lower(kernel.program, steps[:place])
    return before, lower(before, steps[place : place + 1])


def divisions(program: Program) -> int:
    """Count the quotients and remainders by no power of two in indices of rings, and in parities, inside of loops."""
    loops = [loop for loop in find(program, For) if loop.kind is LoopKind.SERIAL and list(find(loop, Address))]
    inner = [loop for loop in loops if not any(other is not loop for other in find(loop, For) if other in loops)]
    accesses = {id(a): a for loop in inner for a in find(loop.body, Load, Address, Store)}.values()
    indices = [i for a in accesses for i in a.indices]
    return sum(
        node.op in ("%", "//") and isinstance(node.b, Const) and node.b.value & (node.b.value - 1) != 0
        for i in indices
        for node in find(i, Binary)
    )


def counters(program: Program) -> list[Buffer]:
    """The variables of rings."""
    return [a.buffer for a in find(program, Alloc) if a.buffer.name in ("stage", "parity") and a.buffer.scope == "var"]


def assert_same_events(before: Program, after: Program, sizes: Any) -> None:
    """All threads wait for the same parities of the same stages, and arrive there."""
    for old, new in zip(before.kernels, after.kernels, strict=True):
        for size in sizes:
            wanted, got = (list_events(kernel, size, MOST) for kernel in (old, new))
            assert [threads for threads, _ in got] == [threads for threads, _ in wanted]
            for (_, some), (_, others) in zip(got, wanted, strict=True):
                assert some and [event[:5] for event in some] == [event[:5] for event in others]
            outcome = run_waits(new, size)
            assert outcome is not None and not outcome.waiting


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7])
def test_waits_and_arrivals_stay(stages: int, scaled: bool) -> None:
    """For one tile and for several, whose rings run on, and loops of none, few and many iterations."""
    for tiles in (1, 2, 3):
        before, after = lowered(products(stages, tiles, scaled))
        trips = [0, 1, 2, *random.sample(range(3, 4 * stages), 4)]
        assert_same_events(before, after, [64 * n for n in trips])
        assert bool(counters(after)) is (stages not in (2, 4))
        assert after is before if stages in (2, 4) else divisions(before) and not divisions(after)


def test_rows_of_a_tile_are_no_stages() -> None:
    """A thread's rows begin at a quotient, and lie a number of rows apart. Their addresses stay sums of constants."""

    @T.prim_func
    def kernel(A: T.Tensor((96, 16), F), B: T.Tensor((96, 16), F)):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((100, 16), F)
            for i in T.serial(3):
                for c in T.serial(4):
                    tile[thread // 4 + 32 * i, thread % 4 * 4 + c] = A[thread // 4 + 32 * i, thread % 4 * 4 + c]
            T.copy(tile[0:96, :], B)

    before, after = lowered(kernel)
    assert after is before and find(before, For)


def test_two_rings_count_for_themselves() -> None:
    """Each has its variables, and a loop may have no iteration."""
    first, second = random.sample([3, 5, 6, 7], 2)
    before, after = lowered(two_rings(first, second, 5))
    assert_same_events(before, after, [0, 64, 64 * first, 64 * random.randrange(2, 15)])
    assert {b.below for b in counters(after)} == {2, first, second} and not divisions(after)


@pytest.mark.parametrize("stages, tiles, depth", [(3, 3, 328), (5, 2, 648), (6, 2, 64), (7, 1, 584)])
@pytest.mark.parametrize("scaled", [False, True])
def test_values_stay(stages: int, tiles: int, depth: int, scaled: bool, seed: int) -> None:
    """In the thread interpreter, and as the printed text on the host."""
    torch.manual_seed(seed)
    compiled = torch_tile.compile(products(stages, tiles, scaled), target=HOPPER)
    a, b = torch.randn(128, depth).half(), torch.randn(64 * tiles, depth).half()
    wanted = a.double() @ b.double().mT * (0.5 if scaled else 1)
    for run in (compiled.interpret, lambda *given: emulate(compiled, *given)):
        c = torch.full(wanted.shape, float("nan"))
        run(a, b, c)
        torch.testing.assert_close(c.double(), wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("stages", [3, 5])
def test_versions_of_ordinary_copies_are_counted(stages: int, seed: int) -> None:
    """A chip without roles has versions of tiles, and no parities."""
    torch.manual_seed(seed)
    kernel = products(stages)
    before, after = lowered(kernel, "cuda:sm_80")
    assert divisions(before) and not divisions(after)
    assert {(b.name, b.below) for b in counters(after)} == {("stage", stages)}
    compiled = torch_tile.compile(kernel, target="cuda:sm_80")
    depth = random.choice([8, 64, 200, 520])
    a, b = torch.randn(128, depth).half(), torch.randn(64, depth).half()
    for run in (compiled.interpret, lambda *given: emulate(compiled, *given)):
        c = torch.full((128, 64), float("nan"))
        run(a, b, c)
        torch.testing.assert_close(c.double(), a.double() @ b.double().mT, rtol=1e-3, atol=1e-2)


# Bounds of a loop from 4 to 17, by what they are made of, and whether a ring's place is known there.
BOUNDS = {
    "constants": (lambda numbers, n: (4, 17), True),
    "a parameter": (lambda numbers, n: (n - 13, n), True),
    "first loaded": (lambda numbers, n: (numbers[0], 17), False),
    "last loaded": (lambda numbers, n: (4, numbers[1]), True),
    "both loaded": (lambda numbers, n: (numbers[0], numbers[1]), False),
    "first called": (lambda numbers, n: (T.cast(T.exp2(T.cast(n - 15, F)), T.int32), n), False),
}


@pytest.mark.parametrize("bounds, is_known", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("stages", [3, 5])
def test_bounds_of_a_loop_may_be_any_expression(stages: int, bounds: Any, is_known: bool, seed: int) -> None:
    """Rings whose place at the start of a loop is not known keep their closed forms."""
    torch.manual_seed(seed)

    @T.prim_func
    def kernel(_numbers: T.Tensor((2,), T.int32), A: T.Tensor((64, 32), F), C: T.Tensor((65, 32), F), _n: T.int32):
        with T.Kernel(1, threads=32) as _:
            ring, lane = T.alloc_shared((stages, 32), F), T.get_thread_binding()
            for i in T.unroll(stages):
                ring[i, lane] = 0
            for k in T.serial(*bounds(_numbers, _n)):
                ring[k % stages, lane] += A[k, lane]
                C[k, lane] = ring[(k + 1) % stages, lane]
            C[64, lane] = ring[bounds(_numbers, _n)[1] % stages, lane]

    assert bool(counters(lowered(kernel, "cuda:sm_80")[1])) is is_known
    compiled = torch_tile.compile(kernel, target="cuda:sm_80")
    a, wanted, ring = torch.randn(64, 32), torch.full((65, 32), 7.0), torch.zeros(stages, 32)
    for k in range(4, 17):
        ring[k % stages] += a[k]
        wanted[k] = ring[(k + 1) % stages]
    wanted[64] = ring[17 % stages]
    for run in (compiled.interpret, lambda *given: emulate(compiled, *given)):
        c = torch.full((65, 32), 7.0)
        run(torch.tensor([4, 17], dtype=torch.int32), a, c, 17)
        assert torch.equal(c, wanted)


def test_the_text_compares() -> None:
    """The stage steps by one and returns to 0, and the parity turns over with it."""
    text = torch_tile.compile(products(5, 2), target=HOPPER).source
    loops = text.split("for (int step = 0")[1:]
    assert len(loops) == 2
    for loop in loops:
        body = loop[: re.search(r"\n *parity\S* = ", loop).start()]
        assert "tile::wrapped<5>(stage" in body and "% 5" not in body and "/ 5" not in body
