# SPDX-License-Identifier: Apache-2.0
"""Products whose operands threads load go by wgmma, alone or beside mma.sync."""

import re

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T

CONFIG = "tl.disable_wgmma"


def gathered(rows=64, columns=64, depth=64, threads=128, stages=2, dtype="float16"):
    """A product of gathered rows, and one of its own results: scores and a sum, as sparse attention has them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, depth), dtype),
        B: T.Tensor((4 * columns, depth), dtype),
        at: T.Tensor((2 * columns,), "int32"),
        C: T.Tensor((rows, depth), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((rows, depth), dtype), T.alloc_shared((columns, depth), dtype)
            p = T.alloc_shared((rows, columns), dtype)
            s, c = T.alloc_fragment((rows, columns), "float32"), T.alloc_fragment((rows, depth), "float32")
            T.copy(A, a)
            T.clear(c)
            for k in T.Pipelined(2, num_stages=stages):
                for i, j in T.Parallel(columns, depth):
                    b[i, j] = B[at[k * columns + i], j]
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, columns):
                    p[i, j] = s[i, j] * 0.5
                T.gemm(p, b, c)
            T.copy(c, C)

    return kernel


def report(kernel, target="cuda:sm_90a", **options):
    """Return what the products became."""
    made = tilelang.compile(kernel, target=target, **options)
    return {remark.became.split()[0] for remark in made.schedule.remarks if remark.op == "T.gemm"}


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "rows, columns, depth, threads", [(64, 64, 64, 128), (128, 32, 48, 256), (64, 96, 80, 256), (192, 16, 128, 384)]
)
def test_values(rows, columns, depth, threads, stages, way, seed):
    """Every way computes the same, and the simulator finds no hazard between threads and products."""
    kernel = gathered(rows, columns, depth, threads, stages)
    a, b = (torch.randint(-2, 3, s).half() for s in ((rows, depth), (4 * columns, depth)))
    at, c = torch.randint(0, 4 * columns, (2 * columns,), dtype=torch.int32), torch.zeros(rows, depth)
    want = torch.zeros(rows, depth, dtype=torch.float64)
    for part in at.long().split(columns):
        want += ((a.double() @ b[part].double().T) * 0.5).half().double() @ b[part].double()
    way(kernel, a, b, at, c)
    assert torch.allclose(c.double(), want)


def test_where_it_is_chosen():
    assert report(gathered()) == {"wgmma"}
    assert report(gathered(), "cuda:sm_80") == report(gathered(), "cuda:sm_120a") == {"mma.sync"}
    assert report(gathered(), pass_configs={CONFIG: True}) == {"mma.sync"}
    assert report(gathered(threads=64)) == {"mma.sync"}


def test_sums_that_outlive_an_iteration_stay_with_mma_sync():
    """Beside a product of 32 rows they do: both kinds of accumulators would not fit."""
    assert report(gathered(rows=32)) == {"mma.sync"}

    @T.prim_func
    def mixed(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"), D: T.Tensor((32, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            d = T.alloc_fragment((32, 64), "float32")
            for i, j in T.Parallel(64, 64):
                a[i, j] = A[i, j] * 2
            T.gemm(a, a, c, clear_accum=True)
            T.gemm(a[0:32, :], a, d, clear_accum=True)
            T.copy(c, C)
            T.copy(d, D)

    assert report(mixed) == {"mma.sync"}


def gradients(rows=64, keys=32, started=True, carried=True, threads=256):
    """Products of a backward: scores of one iteration, sums of all iterations, and sums of `keys` rows that leave."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((rows, 64), "float16"), K: T.Tensor((2 * keys, 64), "float16"), at: T.Tensor((2 * keys,), "int32"),
        dQ: T.Tensor((rows, 64), "float32"), dK: T.Tensor((2 * keys, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            q, k = T.alloc_shared((rows, 64), "float16"), T.alloc_shared((keys, 64), "float16")
            p = T.alloc_shared((rows, keys), "float16")
            s, dq = T.alloc_fragment((rows, keys), "float32"), T.alloc_fragment((rows, 64), "float32")
            dk = T.alloc_fragment((keys, 64), "float32")
            T.copy(Q, q)
            T.clear(dq)
            for step in T.serial(2):
                for i, j in T.Parallel(keys, 64):
                    k[i, j] = K[at[step * keys + i], j]
                if started:
                    for i, j in T.Parallel(rows, keys):
                        s[i, j] = T.if_then_else(at[step * keys + j] % 2 == 0, 1, 0)
                T.gemm(q, k, s, transpose_B=True, clear_accum=not started, policy=T.GemmWarpPolicy.FullCol)
                T.copy(s, p)
                T.gemm(p, k, dq, clear_accum=not carried)
                T.gemm(p, q, dk, transpose_A=True, clear_accum=True)
                T.copy(dk, dK[step * keys, 0])
            T.copy(dq, dQ)

    return kernel


def by_line(kernel):
    """Return what each product became, in the order of the text."""
    found = tilelang.compile(kernel, target="cuda:sm_90a").schedule.remarks
    lines = {r.span.line: r.became.split()[0] for r in found if r.op == "T.gemm"}
    return [lines[line] for line in sorted(lines)]


def test_sums_of_one_iteration_go_by_wgmma_beside_mma_sync():
    assert by_line(gradients()) == by_line(gradients(started=False)) == ["wgmma", "mma.sync", "mma.sync"]
    assert by_line(gradients(carried=False)) == ["wgmma", "mma.sync", "mma.sync"]  # they are stored behind the loop
    assert by_line(gradients(keys=64)) == ["wgmma"] * 3
    assert by_line(gradients(rows=32)) == ["mma.sync"] * 3


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("rows, keys", [(64, 32), (128, 16), (64, 48)])
def test_values_of_both_kinds_of_products(rows, keys, started, way, seed):
    """Sums that arithmetic began are in their registers when wgmma adds to them."""
    q, k = (torch.randint(-2, 3, s).half() for s in ((rows, 64), (2 * keys, 64)))
    at = torch.randint(0, 2 * keys, (2 * keys,), dtype=torch.int32)
    dq, dk = torch.zeros(rows, 64), torch.zeros(2 * keys, 64)
    way(gradients(rows, keys, started), q, k, at, dq, dk)
    gathered = k.double()[at.long()]
    p = (q.double() @ gathered.T + started * (at % 2 == 0)).half().double()
    torch.testing.assert_close(dq.double(), p @ gathered, rtol=0, atol=0)
    torch.testing.assert_close(dk.double(), p.T @ q.double(), rtol=0, atol=0)


def test_the_library_keeps_its_own_choice():
    """Its tilings were measured with mma.sync where no warp copies, and with the blocks that they ask for."""
    from torch_tile.kernels.linear_attention import delta

    kernels = [x for x in vars(delta).values() if type(x).__name__ == "JITFunction"]
    assert kernels and all(kernel.options.measured for kernel in kernels)


def two_products(width, groups, threads=128, blocks=1, depth=64):
    """Products of tiles of several groups: each tile of its own copy has a producer warp of its own."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 512), "float16"), B: T.Tensor((width, 512), "float16"), D: T.Tensor((512,), "float32"),
        C: T.Tensor((64, width), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            T.annotate_min_blocks_per_sm(blocks)
            a, b = T.alloc_shared((64, depth), "float16"), T.alloc_shared((width, depth), "float16")
            d = T.alloc_shared((depth,), "float32")
            c = T.alloc_fragment((64, width), "float32")
            T.clear(c)
            for k in T.Pipelined(512 // depth, num_stages=2):
                T.copy(A[0:64, k * depth : (k + 1) * depth], a)
                T.copy(B[0:width, k * depth : (k + 1) * depth], b)
                T.gemm(a, b, c, transpose_B=True)
                if groups > 1:
                    T.copy(D[k * depth : (k + 1) * depth], d)
                    for i, j in T.Parallel(64, width):
                        c[i, j] += d[0]
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize(
    "given, want",
    [
        ({"width": 64, "groups": 2}, 2),
        ({"width": 64, "groups": 1}, 1),  # one producer warp takes no registers of a second block
        ({"width": 64, "groups": 2, "threads": 256}, 1),
        ({"width": 256, "groups": 2, "depth": 128}, 1),  # 160 KB of tiles
        ({"width": 256, "groups": 2, "depth": 32}, 1),  # an instruction has 128 sums in each thread
        ({"width": 192, "groups": 2, "depth": 32}, 2),
        ({"width": 64, "groups": 2, "blocks": 3}, 3),
    ],
)
def test_blocks_that_share_a_multiprocessor(given, want):
    text = tilelang.compile(two_products(**given), target="cuda:sm_90a").get_kernel_source()
    bounds = re.search(r"__launch_bounds__\((\d+), (\d)\)", text)
    assert "mbarrier" in text and int(bounds[2]) == want, text


def chained(stages, disable_tma):
    """Two products whose tiles are copied ahead; a barrier of the first one's nest stands between copy and wait."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"),
        B: T.Tensor((256, 64), "float16"),
        D: T.Tensor((256, 64), "float16"),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, d = (T.alloc_shared((64, 64), "float16") for _ in range(3))
            halves = T.alloc_shared((64, 64), "float16")
            s, c = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a, disable_tma=disable_tma)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(B[k * 64, 0], b, disable_tma=disable_tma)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                T.copy(s, halves)
                T.copy(D[k * 64, 0], d, disable_tma=True)
                T.gemm(halves, d, c)
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize("disable_tma", [False, True])
@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_copies_that_land_behind_a_barrier_are_fenced(stages, disable_tma, way, seed):
    kernel = chained(stages, disable_tma)
    a, b, d = (torch.randint(-2, 3, s).half() for s in ((64, 64), (256, 64), (256, 64)))
    c, want = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.float64)
    for one, other in zip(b.double().split(64), d.double().split(64), strict=True):
        want += (a.double() @ one.T).half().double() @ other
    way(kernel, a, b, d, c)
    torch.testing.assert_close(c.double(), want, rtol=0, atol=0)
