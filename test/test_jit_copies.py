# SPDX-License-Identifier: Apache-2.0
"""Modules that hold kernels are copied and pickled; macros call themselves; kernels are no methods."""

import copy
import pickle

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


@torch_tile.jit(out_idx=[-1])
def scaled(n, factor):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(n):
                B[i] = A[i] * factor

    return kernel


@torch_tile.jit
def doubled(A):
    n = T.const("n")
    A: T.Tensor[(n,), T.float32]
    B = T.empty((n,), "float32")
    with T.Kernel(1, threads=32) as _:
        for i in T.Parallel(n):
            B[i] = A[i] * 2.0
    return B


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.kernel, self.make, self.function = scaled.on("cpu")(8, 3.0), scaled, doubled

    def forward(self, x):
        return self.kernel(x * self.weight.detach()) + self.function(x) + self.make(8, 5.0)(x)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_module_with_kernels(copied):
    model, x = Model(), torch.randn(8)
    want = model(x)
    made = copied(model)
    assert torch.equal(made(x), want) and torch.equal(want, x * 3 + x * 2 + x * 5)
    assert made.kernel.target == model.kernel.target and made.kernel.out_idx == model.kernel.out_idx
    if copied is not copy.copy:
        made.weight.data += 1.0
        assert not torch.equal(made(x), model(x))


def test_targets_and_switches_are_pickled():
    function = scaled.with_pass_configs({"tl.enable_fast_math": True}).on("cuda:sm_80")
    again = pickle.loads(pickle.dumps(function))
    assert (again.target, again.options, again.function) == (function.target, function.options, function.function)
    assert pickle.loads(pickle.dumps(scaled)) is scaled


def test_a_function_without_a_name_to_find_it_by_is_not_pickled():
    @torch_tile.jit
    def hidden(n):
        raise AssertionError

    assert copy.deepcopy(hidden) is hidden
    with pytest.raises(pickle.PicklingError, match="define it at the top of a module"):
        pickle.dumps(hidden)


def test_kernels_are_no_methods():
    with pytest.raises(TileError, match="staticmethod") as caught:

        class Holder:
            @torch_tile.jit
            def kernel(self, n):
                raise AssertionError

    assert caught.value.code == "bad_argument" and caught.value.span.source().strip().startswith("def kernel(self")

    class Fine:
        @staticmethod
        @torch_tile.jit
        def kernel(n):
            return scaled.make(n, 2.0)

    made = torch_tile.compile(Fine().kernel.make(4), target="cpu", out_idx=[-1])
    assert made(torch.ones(4)).tolist() == [2.0] * 4


@T.macro
def add_many(x, count):
    x[0] += 1.0
    if count > 1:
        add_many(x, count - 1)


def test_macros_that_call_themselves(way):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32) as _:
            add_many(A, 20)

    a = torch.zeros(4)
    way(kernel, a)
    assert a.tolist() == [20.0, 0, 0, 0]
