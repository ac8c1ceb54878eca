# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compat import tvm
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.utils.language import is_shared


def test_dtypes():
    assert tvm.DataType("float16") is T.float16 and tvm.DataType(torch.int8).bits == 8
    assert isinstance(T.float32, tvm.DataType) and not isinstance("float32", tvm.DataType)
    with pytest.raises(ValueError, match="is not a dtype"):
        tvm.DataType("float17")
    assert torch_tile.DataType is tvm.DataType and torch_tile.tvm is tvm


def test_buffers_outside_of_kernels():
    """They are descriptions, as layouts take them."""
    tile = tvm.tirx.decl_buffer((8, 64), "float16", name="A", scope="shared")
    stack = tvm.tirx.decl_buffer((3, 8, 64), "float16", scope="shared")
    assert tile.shape == (8, 64) and tile.dtype == "float16" and is_shared(tile)
    assert not is_shared(tvm.tirx.decl_buffer((4,)))
    for name in ("full", "half", "quarter"):
        make = getattr(T, f"make_{name}_bank_swizzled_layout")
        assert make(stack).is_equal(make(tile).expand([3])) and make(stack).is_equal(make(tile).expand(3))
        assert not make(stack).is_equal(make(tile).expand([2]))
    assert stack.buffer.name == "buffer" and tile.buffer.name == "A"


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


def test_classes_tell_kinds_of_expressions():
    tirx = tvm.tirx
    x, n = tirx.Var("x", "float32"), tirx.Var("n", "int32")
    for kind, made in (
        (tirx.Var, x), (tirx.Call, T.exp(x)), (tirx.Call, T.__exp(x)), (tirx.IntImm, tirx.const(3)),
        (tirx.FloatImm, tirx.const(3.0)), (tirx.Add, x + 1.0), (tirx.FloorDiv, n // 3), (tirx.Min, tirx.min(n, 3)),
        (tirx.LT, n < 3), (tirx.And, tirx.And(n < 3, n > 1)), (tirx.Not, tirx.Not(n < 3)),
        (tirx.Cast, T.cast(n, "float32")), (tirx.Ramp, T.Ramp(n, 1, 4)), (tirx.Sub, tirx.Sub(n, 1)),
    ):  # fmt: skip
        assert isinstance(made, kind), kind
        assert not isinstance("text", kind) and (kind is tirx.Var or not isinstance(x, kind))
    assert str(tirx.Min(n, 3)) == str(tirx.min(n, 3)) and str(tirx.Max(n, 3)) == str(tirx.max(n, 3))
    with pytest.raises(TileError, match="a part of TVM"):
        tirx.For(n)


def test_options_of_an_enclosing_context():
    Context = tvm.transform.PassContext

    @T.prim_func
    def main(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = T.exp(A[1])

    def options():
        return torch_tile.compile(main, target="cuda:sm_80").build.options

    assert Context.current().config == {} and not options().fast_math
    with Context(opt_level=3, config={"tl.enable_fast_math": True}) as outer:
        assert Context.current() is outer and options().fast_math and not options().tf32
        with Context(config={torch_tile.PassConfigKey.TL_ENABLE_TF32: True}):
            assert options().fast_math and options().tf32
            own = torch_tile.compile(main, target="cuda:sm_80", pass_configs={"tl.enable_fast_math": False})
            assert not own.build.options.fast_math
        assert not options().tf32
    assert not options().fast_math
    with pytest.raises(TileError, match="nobody knows"), Context(config={"tl.enable_fast_meth": True}):
        pass
    with pytest.raises(TileError, match="watch TVM's passes"):
        Context(instruments=[object()])
