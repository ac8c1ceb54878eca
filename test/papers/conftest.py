# SPDX-License-Identifier: Apache-2.0
"""Each printed kernel runs twice: in the interpreter on whole tiles, and compiled for the CPU."""

from types import FunctionType

import pytest

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.simulator.tile.interpreter import evaluate


@pytest.fixture(params=["evaluate", "cpu"])
def launch(request):
    """`launch(kernel, *tensors)` runs a @T.prim_func, a compiled kernel, or the undecorated body of an eager kernel.

    All tensors of the signature are given; those that the kernel writes are changed in place.
    """

    def run(kernel, *tensors):
        if request.param == "evaluate":
            evaluate(T.prim_func(kernel) if isinstance(kernel, FunctionType) else kernel, *tensors)
        elif isinstance(kernel, FunctionType):
            tilelang.jit(kernel)(*tensors)
        else:
            compiled = kernel if isinstance(kernel, tilelang.JITKernel) else tilelang.compile(kernel)
            assert "for" in compiled.get_kernel_source()
            made = compiled(*[t for i, t in enumerate(tensors) if i not in compiled.out_idx])
            if compiled.out_idx:
                assert len(compiled.out_idx) == 1
                tensors[compiled.out_idx[0]].copy_(made)

    return run
