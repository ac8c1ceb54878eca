# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.expr import Var
from torch_tile.ir.node import walk
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


@pytest.mark.parametrize(("blocks", "threads"), [((), 1), ((1, 2, 3, 4), 1), ((1.5,), 1), ((1,), -1), ((1,), (1, 0))])
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
