# SPDX-License-Identifier: Apache-2.0
"""Blocks that leave parts of a sum, joined by the last of them to arrive: as the op means it, compiled for the CPU, and
thread by thread, several times on the same counters.
"""

import random
import sys
from pathlib import Path

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import joined_last

TIMES = 3  # that a kernel runs on the same counters


def on_gpu(target):
    """A way to run kernels: thread by thread, where nothing must be found."""

    def run(kernel):
        compiled = torch_tile.compile(kernel, target=target)

        def once(*args):
            findings = compiled.interpret(*args)
            assert not findings, findings.report()

        return once

    return run


WAYS = {
    "meaning": lambda kernel: lambda *args: evaluate(kernel, *args),
    "cpu": torch_tile.compile,
    **{name: on_gpu(f"cuda:{name}") for name in ("sm_80", "sm_90a", "sm_120a")},
}


@pytest.fixture(params=WAYS)
def way(request):
    """`way(kernel)` gives a function of the kernel's arguments, which it changes in place."""
    return WAYS[request.param]


def blank(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def several_times(run, inputs, parts, counters, out, want, tolerance=1e-4):
    for _ in range(TIMES):
        parts.fill_(float("nan"))
        out.fill_(float("nan"))
        run(*inputs, parts, counters, out)
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
        assert not counters.any(), "counters begin at 0 the next time"


def test_sums_of_rows(way, seed):
    rng = random.Random(seed)
    for _ in range(3):
        rows, columns, splits = rng.randint(1, 20), rng.randint(1, 300), rng.randint(1, 6)
        height = rng.choice([1, 4, 8])
        kernel = joined_last.sums(rows, columns, splits, (height, 32), rng.choice([32, 64, 128]))
        a = torch.randn(rows, columns)
        counters = torch.zeros(-(-rows // height), dtype=torch.int32)
        several_times(way(kernel), [a], blank(splits, rows), counters, blank(rows), a.double().sum(1))


def test_products(way, seed):
    rng = random.Random(seed)
    m, n, k, splits = rng.randint(1, 80), 8 * rng.randint(1, 9), 8 * rng.randint(1, 40), rng.randint(1, 4)
    kernel = joined_last.products(m, n, k, splits, stages=rng.randint(1, 3), staged=rng.random() < 0.5)
    a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
    counters = torch.zeros(-(-m // 64), -(-n // 64), dtype=torch.int32)
    want = a.double() @ b.double()
    several_times(way(kernel), [a, b], blank(splits, m, n), counters, blank(m, n, dtype=torch.half), want, 5e-2)


def test_blocks_that_take_share_after_share(way):
    """One block may bring several shares of a tile, also all of them."""
    for blocks in (1, 3):
        kernel = joined_last.tile_after_tile(72, 64, 200, 2, blocks)
        a, b = torch.randn(72, 200).half(), torch.randn(200, 64).half()
        counters, want = torch.zeros(2, 1, dtype=torch.int32), a.double() @ b.double()
        several_times(way(kernel), [a, b], blank(2, 72, 64), counters, blank(72, 64, dtype=torch.half), want, 5e-2)


def test_many_blocks_at_once_on_the_cpu():
    """Threads meet at few counters; each counts all arrivals and has one last one a turn."""

    @T.prim_func
    def kernel(marks: T.Tensor((500, 40), "int32"), counters: T.Tensor((3,), "int32"), out: T.Tensor((3,), "int32")):
        with T.Kernel(3 * 500) as b:
            for i in T.Parallel(40):
                marks[b // 3, i] = 0
                marks[b // 3, i] = b // 3 % 7 + i
            if T.arrive_last(counters[b % 3], 500):
                T.atomic_add(out[b % 3], 1)

    compiled = torch_tile.compile(kernel)
    marks, counters, out = torch.zeros(500, 40), torch.zeros(3), torch.zeros(3)
    marks, counters, out = (x.int() for x in (marks, counters, out))
    for turn in range(20):
        compiled(marks, counters, out)
        assert out.tolist() == [turn + 1] * 3 and not counters.any()


@pytest.mark.parametrize("run", [WAYS["meaning"], WAYS["sm_90a"]])
def test_blocks_of_a_cluster(run):
    """They run side by side in both interpreters."""
    kernel = joined_last.sums(6, 200, 4, cluster=(2, 1, 1))
    a, counters = torch.randn(6, 200), torch.zeros(2, dtype=torch.int32)
    several_times(run(kernel), [a], blank(4, 6), counters, blank(6), a.double().sum(1))


def test_the_count_may_be_known_at_run_time(way):
    """Shares of uneven rows: each row says how many blocks bring it."""

    @T.prim_func
    def kernel(counts: T.Tensor((3,), "int32"), parts: T.Tensor((3, 5), "int32"), counters: T.Tensor((3,), "int32"),
               out: T.Tensor((3,), "int32"), factor: T.int32):  # fmt: skip
        with T.Kernel(5, 3, threads=32) as (bx, by):
            if bx < counts[by]:
                T.fill(parts[by, bx : bx + 1], bx + 1)
                last = T.arrive_last(counters[by], counts[by] * factor)
                if last:
                    out[by] = 0
                    for n in T.serial(counts[by]):
                        out[by] = out[by] + parts[by, n]

    counts = torch.tensor([1, 4, 5], dtype=torch.int32)
    parts, counters, out = (torch.zeros(s, dtype=torch.int32) for s in ((3, 5), (3,), (3,)))
    run = way(kernel)
    for _ in range(TIMES):
        out.fill_(-1)
        run(counts, parts, counters, out, 1)
        assert out.tolist() == [1, 10, 15] and not counters.any()
    run(counts, parts, counters, out.fill_(-1), 2)
    assert out.tolist() == [-1] * 3 and counters.tolist() == [1, 4, 5]
