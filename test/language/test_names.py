# SPDX-License-Identifier: Apache-2.0
"""Names as TIR spells them: T.Var, T.let, T.Let, T.PrimExpr, T.Buffer and T.alloc_buffer."""

import inspect
import re

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def test_symbols_of_a_vector_dtype():
    x, y = T.Var("x", "float16x2"), T.Var("y", "bfloat16x2")
    assert [str(lane.dtype) for lane in x] == ["float16"] * 2 and str(y.dtype) == "bfloat16x2"
    assert isinstance(x[0], T.Var) and x[0] is not x[1]
    for operands in ((x, y), (x, x, y)):
        with pytest.raises(TileError, match="pairs of the same dtype"):
            (T.fma2 if len(operands) == 3 else T.add2)(*operands)


def test_let_in_an_expression(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=64):
            x = T.Var("x", "float32")
            y = T.Var("y", "float32")
            for i in T.Parallel(64):
                B[0, i] = T.let(x, A[i] + 1, x * x)
                B[1, i] = T.Let(x - y, where={x: A[i], y: 2})
                B[2, i] = T.let(A[i] * 2) + 1

    a, b = torch.randn(64), torch.zeros(3, 64)
    way(kernel, a, b)
    torch.testing.assert_close(b, torch.stack([(a + 1) ** 2, a - 2, a * 2 + 1]))


def test_let_as_a_statement_and_an_annotation(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((2, 64), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                x = T.Var("x", "int32")
                T.let(x, i * 3)
                y: T.let[T.int32] = A[i]
                B[0, i] = x + x
                B[1, i] = y

    a, b = torch.randn(64) * 10, torch.zeros(2, 64, dtype=torch.int32)
    way(kernel, a, b)
    assert torch.equal(b, torch.stack([torch.arange(64) * 6, a.to(torch.int32)]).int())


def test_a_symbol_is_a_size(way):
    n = T.Var("n", "int32")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i] + n

    a, b = torch.randn(50), torch.zeros(50)
    way(kernel, a, b)
    assert torch.equal(b, a + 50) and isinstance(n, T.Var) and not isinstance(3, T.Var)


def test_annotations_of_macros(way):
    @T.macro
    def put(to: T.Buffer, at: T.PrimExpr, value: T.PrimExpr):
        assert isinstance(at, T.PrimExpr)
        to[at] = value * 2

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                put(B, i, A[i])

    a, b = torch.randn(64), torch.zeros(64)
    way(kernel, a, b)
    assert torch.equal(b, a * 2)


def test_memory_by_its_scope(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((8, 8), "float32")):
        again = T.alloc_buffer((64,), "float32", data=A)
        scratch = T.alloc_buffer((64,), "float32")
        with T.Kernel(1, threads=64):
            tile = T.alloc_buffer((64,), "float32", scope="shared.dyn")
            part = T.alloc_buffer([64], scope="local.fragment")
            assert (tile.scope(), part.scope(), scratch.scope()) == ("shared", "fragment", "global")
            T.copy(again, tile)
            T.copy(tile, part)
            T.copy(part, scratch)
        with T.Kernel(1, threads=64):
            for i, j in T.Parallel(8, 8):
                B[i, j] = scratch[i * 8 + j]

    a, b = torch.randn(64), torch.zeros(8, 8)
    way(kernel, a, b)
    assert torch.equal(b, a.view(8, 8))


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: T.let(3, 4, 5), "bad_argument"),
        (lambda: T.Let(T.Var("x"), where={"x": 1}), "bad_argument"),
        (lambda: T.alloc_buffer((8,), scope="local.var"), "bad_scope"),
        (lambda: T.alloc_buffer((8,), scope="elsewhere"), "bad_scope"),
        (lambda: T.alloc_buffer((8,), strides=(1,)), "bad_argument"),
    ],
)
def test_what_names_cannot_be(make, code):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32")):
            with T.Kernel(1):
                make()

    assert caught.value.code == code


def test_a_name_that_a_type_makes(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), n: T.int32()):
        with T.Kernel(1, threads=64):
            twice = T.int32()
            T.let(twice, n * 2)
            for i in T.Parallel(64):
                A[i] = twice + i

    a = torch.zeros(64, dtype=torch.int32)
    way(kernel, a, 5)
    assert torch.equal(a, 10 + torch.arange(64, dtype=torch.int32))
    assert isinstance(T.uint8(), T.Var) and (T.int64() & 7).dtype == T.int64


