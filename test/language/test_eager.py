# SPDX-License-Identifier: Apache-2.0
"""Eager kernels: the body is the kernel, T.const dimensions come from the arguments."""

import runpy

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError


@tilelang.jit
def scaled(A, factor: T.float32, rows_per_block: int = 2, dtype: T.dtype = T.float32):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), dtype)
    B = T.empty((M, N), dtype)
    with T.Kernel(T.ceildiv(M, rows_per_block)) as b:
        for i, j in T.Parallel(rows_per_block, N):
            B[b * rows_per_block + i, j] = A[b * rows_per_block + i, j] * factor
    return B


def test_constants_come_from_the_arguments():
    for shape in ((3, 4), (5, 2), (3, 4)):
        a = torch.randn(shape)
        assert torch.equal(scaled(a, 2.0), a * 2.0)
    assert len(scaled.kernels) == 2


def test_compile_time_arguments_specialise():
    a = torch.randn(5, 3)
    before = len(scaled.kernels)
    assert torch.equal(scaled(a, 3.0, rows_per_block=4), a * 3.0)
    assert torch.equal(scaled(a, 4.0, rows_per_block=4), a * 4.0)
    assert torch.equal(scaled(a.half(), 2.0, 4, T.float16), a.half() * 2.0)
    assert len(scaled.kernels) == before + 2


def test_annotated_parameters_and_several_results():
    n = T.dynamic("n")

    @tilelang.jit
    def split(A: T.Tensor((n,), "float32")):
        low, high = T.empty((n,), "float32"), T.empty((n,), "float32")
        with T.Kernel(n) as i:
            low[i] = T.min(A[i], 0.0)
            high[i] = T.max(A[i], 0.0)
        return low, high

    for length in (1, 7):
        a = torch.randn(length)
        low, high = split(a)
        assert torch.equal(low, a.clamp(max=0)) and torch.equal(high, a.clamp(min=0))
    assert len(split.kernels) == 1


def test_constants_steer_python():
    @tilelang.jit
    def kernel(A):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        with T.Kernel(1) as _:
            if N > 3:
                A[0] = N
            for i in [x for x in range(N) if x % 2]:
                A[i] = -1

    for n in (3, 5):
        a = torch.zeros(n, dtype=torch.int32)
        kernel(a)
        assert a.tolist() == ([0, -1, 0] if n == 3 else [5, -1, 0, -1, 0])


def test_wrong_arguments():
    with pytest.raises(LaunchError, match="argument `A` must have 2 dimensions"):
        scaled(torch.randn(3), 1.0)
    with pytest.raises(LaunchError, match="argument `A` must have dtype"):
        scaled(torch.randn(3, 3).double(), 1.0)
    for value, got in ((None, "NoneType"), ([[1.0]], "list"), (2.0, "float")):
        with pytest.raises(LaunchError, match=f"argument `A` must be a tensor, got {got}"):
            scaled(value, 1.0)

    @tilelang.jit
    def unannotated(A, B):
        M = T.const("M")
        A: T.Tensor((M,), "float32")
        with T.Kernel(1) as _:
            A[0] = 1.0

    with pytest.raises(TileError) as caught:
        unannotated(torch.zeros(3), torch.zeros(3))
    assert caught.value.code == "tensor_not_annotated"


LATER = """
from __future__ import annotations
import torch_tile
import torch_tile.language as T

N = 8

@torch_tile.jit
def outside(A: T.Tensor((N,), "float32"), factor: T.float32, add: int = 2):
    B = T.empty((N,), "float32")
    with T.Kernel(1) as _:
        for i in T.Parallel(N):
            B[i] = A[i] * factor + add
    return B

def inside(size):
    @torch_tile.jit
    def fill(A: T.Tensor((size,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(size):
                A[i] = 1.0
    return fill
"""


def test_annotations_as_text(tmp_path):
    path = tmp_path / "later.py"
    path.write_text(LATER)
    kernels = runpy.run_path(str(path))
    a = torch.randn(8)
    torch.testing.assert_close(kernels["outside"](a, 3.0), a * 3 + 2)
    kernels["inside"](8)(a)
    assert torch.equal(a, torch.ones(8))


@tilelang.jit
def increased(A, B, n: T.int32, block: int = 32, dtype=T.float32):
    N = T.const("N")
    A: T.Tensor[[N], dtype]
    B: T.Tensor[[N], dtype]
    with T.Kernel(T.ceildiv(N, block)) as b:
        for i in T.Parallel(block):
            B[b * block + i] = A[b * block + i] + n


def test_sizes_by_name_compile_without_tensors():
    a, b = torch.randn(50), torch.empty(50)
    for kernel in (
        increased.compile(N=50),
        increased.compile(N=50, block=16),
        increased.compile(a),
        increased.compile(T.Tensor((50,), "float32")),
    ):
        b.zero_()
        kernel(a, b, 3)
        assert torch.equal(b, a + 3)
    assert increased.compile(N=50) is increased.compile(N=50) is not increased.compile(N=51)
    assert "float16" in str(increased.get_tir(N=50, dtype="float16"))
    assert increased.get_kernel_source(N=50) == increased.compile(N=50).get_kernel_source()


def test_a_kernel_without_tensor_parameters_compiles_for_sizes():
    @tilelang.jit
    def count(block=16):
        N = T.const("N")
        C = T.empty((N,), "int32")
        with T.Kernel(T.ceildiv(N, block)) as b:
            for i in T.Parallel(block if N > 1 else 1):
                C[b * block + i] = b * block + i
        return C

    assert torch.equal(count.compile(N=37)(), torch.arange(37, dtype=torch.int32))


@pytest.mark.parametrize(
    "given, text",
    [
        ({}, "needs the size `N`"),
        ({"N": 5, "Q": 1}, "got the size `Q`"),
        ({"N": 5.0}, "takes a size as `N`"),
        ({"N": -1}, "takes a size as `N`"),
        ({"N": True}, "takes a size as `N`"),
    ],
)
def test_sizes_that_do_not_fit(given, text):
    with pytest.raises(TypeError, match=text):
        increased.compile(**given)


def test_a_compile_time_argument_left_out_is_named():
    @tilelang.jit
    def filled(A, value):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        with T.Kernel(N) as b:
            A[b] = value

    with pytest.raises(TypeError, match="missing the argument `value`"):
        filled.compile(N=3)


def test_the_profiler_of_a_jitted_function():
    @tilelang.jit
    def doubled(A):
        N = T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        with T.Kernel(N) as b:
            B[b] = A[b] * 2
        return B

    doubled.get_profiler(N=20).assert_allclose(lambda a: a * 2)
