# SPDX-License-Identifier: Apache-2.0
import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from torch_tile.diagnostics.errors import TileError
from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import (
    Binary,
    Call,
    Cast,
    Const,
    Select,
    Unary,
    Var,
    binary,
    cast,
    const,
    fold,
    maximum,
    minimum,
    natural,
    select,
    to_expr,
    truth,
    unary,
)  # fmt: skip
from torch_tile.ir.node import equal

i, j = (Var(n, dt.int32, "loop") for n in "ij")
x, h, b = Var("x", dt.float32), Var("h", dt.float16), Var("b", dt.bool_)
u8, i64, f64 = Var("u8", dt.uint8), Var("i64", dt.int64), Var("f64", dt.float64)
true, false = const(True, dt.bool_), const(False, dt.bool_)


@pytest.mark.parametrize(
    ("e", "want"),
    [
        (h + 1, dt.float16), (1.5 * h, dt.float16), (x / 3, dt.float32), (i + 1, dt.int32), (u8 + 1, dt.int32),
        (i64 * 2, dt.int64), (f64 - 0.1, dt.float64), (i + 0.5, dt.float32), (u8 * 1.5, dt.float32),
        (maximum(h, 0), dt.float16), (select(b, h, 0.0), dt.float16), (h > 1, dt.bool_), (i == 1.5, dt.bool_),
    ],
)  # fmt: skip
def test_a_plain_number_takes_the_type_of_the_other_operand_but_widens_narrow_integers(e, want):
    assert e.dtype == want


@pytest.mark.parametrize(
    ("e", "want"),
    [
        (h + x, dt.float32), (h + i, dt.float16), (i + i64, dt.int64), (u8 + i, dt.int32), (b + b, dt.int32),
        (i / j, dt.float32), (i // j, dt.int32), (h**2, dt.float16), (i**2, dt.float32), (b & b, dt.bool_),
        (minimum(h, x), dt.float32), (select(b, i, x), dt.float32), (-h, dt.float16), (~i, dt.int32), (~b, dt.bool_),
        (abs(i), dt.int32),
    ],
)  # fmt: skip
def test_two_types_meet_in_their_common_one(e, want):
    assert e.dtype == want
    if isinstance(e, Binary):
        assert e.a.dtype == e.b.dtype


def test_every_operator_on_either_side():
    for sign in ("+", "-", "*", "/", "//", "%"):
        f = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
             "%": operator.mod}[sign]  # fmt: skip
        for e, a, b_ in ((f(x, 2.0), x, 2.0), (f(2.0, x), 2.0, x)):
            assert isinstance(e, Binary) and e.op == sign
            sides = [side.value if isinstance(side, Const) else side for side in (e.a, e.b)]
            assert sides[0] is a or sides[0] == a
            assert sides[1] is b_ or sides[1] == b_
    for sign, f in {
        "<<": operator.lshift,
        ">>": operator.rshift,
        "&": operator.and_,
        "|": operator.or_,
        "^": operator.xor,
    }.items():
        assert f(i, 2).op == sign and equal(f(2, i), Binary(sign, const(2, dt.int32), i))
    for sign, f in {
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
    }.items():
        assert equal(f(i, 2), Binary(sign, i, const(2, dt.int32)))
    assert +i is i


FOLDED = ["+", "-", "*", "//", "%", "&", "|", "^", "<<", ">>", "min", "max", "<", "<=", "==", "!=", ">", ">="]


@settings(max_examples=200)
@given(
    st.sampled_from(FOLDED),
    st.sampled_from([t for t in dt.ALL if t.is_integer]), st.integers(-300, 300), st.integers(-300, 300),
)  # fmt: skip
def test_folding_computes_what_the_operator_means(op, t, a, c):
    """In a type that wraps the result wraps; without a result (division by zero) nothing is folded."""
    left, right = const(a, t), const(c, t)
    folded = fold(op, left, right)
    if (op in ("//", "%") and right.value == 0) or (op in ("<<", ">>") and not 0 <= right.value < t.bits):
        assert folded is None
        return
    assert folded is not None and folded.dtype == (dt.bool_ if op[0] in "<>=!" and op not in ("<<", ">>") else t)
    want = evaluate(Binary(op, left, right), {})
    assert folded.value == (want if isinstance(want, bool) else const(want, t).value)


