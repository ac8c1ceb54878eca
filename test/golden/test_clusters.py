# SPDX-License-Identifier: Apache-2.0
"""Kernels whose blocks load for each other, or read each other's tiles: right on any sizes, and in need of all that
orders them.
"""

import random
import sys
from pathlib import Path

import in_clusters
import pytest
import torch
from mutation import ordering, removals
from traced_stages import stages, traces_back

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.bulk import reaches_others
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
import cluster_runs

HOPPER = Target.of("cuda:sm_90a")
CLUSTERS = [(2, 1, 1), (1, 2, 1), (2, 2, 1)]


def randn(*shape):
    return torch.randn(shape).half()


def of_gemm(m, n, k, cluster, **options):
    """A kernel, its arguments, and what it shall give."""
    turned = options.get("turned", (False, True))
    a, b = randn(*((k, m) if turned[0] else (m, k))), randn(*((n, k) if turned[1] else (k, n)))
    want = (a.T if turned[0] else a).double() @ (b.T if turned[1] else b).double()
    return in_clusters.gemm(m, n, k, cluster, **options), (a, b), want


def of_changed(m, n, k, cluster):
    a, b = randn(m, k), randn(n, k)
    return in_clusters.changed(m, n, k, cluster), (a, b), a.double().relu() @ b.double().T


def of_persistent(m, n, k, cluster, clusters):
    a, b = randn(m, k), randn(n, k)
    return in_clusters.persistent(m, n, k, cluster, clusters), (a, b), a.double() @ b.double().T


def of_attention(queries, keys, cluster, threads=128):
    q, k, v = (randn(n, 64) for n in (queries, keys, keys))
    scores = q.double() @ k.double().T
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    want = weights / weights.sum(-1, keepdim=True) @ v.double()
    return in_clusters.attention(queries, keys, cluster, threads=threads), (q, k, v), want


def flat_of(kernel):
    found = lower(kernel.program, cuda_passes(Build(HOPPER)))
    assert any(isinstance(n, Call) and n.name == "tma_load" and reaches_others(n) for n in walk(found))
    return found


def run(flat, kernel, inputs, want):
    """What the thread interpreter finds; the result must be right if it finds nothing."""
    out = torch.full(want.shape, float("nan"), dtype=torch.float16)
    findings = interpret(flat, kernel.program, (*inputs, out))
    if not findings:
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=5e-2)
    return findings


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_ragged_products(cluster, seed):
    rng = random.Random(seed)
    for turned in ((False, True), (False, False), (True, False)):
        m, n, k = (8 * rng.randint(1, 25), 8 * rng.randint(1, 25), 8 * rng.randint(1, 50))
        m = m if turned[0] else rng.randint(1, 200)
        block = rng.choice([(64, 64, 64), (64, 128, 64), (64, 32, 64), (128, 64, 32)])
        options = {"block": block, "turned": turned, "stages": rng.randint(1, 4), "threads": 2 * block[0]}
        kernel, inputs, want = of_gemm(m, n, k, cluster, staged=rng.random() < 0.5, **options)
        findings = run(flat_of(kernel), kernel, inputs, want)
        assert not findings, f"{m, n, k, options}\n{findings.report()}"


