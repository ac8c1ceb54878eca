# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind
from torch_tile.simulator.tile import interpreter as tiles
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.simulator.tile.nests import Plan, plan

N = 12


def kernel_of(body):
    """A kernel with inputs a [N, N], idx [N], output out [N, N], whose only statement is `body(a, idx, out)`."""

    @T.prim_func
    def kernel(a: T.Tensor((N, N), "float32"), idx: T.Tensor((N,), "int32"), out: T.Tensor((N, N), "float32")):
        with T.Kernel(1) as _:
            body(a, idx, out)

    return kernel


@T.macro
def elementwise(a, idx, out):
    for i, j in T.Parallel(N, N):
        out[i, j] = a[i, j] * 2.0 + out[i, j]


@T.macro
def transposed(a, idx, out):
    for i, j in T.Parallel(N, N):
        out[j, i] = a[i, j]


@T.macro
def with_let(a, idx, out):
    for i, j in T.Parallel(N, N - 2):
        row = i + 0
        col = j + 2
        out[row, col] = a[col, row] - out[row, col]


@T.macro
def private_sum(a, idx, out):
    for i in T.Parallel(N):
        total = T.alloc_var("float32", 0.0)
        for j in T.serial(N):
            total += a[i, j]
        out[i, 0] = total


@T.macro
def private_array(a, idx, out):
    for i in T.Parallel(N):
        row = T.alloc_local((N,), "float32")
        for j in T.serial(N):
            row[(j + i) % N] = a[i, j]
        for j in T.serial(N):
            out[i, j] = row[j]


@T.macro
def triangle(a, idx, out):
    for i in T.Parallel(N):
        for j in T.serial(i, N, 2):
            out[i, j] = out[i, j] + a[j, i]


@T.macro
def nested_parallel(a, idx, out):
    for i in T.Parallel(N):
        scale = a[i, 0] * 0.5
        for j in T.Parallel(N):
            out[i, j] = a[i, j] * scale


@T.macro
def accumulate(a, idx, out):
    for j in T.Parallel(N):
        out[0, 0] = T.max(out[0, 0], a[3, j])


@T.macro
def nested_accumulate(a, idx, out):
    for i in T.Parallel(N):
        for j in T.Parallel(N):
            out[i, 0] = out[i, 0] + a[i, j]


@T.macro
def broadcast_write(a, idx, out):
    for i, j in T.Parallel(N, N):
        out[i, 1] = a[i, j]


@T.macro
def shift(a, idx, out):
    for i in T.Parallel(N - 1):
        out[0, i + 1] = out[0, i] + a[0, i]


@T.macro
def swap(a, idx, out):
    for i, j in T.Parallel(N, N):
        out[i, j] = out[j, i] + a[i, j]


@T.macro
def scatter(a, idx, out):
    for i, j in T.Parallel(N, N):
        out[idx[i], j] = a[i, j]


