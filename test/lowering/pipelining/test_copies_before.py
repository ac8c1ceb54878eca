# SPDX-License-Identifier: Apache-2.0
"""Copies in front of a pipelined loop: which begin with its first stage, and that values stay the same."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.node import find
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.pipelining.software_pipeline import pipeline_loops
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.copy.cp_async import AsyncCopy


def same(kernel, *args):
    """The program after the pass and its remarks. Its results are those of the program before."""
    build = Build(Target("cuda", 80))
    program = pipeline_loops(kernel.program, build)
    verify(program, Stage.TILE)
    before, after = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
    evaluate(kernel.program, *before)
    evaluate(program, *after)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True) if isinstance(x, torch.Tensor))
    return program, build.remarks


def kernel_of(case):
    """A sum of products of one tile with each tile of a list. `case` names what else the kernel does."""

    @T.prim_func
    def kernel(q: T.Tensor((4, 16)), x: T.Tensor((32, 16)), out: T.Tensor((4, 16)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            q_tile = T.alloc_shared((4, 16), "float32")
            tile = T.alloc_shared((4, 16), "float32")
            o = T.alloc_fragment((4, 16), "float32")
            own = T.alloc_fragment((4, 16), "float32")
            T.clear(own)
            if case == "written before":
                T.fill(q_tile, 2.0)
            T.copy(q[0, 0], q_tile)
            if case == "read between":
                T.copy(q_tile, own)
            if case == "filled between":
                T.fill(q_tile, 2.0)
            if case == "source written between":
                for i, j in T.Parallel(4, 16):
                    q[i, j] = 3.0
            if case == "barrier between":
                T.sync_threads()
            T.clear(o)
            for k in T.Pipelined(n, num_stages=1 if case == "one stage" else 2):
                if case == "filled in the loop":
                    T.fill(q_tile, 2.0)
                T.copy(x[k * 4, 0], tile)
                if case == "read alone":
                    for i, j in T.Parallel(4, 16):
                        own[i, j] += q_tile[i, j]
                if case == "unread":
                    for i, j in T.Parallel(4, 16):
                        o[i, j] += tile[i, j]
                else:
                    for i, j in T.Parallel(4, 16):
                        o[i, j] += tile[i, j] * q_tile[i, j]
            if case == "read behind":
                T.copy(q_tile, own)
            for i, j in T.Parallel(4, 16):
                out[i, j] = o[i, j] + own[i, j]

    return kernel


KEPT = (
    "read between", "filled between", "source written between", "barrier between", "one stage", "filled in the loop",
    "read alone", "unread", "read behind",
)  # fmt: skip


def copies_that_join(program):
    """The asynchronous copies of `q`."""
    return [n for n in find(program, AsyncCopy) if n.src.buffer.name == "q"]


@pytest.mark.parametrize("case", ["", "written before"])
def test_a_copy_starts_with_the_first_stage(case):
    for n in (0, 1, 5):
        program, notes = same(kernel_of(case), torch.randn(4, 16), torch.randn(32, 16), torch.zeros(4, 16), n)
        assert len(copies_that_join(program)) == 1
        assert any("first stage of the loop" in note.became for note in notes)


@pytest.mark.parametrize("case", KEPT)
def test_a_copy_stays_where_it_is_needed(case):
    for n in (0, 1, 5):
        program, _ = same(kernel_of(case), torch.randn(4, 16), torch.randn(32, 16), torch.zeros(4, 16), n)
        assert not copies_that_join(program)


def test_a_loop_around_stages_its_own_copies():
    """The inner loop must not take a copy that runs an iteration ahead in the outer one."""

    @T.prim_func
    def kernel(q: T.Tensor((32, 16)), x: T.Tensor((32, 16)), out: T.Tensor((4, 16))):
        with T.Kernel(1, threads=32) as _:
            q_tile, tile = (T.alloc_shared((4, 16), "float32") for _ in range(2))
            o = T.alloc_fragment((4, 16), "float32")
            T.clear(o)
            for a in T.Pipelined(5, num_stages=2):
                T.copy(q[a * 4, 0], q_tile)
                for k in T.Pipelined(3, num_stages=2):
                    T.copy(x[k * 4, 0], tile)
                    for i, j in T.Parallel(4, 16):
                        o[i, j] += tile[i, j] * q_tile[i, j]
            T.copy(o, out)

    program, _ = same(kernel, torch.randn(32, 16), torch.randn(32, 16), torch.zeros(4, 16))
    assert len(copies_that_join(program)) == 2  # in front of the outer loop, and in it


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_threads_read_the_tile_after_its_group(n):
    """By the interpreter of threads, which finds reads of tiles under way, in what the GPU would run."""
    kernel = kernel_of("")
    flat = lower(kernel.program, cuda_passes(Build(Target("cuda", 80))))
    q, x, out = torch.randn(4, 16), torch.randn(32, 16), torch.full((4, 16), float("nan"))
    assert not interpret(flat, kernel.program, (q, x, out, n)).found
    assert torch.allclose(out, (x.view(8, 4, 16)[:n] * q).sum(0), atol=1e-5)
