# SPDX-License-Identifier: Apache-2.0
"""Fragments whose elements are all equal get the places at which loops access them; other excess stays an error."""

import pytest
import torch
from emulate import emulate

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def with_sinks(heads, block):
    @T.prim_func
    def kernel(
        S: T.Tensor((heads,), "float32"), A: T.Tensor((heads, block), "float32"), B: T.Tensor((heads, block), "float32")
    ):  # fmt: skip
        with T.Kernel(heads, threads=64) as head:
            sinks, x = T.alloc_fragment([heads], "float32"), T.alloc_fragment([block], "float32")
            T.copy(A[head, 0:block], x)
            for i in T.Parallel(block):
                sinks[i] = S[head]
            for i in T.Parallel(block):
                x[i] += T.exp2(sinks[i] - x[i])
            T.copy(x, B[head, 0:block])

    return kernel


def inputs(heads, block):
    s, a = torch.randn(heads), torch.randn(heads, block)
    return s, a, a.double() + torch.exp2(s.double()[:, None] - a.double())


@pytest.mark.parametrize("heads, block", [(1, 64), (8, 64), (3, 37), (37, 32)])
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_all_places_hold_the_value(heads, block, target, recwarn, seed):
    program = with_sinks(heads, block)
    kernel = tilelang.compile(program, target=target)
    assert any("[equal_elements]" in str(each.message) for each in recwarn) == (heads < block)
    s, a, want = inputs(heads, block)
    for run in (evaluate, kernel if target == "cpu" else kernel.interpret):
        b = torch.full_like(a, float("nan"))
        run(*(program, s, a, b) if run is evaluate else (s, a, b))
        torch.testing.assert_close(b.double(), want, rtol=1e-5, atol=1e-5)


def test_the_printed_text_has_the_places(seed):
    s, a, want = inputs(5, 48)
    b = torch.full_like(a, float("nan"))
    with pytest.warns(UserWarning, match=r"has the shape \(5,\), and loops access it at \(48,\) places"):
        program = with_sinks(5, 48)
    kernel = tilelang.compile(program, target="cuda:sm_90a")
    emulate(kernel, s, a, b)
    torch.testing.assert_close(b.double(), want, rtol=1e-5, atol=1e-5)


def moving(x, i, head, A, S):
    x[i] = A[head, i]


def by_a_name(x, i, head, A, S):
    own = T.alloc_var("float32")
    own = A[head, i]
    x[i] = own


def of_the_thread(x, i, head, A, S):
    x[i] = T.cast(T.get_thread_binding(), "float32")


def updated(x, i, head, A, S):
    x[i] = S[head]
    x[i] += A[head, i]


def taken_whole(x, i, head, A, S):
    x[i] = S[head]


def beyond_below(x, i, head, A, S):
    x[i - 1] = S[head]


@pytest.mark.parametrize("write", [moving, by_a_name, of_the_thread, updated, taken_whole, beyond_below])
@pytest.mark.parametrize("scope", [T.alloc_fragment, T.alloc_shared])
def test_other_excess_is_an_error(write, scope):
    @T.prim_func
    def kernel(S: T.Tensor((8,), "float32"), A: T.Tensor((8, 64), "float32"), B: T.Tensor((8, 64), "float32")):
        with T.Kernel(8, threads=64) as head:
            x = scope([8], "float32")
            for i in T.Parallel(64):
                write(x, i, head, A, S)
            if write is taken_whole:
                T.copy(x, B[head, 0:8])
            else:
                for i in T.Parallel(64):
                    B[head, i] = x[i]

    with pytest.raises(TileError) as caught:
        tilelang.compile(kernel, target="cpu")
    assert {d.code for d in caught.value.diagnostics} & {"leaves_tile", "out_of_bounds", "foreign_element"}


def test_equal_elements_of_shared_memory_stay_an_error():
    @T.prim_func
    def kernel(S: T.Tensor((8,), "float32"), B: T.Tensor((8, 64), "float32")):
        with T.Kernel(8, threads=64) as head:
            x = T.alloc_shared([8], "float32")
            for i in T.Parallel(64):
                x[i] = S[head]
            for i in T.Parallel(64):
                B[head, i] = x[i]

    with pytest.raises(TileError, match="leaves_tile"):
        tilelang.compile(kernel, target="cpu")