@T.macro
def packed(a, idx, out):
    for i, j in T.Parallel(N // 3, 3):
        out[0, i * 3 + j] = a[i, j]


@T.macro
def guarded_write(a, idx, out):
    for i, j in T.Parallel(N, N):
        if j == 5:
            out[i, 0] = a[i, j]
        elif j > 0:
            out[i, j] = -a[i, j]


@T.macro
def early_exit(a, idx, out):
    for i in T.Parallel(N):
        for j in T.serial(N):
            if a[i, j] > 0.5:
                break
            if a[i, j] < -0.5:
                continue
            out[i, j] = a[i, j]


@T.macro
def lane_while(a, idx, out):
    for i in T.Parallel(N):
        n = T.alloc_var("int32", 0)
        while n < i and a[i, n] < 0.7:
            out[i, n] = a[i, n]
            n += 1


@T.macro
def atomics(a, idx, out):
    for i, j in T.Parallel(N, N):
        T.atomic_add(out[0, idx[i] % N], a[i, j])


@T.macro
def parallel_of_lane_extent(a, idx, out):
    for i in T.Parallel(N):
        for j in T.Parallel(i):
            out[i, j] = a[i, j]


@T.macro
def read_then_overwritten(a, idx, out):
    for i in T.Parallel(N - 1):
        out[i, 0] = out[i + 1, 0] + a[i, 0]


KERNELS = {
    elementwise: Plan.INDEPENDENT, transposed: Plan.INDEPENDENT, with_let: Plan.INDEPENDENT,
    private_sum: Plan.INDEPENDENT, private_array: Plan.INDEPENDENT, nested_parallel: Plan.INDEPENDENT,
    triangle: Plan.UNSURE, accumulate: Plan.UNSURE, nested_accumulate: Plan.INDEPENDENT, broadcast_write: Plan.UNSURE,
    shift: Plan.UNSURE, swap: Plan.UNSURE, scatter: Plan.UNSURE, packed: Plan.UNSURE, guarded_write: Plan.UNSURE,
    early_exit: Plan.UNSURE, lane_while: Plan.UNSURE, atomics: Plan.ORDERED, parallel_of_lane_extent: Plan.UNSURE,
    read_then_overwritten: Plan.UNSURE,
}  # fmt: skip


def outer_nest(kernel):
    return next(n for n in walk(kernel.program.kernels[0]) if isinstance(n, For) and n.kind is LoopKind.PARALLEL)


@pytest.mark.parametrize("body", KERNELS, ids=lambda f: f.__name__)
def test_plan(body):
    assert plan(outer_nest(kernel_of(body))) is KERNELS[body]


@pytest.mark.parametrize("collide", [False, True], ids=["permutation", "collisions"])
@pytest.mark.parametrize("body", KERNELS, ids=lambda f: f.__name__)
def test_same_as_in_order(body, collide, monkeypatch):
    """Whatever the plan, the result is bit for bit that of running the iterations one after another."""
    kernel = kernel_of(body)
    a = torch.randn(N, N)
    idx = torch.randint(0, 4, (N,), dtype=torch.int32) if collide else torch.randperm(N).to(torch.int32)
    start = torch.randn(N, N) - 10  # below every element of a, so that a maximum changes it
    together, ordered = start.clone(), start.clone()
    evaluate(kernel, a, idx, together)
    monkeypatch.setattr(tiles, "plan", lambda loop: Plan.ORDERED)
    evaluate(kernel, a, idx, ordered)
    assert torch.equal(together, ordered)
    assert not torch.equal(together, start)


@pytest.mark.parametrize("body", KERNELS, ids=lambda f: f.__name__)
def test_the_cpu_target_agrees(body):
    """The agreed meaning of a nest, iterations in order, is that of compiled kernels too."""
    kernel = kernel_of(body)
    compiled = tilelang.compile(kernel)
    for idx in (torch.randperm(N), torch.randint(0, 4, (N,))):
        a, start = torch.randn(N, N), torch.randn(N, N) - 10
        here, there = start.clone(), start.clone()
        evaluate(kernel, a, idx.to(torch.int32), here)
        compiled(a, idx.to(torch.int32), there)
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


DECISIONS = [
    (scatter, "permutation", True), (scatter, "collisions", False), (packed, "permutation", True),
    (guarded_write, "permutation", True), (triangle, "permutation", True), (lane_while, "permutation", True),
    (swap, "permutation", False), (accumulate, "permutation", False), (broadcast_write, "permutation", False),
    (shift, "permutation", False), (early_exit, "permutation", False), (read_then_overwritten, "permutation", False),
    (parallel_of_lane_extent, "permutation", False),
]  # fmt: skip


@pytest.mark.parametrize(("body", "indices", "expected"), DECISIONS)
def test_watch_decides(body, indices, expected, monkeypatch):
    """A nest of which the text says nothing is run as its accesses turn out to allow."""
    decisions = []
    run = tiles.Tiles._run_at_once

    def spy(self, loop, ranges, how):
        decisions.append((len(self.lanes), how, run(self, loop, ranges, how)))
        return decisions[-1][-1]

    monkeypatch.setattr(tiles.Tiles, "_run_at_once", spy)
    a, out = torch.rand(N, N) * 2 - 1, torch.randn(N, N)
    idx = torch.randperm(N) if indices == "permutation" else torch.zeros(N)
    evaluate(kernel_of(body), a, idx.to(torch.int32), out)
    assert next(d for d in decisions if d[0] == 0) == (0, Plan.UNSURE, expected)


def test_in_order_after_a_failed_trial_sees_the_old_memory():
    """The trial's writes are undone: a prefix sum would otherwise count elements twice."""

    @T.prim_func
    def kernel(a: T.Tensor((64,), "float32"), total: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(64):
                total[0] = total[0] + a[i]

    a, total = torch.randint(0, 9, (64,)).float(), torch.tensor([100.0])
    evaluate(kernel, a, total)
    assert total.item() == 100 + a.sum().item()
