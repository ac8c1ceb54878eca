# SPDX-License-Identifier: Apache-2.0
"""Negative indices count from the end: where ranges show them, and in each lane of a vector."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.language.wrap_indices import wrap_indices


def test_indices_that_are_certainly_negative(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((3, 8), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "float32")
            T.copy(A, tile)
            for k in T.serial(4):
                B[0, k] = A[-k - 1]
                B[-2, -k - 1] = tile[-1 - k]
            for k in T.serial(1, 5):
                B[2, k - 1] = A[-k] + A[k - 1]

    a, b = torch.randn(8), torch.zeros(3, 8)
    way(kernel, a, b)
    expected = torch.zeros(3, 8)
    expected[0, :4] = a.flip(0)[:4]
    expected[1, 4:] = a[4:]
    expected[2, :4] = a.flip(0)[:4] + a[:4]
    torch.testing.assert_close(b, expected)


def test_single_indices_of_tile_operations(way):
    """Each index of a region that is one element wide counts from the end where it is certainly negative."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 32), "float32"), B: T.Tensor((4, 32), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(4, threads=32) as b:
            row = T.alloc_shared((32,), "float32")
            T.copy(A[b - 4, :], row)
            T.copy(row, B[-b - 1, :])
            for i in T.Parallel(3):
                T.atomic_add(C[i - 5], row[i])

    a, b, c = torch.randn(8, 32), torch.zeros(4, 32), torch.zeros(8)
    way(kernel, a, b, c)
    expected = torch.zeros(8)
    expected[3:6] = a[4:, :3].sum(0)
    torch.testing.assert_close(b, a[4:].flip(0))
    torch.testing.assert_close(c, expected)


def test_an_index_that_may_be_negative_reads_zero(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for k in T.serial(8):
                B[k] = A[k - 2]

    a, b = torch.randn(8), torch.ones(8)
    way(kernel, a, b)
    torch.testing.assert_close(b, torch.cat([torch.zeros(2), a[:6]]))


@pytest.mark.parametrize("start", [-2, -7, 0, 3])
def test_lanes_of_a_vector(way, start):
    """Each lane counts from the end for itself, also where only the run shows its sign."""

    @T.prim_func
    def kernel(A: T.Tensor((16,), "float32"), B: T.Tensor((4, 4), "float32"), C: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=1):
            for t in T.serial(4):
                B[t, T.Ramp(0, 1, 4)] = A[T.Ramp(t + start, 1, 4)]
                C[T.Ramp(t + start, 1, 4)] = T.Broadcast(T.float32(t + 1), 4)

    a, b, c = torch.randn(16), torch.zeros(4, 4), torch.zeros(16)
    way(kernel, a, b, c)
    places = (torch.arange(4)[:, None] + torch.arange(4) + start) % 16
    expected = torch.zeros(16)
    for t in range(4):
        expected[places[t]] = t + 1
    torch.testing.assert_close(b, a[places])
    torch.testing.assert_close(c, expected)


def test_lanes_that_are_inside_are_plain_indices():
    @T.prim_func
    def kernel(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=1):
            for t in T.serial(4):
                B[T.Ramp(t * 4, 1, 4)] = A[T.Ramp(t * 4, 1, 4)]

    assert "if" not in kernel.script() and wrap_indices(kernel.program) is kernel.program
