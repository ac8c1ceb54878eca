# SPDX-License-Identifier: Apache-2.0
"""One kernel for each mistake that only the whole kernel shows, or only its run."""

import linecache
import re
from dataclasses import replace

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import InternalError, TileError
from torch_tile.hardware import Target
from torch_tile.ir.arith_util import Substitute
from torch_tile.ir.expr import Var
from torch_tile.lowering.sync.insert_barriers import insert_barriers
from torch_tile.lowering.threads.allocate_shared import allocate_shared
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tileop.fill import Fill


def non_affine_region():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4,), "float32")
            for i in T.serial(4):
                T.copy(A[i * i : i * i + 4], tile)  # here

    tilelang.compile(kernel)


def dynamic_tile():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((n,), "float32")  # here
            T.clear(tile)

    tilelang.compile(kernel)


def empty_tile():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4, 0), "float32")  # here
            T.clear(tile)

    tilelang.compile(kernel)


def unwritten_element():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((64,), "float32")
            T.copy(A[0:32], tile[0:32])
            T.copy(tile, B)  # here

    evaluate(kernel, torch.zeros(64), torch.zeros(64))


def out_of_bounds():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                A[i] = tile[i + 8]  # here

    tilelang.compile(kernel)


def out_of_bounds_region():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8,), "float32")
            T.copy(A[0:6], tile[4:10])  # here

    tilelang.compile(kernel)


def leaves_tile():
    @T.prim_func
    def kernel(A: T.Tensor((96,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(96):
                tile[i] = A[i]  # here

    tilelang.compile(kernel)


def leaves_tile_with_a_region():
    @T.prim_func
    def kernel(A: T.Tensor((80,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((64,), "float32")
            for k in T.serial(5):
                T.copy(A[k * 16], tile[k * 16 : k * 16 + 16])  # here

    tilelang.compile(kernel)


def out_of_bounds_when_run():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8,), "int32")
            A[0] = tile[A[1]]  # here

    evaluate(kernel, torch.full((64,), 8, dtype=torch.int32))


def unsupported_on_target():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as _, T.ws(0):  # here
            A[0] = 1.0

    tilelang.compile(kernel, target="cpu")


def not_in_parallel():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((8,), "float32")
            for i in T.Parallel(8):
                tile[i] = A[i * 8]
                if tile[i] > 0:
                    break  # here

    tilelang.compile(kernel)


def device_assert():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            T.device_assert(A[0] > 0.0, "A must be positive")  # here

    tilelang.compile(kernel)(torch.zeros(64))


def device_assert_in_interpreter():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            assert A[0] > 0.0, "A must be positive"  # here

    evaluate(kernel, torch.zeros(64))


def shared_memory():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            small = T.alloc_shared((64,), "float32")
            large = T.alloc_shared((512, 128), "float32")  # here
            small[0] = A[0]
            large[0, 0] = small[0]
            A[0] = large[0, 0] + small[0]

    allocate_shared(kernel.program, Build(Target.of("cuda:sm_90a")))


def divergent_hazard():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), thread: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((32,), "float32")
            if thread < 16:
                tile[thread] = A[thread]
                A[thread] = tile[thread ^ 1]  # here

    program = kernel.program
    index = Var("thread", role="thread")
    (block,) = Substitute({program.params[1]: index})(program).kernels
    made = replace(program, params=program.params[:1], kernels=(replace(block, thread=index),))
    insert_barriers(made)


def unwritten():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            total = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                total[i] += A[i]  # here
            T.copy(total, A)

    tilelang.compile(kernel).run()


def unwritten_sums():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64) as _:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A, a)
                if k > 0:
                    T.gemm(a, a, c)  # here
            T.copy(c, C)

    tilelang.compile(kernel).run()


def unwritten_yet():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            tile = T.alloc_shared((64,), "float32")
            for _ in T.serial(4):
                T.copy(tile, A)  # here
                T.copy(A, tile)

    tilelang.compile(kernel).run()


def lost_result():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        B = T.empty((64,), "float32")  # here
        with T.Kernel(1, threads=64) as _:
            T.copy(A, B)

    tilelang.compile(kernel)


def lost_counts():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        B = T.empty((8,), "int32")  # here
        with T.Kernel(1, threads=64) as _:
            T.clear(B)
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                T.atomic_add(B[A[i] % 8], 1)

    tilelang.compile(kernel)


def parted_threads():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            tile = T.alloc_shared((64,), "float32")
            if T.get_thread_binding() < 20:
                T.copy(A, tile)  # here

    tilelang.compile(kernel, target="cuda:sm_90a")


def foreign_element():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            own = T.alloc_fragment((64,), "float32")
            own[T.get_thread_binding()] = 1.0  # here
            T.copy(own, A)

    tilelang.compile(kernel, target="cuda:sm_90a")


def barrier_as_tile():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            full = T.alloc_barrier([1] * 64)
            T.copy(A, full)  # here

    tilelang.compile(kernel, target="cuda:sm_90a")


def barrier_as_value():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            full = T.alloc_barrier(1)
            full[0] = 1  # here
            A[0] = 1.0

    tilelang.compile(kernel, target="cuda:sm_90a")


def no_config():
    @tilelang.autotune(configs=[{"block": 0}, {"block": -1}])
    @tilelang.jit(out_idx=[-1])
    def kernel(n, block):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, block)) as bx:
                tile = T.alloc_shared((block,), "float32")
                T.copy(tile, A[bx * block])

        return main

    kernel(64)


