# SPDX-License-Identifier: Apache-2.0
"""What does not outlive T.sync_grid."""

import pytest

import torch_tile.language as T


def kept_barrier():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            ready = T.alloc_barrier(32)  # here
            T.barrier_arrive(ready)
            T.sync_grid()
            T.barrier_wait(ready, 0)
            A[bx] = 1


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
    kept_barrier: ("lost_at_grid_sync", "T.alloc_barrier(32)"),
    in_a_loop: ("not_outermost", "T.sync_grid()"),
    in_a_branch: ("not_outermost", "T.sync_grid()"),
    in_a_long_loop: ("bad_argument", "for _ in T.serial(257):"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])
