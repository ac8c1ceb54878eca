# SPDX-License-Identifier: Apache-2.0
"""Hints change nothing, neither on the CPU nor in the program; what they cannot mean is refused."""

import random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.expr import Var
from torch_tile.ir.node import alike, walk
from torch_tile.ir.stmt import Alloc
from torch_tile.simulator.tile.interpreter import evaluate


def test_kernels():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 4), 2, threads=(32, 2)) as (bx, by):
            A[bx * 4 + by] = 1.0
        with T.Kernel(n) as only:
            T.use_swizzle(4)
            A[only] = A[only] + 1.0
        with T.Kernel(1, 1, 1, threads=64) as blocks:
            T.use_swizzle(10, order="col", enable=True)
            A[blocks[2]] += 1.0
        with T.Kernel(1) as _:
            T.use_swizzle(2, enable=False)
            A[0] += 1.0

    first, second, third, last = kernel.program.kernels
    assert [len(k.grid) for k in (first, second, third)] == [2, 1, 3]
    assert [k.threads for k in (first, second, third)] == [(32, 2), (128,), (64,)]
    assert [k.swizzle for k in (first, second, third, last)] == [None, (4, "row"), (10, "column"), None]
    a = torch.zeros(6)
    evaluate(kernel, a)
    assert a.tolist() == [4, 2, 1, 1, 2, 2]


def test_blocks_that_share_a_multiprocessor():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=128) as bx:
            T.annotate_min_blocks_per_sm(3)
            A[bx] = 1.0
        with T.Kernel(4, threads=128) as bx:
            A[bx] += 1.0

    assert [k.min_blocks for k in kernel.program.kernels] == [3, 1]
    a = torch.zeros(8)
    evaluate(kernel, a)
    assert a.tolist() == [2, 2, 2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("blocks", [0, 17, 2.0, "2"])
def test_more_blocks_than_a_multiprocessor_runs(blocks):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(4, threads=128) as bx:
                T.annotate_min_blocks_per_sm(blocks)
                A[bx] = 1.0

    assert caught.value.code == "bad_argument" and "from 1 to 16" in str(caught.value)


def test_memory_of_every_scope():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.alloc_shared((4, 2), "float16")
            T.alloc_shared([4], T.bool, scope="shared")
            T.alloc_fragment(3, "bfloat16")
            T.alloc_local((2,), torch.int8)
            T.alloc_var("int32")
            T.alloc_var("float32", 1)
            T.alloc_var("float32", "local.var")
            T.alloc_var(T.int64, init=7, scope="local.var")
            T.alloc_var("int32", ...)

    allocs = [n for n in walk(kernel.program) if isinstance(n, Alloc)]
    found = [(a.buffer.scope, a.buffer.dtype.name, a.buffer.static_shape) for a in allocs]
    assert found == [
        ("shared", "float16", (4, 2)), ("shared", "bool", (4,)), ("fragment", "bfloat16", (3,)),
        ("local", "int8", (2,)), ("var", "int32", ()), ("var", "float32", ()), ("var", "float32", ()),
        ("var", "int64", ()), ("var", "int32", ()),
    ]  # fmt: skip
    assert [a.init if a.init is None else a.init.value for a in allocs[4:]] == [0, 1.0, 0.0, 7, None]


def test_dynamic_dimensions():
    m = T.dynamic("m")
    a, b = T.symbolic("a, b", "int64")
    assert isinstance(m, Var) and (m.name, m.role, m.dtype) == ("m", "dim", T.int32)
    assert (a.name, b.name, a.dtype) == ("a", "b", T.int64)

    @T.prim_func
    def kernel(A: T.Tensor((m, a), "float32"), B: T.Tensor((a, m * 2), "float32")):
        with T.Kernel(m, a) as (i, j):
            B[j, i * 2] = A[i, j]
            B[j, i * 2 + 1] = m * 10 + a

    x, y = torch.randn(3, 2), torch.zeros(2, 6)
    evaluate(kernel, x, y)
    assert torch.equal(y[:, ::2], x.T) and y[:, 1::2].eq(32).all()


def test_layouts_are_requests():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float16")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8, 8), "float16")
            T.annotate_layout({tile: T.make_swizzled_layout(tile)})
            T.copy(A, tile)

    assert "T.copy" in repr(kernel)
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def wrong(A: T.Tensor((8, 8), "float16")):
            with T.Kernel(1) as _:
                T.annotate_layout({"A": None})

    assert caught.value.code == "bad_argument" and "keys are buffers" in str(caught.value)


def test_grids_of_one_size_and_of_none(way):
    @T.prim_func
    def kernel(A: T.Tensor((3, 32), "int32"), n: T.int32):
        with T.Kernel(n, threads=32) as (row,):
            for i in T.Parallel(32):
                A[row, i] = row * 100 + i
        with T.Kernel(threads=32):
            A[0, 0] = 7
        with T.Kernel(threads=64) as block:
            A[1, 0] = block + T.get_block_extent(0)

    (first, second, third) = kernel.program.kernels
    assert first.blocks[0].name == "row" and [len(k.grid) for k in (first, second, third)] == [1, 1, 1]
    a = torch.zeros(3, 32, dtype=torch.int32)
    way(kernel, a, 3)
    want = torch.arange(3)[:, None] * 100 + torch.arange(32)
    want[0, 0], want[1, 0] = 7, 1
    assert torch.equal(a, want.int())
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def wrong(A: T.Tensor((4,), "int32")):
            with T.Kernel(2, 2) as (bx,):
                A[bx] = 0

    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize(("blocks", "threads"), [((1, 2, 3, 4), 1), ((1.5,), 1), ((1,), -1), ((1,), (1, 0))])
def test_wrong_launches(blocks, threads):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float16")):
            with T.Kernel(*blocks, threads=threads) as _:
                pass

    assert caught.value.code == "bad_shape"


@pytest.mark.parametrize("make", [T.alloc_shared, T.alloc_fragment, T.alloc_local, T.alloc_global])
def test_wrong_shapes(make):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float16")):
            with T.Kernel(1) as _:
                make((2, "four"), "float32")

    assert caught.value.code == "bad_shape"


@pytest.mark.parametrize("arrivals", [0, [1, 2], [], "one", 2**20])
def test_wrong_barriers(arrivals):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=128) as _:
                T.alloc_barrier(arrivals)

    assert caught.value.code == "bad_argument" and "`arrive_count`" in str(caught.value)


