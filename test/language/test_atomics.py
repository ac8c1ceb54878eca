# SPDX-License-Identifier: Apache-2.0
"""T.arrive_last: what it becomes, and what it refuses, with the place of the mistake."""

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, If, Let
from torch_tile.tileop.atomic import ArriveLast


def kernel_of(body, dtype="int32"):
    @T.prim_func
    def kernel(A: T.Tensor((8, 4), "float32"), counters: T.Tensor((8,), dtype), n: T.int32):
        with T.Kernel(8, threads=32) as b:
            body(A, counters, n, b)

    return kernel


def test_each_arrival_has_a_flag_of_its_own():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(8, threads=32) as b:
            last = T.arrive_last(counters[0], n)
            if T.arrive_last(counters[1], 8) and last:
                A[b] = 1.0

    body = kernel.program.kernels[0].body.stmts
    assert [type(s) for s in body] == [Alloc, ArriveLast, Let, Alloc, ArriveLast, If]
    first, second = (s for s in body if isinstance(s, ArriveLast))
    assert first.flag.buffer is body[0].buffer and second.flag.buffer is body[3].buffer
    assert body[2].var.name == "last" and body[2].value.dtype == T.bool
    assert any(n is second.flag.buffer for n in walk(body[5].condition))


def test_it_may_stand_in_branches_and_loops():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(8, threads=32) as b:
            if b > 2:
                for k in range(n):
                    while A[k] < 0:
                        if not T.arrive_last(counters[k], n + 1):
                            A[k] = 0.0

    assert sum(isinstance(n, ArriveLast) for n in walk(kernel.program)) == 1
    torch_tile.compile(kernel)
    torch_tile.compile(kernel, target="cuda:sm_80")


WRONG = {
    "a region": (lambda A, c, n: T.arrive_last(c, 4), "is no element of a tensor"),
    "a slice": (lambda A, c, n: T.arrive_last(c[0:1], 4), "is no element of a tensor"),
    "a number": (lambda A, c, n: T.arrive_last(3, 4), "is no element of a tensor"),
    "floats": (lambda A, c, n: T.arrive_last(A[0, 0], 4), "`A`, float32 in global memory"),
    "no count": (lambda A, c, n: T.arrive_last(c[0], 0), "`count` is 0"),
    "half a count": (lambda A, c, n: T.arrive_last(c[0], 2.5), "`count` is 2.5"),
    "a flag for a count": (lambda A, c, n: T.arrive_last(c[0], n > 2), "`count` is a bool"),
    "a tensor for a count": (lambda A, c, n: T.arrive_last(c[0], c), "`count` is counters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments(name):
    call, why = WRONG[name]
    with pytest.raises(TileError) as caught:
        kernel_of(lambda A, counters, n, b: call(A, counters, n))
    assert caught.value.code == "bad_argument" and why in str(caught.value), str(caught.value)
    assert "fix: give" in str(caught.value)


def test_a_counter_of_64_bits():
    with pytest.raises(TileError, match="`counters`, int64 in global memory"):
        kernel_of(lambda A, counters, n, b: T.arrive_last(counters[0], 4), "int64")


@pytest.mark.parametrize("scope", ["shared", "fragment"])
def test_a_counter_of_one_block(scope):
    def body(A, counters, n, b):
        tile = getattr(T, f"alloc_{scope}")((4,), "int32")
        T.arrive_last(tile[0], 4)

    with pytest.raises(TileError, match=f"int32 in {scope} memory"):
        kernel_of(body)


def test_a_counter_that_nobody_sets_to_zero():
    with pytest.raises(TileError, match="which nobody sets to 0 before a launch"):

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            counters = T.alloc_global((8,), "int32")
            with T.Kernel(8, threads=32) as b:
                T.arrive_last(counters[b], 4)


@pytest.mark.parametrize("target", ["c", "cuda:sm_90a"])
def test_not_in_parallel_iterations(target):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32")):
        with T.Kernel(8, threads=32) as _:
            for i in T.Parallel(8):
                if T.arrive_last(counters[i], 4):  # here
                    A[i] = 1.0

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target=target)
    assert "T.arrive_last inside T.Parallel" in str(caught.value)
    assert caught.value.span.source().endswith("# here") and "T.serial" in str(caught.value)


def test_operands_that_may_not_be_wanted():
    """Python computes them in any case, so that a block would arrive although it is not asked for."""

    def refused(make, word):
        with pytest.raises(TileError) as caught:
            make()
        assert caught.value.code == "bad_argument" and f"is counted only if {word} asks for it" in str(caught.value)
        assert caught.value.span.source().endswith("# here")

    def conjunction():
        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(8, threads=32) as _:
                if n > 2 and T.arrive_last(counters[0], 4):  # here
                    A[0] = 1.0

    def disjunction():
        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(8, threads=32) as _:
                last = n > 2 or T.arrive_last(counters[0], 4)  # here
                if last:
                    A[0] = 1.0

    def choice():
        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(8, threads=32) as _:
                last = T.arrive_last(counters[0], 4) if n > 2 else False  # here
                if last:
                    A[0] = 1.0

    def repetition():
        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32")):
            with T.Kernel(8, threads=32) as _:
                while not T.arrive_last(counters[0], 4):  # here
                    A[0] = 1.0

    refused(conjunction, "`and`")
    refused(disjunction, "`or`")
    refused(choice, "`if` in a line")
    refused(repetition, "`while`")


def test_the_first_operand_is_always_wanted():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), counters: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(8, threads=32) as _:
            if T.arrive_last(counters[0], 4) and n > 2:
                A[0] = 1.0

    assert sum(isinstance(n, ArriveLast) for n in walk(kernel.program)) == 1


def test_outside_kernels():
    with pytest.raises(TileError) as caught:
        T.arrive_last(None, 4)
    assert caught.value.code == "not_in_kernel"


@pytest.mark.parametrize("order", ["acquire", "acq_rel", "consume", "nothing"])
def test_orders_that_a_store_does_not_have(order):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                T.atomic_store(A[0], 1, order)

    assert caught.value.code == "bad_argument" and "memory_order" in str(caught.value)
