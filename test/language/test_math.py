# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.intrinsics import lookup
from torch_tile.language.math import FUNCTIONS
from torch_tile.simulator.tile.interpreter import evaluate

PYTHON = {
    "abs": torch.abs,
    "quick_sigmoid": torch.sigmoid,
    "quick_erf": torch.erf,
    "quick_tanh": torch.tanh,
    "fma": lambda a, b, c: a * b + c,
    "float_from_bits": lambda a, b, c: torch.zeros_like(a),  # of what is less than 1, whose int32 is 0
    "nibble": lambda a, b, c: torch.zeros_like(a),
    "nibble_in_place": lambda a, b, c: torch.zeros_like(a),
    "round": torch.round,
}


def arity(name):
    return lookup(name).arity


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_function_of_one_to_three_operands(dtype):
    """The language's functions in the interpreter and on the CPU against torch in float64."""
    names = [
        n for n in FUNCTIONS if not n.startswith("is") and n not in ("float8_of_code", "positive_half")
    ]  # tested below

    @T.prim_func
    def kernel(x: T.Tensor((40,), dtype), y: T.Tensor((40,), dtype), out: T.Tensor((len(names), 40), dtype)):
        with T.Kernel(1) as _:
            for row, name in enumerate(names):
                for i in T.Parallel(40):
                    out[row, i] = getattr(T, name)(*[x[i], y[i], y[i]][: arity(name)])

    torch_type = getattr(torch, dtype)
    x, y = ((torch.rand(40) * 0.9 + 0.05).to(torch_type) for _ in range(2))
    wide = x.double(), y.double(), y.double()
    compiled = tilelang.compile(kernel)
    for run in (lambda *args: evaluate(kernel, *args), compiled):
        out = torch.zeros(len(names), 40, dtype=torch_type)
        run(x, y, out)
        for row, name in enumerate(names):
            wanted = PYTHON.get(name, getattr(torch, name, None))(*wide[: arity(name)])
            tolerance = {"float32": 3e-6, "float64": 1e-13, "bfloat16": 1e-2}[dtype]
            torch.testing.assert_close(
                out[row].double(),
                wanted,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_nibble():
    """Each field of 4 bits of an int32, of its sign bit too, on the CPU and in the interpreter."""

    @T.prim_func
    def kernel(x: T.Tensor((16,), "int32"), out: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(16, 8):
                out[i, j] = T.nibble(x[i], j // 2, j % 2)

    x = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32)
    want = torch.stack([x.long() % 2**32 >> 4 * j & 15 for j in range(8)], 1).float()
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(16, 8)
        run(x, out)
        assert torch.equal(out, want)


def test_nibble_in_place():
    """The float16 that a masked half of a word is, of all fields and signs, on the CPU and in the interpreter."""

    @T.prim_func
    def kernel(x: T.Tensor((16,), "int32"), out: T.Tensor((16, 4, 2), "float16")):
        with T.Kernel(1) as _:
            for i, place, half in T.Parallel(16, 4, 2):
                out[i, place, half] = T.nibble_in_place(x[i], place, half)

    x = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32)
    halves = torch.stack([x.long() % 2**32 >> 16 * half for half in range(2)], 1)
    bits = torch.stack([halves >> 4 * (place - place % 2) & 15 << 4 * (place % 2) for place in range(4)], 1)
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(16, 4, 2, dtype=torch.float16)
        run(x, out)
        assert torch.equal(out.view(torch.int16).long(), bits)


def test_positive_half():
    """Numbers of all sizes, ties, numbers below 0, infinities and NaN; on the CPU and in the interpreter."""

    @T.prim_func
    def kernel(x: T.Tensor((512,), "float32"), out: T.Tensor((512,), "float16")):
        with T.Kernel(1) as _:
            for i in T.Parallel(512):
                out[i] = T.cast(T.positive_half(x[i]), "float16")

    few = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 2.0**-25, 2.0**-26, 3 * 2.0**-25, 65519.0, 65520.0])
    x = torch.cat([few, torch.randn(512 - len(few)) * 2.0 ** torch.randint(-26, 17, (512 - len(few),))])
    want = torch.where(x < 0, 0.0, x).half()
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(512, dtype=torch.float16)
        run(x, out)
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def test_float8_of_code():
    """Rounded codes, halves, numbers below 0 and NaN; on the CPU and in the interpreter."""

    @T.prim_func
    def kernel(x: T.Tensor((512,), "float32"), out: T.Tensor((512,), "float8_e4m3fn")):
        with T.Kernel(1) as _:
            for i in T.Parallel(512):
                out[i] = T.cast(T.float8_of_code(x[i]), "float8_e4m3fn")

    codes = torch.cat(
        [torch.arange(127), torch.arange(126) + 0.5, torch.rand(256) * 126.4, torch.tensor([-1.0, -1e30, math.nan])]
    )
    want = codes[:-1].clamp_min(0).round().to(torch.uint8)
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(512, dtype=torch.float8_e4m3fn)
        run(codes * 2.0**-24, out)
        assert torch.equal(out[:-1].view(torch.uint8), want) and out[-1].isnan()


