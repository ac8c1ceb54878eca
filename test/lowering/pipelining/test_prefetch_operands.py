# SPDX-License-Identifier: Apache-2.0
"""Products whose operands are loaded a step ahead: the same values, one barrier for an iteration, and who gets them."""

import collections
import functools

import pytest
import torch
from mutation import removals

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Do, For, LoopKind
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.pipelining.prefetch_operands import prefetch_operands
from torch_tile.lowering.pipelining.software_pipeline import pipeline_loops
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.gemm.op import Gemm

AHEAD = "operands loaded a step of K ahead, also across the loop's barrier"


def product(tile=(32, 32, 32), stages=3, turned=(False, True), threads=64, types=("float16", "float32"), twice=False):
    """c = a b (+ a d with `twice`), steps from a first one on, of which there may be none."""
    bm, bn, bk = tile
    m, n, k = T.dynamic("m, n, k", multiple_of=8)
    types = tuple(types)
    a_shape, b_shape = (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n)

    @T.prim_func
    def kernel(
        a: T.Tensor(a_shape, types[0]), b: T.Tensor(b_shape, types[0]), d: T.Tensor(b_shape, types[0]),
        c: T.Tensor((m, n), types[1]), first: T.int32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            a_tile = T.alloc_shared((bk, bm) if turned[0] else (bm, bk), types[0])
            b_tile = T.alloc_shared((bn, bk) if turned[1] else (bk, bn), types[0])
            d_tile = T.alloc_shared((bn, bk) if turned[1] else (bk, bn), types[0])
            total = T.alloc_fragment((bm, bn), types[1])
            T.clear(total)
            for step in T.Pipelined(first, T.ceildiv(k, bk), num_stages=stages):
                row = step * bk
                T.copy(a[row, by * bm] if turned[0] else a[by * bm, row], a_tile)
                T.copy(b[bx * bn, row] if turned[1] else b[row, bx * bn], b_tile)
                if twice:
                    T.copy(d[bx * bn, row] if turned[1] else d[row, bx * bn], d_tile)
                T.gemm(a_tile, b_tile, total, transpose_A=turned[0], transpose_B=turned[1])
                if twice:
                    T.gemm(a_tile, d_tile, total, transpose_A=turned[0], transpose_B=turned[1])
            T.copy(total, c[by * bm, bx * bn])

    return kernel


def overlapped(kernel, target="cuda:sm_80"):
    """The program after the pass, and what the report says of the product."""
    build = Build(Target.of(target))
    program = prefetch_operands(pipeline_loops(kernel.program, build), build)
    verify(program, Stage.TILE)
    notes = [note.became for note in build.remarks if note.op == "T.gemm"]
    assert prefetch_operands(program, build) is program
    return program, notes


def numbers(shape, dtype):
    if dtype == "int8":
        return torch.randint(-9, 9, shape, dtype=torch.int8)
    return torch.randn(shape).to(getattr(torch, dtype))


def problem(m, n, k, turned=(False, True), types=("float16", "float32")):
    """Tensors for `product`; C is poisoned."""
    a = numbers((k, m) if turned[0] else (m, k), types[0])
    b, d = (numbers((n, k) if turned[1] else (k, n), types[0]) for _ in range(2))
    return [a, b, d, torch.full((m, n), 77, dtype=getattr(torch, types[1]))]


def wanted(tensors, turned, skip, twice):
    a, b, d, _ = (t.double() for t in tensors)
    a, b, d = a.T if turned[0] else a, b.T if turned[1] else b, d.T if turned[1] else d
    return a[:, skip:] @ (b + d if twice else b)[skip:]


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_values_and_order(stages, steps):
    """Loops with no, one and several iterations, through whole tiles and through threads."""
    kernel = product(stages=stages)
    program, notes = overlapped(kernel)
    assert notes == [AHEAD]
    fragments = [n.buffer for n in walk(program) if isinstance(n, Alloc) and n.buffer.scope == "fragment"]
    assert [f.static_shape for f in fragments] == [(32, 32)] + [(32, 16)] * 4
    assert len([n for n in walk(program) if isinstance(n, Gemm)]) == 2
    tensors = problem(40, 48, 32 * 7 - 8)
    evaluate(program, *tensors, 7 - steps)
    torch.testing.assert_close(
        tensors[3].double(), wanted(tensors, (False, True), 32 * (7 - steps), False), rtol=1e-4, atol=1e-3
    )
    got = torch.full_like(tensors[3], 77)
    made = torch_tile.compile(kernel, target="cuda:sm_80")
    assert not made.interpret(*tensors[:3], got, 7 - steps)
    torch.testing.assert_close(got, tensors[3], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("twice", [False, True])
def test_orders_in_memory(turned, twice):
    tensors = problem(64, 40, 96, turned)
    kernel = torch_tile.compile(product(turned=turned, twice=twice), target="cuda:sm_90a")
    assert sum(note.became == AHEAD for note in kernel.schedule.remarks) == 1
    assert not kernel.interpret(*tensors, 0)
    torch.testing.assert_close(tensors[3].double(), wanted(tensors, turned, 0, twice), rtol=1e-4, atol=1e-3)


def test_bytes():
    types = "int8", "int32"
    tensors = problem(40, 48, 208, types=types)
    kernel = torch_tile.compile(product((32, 32, 64), types=types), target="cuda:sm_80")
    assert any(note.became == AHEAD for note in kernel.schedule.remarks)
    assert not kernel.interpret(*tensors, 0)
    torch.testing.assert_close(tensors[3].double(), wanted(tensors, (False, True), 0, False))


def test_ordering():
    """One wait and one barrier in the loop, one of each before it; none of them can be spared."""
    kernel = product()
    program = lower(kernel.program, cuda_passes(Build(Target.of("cuda:sm_80"))))
    loop = next(n for n in walk(program) if isinstance(n, For) and n.kind is LoopKind.SERIAL)
    calls = [collections.Counter(n.call.name for n in walk(x) if isinstance(n, Do)) for x in (program, loop)]
    assert [(c["barrier"], c["cp_async_wait"]) for c in calls] == [(2, 2), (1, 1)]
    args = *problem(32, 32, 32 * 6), 0
    assert not interpret(program, kernel.program, args)
    made = list(removals(program))
    assert made
    for removal in made:
        assert interpret(removal.program, kernel.program, args), (
            f"nothing found without {removal.name} {removal.number}"
        )


@pytest.mark.parametrize(
    "why, options",
    [
        ("an odd number of steps", {"tile": (32, 32, 48)}),
        ("a single step", {"tile": (32, 32, 16)}),
        ("no pipeline", {"stages": 0}),
        ("no ldmatrix", {"types": ("float32", "float32")}),
    ],
)
def test_others_stay(why, options):
    build = Build(Target.of("cuda:sm_80"))
    program = pipeline_loops(product(**options).program, build)
    assert prefetch_operands(program, build) is program, why
    assert not any(note.op == "T.gemm" for note in build.remarks)


def test_too_many_registers():
    """64 x 128 for each warp leave no room: 256 registers hold sums."""
    _, notes = overlapped(product((128, 128, 32), threads=64))
    assert len(notes) == 1 and "registers" in notes[0] and notes[0] != AHEAD


@functools.cache
def by_hand():
    """What the pass makes, as an author may write it."""

    @T.prim_func
    def kernel(a: T.Tensor((32, 192), "float16"), b: T.Tensor((32, 192), "float16"), c: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=64) as _:
            a_tile = T.alloc_shared((32, 32), "float16")
            b_tile = T.alloc_shared((32, 32), "float16")
            a_part = T.alloc_fragment((32, 16), "float16")
            b_part = T.alloc_fragment((32, 16), "float16")
            total = T.alloc_fragment((32, 32), "float32")
            T.clear(total)
            for step in T.Pipelined(6, num_stages=3):
                T.copy(a[0, step * 32], a_tile)
                T.copy(b[0, step * 32], b_tile)
                for half in T.unroll(2):
                    T.copy(a_tile[:, half * 16 : half * 16 + 16], a_part)
                    T.copy(b_tile[:, half * 16 : half * 16 + 16], b_part)
                    T.gemm(a_part, b_part, total, transpose_B=True)
            T.copy(total, c)

    return kernel


def test_steps_by_hand():
    a, b, c = torch.randn(32, 192).half(), torch.randn(32, 192).half(), torch.zeros(32, 32)
    kernel = torch_tile.compile(by_hand(), target="cuda:sm_80")
    assert "ldmatrix" in kernel.source and not kernel.interpret(a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=1e-4, atol=1e-3)


def test_parts_of_one_tile_are_different_operands():
    """Halves of A in two products, and one tile as both operands."""
    shape, half = (64, 256), "float16"

    @T.prim_func
    def kernel(a: T.Tensor(shape, half), b: T.Tensor(shape, half), c: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a_tile, b_tile = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            upper, lower = T.alloc_fragment((32, 64), "float32"), T.alloc_fragment((32, 64), "float32")
            square = T.alloc_fragment((64, 64), "float32")
            T.clear(upper)
            T.clear(lower)
            T.clear(square)
            for step in T.Pipelined(4, num_stages=3):
                T.copy(a[0, step * 64], a_tile)
                T.copy(b[0, step * 64], b_tile)
                T.gemm(a_tile[0:32, :], b_tile, upper, transpose_B=True)
                T.gemm(a_tile[32:64, :], b_tile, lower, transpose_B=True)
                T.gemm(a_tile, a_tile, square, transpose_B=True)
            T.copy(upper, c[0, 0:32, :])
            T.copy(lower, c[0, 32:64, :])
            T.copy(square, c[1, :, :])

    assert overlapped(kernel)[1] == [AHEAD]
    a, b = torch.randint(-3, 4, (2, 64, 256)).half()
    c = torch.zeros(2, 64, 64)
    assert not torch_tile.compile(kernel, target="cuda:sm_80").interpret(a, b, c)
    torch.testing.assert_close(c[0], a.float() @ b.float().T, rtol=0, atol=0)
    torch.testing.assert_close(c[1], a.float() @ a.float().T, rtol=0, atol=0)