def test_barriers():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=128) as _:
            T.alloc_barrier(3, 4)
            T.alloc_barrier([2] * 5)
            T.alloc_barrier(1)

    found = [n.buffer for n in walk(kernel.program) if isinstance(n, Alloc)]
    assert [(b.scope, b.arrivals, b.static_shape) for b in found] == [
        ("barrier", 3, (4,)), ("barrier", 2, (5,)), ("barrier", 1, (1,)),
    ]  # fmt: skip


def test_clusters():
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32")):
        with T.Kernel(4, 2, threads=32, cluster_dims=(2, 2)) as (bx, by):
            A[bx, by] = 1.0
        with T.Kernel(4, threads=32, cluster_dims=2) as bx:
            A[bx, 0] = 1.0
        with T.Kernel(4, threads=32) as bx:
            A[bx, 0] = 1.0

    assert [k.cluster for k in kernel.program.kernels] == [(2, 2, 1), (2, 1, 1), (1, 1, 1)]
    assert "with T.Kernel(4, 2, threads=32, cluster_dims=(2, 2, 1)) as" in repr(kernel)


@pytest.mark.parametrize("cluster", [0, (2, 2), (1, 2), "two", (2, 1, 1, 1), 16, (2.0,)])
def test_wrong_clusters(cluster):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(4, threads=32, cluster_dims=cluster) as bx:
                A[bx] = 1.0

    assert caught.value.code == "bad_argument" and "`cluster_dims`" in str(caught.value)


def test_clusters_are_not_swizzled():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8, 8), "float32")):
            with T.Kernel(4, 2, threads=32, cluster_dims=2) as (bx, by):
                T.use_swizzle(2)
                A[bx, by] = 1.0

    assert caught.value.code == "bad_argument" and "`cluster_dims`" in str(caught.value)


def doubled(hinted):
    @T.prim_func
    def kernel(X: T.Tensor((40,), "float32"), Y: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=128):
            if hinted:
                T.disable_warp_group_reg_alloc()
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc()
                T.annotate_l2_hit_ratio({X: 0.5})
                T.annotate_restrict_buffers(X, Y)
            for i in T.Parallel(40):
                Y[i] = X[i] * 2

    return kernel


def test_hints_change_nothing():
    assert alike(doubled(True).program, doubled(False).program)
    x, y = torch.randn(40), torch.full((40,), float("nan"))
    evaluate(doubled(True), x, y)
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize(
    "hint",
    [
        lambda A, tile: T.annotate_producer_reg_dealloc(20),
        lambda A, tile: T.annotate_consumer_reg_alloc("many"),
        lambda A, tile: T.annotate_l2_hit_ratio({A: 1.5}),
        lambda A, tile: T.annotate_l2_hit_ratio({tile: 0.5}),
        lambda A, tile: T.annotate_restrict_buffers(A, 3),
    ],
)
def test_what_hints_cannot_mean(hint):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                tile = T.alloc_shared((4,), "float32")
                hint(A, tile)

    assert caught.value.code == "bad_argument"


