# SPDX-License-Identifier: Apache-2.0
"""Parameters T.ptr, T.make_tensor and T.match_buffer."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError


def test_tensors_whose_sizes_are_scalars(way):
    @T.prim_func
    def kernel(a: T.ptr, b: T.ptr, c: T.ptr, m: T.int32, n: T.int32, k: T.int32):
        A = T.make_tensor(a, (m, k), "float16")
        B = T.make_tensor(b, (k, n), "float16")
        C = T.make_tensor(c, (m, n), "float32")
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=128) as (bx, by):
            x = T.alloc_shared((32, 32), "float16")
            y = T.alloc_shared((32, 32), "float16")
            z = T.alloc_fragment((32, 32), "float32")
            T.clear(z)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=2):
                T.copy(A[by * 32, step * 32], x)
                T.copy(B[step * 32, bx * 32], y)
                T.gemm(x, y, z)
            T.copy(z, C[by * 32, bx * 32])

    for m, n, k in ((40, 48, 72), (64, 32, 33)):
        a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n)
        way(kernel, a, b.flatten(), c, m, n, k)
        torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)


def test_a_part_of_a_larger_tensor_with_strides(way):
    @T.prim_func
    def kernel(a: T.ptr, b: T.handle, n: T.int32, s: T.int32):
        A = T.make_tensor(a, (n, 16), "float32", strides=(s, 1))
        B = T.match_buffer(b, (n, 16), "float32")
        with T.Kernel(n, threads=32) as bx:
            for i in T.Parallel(20):
                if i < 16:
                    B[bx, i] = A[bx, i] + A[bx, i + 4]

    a, b = torch.randn(5, 24), torch.zeros(4, 16)
    way(kernel, a, b, 4, 24)
    wanted = a[:4, :16].clone()
    wanted[:, :12] += a[:4, 4:16]
    assert torch.equal(b, wanted)


def test_a_matched_buffer_binds_its_sizes(way):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(a: T.handle, b: T.handle("float32"), unused: T.ptr):
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = T.make_tensor(A, (n,), "int32")[bx * 32 + i]

    a, b = torch.randn(50), torch.zeros(50)
    way(kernel, a, b, None)
    assert torch.equal(b, a.view(torch.int32).float())


def test_an_eager_kernel_takes_pointers():
    @torch_tile.jit(target="cpu")
    def double(a: T.ptr, b: T.ptr, n: T.int32):
        A = T.make_tensor(a, (n,), "float32")
        B = T.make_tensor(b, (n,), "float32")
        with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
            for i in T.Parallel(64):
                B[bx * 64 + i] = A[bx * 64 + i] * 2

    for n in (10, 100):
        a, b = torch.randn(100), torch.zeros(100)
        double(a, b, n)
        assert torch.equal(b[:n], a[:n] * 2) and not b[n:].any()


@T.prim_func
def square(a: T.ptr, n: T.int32):
    A = T.make_tensor(a, (n, n), "float32")
    with T.Kernel(n, threads=32) as bx:
        for i in T.Parallel(32):
            A[bx, i] = A[bx, i] * 2


def test_tensors_that_are_too_small_are_refused():
    kernel = torch_tile.compile(square, target="cpu")
    a = torch.ones(16)
    kernel(a, 4)
    assert torch.equal(a, torch.full((16,), 2.0))
    with pytest.raises(LaunchError, match="must have 25 elements, got 16"):
        kernel(a, 5)
    with pytest.raises(LaunchError, match="contiguous"):
        kernel(torch.ones(16, 2)[:, 0], 4)
    with pytest.raises(LaunchError, match="float32"):
        kernel(a.double(), 4)


def indexed(a):
    a[0] = 1


def declared_twice(a):
    T.make_tensor(a, (8,), "float32")
    T.make_tensor(a, (9,), "float32")


@pytest.mark.parametrize("body", [indexed, declared_twice, lambda a: T.make_tensor(3, (8,))])
def test_what_pointers_cannot(body):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(a: T.ptr):
            with T.Kernel(1, threads=32):
                body(a)

    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize("dtype", ["handle", T.ptr])
def test_tables_of_pointers_are_refused(dtype):
    with pytest.raises(TileError, match="tables of pointers are not supported"):
        T.Tensor((4,), dtype)
