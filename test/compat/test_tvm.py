# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compat import tvm
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target


def test_dtypes():
    assert tvm.DataType("float16") is T.float16 and tvm.DataType(torch.int8).bits == 8
    assert isinstance(T.float32, tvm.DataType) and not isinstance("float32", tvm.DataType)
    with pytest.raises(ValueError, match="is not a dtype"):
        tvm.DataType("float17")
    assert torch_tile.DataType is tvm.DataType and torch_tile.tvm is tvm


def test_constants(way):
    tir = tvm.tirx

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), B: T.Tensor((2,), "float16")):
        with T.Kernel(1, threads=32):
            A[0] = tir.const(3, "int32") + tir.const(4)
            A[1] = tir.IntImm("int32", 5)
            A[2] = tir.max(A[0], A[1])
            A[3] = tir.if_then_else(A[0] > 6, 1, 0)
            B[0] = tir.FloatImm("float16", 0.5)
            B[1] = tir.const(1, "float16") / 4

    a, b = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.float16)
    way(kernel, a, b)
    assert a.tolist() == [7, 5, 7, 1] and b.tolist() == [0.5, 0.25]
    assert tir.all() is not None and str(tir.any(False, True)) == str(tir.const(True)) != str(tir.all(True, False))
    assert isinstance(tir.const(1), tir.PrimExpr) and isinstance(kernel, tir.PrimFunc)


def test_targets():
    for text, kind in (("c", "cpu"), ("llvm", "cpu"), ("cuda -arch=sm_80", "cuda"), ("cuda", "cuda")):
        made = tvm.target.Target(text)
        assert made == Target.of(text) and made.kind == kind and isinstance(made, tvm.target.Target)
    with pytest.raises(TileError, match="hip"):
        tvm.target.Target("hip")
    with pytest.raises(ValueError, match="no target around"):
        tvm.target.Target.current(allow_none=False)


def test_a_target_around_is_what_auto_means():
    @torch_tile.jit
    def made(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32):
                A[0] = 1.0

        return main

    with tvm.target.Target("cuda -arch=sm_80") as outer:
        assert made(4).target == outer == tvm.target.Target.current()
        with tvm.target.Target("c"):
            assert made(4).target.kind == torch_tile.compile(made.get_tir(4)).target.kind == "cpu"
            assert torch_tile.compile(made.get_tir(4), target="cuda:sm_90a").target.capability == 90
        assert made(4).target == outer
    assert Target.current() is None and made(4).target == Target.of("auto")