SEVERAL = {
    "gemm 4 x 1": lambda: of_gemm(100, 300, 264, (4, 1, 1)),
    "gemm 4 x 2": lambda: of_gemm(100, 200, 136, (4, 2, 1), block=(64, 32, 64)),
    "gemm of two warpgroups": lambda: of_gemm(300, 100, 264, (1, 2, 1), block=(128, 64, 64), threads=256),
    "threads read stages": lambda: of_changed(100, 200, 264, (2, 1, 1)),
    "threads read stages 2 x 2": lambda: of_changed(100, 200, 264, (2, 2, 1)),
    "tile after tile": lambda: of_persistent(200, 200, 200, (2, 1, 1), 2),
    "tile after tile of 4": lambda: of_persistent(100, 500, 264, (4, 1, 1), 2),
    "attention": lambda: of_attention(200, 320, (2, 1, 1)),
    "attention of two warpgroups": lambda: of_attention(500, 256, (4, 1, 1), 256),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_values(name):
    kernel, inputs, want = SEVERAL[name]()
    findings = run(flat_of(kernel), kernel, inputs, want)
    assert not findings, findings.report()


JOINED = {
    "by mma": {"count": 4},
    "of 3 blocks": {"count": 3, "rows": False},
    "by wgmma": {"count": 2, "block": (64, 64, 64)},
    "of two warpgroups": {"count": 8, "block": (128, 32, 64), "threads": 256, "stages": 2, "dtype": "bfloat16"},
}


def of_joined(name, m=100, n=72, k=712):
    """A kernel, its arguments, the tensor that it fills, and what it shall give."""
    options = JOINED[name]
    dtype = getattr(torch, options.get("dtype", "float16"))
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    out = torch.full((m, n), float("nan"))
    return in_clusters.joined(m, n, k, **options), (a, b, out), a.double() @ b.double().T


@pytest.mark.parametrize("name", JOINED)
def test_blocks_read_each_others_tiles(name):
    kernel, args, want = of_joined(name)
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    assert any(isinstance(n, Role) for n in walk(flat)) == ("block" in JOINED[name])  # copied ahead, for wgmma
    findings = interpret(flat, kernel.program, args)
    assert not findings, findings.report()
    torch.testing.assert_close(args[-1].double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", JOINED)
def test_blocks_read_each_others_tiles_by_tiles(name):
    kernel, args, want = of_joined(name)
    evaluate(kernel, *args)
    torch.testing.assert_close(args[-1].double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["by mma", "by wgmma"])
def test_each_meeting_is_needed(name):
    """Nothing that orders blocks which read each other's tiles can go."""
    kernel, args, _ = of_joined(name, 64, 64, 512)
    flat = lower(kernel.program, cuda_passes(Build(HOPPER)))
    meetings = [r for r in removals(flat) if r.name in ("cluster_arrive", "cluster_wait")]
    if name == "by wgmma":  # the last wait of readers, or of producer warps: the block does not end before the others
        *_, readers, _, _, _, copiers = meetings
        assert readers.name == copiers.name == "cluster_wait"
        meetings = [r for r in meetings if r not in (readers, copiers)]
    assert len(meetings) == (6 if name == "by wgmma" else 4)
    for removal in meetings:
        kinds = interpret(removal.program, kernel.program, args).kinds
        assert kinds & {"race", "missing_wait", "barrier", "deadlock", "unwritten"}, (removal.name, kinds)


def test_random_problems(seed):
    """A few of those that test/device/test_cluster.py runs on a GPU."""
    for number in range(seed, seed + 6):
        problem = cluster_runs.problem(number, 150)
        compiled = problem.compile()
        findings = compiled.interpret(*problem.inputs, problem.out)
        assert not findings, f"seed {number}, {problem.text}\n{findings.report()}"
        assert not (wrong := problem.wrong(problem.out)), f"seed {number}, {wrong}"


def test_guards_that_all_blocks_share():
    """What is loaded, or whether, depends on the other axis; so the expected bytes do."""

    @T.prim_func
    def kernel(
        A: T.Tensor((256, 320), "float16"), B: T.Tensor((128, 320), "float16"), C: T.Tensor((256, 128), "float16")
    ):
        with T.Kernel(2, 4, threads=128, cluster_dims=(2, 1, 1)) as (bx, by):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(5, num_stages=2):
                if k % 2 == by % 2:
                    T.copy(A[by * 64, k * 64], a)
                else:
                    T.copy(A[0, k * 64], a)
                T.copy(B[bx * 64, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    inputs, want = (randn(256, 320), randn(128, 320)), torch.empty(256, 128, dtype=torch.float16)
    evaluate(kernel, *inputs, want)
    findings = run(flat_of(kernel), kernel, inputs, want.double())
    assert not findings, findings.report()


def test_a_tile_that_all_blocks_keep():
    """It comes once, so that nobody releases it; others come each iteration, for each block alone. Sizes are
    dynamic.
    """
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((m, 256), "float16"), W: T.Tensor((64, 64), "float16"), C: T.Tensor((m, 64), "float16")):
        with T.Kernel(T.ceildiv(T.ceildiv(m, 64), 2) * 2, threads=128, cluster_dims=(2, 1, 1)) as bx:
            a, w = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(W, w)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[bx * 64, k * 64], a)
                T.gemm(a, w, c)
            T.copy(c, C[bx * 64, 0])

    a, w = randn(random.randint(1, 300), 256), randn(64, 64)
    want = a.view(len(a), 4, 64).double().sum(1) @ w.double()
    findings = run(flat_of(kernel), kernel, (a, w), want)
    assert not findings, findings.report()


def test_other_targets_and_the_tiles_know_nothing_of_it():
    kernel, inputs, want = of_gemm(100, 90, 80, (2, 2, 1))
    for compute in (lambda *args: evaluate(kernel, *args), torch_tile.compile(kernel, target="cpu")):
        out = torch.empty(want.shape, dtype=torch.float16)
        compute(*inputs, out)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=5e-2)


# What needs not be there without clusters, either: the stages of a loop's last iterations are released for nobody, the
# assembler wants fences between products anyway, and stores of two iterations to one tensor could meet.
NEEDLESS = {"wgmma_fence": 1, "mbarrier_arrive": 1, "named_barrier": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2 x 1", "1 x 2", "2 x 2", "threads read stages", "tile after tile", "attention"])
def test_each_wait_and_arrival_is_needed(name):
    make = {
        "threads read stages": lambda: of_changed(64, 128, 320, (2, 1, 1)),
        "tile after tile": lambda: of_persistent(64, 256, 320, (2, 1, 1), 1),
        "attention": lambda: of_attention(128, 320, (2, 1, 1)),
    }.get(name) or (lambda: of_gemm(128, 128, 320, tuple(map(int, f"{name} x 1".split(" x "))), stages=2))
    kernel, inputs, want = make()
    flat = flat_of(kernel)
    assert [c.name for c in ordering(flat)].count("cluster_wait") == 2
    missed = [r for r in removals(flat) if not run(r.program, kernel, inputs, want)]
    counts = {n: sum(r.name == n for r in missed) for n in {r.name for r in missed}}
    assert all(counts[n] <= NEEDLESS.get(n, 0) for n in counts), [f"{r.name} {r.number}, {r.span}" for r in missed]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_stage_traces_back(cluster):
    program = in_clusters.gemm(256, 256, 256, cluster).program
    for step, made in stages(program, Build(HOPPER)):
        traces_back(step, made)


BIG, SMALL, FP8 = (128, 256, 64), (128, 128, 64), "float8_e4m3fn"
COMPILED = {
    "2 x 1": lambda: in_clusters.gemm(1024, 1024, 1024, (2, 1, 1), BIG, 4, threads=256, staged=True),
    "1 x 2": lambda: in_clusters.gemm(1024, 1024, 1024, (1, 2, 1), BIG, 4, threads=256, staged=True),
    "2 x 2": lambda: in_clusters.gemm(1024, 1024, 1024, (2, 2, 1), BIG, 4, threads=256, staged=True),
    "k x n": lambda: in_clusters.gemm(1024, 1024, 1024, (2, 1, 1), BIG, 4, "bfloat16", (False, False), 256),
    "one warpgroup": lambda: in_clusters.gemm(1024, 1024, 1024, (2, 1, 1), (64, 256, 64), 4),
    "float8": lambda: in_clusters.gemm(
        1024, 1024, 1024, (2, 1, 1), (128, 256, 128), 3, FP8, threads=256, out="bfloat16", staged=True
    ),
    "int8": lambda: in_clusters.gemm(
        1024, 1024, 1024, (2, 2, 1), (128, 128, 128), 3, "int8", threads=256, total="int32", out="int32"
    ),
    "tile after tile": lambda: in_clusters.persistent(1024, 1024, 1024, (2, 1, 1), 66),
    "threads read stages": lambda: in_clusters.changed(1024, 1024, 1024, (2, 2, 1)),
    "attention": lambda: in_clusters.attention(1024, 1024, (2, 1, 1), 128, threads=256),
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_assembler_has_no_advice(name):
    made = torch_tile.compile(COMPILED[name](), target="cuda:sm_90a")
    (found,) = made.resources.values()
    assert not made.cubin.warnings, made.cubin.warnings
    assert (found.spills, found.stack) == (0, 0) and not made.schedule.slow, (found, made.schedule)
    assert "tma_load_multicast(" in made.source and made.source.count("tile::cluster_wait();") == 2