def test_conditions_as_tir_spells_them(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "bool")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[i] = T.Not(T.And(A[i] > 0, T.Or(A[i] < 1, i > 40)))

    a, b = torch.randn(64), torch.zeros(64, dtype=torch.bool)
    way(kernel, a, b)
    assert torch.equal(b, ~((a > 0) & ((a < 1) | (torch.arange(64) > 40))))


def test_values_without_effect_are_dropped():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            T.evaluate(0)
            T.evaluate(A[0])
            T.evaluate(T.atomic_add(A[1], 1, return_prev=True) + 1)

    assert "evaluate" not in kernel.script().replace("atomic", "") and "atomic" in kernel.script()


def test_parameters_declared_in_the_body(way):
    @T.prim_func
    def kernel(A, B, n):
        m = T.dynamic("m")
        A: T.Tensor[[m], T.float32]
        n: T.int32
        B: T.Tensor[[m * 2 + 1], T.float32]
        with T.Kernel(1, threads=1):
            for i in T.serial(m * 2 + 1):
                B[i] = A[i % m] + n

    a, b = torch.randn(5), torch.zeros(11)
    way(kernel, a, b, 3)
    torch.testing.assert_close(b, a.repeat(3)[:11] + 3)


def test_a_parameter_that_nothing_declares():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A, n):
            n: T.int32
            with T.Kernel(1, threads=1):
                A[0] = n

    assert caught.value.code == "bad_annotation" and "`A`" in str(caught.value)


def test_hints_and_names_of_values(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                x = T.bind(A[i] + 1)
                if T.likely(i < 40):
                    B[i] = x * x

    a, b = torch.randn(64), torch.zeros(64)
    way(kernel, a, b)
    assert torch.equal(b[:40], (a[:40] + 1) * (a[:40] + 1)) and not b[40:].any()
    assert T.ramp is T.Ramp and T.broadcast is T.Broadcast


def test_local_arrays_lanes_and_names_bound_again():
    """As TileLang's files write them; `w` is a tensor outside the loop and a number inside it."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), w: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=1):
            start = T.alloc_fragment((1,), "int32", "local")
            pair = T.alloc_local((1,), T.float32x2)
            start[0] = 2
            B[0] = w[0] + start[0]
            pair[0] = T.float32x2(A[0], A[1])
            for i in T.serial(1, 8):
                w = pair[0][1] + i
                B[i] = w

    a, b = torch.randn(8), torch.full((8,), torch.nan)
    torch_tile.compile(kernel, target="cpu")(a, a, b)
    torch.testing.assert_close(b, torch.cat([a[:1] + 2, a[1] + torch.arange(1, 8)]))
    with pytest.raises(TileError, match="lanes"):
        T.float32x2(1.0, 2.0, 3.0)


def test_a_result_by_position_that_nothing_writes_is_warned_of():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32"), C: T.Tensor((2,), "float32")):
        with T.Kernel(1):
            T.copy(A, B)

    with pytest.warns(UserWarning, match="`C` is returned, but no statement writes it"):
        made = torch_tile.compile(kernel, out_idx=[1, 2], target="cpu")
    a = torch.randn(4)
    b, c = made(a)
    assert torch.equal(a, b) and c.shape == (2,)


# What these mean in any function: operands of arithmetic, and TIR's parts that the language has no use for.
PLAIN = {"x", "y", "a", "b", "value", "mask", "dtype", "lanes", "buffer", "shape", "span", "annotations"}


def documented(function):
    """What a docstring says, with those of the functions that it refers to."""
    text = inspect.getdoc(function) or ""
    referred = [getattr(T, name, None) for name in re.findall(r"T\.(\w+)|`(make_\w+)`", text) for name in name if name]
    return text + "".join(inspect.getdoc(found) or "" for found in referred if callable(found))


def test_parameters_are_typed_and_explained():
    """Every public function says what each of its parameters is, or which function says it."""
    lacking = []
    for name in T.__all__:
        function = getattr(T, name)
        if not callable(function) or inspect.isclass(function) or isinstance(function, str):
            continue
        text = documented(function)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.annotation is parameter.empty:
                lacking.append(f"T.{name}: `{parameter.name}` has no type")
            if parameter.name not in PLAIN and not re.search(rf"\b{parameter.name}\b", text):
                lacking.append(f"T.{name}: `{parameter.name}` is not explained")
    assert not lacking, "\n".join(lacking)
