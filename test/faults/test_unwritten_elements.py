# SPDX-License-Identifier: Apache-2.0
"""Reads of elements that no statement wrote are found by the compiler where certain, else by both simulators."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def _reads(case, scope="fragment"):
    alloc = getattr(T, f"alloc_{scope}")

    @T.prim_func
    def kernel(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            s = alloc((16, 16), "float32")
            r = T.alloc_fragment((16,), "float32")
            if case == "part of a copy":
                T.copy(X[0:8, 0:16], s[0:8, :])
                T.copy(s, Y[0:16, 0:16])
            elif case == "part of a nest":
                for i, j in T.Parallel(16, 12):
                    s[i, j] = X[i, j]
                T.reduce_sum(s, r, dim=1)
                T.copy(r, Y[0, 0:16])
            elif case == "a path":
                if X[0, 0] > 2:
                    T.clear(s)
                for i, j in T.Parallel(16, 16):
                    Y[i, j] = s[i, j]
            elif case == "guarded stores":
                for i, j in T.Parallel(16, 16):
                    if i > 3:
                        s[i, j] = X[i, j]
                for i, j in T.Parallel(16, 16):
                    s[i, j] = s[i, j] + 1
                T.copy(s, Y[0:16, 0:16])
            elif case == "nothing":
                T.clear(s)
                T.copy(X[0:8, 0:16], s[0:8, :])
                T.copy(s, Y[0:16, 0:16])
            elif case == "guarded reads":
                T.copy(X[0:8, 0:16], s[0:8, :])
                for i, j in T.Parallel(16, 16):
                    Y[i, j] = T.if_then_else(i < 8, s[i, j], 0.0)

    return kernel


def _of_each_thread(case):
    @T.prim_func
    def kernel(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64):
            v = T.alloc_local((4,), "float32")
            w = T.alloc_var("float32", ...)
            v[0] = X[0, 0]
            if X[0, 0] > 2:
                w = X[0, 1]
            Y[0, 0] = v[0] + (v[3] if case == "array" else w)

    return kernel


def _found(kernel):
    """Whether the interpreter of tiles and, for each chip, the compiler or the simulator report an unwritten read."""
    args = torch.ones(64, 64), torch.zeros(64, 64)
    found = []
    try:
        evaluate(kernel, *args)
        found.append(False)
    except TileError as problem:
        assert "no statement before has written" in str(problem)
        found.append(True)
    for arch in ("sm_80", "sm_90a"):
        try:
            found.append("unwritten" in torch_tile.compile(kernel, target=f"cuda:{arch}").interpret(*args).kinds)
        except TileError as problem:
            assert problem.code == "unwritten_element"
            found.append(True)
    return found


def test_calls_of_a_kernel_that_reads_garbage_raise():
    with pytest.warns(UserWarning, match="its calls raise this error"):
        compiled = torch_tile.compile(_reads("part of a copy"), target="cpu")
    assert "s[" in compiled.get_kernel_source()
    with pytest.raises(TileError, match="an element of `s` is read here"):
        compiled(torch.ones(64, 64), torch.zeros(64, 64))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scope", ["fragment", "shared"])
@pytest.mark.parametrize("case", ["part of a copy", "part of a nest", "a path", "guarded stores"])
def test_tiles(case, scope):
    assert all(_found(_reads(case, scope)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", ["array", "variable"])
def test_memory_of_each_thread(case):
    assert all(_found(_of_each_thread(case)))


@pytest.mark.parametrize("scope", ["fragment", "shared"])
@pytest.mark.parametrize("case", ["nothing", "guarded reads"])
def test_nothing_is_reported_where_all_is_written(case, scope):
    assert not any(_found(_reads(case, scope)))


def test_scratch_memory():
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        w = T.alloc_global((16,), "float32")
        with T.Kernel(1, threads=64):
            for i in T.Parallel(8):
                w[i] = X[i]
        with T.Kernel(1, threads=64):
            for i in T.Parallel(16):
                Y[i] = w[i]

    with pytest.raises(TileError, match="an element of `w` is read here"):
        evaluate(kernel, torch.ones(64), torch.zeros(64))
