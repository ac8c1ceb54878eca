# SPDX-License-Identifier: Apache-2.0
"""Text of the author's own that a compiler refuses, or an interpreter cannot look inside."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

CUDA = "__device__ float twice(float x) { return 2.0f * x; }"


def calling(source, target="cuda"):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            T.import_source(source, target)
            for i in T.Parallel(4):
                A[i] = T.call_extern("float32", "twice", A[i])  # here

    return kernel


def bad_cuda():
    torch_tile.compile(calling("__device__ float twice(float x) { return 2.0f * y; }"), target="cuda:sm_80")


def no_such_function():
    torch_tile.compile(calling("__device__ float thrice(float x) { return 3.0f * x; }"), target="cuda:sm_80")


def bad_cpp():
    torch_tile.compile(calling("static float twice(float x) { return 2.0f * y; }", "cpu"), target="cpu")


def no_cpp():
    torch_tile.compile(calling(CUDA), target="cpu")


def on_threads():
    torch_tile.compile(calling(CUDA), target="cuda:sm_80").interpret(torch.zeros(4))


def on_tiles():
    from torch_tile.simulator.tile.interpreter import evaluate

    evaluate(calling(CUDA), torch.zeros(4))


CASES = {
    bad_cuda: ("foreign_text", '"y" is undefined'), no_such_function: ("foreign_text", '"twice" is undefined'),
    bad_cpp: ("foreign_text", "error"), no_cpp: ("foreign_text", "no C++ of it for CPUs"),
    on_threads: ("foreign_meaning", "evaluate=f"), on_tiles: ("foreign_meaning", "evaluate=f"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case):
    code, text = CASES[case]
    with pytest.raises(torch_tile.TileError) as caught:
        case()
    assert caught.value.code == code and text in str(caught.value)
    span = caught.value.span
    assert span.source().endswith("# here") and span.source()[span.column :].startswith("T.call_extern")
