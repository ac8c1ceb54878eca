# SPDX-License-Identifier: Apache-2.0
"""What does not outlive T.sync_grid."""

import pytest

import torch_tile.language as T


def kept_tile():
    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32")):
        with T.Kernel(4, threads=64) as bx:
            tile = T.alloc_shared((64,), "float32")  # here
            T.copy(A[bx, :], tile)
            T.sync_grid()
            T.copy(tile, A[3 - bx, :])


def half_set_tile():
    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "float32")):
        with T.Kernel(4, threads=64) as bx:
            tile = T.alloc_shared((64,), "float32")  # here
            T.copy(A[bx, :], tile)
            T.sync_grid()
            T.clear(tile[0:32])
            T.copy(tile, A[3 - bx, :])


def changed_value():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            x = A[bx]  # here
            A[bx] = x + 1
            T.sync_grid()
            A[3 - bx] = x


def kept_variable():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            v = T.alloc_var("float32", 1.0)  # here
            v = v + A[bx]
            T.sync_grid()
            A[bx] = v


def in_a_loop():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(4, threads=32) as bx:
            for _ in T.serial(n):
                A[bx] = A[bx] + 1
                T.sync_grid()  # here


def in_a_branch():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            if bx > 2:
                T.sync_grid()  # here
            A[bx] = 1


def in_a_long_loop():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            for _ in T.serial(257):  # here
                A[bx] = A[bx] + 1
                T.sync_grid()


CASES = {
    kept_tile: ("lost_at_grid_sync", 'T.alloc_shared((64,), "float32")'),
    half_set_tile: ("lost_at_grid_sync", 'T.alloc_shared((64,), "float32")'),
    changed_value: ("lost_at_grid_sync", "x = A[bx]"),
    kept_variable: ("lost_at_grid_sync", 'T.alloc_var("float32", 1.0)'),
    in_a_loop: ("not_outermost", "T.sync_grid()"),
    in_a_branch: ("not_outermost", "T.sync_grid()"),
    in_a_long_loop: ("bad_argument", "for _ in T.serial(257):"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])
