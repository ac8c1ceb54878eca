# SPDX-License-Identifier: Apache-2.0
import math
import operator

import pytest
from hypothesis import given, settings, strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.interval import Interval, of_binary, range_of

OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min,
    "max": max, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
bounds = st.integers(-20, 20)


def intervals() -> st.SearchStrategy[Interval]:
    closed = st.tuples(bounds, bounds).map(lambda ab: Interval(min(ab), max(ab)))
    return closed | bounds.map(lambda a: Interval(low=a)) | bounds.map(lambda b: Interval(high=b)) | st.just(Interval())


def member(draw_from: Interval) -> st.SearchStrategy[int]:
    low = draw_from.low if isinstance(draw_from.low, int) else min(-200, draw_from.high)
    high = draw_from.high if isinstance(draw_from.high, int) else max(200, low)
    return st.integers(int(low), int(high))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(OPERATORS)), st.data())
def test_results_lie_inside(op, data):
    a, b = data.draw(intervals()), data.draw(intervals())
    x, y = data.draw(member(a)), data.draw(member(b))
    if (op in ("//", "%") and y == 0) or (op in ("<<", ">>") and not 0 <= y < 64):
        return
    found = of_binary(op, a, b)
    assert found.low <= OPERATORS[op](x, y) <= found.high


@pytest.mark.parametrize(("op", "a", "b", "want"), [
    ("+", Interval(1, 2), Interval(3, 4), Interval(4, 6)),
    ("-", Interval(1, 2), Interval(3, 4), Interval(-3, -1)),
    ("*", Interval(-1, 2), Interval(3, 4), Interval(-4, 8)),
    ("//", Interval(0, 127), Interval(32, 32), Interval(0, 3)),
    ("//", Interval(low=5), Interval(2, 2), Interval(low=2)),
    ("%", Interval(0, 3), Interval(8, 8), Interval(0, 3)),
    ("%", Interval(9, 11), Interval(8, 8), Interval(1, 3)),
    ("%", Interval(), Interval(1, 8), Interval(0, 7)),
    ("&", Interval(), Interval(7, 7), Interval(0, 7)),
    ("<<", Interval(1, 3), Interval(2, 2), Interval(4, 12)),
])  # fmt: skip
def test_results_are_as_small_as_expected(op, a, b, want):
    assert of_binary(op, a, b) == want


def test_sets():
    a, b = Interval(0, 5), Interval(3, 9)
    assert a | b == Interval(0, 9) and a & b == Interval(3, 5) and -a == Interval(-5, 0)
    assert Interval(3, 4).within(a) and not b.within(a) and Interval(2, 2).is_point
    assert Interval().low == -math.inf and not Interval().is_point


def test_ranges_of_types():
    assert range_of(dt.bool_) == Interval(0, 1)
    assert range_of(dt.int8) == Interval(-128, 127) and range_of(dt.uint16) == Interval(0, 65535)
