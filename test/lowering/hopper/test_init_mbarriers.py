# SPDX-License-Identifier: Apache-2.0
"""One thread makes the mbarriers, before and after."""

import torch_tile
import torch_tile.language as T
from torch_tile.ir.expr import Call
from torch_tile.ir.node import walk
from torch_tile.lowering.hopper.init_mbarriers import init_mbarriers


def test_made_before_anybody_meets_at_them(becomes):
    @T.prim_func
    def before(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            thread = T.thread_index()
            full = T.alloc_barrier(1, (2,))
            v = T.alloc_local((1,), "float32")
            empty = T.alloc_barrier(2)
            v[0] = x[thread]
            with T.role(0, 32):
                T.evaluate(T.call("mbarrier_wait", T.address_of(full[1]), 0))
                x[thread] = v[0]
            with T.role(32, 32):
                T.evaluate(T.call("mbarrier_wait", T.address_of(empty[0]), 0))

    @T.prim_func
    def after(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            thread = T.thread_index()
            full = T.alloc_barrier(1, (2,))
            v = T.alloc_local((1,), "float32")
            empty = T.alloc_barrier(2)
            if thread == 0:
                T.evaluate(T.call("mbarrier_init", T.address_of(full[0]), options=(1,)))
                T.evaluate(T.call("mbarrier_init", T.address_of(full[1]), options=(1,)))
                T.evaluate(T.call("mbarrier_init", T.address_of(empty[0]), options=(2,)))
                T.evaluate(T.call("fence_barrier_init"))
            T.evaluate(T.call("barrier"))
            v[0] = x[thread]
            with T.role(0, 32):
                T.evaluate(T.call("mbarrier_wait", T.address_of(full[1]), 0))
                x[thread] = v[0]
            with T.role(32, 32):
                T.evaluate(T.call("mbarrier_wait", T.address_of(empty[0]), 0))

    becomes(init_mbarriers, before, after)


def test_a_cluster_whose_blocks_reach_each_other_meets(becomes):
    @T.prim_func
    def before():
        with T.Kernel(2, threads=64, cluster_dims=2) as _:
            thread = T.thread_index()
            full = T.alloc_barrier(128)
            T.evaluate(T.call("mbarrier_arrive", T.address_of(full[0]), thread % 2))

    @T.prim_func
    def after():
        with T.Kernel(2, threads=64, cluster_dims=2) as _:
            thread = T.thread_index()
            full = T.alloc_barrier(128)
            if thread == 0:
                T.evaluate(T.call("mbarrier_init", T.address_of(full[0]), options=(128,)))
                T.evaluate(T.call("fence_barrier_init"))
            T.evaluate(T.call("cluster_arrive_relaxed"))
            T.evaluate(T.call("cluster_wait"))
            T.evaluate(T.call("mbarrier_arrive", T.address_of(full[0]), thread % 2))

    becomes(init_mbarriers, before, after)


def test_nothing_to_make(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            x[T.thread_index()] = 0.0

    keeps(init_mbarriers, kernel)


def test_each_map_is_asked_for_once():
    @T.prim_func
    def kernel(
        a: T.Tensor((256, 128), "float16"), b: T.Tensor((128, 128), "float16"), c: T.Tensor((256, 128), "float")
    ):
        with T.Kernel(2, threads=128) as n:
            a_tile = T.alloc_shared((128, 64), "float16")
            b_tile = T.alloc_shared((64, 128), "float16")
            sums = T.alloc_fragment((128, 128), "float")
            T.clear(sums)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(a[n * 128, k * 64], a_tile)
                T.copy(b[k * 64, 0], b_tile)
                T.gemm(a_tile, b_tile, sums)
            T.copy(sums, c[n * 128, 0])

    lowered = torch_tile.compile(kernel, target="cuda:sm_90a").lowered
    calls = [n for n in walk(lowered.kernels[0].body) if isinstance(n, Call)]
    first, *_ = [n for n, call in enumerate(calls) if call.name == "mbarrier_init"]
    asked = [call.args[0].buffer.name for call in calls[:first] if call.name == "prefetch_map"]
    assert sorted(asked) == ["a", "b"]
    assert sum(call.name == "prefetch_map" for call in calls) == 2
    assert sum(call.name == "tma_load" for call in calls) > 2
