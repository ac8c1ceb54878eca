# SPDX-License-Identifier: Apache-2.0
"""One thread makes the mbarriers, before and after."""

import torch_tile.language as T
from torch_tile.lowering.init_barriers import init_barriers


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

    becomes(init_barriers, before, after)


def test_nothing_to_make(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            x[T.thread_index()] = 0.0

    keeps(init_barriers, kernel)
