# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError, TileError
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Address, Call
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Assert, Do, Print
from torch_tile.simulator.tile.interpreter import evaluate


def test_printing_takes_scalars_and_regions():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as b:
            T.print(A)
            T.print(A[1:3, 0], msg="column")
            T.print(A[0, 0] + b)
            T.print(3)

    found = [n for n in walk(kernel.program) if isinstance(n, Print)]
    assert [isinstance(n.value, Region) for n in found] == [True, True, False, False]
    assert [n.message for n in found] == ["", "column", "", ""]


@pytest.mark.parametrize("inside", [False, True])
def test_functions_ask_for_options_of_the_compiler(inside):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        if not inside:
            T.annotate_pass_configs({torch_tile.PassConfigKey.TL_ENABLE_FAST_MATH: True, "tl.disable_wgmma": True})
        with T.Kernel(1):
            if inside:
                T.annotate_compile_flags(["-O3", "--use_fast_math"])
                T.annotate_pass_configs({"tl.enable_tf32": True})
            A[0] = T.exp(A[0])

    wanted = {"fast_math", "tf32"} if inside else {"fast_math", "mma_sync"}
    assert set(kernel.program.switches) == wanted
    again = torch_tile.compile(kernel, target="cuda:sm_80", pass_configs={"tl.enable_fast_math": False})
    assert again.build.options.fast_math and again.build.options.tf32 is inside

    @torch_tile.jit(target="cuda:sm_80")
    def eager(A):
        A: T.Tensor((4,), "float32")
        T.annotate_compile_flags("--use_fast_math")
        with T.Kernel(1):
            A[0] = T.exp(A[0])

    assert eager.compile().build.options.fast_math


def test_switches_are_printed():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        T.annotate_pass_configs({"tl.enable_tf32": True, "tl.enable_fast_math": True})
        with T.Kernel(1):
            A[0] = 1.0

    assert 'T.annotate_pass_configs({"tl.enable_fast_math": True, "tl.enable_tf32": True})' in kernel.script()


@pytest.mark.parametrize("configs", [{"tl.enable_fast_maths": True}, {"nothing": 1}])
def test_unknown_options(configs):
    with pytest.raises(TileError, match="nobody knows"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1):
                T.annotate_pass_configs(configs)


def test_assertions_take_any_condition():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1) as _:
            T.device_assert(A[0], "not zero")
            T.device_assert(A[1] > 2)
            assert A[2] < 3

    found = [n for n in walk(kernel.program) if isinstance(n, Assert)]
    assert [n.message for n in found] == ["not zero", "", ""]
    assert all(n.condition.dtype == T.bool for n in found)


def test_promises_leave_no_trace():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1) as _:
            T.assume(n > 0)
            A[0] = n

    assert len(kernel.program.kernels[0].body.stmts) == 1


def test_target_level_calls():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            T.evaluate(T.call("cpu_reduce", T.address_of(A[1, 2]), 4, dtype="float32", options=("sum",)))

    (effect,) = [n for n in walk(kernel.program) if isinstance(n, Do)]
    assert isinstance(effect.call, Call) and isinstance(effect.call.args[0], Address)
    assert (effect.call.dtype, effect.call.options) == (T.float32, ("sum",))


@pytest.mark.parametrize("value", ["a string", None, [1]])
def test_what_cannot_be_printed(value):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.print(value)

    assert caught.value.code == "bad_argument"


def test_addresses_are_of_elements():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                T.evaluate(T.address_of(A))

    assert caught.value.code == "bad_operand"


def test_effects_of_pure_calls_are_evaluated(capsys):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            T.evaluate(T.exp(A[0]))
            T.print(A[0], msg="first")

    evaluate(kernel, torch.ones(4))
    assert "first: 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("condition", [lambda n: False, lambda n: n - n > 0, lambda n: 1 > 2])
def test_assumptions_that_never_hold(condition):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
            with T.Kernel(1):
                T.assume(condition(n))

    assert caught.value.code == "bad_argument" and "never holds" in str(caught.value)


def test_assumptions_that_may_hold():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1):
            T.assume(n > 3)
            T.assume(n == n)
            T.assume(True)
            T.assume(A[0] == A[0])
            A[0] = 1.0

    assert kernel.script().count("T.assume") == 1  # what the host can check


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_assumptions_of_sizes_are_checked_at_launches(target):
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((m,), "int32"), n: T.int32):
        with T.Kernel(T.ceildiv(m, 32), threads=32) as bx:
            T.assume(m % 32 == 0)
            T.assume(n < m)
            for i in T.Parallel(32):
                T.assume(i < n)  # of a loop: no launch can tell
                A[bx * 32 + i] = n

    made = torch_tile.compile(kernel, target=target)
    run = made if target == "cpu" else made.interpret
    a = torch.zeros(64, dtype=torch.int32)
    run(a, 5)
    assert (a == 5).all()
    for args, text in (((a[:40], 5), "m % 32 == 0, got m = 40"), ((a, 64), "n < m, got n = 64, m = 64")):
        with pytest.raises(LaunchError, match=f"Assume: {text}"):
            run(*args)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_an_assertion_before_the_kernel_is_of_the_launch(target):
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((m,), "int32")):
        assert m % 4 == 0, "whole rows"
        with T.Kernel(T.ceildiv(m, 32), threads=32) as bx:
            for i in T.Parallel(32):
                A[bx * 32 + i] = 1

    made = torch_tile.compile(kernel, target=target)
    run = made if target == "cpu" else made.interpret
    a, b = torch.zeros(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    run(a)
    assert a.all()
    with pytest.raises(torch_tile.LaunchError):
        run(b)
    assert not b.any()


def test_compile_flags_in_the_body_are_among_the_attributes():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        T.annotate_compile_flags("-O3 --use_fast_math")
        T.annotate_compile_flags(["-O3"])
        with T.Kernel(1, threads=32):
            A[0] = 1.0

    assert kernel.attrs["tilelang_compile_flags"] == ["-O3", "--use_fast_math"]
    assert kernel.program.switches == ("fast_math",)