def test_floating_arithmetic_is_left_to_the_device():
    one = natural(1.0)
    assert isinstance(binary("+", one, one), Binary)
    assert binary("<", one, natural(2.0)).value is True


def test_logic_folds_and_keeps_order():
    assert binary("and", true, i < 3).op == "<" and binary("and", i < 3, false) is false
    assert binary("or", i < 3, true) is true and equal(binary("or", false, b), b)
    assert equal(binary("and", i, b), Binary("and", Binary("!=", i, const(0, dt.int32)), b))
    assert unary("not", true).value is False and equal(unary("not", i), Unary("not", i != 0))
    assert equal(select(true, i, j), i) and equal(select(false, i, j), j)


def test_casts():
    assert cast(i, dt.int32) is i and isinstance(cast(i, "float16"), Cast)
    assert cast(3, dt.float16).value == 3.0 and cast(natural(2.9), dt.int32).value == 2
    assert cast(natural(-2.9), dt.int32).value == -2 and cast(natural(300), dt.uint8).value == 44
    assert cast(natural(0.1), dt.float16).value == float(np.float16(0.1))
    assert cast(natural(math.inf), dt.int32).value == 2**31 - 1 and cast(natural(-0.5), dt.uint8).value == 0
    assert cast(natural(0.5), dt.bool_).value is True
    assert x.astype("int64").dtype == dt.int64


def test_literals():
    assert natural(True).dtype == dt.bool_ and natural(2**31 - 1).dtype == dt.int32 and natural(2**31).dtype == dt.int64
    assert natural(0.1).value == float(np.float32(0.1))
    assert const(-1, dt.uint8).value == 255 and const(128, dt.int8).value == -128 and const(2, dt.bool_).value is True
    assert to_expr(np.int64(7)).value == 7 and to_expr(np.float32(0.5), dt.float16).dtype == dt.float16
    assert to_expr(0.5, dt.int32).dtype == dt.float32 and to_expr(3, dt.bool_).dtype == dt.int32
    assert truth(natural(2)).value is True


def test_extremes_fold():
    assert minimum(natural(2), 3).value == 2 and maximum(natural(2.5), 3).value == 3.0
    assert isinstance(minimum(i, 3), Binary)


def test_powers_and_magnitudes_are_calls():
    assert isinstance(h**2, Call) and (h**2).name == "pow" and abs(x).name == "abs"
    assert equal(2**h, Call("pow", (const(2, dt.float16), h), dt.float16))


ERRORS = {
    "a tile expression as a Python condition": (lambda: bool(i < 3), "symbolic_condition"),
    "an object": (lambda: i + object(), "bad_operand"),
    "a string": (lambda: maximum("a", i), "bad_operand"),
    "a bitwise operator on floats": (lambda: x & 1, "bad_operand"),
    "a complement of a float": (lambda: ~x, "bad_operand"),
    "an unknown type": (lambda: cast(i, "int7"), "bad_dtype"),
    "an infinity as an integer": (lambda: const(math.inf, dt.int32), "bad_operand"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, code = ERRORS[name]
    with pytest.raises(TileError) as caught:
        make()
    assert caught.value.code == code


def test_buffers_and_regions():
    rows = Var("M", dt.int32, "dim")
    tile = Buffer("t", (const(4, dt.int32), const(8, dt.int32)), dt.float16, "shared")
    assert tile.rank == 2 and tile.static_shape == (4, 8)
    assert Buffer("A", (rows, const(8, dt.int32)), dt.float16, "global").static_shape is None
    part = Region(tile, (Range(i, const(2, dt.int32)), Range(j, const(1, dt.int32), keep=False)))
    assert [e.value for e in part.extents] == [2, 1] and part.starts == (i, j)
    assert [e.value for e in part.tile_shape] == [2]


def test_selects_of_literals():
    both = select(b, 1, 0.5)
    assert isinstance(both, Select) and both.dtype == dt.float32
