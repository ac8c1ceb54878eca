# SPDX-License-Identifier: Apache-2.0
"""Variables that nests set: an iteration's own where no later statement could tell."""

import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For, LoopKind
from torch_tile.lowering.private_vars import private_vars


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
