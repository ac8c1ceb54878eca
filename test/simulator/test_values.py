# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from torch_tile.ir import dtype as dt
from torch_tile.simulator import values as va

LOW = [dt.float16, dt.bfloat16, dt.float8_e4m3fn, dt.float8_e5m2]
INTEGERS = [t for t in dt.ALL if t.is_integer]
PYTHON = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
    "%": lambda a, b: a % b, "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b, "min": min, "max": max, "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}  # fmt: skip


def wrapped(number, dtype):
    """A Python integer as its two's complement in `dtype`."""
    number %= 1 << dtype.bits
    return number - (1 << dtype.bits) if dtype.kind == "int" and number >= 1 << (dtype.bits - 1) else number


@pytest.mark.parametrize("op", PYTHON)
@pytest.mark.parametrize("dtype", [dt.int8, dt.int32, dt.int64, dt.uint8, dt.uint32], ids=str)
def test_integer_operators(op, dtype, seed):
    """Lanes and Python numbers give what Python gives; narrow and unsigned results wrap, others when cast."""
    half = 1 << min(dtype.bits - 2, 20)
    a = torch.randint(0 if dtype.kind == "uint" else -half, half, (50,))
    b = torch.randint(1, 6 if op in ("<<", ">>") else half, (50,))
    wanted = [PYTHON[op](x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    together = va.binary(op, a, b, dtype)
    single = [va.binary(op, x, y, dtype) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert together.tolist() == single
    if not isinstance(wanted[0], bool):
        wanted = [wrapped(w, dtype) for w in wanted]
        together = va.cast(together, dtype, dtype)
    assert together.tolist() == wanted


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_casts_between_integers_wrap(dtype):
    numbers = torch.tensor([0, 1, -1, 127, 128, -129, 255, 256, 2**31, -(2**31) - 1, 2**40 + 3])
    wanted = [wrapped(n, dtype) for n in numbers.tolist()]
    if dtype.name == "uint64":  # held as its two's complement
        wanted = numbers.tolist()
    assert va.cast(numbers, dt.int64, dtype).tolist() == wanted
    assert [va.cast(n, dt.int64, dtype) for n in numbers.tolist()] == wanted


@pytest.mark.parametrize("op", ["+", "-", "*", "/", "//", "%", "min", "max"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_is_rounded_after_each_operation(dtype, op):
    a, b = (torch.randn(200).to(dtype.as_torch()) for _ in range(2))
    b = torch.where(b.float() == 0, torch.ones(()), b.float()).to(dtype.as_torch())
    got = va.binary(op, a, b, dtype)
    exact = va.binary(op, a.double(), b.double(), dt.float64)
    assert got.dtype == dtype.as_torch()
    # float32 in between is wide enough for + - * / of two such numbers: one rounding is seen, not two.
    wanted = exact.float().to(dtype.as_torch())
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["<", "<=", "==", "!=", ">", ">="])
@pytest.mark.parametrize("dtype", [*LOW, dt.float32, dt.float64], ids=str)
def test_comparisons_of_floats(dtype, op):
    a = torch.tensor([0.0, 1.0, -2.0, math.nan, 0.5]).to(dtype.as_torch())
    got = va.binary(op, a[:, None], a[None, :], dtype)
    wanted = [[PYTHON[op](x, y) for y in a.tolist()] for x in a.tolist()]
    assert got.tolist() == wanted
    assert va.binary(op, a[1], a[1], dtype) is wanted[1][1]


@pytest.mark.parametrize("dtype", [dt.float32, dt.float64, dt.bfloat16], ids=str)
def test_min_and_max_keep_nan(dtype):
    nan, one = va.constant(math.nan, dtype), va.constant(1.0, dtype)
    for op in ("min", "max"):
        assert math.isnan(va.binary(op, nan, one, dtype).item())
        assert math.isnan(va.binary(op, one, nan, dtype).item())


@pytest.mark.parametrize("to", [*LOW, dt.float32, dt.int8, dt.int32, dt.uint8, dt.bool_], ids=str)
def test_casts_of_floats(to):
    x = torch.randn(100) * 20
    x = x.abs() if to.kind == "uint" else x
    assert torch.equal(va.cast(x, dt.float32, to).double(), x.to(to.as_torch()).double())
    single = va.cast(x[3], dt.float32, to)
    assert float(single) == x[3].to(to.as_torch()).double().item()


@pytest.mark.parametrize("to", [*LOW, dt.float32, dt.float64], ids=str)
def test_casts_of_integers_to_floats(to):
    assert va.cast(7, dt.int32, to).item() == 7.0
    assert va.cast(True, dt.bool_, to).item() == 1.0
    lanes = torch.arange(-8, 8)
    assert torch.equal(va.cast(lanes, dt.int32, to).double(), lanes.double())


@pytest.mark.parametrize("dtype", [dt.float16, dt.bfloat16, dt.float32, dt.float64], ids=str)
@pytest.mark.parametrize("name", ["exp", "sqrt", "tanh", "abs", "floor"])
def test_calls_have_their_dtype(name, dtype):
    x = torch.rand(50).to(dtype.as_torch())
    got = va.call(name, [x], dtype, dtype)
    assert got.dtype == dtype.as_torch()
    wide = x if dtype.bits >= 32 else x.float()
    assert torch.equal(got, getattr(torch, name)(wide).to(got.dtype))


def test_calls_of_integers_and_predicates():
    assert va.call("abs", [-3], dt.int32, dt.int32) == 3
    assert va.call("isnan", [torch.tensor(math.nan)], dt.float32, dt.bool_) is True
    assert va.call("isinf", [torch.tensor([1.0, math.inf])], dt.float32, dt.bool_).tolist() == [False, True]


def test_unary():
    assert va.unary("-", 3, dt.uint8) == 253
    assert va.unary("~", 3, dt.int32) == -4
    assert va.unary("not", True, dt.bool_) is False
    assert va.unary("not", torch.tensor([True, False]), dt.bool_).tolist() == [False, True]
    assert va.unary("-", torch.tensor(1.5, dtype=torch.bfloat16), dt.bfloat16).item() == -1.5


def test_division_by_zero_stops_nobody():
    """Lanes that a guard hides may divide by zero; the quotient there is undefined."""
    got = va.binary("//", torch.tensor([6, 7]), torch.tensor([0, 2]), dt.int32)
    assert got[1] == 3
    va.binary("%", 5, 0, dt.int32)


def test_conditions():
    some, none = torch.tensor([True, False]), torch.tensor([False, False])
    assert va.both(None, some) is some and va.both(some, True) is some
    assert va.both(some, False).tolist() == [False, False]
    assert va.some(some) and not va.some(none) and va.some(True) and not va.some(False)
    assert va.pick(True, 1, 2) == 1
    assert va.pick(some, 1, 2).tolist() == [1, 2]