def test_hints_stand_in_kernels():
    with pytest.raises(TileError) as caught:
        T.disable_warp_group_reg_alloc()
    assert caught.value.code == "not_in_kernel"


def convolution(N, C, H, W, F, K, S, D, P, block, stages=2, threads=128, dtype="float16"):
    """NHWC, as a product of flat views of weights and result."""
    OH, OW = ((size + 2 * P - D * (K - 1) - 1) // S + 1 for size in (H, W))
    block_m, block_n, block_k = block

    @T.prim_func
    def main(
        data: T.Tensor((N, H, W, C), dtype),
        kernel: T.Tensor((K, K, C, F), dtype),
        out: T.Tensor((N, OH, OW, F), dtype),
    ):
        with T.Kernel(T.ceildiv(F, block_n), T.ceildiv(N * OH * OW, block_m), threads=threads) as (bx, by):
            data_shared = T.alloc_shared((block_m, block_k), dtype)
            kernel_shared = T.alloc_shared((block_k, block_n), dtype)
            out_local = T.alloc_fragment((block_m, block_n), "float")
            out_shared = T.alloc_shared((block_m, block_n), dtype)
            kernel_flat = T.Tensor((K * K * C, F), dtype, kernel.data)
            out_flat = T.Tensor((N * OH * OW, F), dtype, out.data)
            T.clear(out_local)
            for k in T.Pipelined(T.ceildiv(K * K * C, block_k), num_stages=stages):
                for i, j in T.Parallel(block_m, block_k):
                    column, pixel = k * block_k + j, by * block_m + i
                    y = pixel % (OH * OW) // OW * S + column // (K * C) * D - P
                    x = pixel % OW * S + column // C % K * D - P
                    inside = (y >= 0) and (x >= 0) and (y < H) and (x < W)
                    data_shared[i, j] = T.if_then_else(inside, data[pixel // (OH * OW), y, x, column % C], 0)
                T.copy(kernel_flat[k * block_k, bx * block_n], kernel_shared)
                T.gemm(data_shared, kernel_shared, out_local)
            T.copy(out_local, out_shared)
            T.copy(out_shared, out_flat[by * block_m, bx * block_n])

    return main


def test_a_convolution(way, seed):
    rng = random.Random(seed)
    n, c, h, w, f = (
        rng.randint(1, 2),
        16 * rng.randint(1, 2),
        rng.randint(4, 8),
        rng.randint(4, 8),
        8 * rng.randint(1, 5),
    )
    K, S, D, P = rng.choice([1, 3]), rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2)
    data, weights = torch.randn(n, h, w, c).half(), torch.randn(K, K, c, f).half()
    want = torch.conv2d(
        data.double().permute(0, 3, 1, 2), weights.double().permute(3, 2, 0, 1), stride=S, padding=P, dilation=D
    ).permute(0, 2, 3, 1)
    out = torch.full(want.shape, float("nan")).half()
    way(convolution(n, c, h, w, f, K, S, D, P, (32, 32, 16)), data, weights, out)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_machine_code(target):
    made = tilelang.compile(convolution(8, 64, 32, 32, 128, 3, 1, 1, 1, (128, 128, 32), 3, 256), target=target)
    (found,) = made.resources.values()
    assert not made.cubin.warnings and not found.spills, made.schedule


def test_sizes_known_at_run_time(way, seed):
    """Rows of a batch as one list; edges are those of the view."""
    rng = random.Random(seed)
    b, s, heads = T.dynamic("b"), T.dynamic("s"), 3

    @T.prim_func
    def kernel(A: T.Tensor((b, s, heads, 8), "float32"), B: T.Tensor((b * s * heads, 8), "float32"), n: T.int32):
        flat = T.reshape(A, (b * s, heads * 8))
        wide = T.view(B, (b * s, heads * 8))
        with T.Kernel(T.ceildiv(b * s, 16), threads=64) as bx:
            tile = T.alloc_fragment((16, heads * 8), "float32")
            T.copy(flat[bx * 16 - n, 0], tile)
            for i, j in T.Parallel(16, heads * 8):
                tile[i, j] += 1
            T.copy(tile, wide[bx * 16 - n, 0])

    for _ in range(2):
        a = torch.randn(rng.randint(1, 3), rng.randint(1, 15), heads, 8)
        out = torch.full((a.shape[0] * a.shape[1] * heads, 8), torch.nan)
        way(kernel, a, out, 1)
        want = a.reshape(-1, heads, 8) + 1
        blocks = -(-len(want) // 16)
        want[16 * blocks - 1 :] = torch.nan
        torch.testing.assert_close(out, want.reshape(-1, 8), equal_nan=True)


def test_views_of_views_and_of_what_is_allocated(way):
    """Scratch memory and results, one kernel after another, each by the name that it likes."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "int32"), out: T.Tensor((24,), "int32")):
        scratch = T.alloc_global((24,), "int32")
        half = T.view(scratch, (2, 12))
        with T.Kernel(2, threads=32) as b:
            for j in T.Parallel(12):
                half[b, j] = T.view(A, (24,))[b * 12 + j] * 2
        with T.Kernel(3, threads=32) as b:
            for j in T.Parallel(8):
                T.reshape(T.view(out, [4, 6]), (3, 8))[b, j] = T.reshape(half, (3, 8))[b, j] + scratch[b * 8 + j]

    a, out = torch.arange(24, dtype=torch.int32).reshape(4, 6), torch.zeros(24, dtype=torch.int32)
    way(kernel, a, out)
    assert torch.equal(out, a.flatten() * 4)
    assert "half = T.view(scratch, (2, 12))" in repr(kernel)


def test_printed_and_read_again():
    kernel = convolution(1, 16, 5, 5, 8, 3, 1, 1, 1, (32, 32, 16))
    names = {"T": T}
    text = repr(kernel)
    assert "kernel_flat = T.view(kernel, (144, 8))" in text
    import linecache

    linecache.cache["printed.py"] = (len(text), None, text.splitlines(True), "printed.py")
    exec(compile(text, "printed.py", "exec"), names)
    data, weights = torch.randn(1, 5, 5, 16).half(), torch.randn(3, 3, 16, 8).half()
    results = []
    for each in (kernel, names["main"]):
        results.append(torch.full((1, 5, 5, 8), torch.nan).half())
        evaluate(each, data, weights, results[-1])
    assert torch.equal(*results)


def too_many():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32")):
        flat = T.view(A, (25,))  # here
        with T.Kernel(1):
            flat[0] = 1


def perhaps_too_many():
    @T.prim_func
    def kernel(A: T.Tensor((T.dynamic("m"), 6), "float32")):
        with T.Kernel(1):
            T.reshape(A, (24,))[0] = 1  # here


def of_a_part():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32")):
        with T.Kernel(1):
            tile = T.alloc_fragment((4, 6), "float32")
            flat = T.reshape(tile[0:2, :], (12,))  # here
            T.copy(A[0:2, :], flat)


def of_strides():
    @T.prim_func
    def kernel(A: T.StridedTensor((4, 6), (8, 1), "float32")):
        with T.Kernel(1):
            T.reshape(A, (24,))[0] = 1  # here


def written_by_two_names():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32")):
        flat = T.view(A, (24,))
        with T.Kernel(1):
            for i in T.Parallel(4):
                flat[i] = A[i, 0]  # here

    tilelang.compile(kernel)


def copied_by_two_names():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32")):
        flat, turned = T.view(A, (24,)), T.view(A, (6, 4))
        with T.Kernel(1):
            tile = T.alloc_fragment((6, 4), "float32")
            T.copy(turned, tile)
            T.atomic_add(flat[0:4], tile[0, :])  # here

    tilelang.compile(kernel)


MISTAKES = {
    too_many: "T.view(A, (25,))",
    perhaps_too_many: "T.reshape(A, (24,))",
    of_a_part: "T.reshape(tile[0:2, :], (12,))",
    of_strides: "T.reshape(A, (24,))",
    written_by_two_names: "flat[i]",
    copied_by_two_names: "T.atomic_add(flat[0:4], tile[0, :])",
}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(case, refused):
    refused(case, "bad_argument", MISTAKES[case])


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_tiles_that_lie_in_the_padding(target):
    """Of a peeled turn all may be known to be outside: the gather that was to run ahead stores zeros."""
    data, weights = torch.randn(1, 1, 1, 16).half(), torch.randn(3, 3, 16, 8).half()
    kernel = convolution(1, 16, 1, 1, 8, 3, 2, 1, 1, (32, 32, 16))
    out = torch.full((1, 1, 1, 8), torch.nan).half()
    findings = tilelang.compile(kernel, target=target).interpret(data, weights, out)
    assert not findings, findings.report()
    torch.testing.assert_close(
        out.double().flatten(), data.double().flatten() @ weights[1, 1].double(), rtol=2e-2, atol=5e-2
    )