CASES = {
    non_affine_region: ("non_affine_region", "T.copy(A[i * i : i * i + 4], tile)"),
    dynamic_tile: ("dynamic_tile", "T.alloc_fragment((n,), \"float32\")"),
    unwritten_element: ("unwritten_element", "T.copy(tile, B)"),
    empty_tile: ("bad_shape", "T.alloc_shared((4, 0), \"float32\")"),
    out_of_bounds: ("out_of_bounds", "tile[i + 8]"),
    out_of_bounds_region: ("out_of_bounds", "T.copy(A[0:6], tile[4:10])"),
    leaves_tile: ("leaves_tile", "tile[i]"),
    leaves_tile_with_a_region: ("leaves_tile", "T.copy(A[k * 16], tile[k * 16 : k * 16 + 16])"),
    shared_memory: ("shared_memory", "T.alloc_shared((512, 128), \"float32\")"),
    divergent_hazard: ("divergent_hazard", "A[thread]"),
    unwritten: ("unwritten", "total[i]"),
    unwritten_sums: ("unwritten", "T.gemm(a, a, c)"),
    unwritten_yet: ("unwritten", "T.copy(tile, A)"),
    lost_result: ("lost_result", 'T.empty((64,), "float32")'),
    lost_counts: ("lost_result", 'T.empty((8,), "int32")'),
    foreign_element: ("foreign_element", "own[T.get_thread_binding()]"),
    barrier_as_tile: ("barrier_as_tile", "T.copy(A, full)"),
    barrier_as_value: ("barrier_as_tile", "full[0]"),
    parted_threads: ("parted_threads", "T.copy(A, tile)"),
    out_of_bounds_when_run: ("out_of_bounds", "tile[A[1]]"),
    unsupported_on_target: ("unsupported_on_target", "T.ws(0)"),
    not_in_parallel: ("not_in_parallel", "break"),
    device_assert: ("device_assert", "T.device_assert(A[0] > 0.0, \"A must be positive\")"),
    no_config: ("no_config", None),
    device_assert_in_interpreter: ("device_assert", "assert A[0] > 0.0, \"A must be positive\""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


def test_all_findings_are_reported_together():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            small = T.alloc_shared((8,), "float32")
            T.alloc_fragment((n,), "float32")
            T.copy(A[0:9], small)
            A[0] = small[8]

    with pytest.raises(TileError) as caught:
        tilelang.compile(kernel)
    assert [d.code for d in caught.value.diagnostics] == ["dynamic_tile", "copy_shape", "out_of_bounds"]
    assert str(caught.value).count("-->") == 3


def test_an_assertion_of_the_compilers_names_the_authors_line(monkeypatch):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_fragment((64,), "float32")
            T.clear(tile)
            T.copy(tile, A)

    def lower_cuda(self, ctx):
        assert self.dst is None

    monkeypatch.setattr(Fill, "lower_cuda", lower_cuda)
    with pytest.raises(InternalError, match="fails in bind_threads") as caught:
        tilelang.compile(kernel, target="cuda:sm_80")
    place = re.search(r"test_kernels.py:(\d+)", str(caught.value))
    assert linecache.getline(__file__, int(place[1])).strip() == "T.clear(tile)"
