# SPDX-License-Identifier: Apache-2.0
"""Functions without T.Kernel whose T.thread_binding and T.launch_thread give the grid and the threads."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def run(kernel, target, *args):
    """Run a kernel of threads as on a GPU; nothing must be found."""
    findings = torch_tile.compile(kernel, target=target).interpret(*args)
    assert not findings, findings.report()


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_loops_of_blocks_and_threads(target):
    """The tile is allocated, and thread y bound, before the kernel's 24 x 4 threads are known."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 4, 24), "float32"), B: T.Tensor((5, 4, 24), "float32")):
        for b in T.thread_binding(5, "blockIdx.x"):
            tile = T.alloc_shared((4, 24), "float32")
            for y in T.thread_binding(0, 4, "threadIdx.y"):
                for x in T.thread_binding(24, thread="threadIdx.x"):
                    tile[y, x] = A[b, y, x]
                    T.sync_threads()
                    B[b, y, x] = tile[3 - y, 23 - x] + 1

    (launch,) = kernel.program.kernels
    assert launch.threads == (24, 4)
    a, b = torch.randn(5, 4, 24), torch.zeros(5, 4, 24)
    run(kernel, target, a, b)
    assert torch.equal(b, a.flip(1, 2) + 1)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_regions_and_values(target):
    """A grid of sizes known at run time, whose second dimension is bound first."""

    @T.prim_func
    def regions(A: T.Tensor((6, 3, 32), "float32"), n: T.int32):
        with T.launch_thread("blockIdx.y", n) as row, T.launch_thread("blockIdx.x", 3) as b:
            for _ in T.serial(1):
                with T.launch_thread("threadIdx.x", 32) as x:
                    A[row, b, x] = row * 100 + b * 10 + x

    @T.prim_func
    def values(A: T.Tensor((6, 3, 32), "float32"), n: T.int32):
        b = T.launch_thread("blockIdx.x", 3)
        row = T.launch_thread("blockIdx.y", n)
        x = T.launch_thread("threadIdx.x", 32)
        tile = T.alloc_fragment((32,), "float32")
        for i in T.Parallel(32):
            tile[i] = row * 100 + b * 10
        T.copy(tile, A[row, b, :])
        A[row, b, x] += x

    want = torch.arange(6)[:, None, None] * 100.0 + torch.arange(3)[:, None] * 10 + torch.arange(32)
    for kernel in (regions, values):
        a = torch.full((6, 3, 32), -1.0)
        run(kernel, target, a, 5)
        assert torch.equal(a[:5], want[:5]) and a[5].eq(-1).all()


def test_blocks_alone_run_on_the_cpu_too(way):
    @T.prim_func
    def kernel(A: T.Tensor((7, 9), "float32"), B: T.Tensor((7, 9), "float32")):
        for b in T.thread_binding(7, "blockIdx.x"):
            for i in T.serial(9):
                B[b, i] = A[b, i] * 2

    a, b = torch.randn(7, 9), torch.zeros(7, 9)
    way(kernel, a, b)
    assert torch.equal(b, a * 2)


def second_launch(A):
    for b in T.thread_binding(8, "blockIdx.x"):
        A[b] = 1
    for b in T.thread_binding(8, "blockIdx.x"):
        A[b] = A[7 - b]


def second_launch_of_threads(A):
    for x in T.thread_binding(8, "threadIdx.x"):
        A[x] = 1
    for x in T.thread_binding(8, "threadIdx.x"):
        A[x] = A[7 - x]


def in_a_loop(A):
    for _ in T.serial(2):
        for b in T.thread_binding(8, "blockIdx.x"):
            A[b] = 1


def after_a_store(A):
    A[0] = 1
    for b in T.thread_binding(8, "blockIdx.x"):
        A[b] = 1


def of_a_float(A):
    for x in T.thread_binding(8.0, "threadIdx.x"):
        A[x] = 1


def of_an_element(A):
    for b in T.thread_binding(T.cast(A[0], "int32"), "blockIdx.x"):
        A[b] = 1


def of_another_extent(A):
    for b in T.thread_binding(8, "blockIdx.x"):
        for x in T.thread_binding(8, "threadIdx.x"):
            A[x] = b
        for x in T.thread_binding(4, "threadIdx.x"):
            A[x] = b


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (second_launch, "second launch"),
        (second_launch_of_threads, "second launch"),
        (in_a_loop, "more than once"),
        (after_a_store, "no thread runs"),
        (of_a_float, "positive integer"),
        (of_an_element, "known before the launch"),
        (of_another_extent, "count from 0 to 8"),
    ],
)
def test_what_is_no_single_launch(body, text):
    with pytest.raises(TileError, match=text) as caught:
        T.prim_func(with_tensor(body))

    assert caught.value.code in ("bad_argument", "bad_shape")


def with_tensor(body):
    """Annotate the one parameter of a body."""
    body.__annotations__ = {"A": T.Tensor((8,), "float32")}
    return body
