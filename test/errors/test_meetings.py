# SPDX-License-Identifier: Apache-2.0
"""Barriers and exchanges to which only some of their threads come."""

import pytest

import torch_tile
import torch_tile.language as T

TARGET = "cuda:sm_90a"


def one_thread():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            if tx < 1:
                T.sync_threads()  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def threads_that_returned():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            if tx >= n:
                T.thread_return()
            T.sync_threads()  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def both_branches():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            if tx < 64:
                T.sync_threads()  # here
            else:
                T.sync_threads()
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def tree_of_sums():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            s = T.alloc_shared((128,), "float32")
            s[tx] = A[tx]
            m = T.alloc_var("int32", 64)
            while m > 0:
                if tx < m:
                    s[tx] = s[tx] + s[tx + m]
                    T.sync_threads()  # here
                m = m // 2
            A[tx] = s[0]

    torch_tile.compile(kernel, target=TARGET)


def part_of_a_role():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tx = T.get_thread_binding()
            with T.ws(0):
                if tx < 64:
                    T.sync_threads()  # here
                A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def one_block_of_a_cluster():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(2, threads=128, cluster_dims=2) as bx:
            if bx == 0:
                T.cluster_sync()  # here
            A[bx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def turns_of_blocks():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(4, threads=128, cluster_dims=2) as bx:
            for k in T.serial(bx):
                A[k] = 1.0
                T.cluster_arrive()  # here
                T.cluster_wait()

    torch_tile.compile(kernel, target=TARGET)


def half_a_warp():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            total = T.alloc_var("float32", 0.0)
            if tx < 16:
                total = T.warp_reduce_sum(A[tx])  # here
            A[tx] = total

    torch_tile.compile(kernel, target=TARGET)


def lanes_that_left_a_loop():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            lane = T.get_lane_idx()
            for k in T.serial(4):
                if lane < 4:
                    break
                T.sync_warp()  # here
                A[k] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def too_few_at_a_number():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            w = tx // 32
            if w < 2:
                T.sync_threads(1, 128)  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def too_many_at_a_number():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            if tx < 96:
                T.sync_threads(1, 64)  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def roles_that_wait_in_two_orders():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tx = T.get_thread_binding()
            with T.ws(0):
                T.sync_threads(1, 256)  # here
                T.sync_threads(2, 256)
            with T.ws(1):
                T.sync_threads(2, 256)
                T.sync_threads(1, 256)
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def loops_of_two_lengths():
    @T.prim_func
    def kernel(A: T.Tensor((T.dynamic("n"),), "float32")):
        with T.Kernel(1, threads=256) as _:
            tx = T.get_thread_binding()
            with T.ws(0):
                for _ in T.serial(T.ceildiv(A.shape[0], 64)):
                    T.named_barrier_arrive(1, 256)
            with T.ws(1):
                for _ in T.serial(T.ceildiv(A.shape[0], 64) + 1):
                    T.sync_threads(1, 256)  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def more_phases_than_arrivals():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tx = T.get_thread_binding()
            full = T.alloc_barrier(128)
            with T.ws(0):
                for _ in T.serial(3):
                    T.mbarrier_arrive(full)
                    T.sync_threads(1, 256)
            with T.ws(1):
                for k in T.serial(3):
                    T.mbarrier_wait_parity(full, k % 2)
                    T.sync_threads(1, 256)
                T.mbarrier_wait_parity(full, 1)  # here
            A[tx] = 1.0

    torch_tile.compile(kernel, target=TARGET)


def values_of_a_warp_that_waits():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            s = T.alloc_shared((32,), "float32")
            if tx // 32 == 0:
                s[tx] = A[tx]
                T.sync_threads(1, 64)
            A[tx] = s[tx % 32]  # here
            if tx // 32 == 1:
                T.sync_threads(1, 64)

    torch_tile.compile(kernel, target=TARGET)


def grid_behind_a_return():
    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32")):
        with T.Kernel(2, threads=128) as bx:
            tx = T.get_thread_binding()
            if tx >= 64:
                T.thread_return()
            T.sync_grid()  # here
            A[bx * 128 + tx] = 1.0


def tile_behind_a_return():
    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            tile = T.alloc_fragment((32, 32), "float32")
            T.copy(A, tile)  # here
            if tx < 32:
                T.thread_return()
            T.copy(tile, A)


CASES = {
    one_thread: ("parted_barrier", "T.sync_threads()"),
    threads_that_returned: ("parted_barrier", "T.sync_threads()"),
    both_branches: ("parted_barrier", "T.sync_threads()"),
    tree_of_sums: ("parted_barrier", "T.sync_threads()"),
    part_of_a_role: ("parted_barrier", "T.sync_threads()"),
    one_block_of_a_cluster: ("parted_barrier", "T.cluster_sync()"),
    turns_of_blocks: ("parted_barrier", "T.cluster_arrive()"),
    half_a_warp: ("parted_warp", "T.warp_reduce_sum(A[tx])"),
    lanes_that_left_a_loop: ("parted_warp", "T.sync_warp()"),
    too_few_at_a_number: ("bad_argument", "T.sync_threads(1, 128)"),
    too_many_at_a_number: ("bad_argument", "T.sync_threads(1, 64)"),
    roles_that_wait_in_two_orders: ("stuck_barrier", "T.sync_threads(1, 256)"),
    loops_of_two_lengths: ("stuck_barrier", "T.sync_threads(1, 256)"),
    more_phases_than_arrivals: ("stuck_wait", "T.mbarrier_wait_parity(full, 1)"),
    values_of_a_warp_that_waits: ("waiting_hazard", "A[tx]"),
    grid_behind_a_return: ("not_outermost", "T.sync_grid()"),
    tile_behind_a_return: ("mixed_roles", "T.copy(A, tile)"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    problem = refused(case, *CASES[case])
    if problem.code.startswith("parted") or case is roles_that_wait_in_two_orders:  # where threads part, or wait, too
        (_, text), *_ = problem.diagnostics[0].notes
        assert text
