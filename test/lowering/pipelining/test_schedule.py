# SPDX-License-Identifier: Apache-2.0
"""Schedules by hand: what is accepted computes the same, what would not is refused with its reason."""

import random

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, Do, For, LoopKind
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.pipelining.copy_plan import plan_copies
from torch_tile.lowering.pipelining.schedule import Schedule, schedule_by_hand, single_schedule
from torch_tile.lowering.pipelining.software_pipeline import pipeline_loops
from torch_tile.simulator.tile.interpreter import evaluate


def attention_like(order, stage, stages, row_name=True):
    """Two products in a chain, as in attention: load, multiply, rescale, load, multiply."""

    @T.prim_func
    def kernel(k: T.Tensor((40, 8)), v: T.Tensor((40, 8)), out: T.Tensor((8, 8)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            k_tile = T.alloc_shared((8, 8), "float32")
            v_tile = T.alloc_shared((8, 8), "float32")
            s = T.alloc_fragment((8, 8), "float32")
            p = T.alloc_fragment((8, 8), "float32")
            o = T.alloc_fragment((8, 8), "float32")
            T.clear(o)
            for step in T.Pipelined(n, num_stages=stages, order=order, stage=stage):
                row = step * 8
                T.copy(k[row, 0], k_tile)
                T.gemm(k_tile, k_tile, s, clear_accum=True)
                for i, j in T.Parallel(8, 8):
                    p[i, j] = T.exp2(-s[i, j] * s[i, j]) + T.cast(row, "float32")
                T.copy(v[row, 0], v_tile)
                T.gemm(p, v_tile, o)
            T.copy(o, out)

    return kernel.program


def loop_of(program):
    return next(n for n in walk(program) if isinstance(n, For) and n.kind is LoopKind.PIPELINED)


def schedule(program):
    return schedule_by_hand(loop_of(program), plan_copies(loop_of(program)))


def same(program):
    """Pipeline the program; it must compute the same. Returns the notes."""
    build = Build(Target.of("cuda:sm_80"))
    done = pipeline_loops(program, build)
    verify(done, Stage.TILE)
    for n in (0, 1, 2, 5):
        k, v = torch.randn(40, 8), torch.randn(40, 8)
        outs = torch.zeros(8, 8), torch.zeros(8, 8)
        evaluate(program, k, v, outs[0], n)
        evaluate(done, k, v, outs[1], n)
        assert torch.equal(*outs)
    return build.remarks


def test_the_next_product_starts_before_this_one_is_rescaled():
    """Loads far ahead, the first product one ahead: the tensor cores work while the softmax does."""
    program = attention_like([0, 3, 2, 1, 4], [0, 1, 2, 1, 2], 0)
    found = schedule(program)
    assert isinstance(found, Schedule)
    assert [item.ahead for item in found.items] == [2, 1, 0, 1, 0]
    assert {b.name: found.versions[b] for b in found.staged} == {"k_tile": 2, "v_tile": 2}
    assert not any(n.why_not for n in same(program))


def test_copies_of_stage_minus_one_go_as_far_as_stages_allow():
    program = attention_like([-1, 1, 0, -1, 2], [-1, 0, 1, -1, 1], 3)
    found = schedule(program)
    assert isinstance(found, Schedule)
    assert {b.name: found.versions[b] for b in found.staged} == {"k_tile": 3, "v_tile": 4}
    assert not any(n.why_not for n in same(program))


def test_one_stage_fills_a_tile_again_after_its_last_reader():
    """The keys of the next step come while this one's softmax runs, the values while the first product does."""
    program = attention_like(None, None, 1)
    found = single_schedule(loop_of(program).body, plan_copies(loop_of(program)))
    parts = [(item.ahead, type(item.moves[0].stmt).__name__) for item in found.items]
    assert parts == [(0, "Copy"), (0, "Let"), (0, "Gemm"), (1, "Copy"), (0, "For"), (0, "Gemm")]
    assert [b.name for b in found.staged] == ["v_tile", "k_tile"]
    assert set(found.versions.values()) == {1}
    assert not any(n.why_not for n in same(program))
    pipelined = pipeline_loops(program, Build(Target.of("cuda:sm_80")))
    waits = [n.call.options for n in walk(pipelined) if isinstance(n, Do) and n.call.name == "cp_async_wait"]
    assert waits == [(0,), (0,)]  # before either copy, where a barrier is needed anyway: none before the last product


def test_the_same_by_hand():
    """A copy of its own iteration is asynchronous too, and an order that fills after the last reader saves memory."""
    program = attention_like([2, 1, 3, 0, 4], [0, 1, 1, 1, 1], 0)
    found = schedule(program)
    assert isinstance(found, Schedule)
    assert {b.name: found.versions[b] for b in found.staged} == {"k_tile": 1, "v_tile": 1}
    assert not any(n.why_not for n in same(program))


def test_one_stage_without_anything_to_wait_beside_is_a_plain_loop():
    """A product right after its copies, and nothing else."""

    @T.prim_func
    def kernel(a: T.Tensor((40, 8)), out: T.Tensor((8, 8)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8, 8), "float32")
            total = T.alloc_fragment((8, 8), "float32")
            T.clear(total)
            for step in T.Pipelined(n, num_stages=1):
                T.copy(a[step * 8, 0], tile)
                T.gemm(tile, tile, total)
            T.copy(total, out)

    loop = loop_of(kernel.program)
    assert single_schedule(loop.body, plan_copies(loop)) is None


REFUSED = {
    "too few": ([0, 1], [0, 1], "`stage` and `order` need one entry for each of 5 statements"),
    "no copy": ([0, 1, 2, 3, 4], [0, -1, 1, 0, 1], "a statement of stage -1 is not a copy that can run ahead"),
    "overwrites": (
        [0, 1, 2, 3, 4], [0, 0, 1, 0, 1], "in the given order an iteration overwrites `s` while an earlier one needs it"
    ),
    "too early": ([1, 0, 2, 3, 4], [0, 0, 0, 1, 1], "the given order lets a statement meet `k_tile` too early"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_results_is_refused(name):
    order, stage, why = REFUSED[name]
    program = attention_like(order, stage, 2)
    assert schedule(program) == why
    assert [n.why_not for n in same(program)] == [why]  # and the usual schedule is used


def test_random_schedules(seed):
    """None changes a result; some are accepted."""
    rng = random.Random(seed)
    accepted = drawn = 0
    while drawn < 60 or (accepted < 4 and drawn < 600):  # about one of nine is accepted
        drawn += 1
        stage = sorted(rng.choice([0, 1, 2]) for _ in range(5)) if rng.random() < 0.7 else [rng.choice([0, 1, 2])] * 5
        stage[3] = rng.choice([0, 1, 2])
        order = rng.sample(range(5), 5) if rng.random() < 0.6 else list(range(5))
        program = attention_like(order, stage, rng.choice([0, 1, 3]))
        accepted += isinstance(schedule(program), Schedule) and max(stage) > min(stage)
        same(program)
    assert accepted > 3


def test_buffers_of_the_body_outlive_the_step_that_makes_them():
    @T.prim_func
    def kernel(k: T.Tensor((40, 8)), v: T.Tensor((40, 8)), out: T.Tensor((8, 8)), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((8, 8), "float32")
            for step in T.Pipelined(n, order=[0, 2, 1], stage=[0, 0, 1]):
                twice = T.alloc_fragment((8, 8), "float32")
                T.copy(k[step * 8, 0], tile)
                for i, j in T.Parallel(8, 8):
                    twice[i, j] = tile[i, j] * 2.0
                for i, j in T.Parallel(8, 8):
                    out[i, j] += twice[i, j] * v[step * 8 + i, j]

    assert not any(n.why_not for n in same(kernel.program))
    found = schedule(kernel.program)
    assert [a.buffer.name for a in found.before if isinstance(a, Alloc)] == ["twice"]


def test_arrivals_keep_their_place():
    """No access of the kernel tells what of other blocks' an arrival orders."""

    @T.prim_func
    def kernel(x: T.Tensor((40, 8)), y: T.Tensor((40, 8)), counters: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as _:
            tile = T.alloc_shared((8, 8), "float32")
            for step in T.Pipelined(n, num_stages=2, order=[0, 2, 1], stage=[0, 1, 1]):
                T.copy(x[step * 8, 0], tile)
                T.copy(tile, y[step * 8, 0])
                T.arrive_last(counters[step], 4)

    assert schedule(kernel.program) == "T.arrive_last orders all that other blocks read and write"


def test_what_the_last_block_reads_is_not_loaded_ahead():
    """Whether it does is known in its own iteration."""

    @T.prim_func
    def kernel(x: T.Tensor((40, 8)), y: T.Tensor((40, 8)), counters: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(4, threads=32) as _:
            tile = T.alloc_shared((8, 8), "float32")
            for step in T.Pipelined(n, num_stages=2):
                if T.arrive_last(counters[step], 4):
                    T.copy(x[step * 8, 0], tile)
                    T.copy(tile, y[step * 8, 0])

    plan = plan_copies(loop_of(kernel.program))
    assert not plan.moves
    ((_, why),) = plan.refused
    assert why == "where it reads depends on `arrived_last`, which the loop writes"
