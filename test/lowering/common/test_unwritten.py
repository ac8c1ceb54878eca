# SPDX-License-Identifier: Apache-2.0
"""Reads of what was never written: what the compiler is certain of, and what only the simulator sees."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.lowering.common.check import check_kernel


def by_a_condition():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((64,), "float32")
            for k in T.serial(n):
                if k > 0:
                    T.copy(tile, A)
                T.copy(A, tile)

    return kernel


def in_parts():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_fragment((64,), "float32")
            for i in T.Parallel(32):
                tile[i] = 1.0
            for i in T.Parallel(32):
                tile[i + 32] = tile[i]
            T.copy(tile, A)

    return kernel


def by_a_loop_that_clears():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            total, last = T.alloc_fragment((64,), "float32"), T.alloc_var("int32")
            for k in T.serial(4):
                if k == 0:
                    T.clear(total)
                for i in T.Parallel(64):
                    total[i] += A[i]
                last += 1
            T.copy(total, A)

    return kernel


def by_a_choice():
    """The first turn keeps what it finds only where it found something."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(2, threads=32) as bx:
            which = T.alloc_local((1,), "int32")
            for k in T.serial(4):
                which[0] = T.if_then_else(bx >= k - 1, k, which[0])
            A[bx] = which[0]

    return kernel


def by_another_role():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            tile, ready = T.alloc_shared((64,), "float32"), T.alloc_barrier(128)
            with T.ws(0):
                T.mbarrier_wait_parity(ready, 0)
                T.copy(tile, A)
            with T.ws(1):
                T.clear(tile)
                T.mbarrier_arrive(ready)

    return kernel


def through_an_address():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32) as _:
            counts = T.alloc_shared((1,), "int32")
            T.fill(counts, 0)
            T.sync_threads()
            A[0] = T.atomic_add(counts[0], 1, return_prev=True)

    return kernel


@pytest.mark.parametrize(
    "make", [by_a_condition, in_parts, by_a_loop_that_clears, by_a_choice, by_another_role, through_an_address]
)
def test_what_may_be_written_is_no_error(make):
    program = make().program
    assert check_kernel(program) is program


def test_each_tile_is_told_once():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as _:
            one, two = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                A[i] = one[i] + two[i] + one[i]

    with pytest.raises(TileError) as caught:
        check_kernel(kernel.program)
    assert [d.code for d in caught.value.diagnostics] == ["unwritten", "unwritten"]


def half_written(scope):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32) as _:
            tile = T.alloc_shared((64,), "float32") if scope == "shared" else T.alloc_fragment((64,), "float32")
            for i in T.Parallel(64):
                if i < n:
                    tile[i] = A[i]
            for i in T.Parallel(64):
                B[i] = tile[i] * 2.0

    return kernel


@pytest.mark.parametrize("scope", ["shared", "fragment"])
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_the_simulator_looks_at_each_element(scope, target):
    kernel = torch_tile.compile(half_written(scope), target=target)
    a, b = torch.randn(64), torch.zeros(64)
    assert not kernel.interpret(a, b, 64)
    assert torch.equal(b, a * 2)
    findings = kernel.interpret(a, b, 50)
    assert findings.kinds == {"unwritten"} and "nothing was written" in findings.report()


def test_the_simulator_looks_at_sums(way):
    """The tile is cleared on a path that is not taken."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(1, threads=128) as _:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            if n > 0:
                T.clear(c)
            T.gemm(a, a, c)
            T.copy(c, C)

    a, c = torch.randint(-2, 3, (64, 64)).half(), torch.zeros(64, 64)
    way(kernel, a, c, 1)
    assert torch.equal(c, a.float() @ a.float())
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        assert torch_tile.compile(kernel, target=target).interpret(a, c, 0).kinds == {"unwritten"}
