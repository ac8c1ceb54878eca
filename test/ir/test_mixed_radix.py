# SPDX-License-Identifier: Apache-2.0
import random

from hypothesis import given, settings, strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.expr import Binary, Cast, Unary, Var, const
from torch_tile.ir.mixed_radix import MixedRadix

t, i = Var("t", dt.int32, "thread"), Var("i", dt.int32, "loop")
w = Var("w", dt.int64, "loop")
RANGES = Ranges().within(t, 0, 127).within(i, -5, 40)
counts = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32])


@st.composite
def sums(draw, depth=3):
    """Index expressions as layouts make them, and some that they do not."""
    if depth == 0:
        return draw(st.sampled_from([t, t, i, w, const(draw(st.integers(-9, 40)), dt.int32)]))
    a = draw(sums(depth - 1))
    op = draw(st.sampled_from(["+", "+", "-", "*", "//", "//", "%", "%", "<<", ">>", "&", "neg", "same"]))
    if op == "same":
        return a
    if op == "neg":
        return Unary("-", a)
    if op in ("+", "-"):
        b = draw(sums(depth - 1))
        if a.dtype != b.dtype:
            a, b = (x if x.dtype == dt.int64 else Cast(dt.int64, x) for x in (a, b))
        return Binary(op, a, b)
    n = draw(counts)
    if op in ("<<", ">>"):
        return Binary(op, a, const(n.bit_length() - 1, a.dtype))
    return Binary(op, a, const(n - 1 if op == "&" and n & (n - 1) == 0 else n, a.dtype))


def values():
    return {t: random.randrange(128), i: random.randrange(-5, 41), w: random.randrange(-(2**20), 2**20)}


@settings(max_examples=400)
@given(sums(), counts, st.one_of(st.none(), counts), st.booleans())
def test_digits_have_the_value_of_the_expression(e, divisor, modulus, known):
    radix = MixedRadix(RANGES if known else None)
    digits = radix.of(e)
    digit = radix.quotient(digits, divisor, modulus)
    for _ in range(8):
        env = values()
        if abs(value := evaluate(e, env)) >= 2**31:
            continue  # an offset on the chip is narrow
        assert evaluate(digits.expr(), env) == value
        bounds = radix.interval(digits)
        assert bounds.low <= value <= bounds.high
        quotient = value // divisor if modulus is None else value // divisor % modulus
        assert evaluate(digit.expr(), env) == quotient, (e, digit.expr(), env)


def text(e, divisor=1, modulus=None, ranges=None):
    radix = MixedRadix(ranges)
    return repr(radix.quotient(radix.of(e), divisor, modulus).expr())


def test_what_is_left_of_a_digit():
    row = t // 32 * 16 + t // 4 % 8 + i * 8
    assert text(row, 8, 2) == "i % 2"
    assert text(row, 1, 8) == "t // 4 % 8"
    assert text(t // 4 * 4 + t % 4) == "t"
    assert text(t // 8 % 4 * 2 + t // 4 % 2) == "t // 4 % 8"
    assert text(i * 4 + t % 4, 8) == "i // 2"
    assert text(i * 64 + t, 64, None, RANGES) == "i + t // 64"
    assert text(i - t, 8, 4) == "(i - t) // 8 % 4"
    assert text(t // 64 % 2, 1, None, RANGES) in ("t // 64 % 2", "t // 64")


def test_a_sum_below_a_size_has_small_digits():
    radix = MixedRadix()
    lane = radix.below(radix.of(t), 128)
    assert repr(radix.quotient(lane, 32, 4).expr()) == "t // 32"
    unknown = radix.of(i - t)
    assert radix.below(unknown, 8) is unknown