def test_table_nibble():
    """The number with the index that a field of 4 bits is; a table of another length is refused."""
    table = [*torch.randn(16).tolist()[:-1], -0.0]

    @T.prim_func
    def kernel(x: T.Tensor((16,), "int32"), out: T.Tensor((16, 8), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(16, 8):
                out[i, j] = T.table_nibble(x[i], j // 2, j % 2, table)

    x = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32)
    want = torch.tensor(table)[torch.stack([x.long() % 2**32 >> 4 * j & 15 for j in range(8)], 1)]
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(16, 8)
        run(x, out)
        assert torch.equal(out, want)
    with pytest.raises(TileError, match=r"T\.table_nibble.* has 3 numbers"):
        T.table_nibble(0, 0, 0, [1.0, 2.0, 3.0])


def test_table_place():
    """The place of a byte's pair in a table with a copy for each lane, whatever the sign of the word."""

    @T.prim_func
    def kernel(x: T.Tensor((16,), "int32"), out: T.Tensor((16, 4, 2), "int32")):
        with T.Kernel(1) as _:
            for i, j, part in T.Parallel(16, 4, 2):
                out[i, j, part] = T.table_place(x[i], j, 2 * i + 1, part)

    x = torch.randint(-(2**31), 2**31, (16,), dtype=torch.int32)
    codes = torch.stack([x.long() % 2**32 >> 8 * j & 255 for j in range(4)], 1)
    want = (codes * 64 + 2 * (2 * torch.arange(16)[:, None] + 1))[:, :, None] + torch.arange(2)
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.empty(16, 4, 2, dtype=torch.int32)
        run(x, out)
        assert torch.equal(out, want.int())


def test_float_from_bits():
    """Integers become floats by their bits, in the interpreter and on the CPU; the fourth byte holds -0.5's."""

    @T.prim_func
    def kernel(x: T.Tensor((5,), "int32"), out: T.Tensor((2, 5), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(5):
                out[0, i] = T.float_from_bits(x[i], -1, 0)
                out[1, i] = T.float_from_bits(x[i], 15, 0x4B000008)

    x = torch.tensor([0, 7, 0x3F800000, -0x41000000, -1], dtype=torch.int32)
    for run in (lambda *args: evaluate(kernel, *args), tilelang.compile(kernel)):
        out = torch.zeros(2, 5)
        run(x, out)
        torch.testing.assert_close(out[0], x.view(torch.float32), equal_nan=True, rtol=0, atol=0)
        assert (out[1] - 2**23).tolist() == [8, 15, 8, 8, 7]


def test_predicates():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32"), out: T.Tensor((3, 4), "bool")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                out[0, i] = T.isnan(x[i])
                out[1, i] = T.isinf(x[i])
                out[2, i] = T.isfinite(x[i])

    x, out = torch.tensor([1.0, math.nan, math.inf, -math.inf]), torch.zeros(3, 4, dtype=torch.bool)
    evaluate(kernel, x, out)
    assert torch.equal(out, torch.stack([x.isnan(), x.isinf(), x.isfinite()]))


def test_helpers_on_python_numbers_stay_python():
    assert (T.ceildiv(10, 4), T.floordiv(-7, 2), T.floormod(-7, 2), T.truncdiv(-7, 2), T.align_up(10, 8)) == (
        3,
        -4,
        1,
        -3,
        16,
    )
    assert (T.max(3, 1, 2), T.min(3, 1, 2), T.max(1.5, 2), T.clamp(7, 0, 5)) == (3, 1, 2, 5)
    assert all(type(x) is int for x in (T.ceildiv(10, 4), T.max(3, 1), T.align_up(10, 8)))


def test_helpers_on_expressions():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((16,), "int32")):
        with T.Kernel(1) as _:
            out[0] = T.ceildiv(n, 4)
            out[1] = T.floordiv(n, 4)
            out[2] = T.floormod(n, 4)
            out[3] = T.truncdiv(n, 4)
            out[4] = T.align_up(n, 8)
            out[5] = T.max(n, 3, 5)
            out[6] = T.clamp(n, -2, 2)
            out[7] = T.shift_left(n, 2)
            out[8] = T.shift_right(n, 1)
            out[9] = T.bitwise_and(n, 6)
            out[10] = T.bitwise_or(n, 1)
            out[11] = T.bitwise_xor(n, 3)
            out[12] = T.bitwise_not(n)
            out[13] = T.Select(T.logical_or(n < -5, n > 5), 1, 0)
            out[14] = T.cast(T.logical_and(n > 0, n < 8), "int32")
            out[15] = T.Cast(n, "float32") * 0.5 > 1

    def wanted(n):
        return [-(-n // 4), n // 4, n % 4, int(n / 4), -(-n // 8) * 8, max(n, 5), max(-2, min(n, 2)), n << 2, n >> 1,
                n & 6, n | 1, n ^ 3, ~n, int(abs(n) > 5), int(0 < n < 8), int(n * 0.5 > 1)]  # fmt: skip

    for n in (-9, -4, 0, 3, 7, 100):
        out = torch.zeros(16, dtype=torch.int32)
        evaluate(kernel, n, out)
        assert out.tolist() == wanted(n)


def test_remainders_of_truncated_division_and_negations():
    @T.prim_func
    def kernel(a: T.int32, b: T.int32, out: T.Tensor((5,), "int32")):
        with T.Kernel(1) as _:
            out[0] = T.truncmod(a, b)
            out[1] = T.indexdiv(a, b) * b + T.indexmod(a, b)
            out[2] = T.cast(T.logical_not(a > b), "int32")
            out[3] = T.cast(T.logical_not(a), "int32")
            out[4] = T.logical_not(3 > 2)

    for a, b in itertools.product((-50, -48, 0, 47, -(2**31)), (-3, 3, -7, 50)):
        out = torch.full((5,), 77, dtype=torch.int32)
        evaluate(kernel, a, b, out)
        assert out.tolist() == [int(math.fmod(a, b)), a, int(a <= b), int(a == 0), 0]
        assert T.truncmod(a, b) == math.fmod(a, b)


def test_index_to_coordinates(seed):
    """Row-major, of numbers and of expressions."""
    shape = (3, 1, 5)

    @T.prim_func
    def kernel(out: T.Tensor((15, 3), "int32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(15):
                for d, where in enumerate(T.index_to_coordinates(i, shape)):
                    out[i, d] = where

    out = torch.full((15, 3), -1, dtype=torch.int32)
    evaluate(kernel, out)
    assert (
        out.tolist() == [T.index_to_coordinates(i, shape) for i in range(15)] == [[i // 5, 0, i % 5] for i in range(15)]
    )
    assert T.index_to_coordinates(-1, (4, 6)) == [3, 5]


def test_cast_with_the_dtype_in_front():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((3,), "float32")):
        with T.Kernel(1) as _:
            out[0] = T.Cast("float32", n) * 0.5
            out[1] = T.Cast(torch.float32, T.Cast(T.int8, n + 256))
            out[2] = T.Cast("float32", 3)

    out = torch.zeros(3)
    evaluate(kernel, 7, out)
    assert out.tolist() == [3.5, 7, 3]


def test_truncated_division_by_numbers_of_either_sign():
    @T.prim_func
    def kernel(a: T.int32, b: T.int32, out: T.Tensor((3,), "int32")):
        with T.Kernel(1) as _:
            out[0] = T.truncdiv(a, b)
            out[1] = T.truncdiv(a, -3)
            out[2] = T.truncdiv(50, b)

    for a, b in itertools.product((-50, -48, 0, 47, 48, -(2**31)), (-3, 3, -7, 50)):
        out = torch.zeros(3, dtype=torch.int32)
        evaluate(kernel, a, b, out)
        assert out.tolist() == [int(x / y) for x, y in ((a, b), (a, -3), (50, b))]
        assert T.truncdiv(a, b) == int(a / b)
    assert T.truncdiv(10**17 + 1, -1) == -(10**17) - 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_limits_of_floats(dtype):
    info = torch.finfo(getattr(torch, dtype))
    assert (T.max_value(dtype).value, T.min_value(dtype).value) == (info.max, info.min)
    if dtype != "float8_e4m3fn":
        assert T.infinity(dtype).value == math.inf


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint16"])
def test_limits_of_integers(dtype):
    info = torch.iinfo(getattr(torch, dtype))
    assert (T.max_value(dtype).value, T.min_value(dtype).value) == (info.max, info.min)


def test_dtypes_are_casts_and_have_many_spellings():
    assert T.float16(2).dtype == T.float16 and T.float16(2).value == 2.0
    assert T.dtype("half") == T.dtype(torch.float16) == T.half == T.float16
    assert T.dtype(float) == T.float32 and T.dtype("e4m3") == T.float8_e4m3fn
    assert T.float16.as_torch() is torch.float16 and (T.float16.bits, T.float16.itemsize) == (16, 2)


def test_wrong_operands():
    with pytest.raises(TileError) as caught:
        T.max(1)
    assert caught.value.code == "bad_argument"
    with pytest.raises(TileError) as caught:
        T.exp(T.float32(1.0), 2)
    assert caught.value.code == "bad_call" and "takes 1 positional argument but 2 were given" in str(caught.value)
    with pytest.raises(TileError) as caught:
        T.sqrt("two")
    assert caught.value.code == "bad_argument"


def test_unknown_names_say_where_to_look():
    with pytest.raises(AttributeError, match="has no `teleport`"):
        T.teleport


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_round_with_a_mode(way, dtype):
    """Halves away from zero: also the largest number below a half, and infinities."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), dtype), B: T.Tensor((2, 64), dtype)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[0, i] = T.round(A[i])
                B[1, i] = T.round(A[i], "ties-away-from-zero")

    kind = getattr(torch, dtype)
    special = torch.tensor([0.49999997, -0.49999997, torch.inf, -torch.inf])
    a = torch.cat([(torch.arange(60) - 30) / 4, special]).to(kind)
    b = torch.zeros(2, 64, dtype=kind)
    way(kernel, a, b)
    assert torch.equal(b[0], a.round())
    assert torch.equal(b[1], torch.where((a - a.trunc()).abs() >= 0.5, a.trunc() + a.sign(), a.trunc()))


def test_round_with_an_unknown_mode():
    with pytest.raises(TileError, match="ties-to-even"):
        T.round(3.5, "up")


def test_saturation_as_a_bool():
    for sat, expected in ((True, 448.0), ("satfinite", 448.0), (False, None), (None, None)):
        text = repr(T.cast(T.Var("x", "float32"), "float8_e4m3fn", sat=sat))
        assert ("448" in text) == (expected is not None)


@pytest.mark.parametrize("name", ["exp", "exp10", "log", "log2", "log10", "sin", "cos", "tan"])
def test_fast_spellings_take_floats_only(name):
    function = getattr(T, f"__{name}")
    assert function.__name__ == f"__{name}"
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert function(T.Var("x", dtype)).dtype == dtype
    for dtype in ("bool", "int8", "uint64", "int32", "float8_e4m3fn", "float8_e5m2"):
        with pytest.raises(TypeError, match=f"__{name} only supports floating-point inputs, but got {dtype}"):
            function(T.Var("x", dtype))
