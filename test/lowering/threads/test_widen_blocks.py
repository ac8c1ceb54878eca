# SPDX-License-Identifier: Apache-2.0
"""Blocks whose accumulators need more registers than their threads have get more threads."""

import math

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.lowering.threads.widen_blocks import widen_blocks

TARGETS = ["cuda:sm_80", "cuda:sm_90a"]


def product(rows, columns, threads=128, depth=64, body=None, layouts=None, min_blocks=1):
    """A product of one block; `body` is run in the kernel before the loop."""

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, depth), "float16"),
        B: T.Tensor((depth, columns), "float16"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            T.annotate_min_blocks_per_sm(min_blocks)
            a, b = T.alloc_shared((rows, 32), "float16"), T.alloc_shared((32, columns), "float16")
            c = T.alloc_fragment((rows, columns), "float32")
            if body is not None:
                body(A)
            T.clear(c)
            for k in T.Pipelined(depth // 32, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return kernel


def attention(keys, dim, extra, threads=128):
    """Scores and a sum of values, which live together; `extra` products of their own follow one after another."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((128, 64), "float16"), K: T.Tensor((2 * keys, 64), "float16"),
        V: T.Tensor((2 * keys, dim), "float16"), C: T.Tensor((128, dim), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            q, k = T.alloc_shared((128, 64), "float16"), T.alloc_shared((keys, 64), "float16")
            v, p = T.alloc_shared((keys, dim), "float16"), T.alloc_shared((128, keys), "float16")
            c = T.alloc_fragment((128, dim), "float32")
            T.copy(Q, q)
            T.clear(c)
            for step in T.Pipelined(2, num_stages=1):
                T.copy(K[step * keys, 0], k)
                T.copy(V[step * keys, 0], v)
                for _ in T.unroll(extra):
                    s = T.alloc_fragment((128, keys), "float32")
                    T.clear(s)
                    T.gemm(q, k, s, transpose_B=True)
                    for i, j in T.Parallel(128, keys):
                        p[i, j] = s[i, j] * 0.125
                    for i, j in T.Parallel(128, dim):
                        c[i, j] *= 0.5
                    T.gemm(p, v, c)
            T.copy(c, C)

    return kernel


def two_levels(columns, anew=False):
    """Sums of products are added to sums of arithmetic in every second step; or a tile takes their double `anew`."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, columns), "float16"),
        C: T.Tensor((128, columns), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((128, 32), "float16"), T.alloc_shared((32, columns), "float16")
            part, total = T.alloc_fragment((128, columns), "float32"), T.alloc_fragment((128, columns), "float32")
            T.clear(part)
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 32], a)
                T.copy(B[k * 32, 0], b)
                T.gemm(a, b, part)
                if (k + 1) % 2 == 0:
                    for i, j in T.Parallel(128, columns):
                        total[i, j] = part[i, j] * 2.0 if anew else total[i, j] + part[i, j]
                    T.clear(part)
            T.copy(total, C)

    return kernel


def threads_of(kernel, target="cuda:sm_90a", **options):
    """Return the threads that the pass gives a kernel; the schedule report tells of a change."""
    build = Build(torch_tile.hardware.Target.of(target), PassOptions(**options))
    (made,) = widen_blocks(kernel.program, build).kernels
    assert bool(build.remarks) == (made is not kernel.program.kernels[0])
    return math.prod(made.threads)


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (192, 160), (256, 128)])
def test_values_of_products(rows, columns, way, seed):
    torch.manual_seed(seed)
    a, b, c = torch.randn(rows, 64).half(), torch.randn(64, columns).half(), torch.zeros(rows, columns)
    way(product(rows, columns), a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_values_of_sums_that_live_together(way, seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(128, 64).half(), torch.randn(256, 64).half(), torch.randn(256, 128).half()
    c = torch.zeros(128, 128)
    way(attention(128, 128, 1), q, k, v, c)
    want = torch.zeros(128, 128, dtype=torch.float64)
    for keys, values in zip(k.split(128), v.split(128), strict=True):
        want = want * 0.5 + (q.double() @ keys.double().T * 0.125).half().double() @ values.double()
    torch.testing.assert_close(c.double(), want, rtol=1e-3, atol=2e-2)


def test_values_of_sums_of_two_levels(way, seed):
    torch.manual_seed(seed)
    a, b, c = torch.randn(128, 128).half(), torch.randn(128, 128).half(), torch.zeros(128, 128)
    way(two_levels(128), a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_afterwards(target):
    for kernel in (product(128, 256), product(256, 128), product(192, 160), two_levels(128)):
        made = torch_tile.compile(kernel, target=target)
        assert not any(used.spills for used in made.resources.values()), made.schedule


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "threads"),
    [
        (product(128, 256), 256),
        (product(256, 128), 256),
        (product(128, 192), 128),  # 192 registers of 128 threads
        (product(128, 256, threads=256), 256),
        (product(192, 160), 384),  # 192 rows are three times 64, and no half of 160 columns is whole panels
        (product(256, 256), 128),  # of 512 threads each has 128 registers, and needs as many
        (attention(128, 128, 1), 256),
        (attention(64, 128, 1), 128),
        (two_levels(128), 256),
        (two_levels(64), 128),
        (two_levels(128, anew=True), 128),  # the tile that is taken anew lives after the sums
        (attention(64, 128, 2), 128),  # scores that come one after another do not live together
    ],
)
def test_blocks_that_are_widened(kernel, threads, target):
    assert threads_of(kernel, target) == threads


def thread_index(A):
    A[T.get_thread_binding(), 0] = 0


def barrier(A):
    T.mbarrier_arrive(T.alloc_barrier(128)[0])


def named_barrier(A):
    T.sync_threads(1, 128)


def warps(A):
    A[0, 0] = T.warp_reduce_sum(A[0, 1])


def placed_fragment(A):
    tile = T.alloc_fragment((128,), "float32", layout=T.Fragment((128,), forward_thread_fn=lambda i: i))
    T.clear(tile)
    T.copy(tile, A[:, 0])


def placed_loop(A):
    layout = T.Fragment((128,), forward_thread_fn=lambda i: i)
    for i in T.Parallel(128, loop_layout=layout):
        A[i, 0] = 0


@pytest.mark.parametrize("body", [thread_index, barrier, named_barrier, warps, placed_fragment, placed_loop])
def test_kernels_that_name_their_threads_keep_them(body):
    assert threads_of(product(128, 256, body=body)) == 128
    assert threads_of(product(128, 256, body=lambda A: T.sync_threads())) == 256


def test_blocks_that_shall_fit_together_keep_their_threads():
    assert threads_of(product(128, 256, min_blocks=2)) == 128


def test_kernels_of_the_library_keep_their_threads():
    assert threads_of(product(128, 256), measured=True) == 128
