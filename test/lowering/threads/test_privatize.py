# SPDX-License-Identifier: Apache-2.0
"""Variables that nests set: an iteration's own where no later statement could tell."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For, LoopKind
from torch_tile.lowering.threads.privatize import private_vars
from torch_tile.simulator.tile.interpreter import evaluate


def owned(kernel):
    """How many variables belong to the iterations of nests afterwards."""
    (k,) = kernel.program.kernels
    nests = [n for n in walk(private_vars(k)) if isinstance(n, For) and n.kind is LoopKind.PARALLEL]
    return sum(isinstance(n, Alloc) for nest in nests for n in walk(nest.body))


def test_set_before_it_is_used():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = i * 2
                A[i] = x
            for i in T.Parallel(8):
                x = i * 3
                A[i] = A[i] + x

    assert owned(kernel) == 2


def test_used_before_it_is_set_or_after_the_nest():
    @T.prim_func
    def carried(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = x + A[i]
            A[0] = x

    @T.prim_func
    def last(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_var("int32", 0)
            for i in T.Parallel(8):
                x = A[i]
            A[0] = x

    assert owned(carried) == owned(last) == 0


def test_unchanged_kernels_stay_the_same():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):
                A[i] = i

    (k,) = kernel.program.kernels
    assert private_vars(k) is k


def agree(kernel, shape, seed):
    """Whether the threads of a compiled kernel give what its program says, on fresh numbers."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    want, got = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    evaluate(kernel.program, x, want)
    assert not tilelang.compile(kernel, target="cuda:sm_90").interpret(x, got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("flag", [False, True])
def test_made_inside_the_nest_is_declared_once(flag, seed):
    """The name is the iteration's own already: its first value must reach the other uses."""
    shape = (5, 33)

    @T.prim_func
    def static(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                d = A[i, j]
                if not flag:
                    d = T.if_then_else(j < 5 * i, d, 0.0)
                B[i, j] = d

    @T.prim_func
    def dynamic(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                d = A[i, j]
                if j < 5 * i:
                    d *= 2.0
                    if flag:
                        d += 1.0
                B[i, j] = d

    @T.prim_func
    def loops(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(*shape):
                total = A[i, j] * 0.5
                for k in T.serial(3):
                    e = A[i, (j + k) % shape[1]]
                    if flag:
                        e = T.if_then_else(e > 0.0, e, 0.0)
                    if k > i:
                        e += 1.0
                    total += e
                B[i, j] = total

    for kernel, variables in ((static, 1), (dynamic, 1), (loops, 2)):
        assert owned(kernel) == variables
        agree(kernel, shape, seed)
