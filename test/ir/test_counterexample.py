# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.counterexample import FAR
from torch_tile.ir.expr import Expr, Var, const, maximum, minimum, select
from torch_tile.ir.polynomial import Polynomial

n, m = (Var(name, dt.int32, "dim") for name in "nm")
i, j, t = (Var(name, dt.int32, role) for name, role in (("i", "loop"), ("j", "loop"), ("t", "thread")))


def refuted(e: Expr, ranges: Ranges) -> bool:
    """Whether `e >= 0` has a counterexample."""
    return ranges._is_refuted(ranges._atoms.of(e))


def test_what_can_be_negative_is_refuted():
    inside = Ranges().loop(i, 0, n).loop(t, 0, 128)
    for e in (i - 1, n - 2 - i, 1 - t // 32, 30 - t % 32, minimum(i, t) - 1, 5 - maximum(n - i, t), t - i):
        assert refuted(e, inside), e


def test_what_follows_is_not():
    inside = Ranges().loop(i, 0, n).loop(t, 0, 128).assume(i * 8 + 7 < m)
    for e in (i, n - 1 - i, 3 - t // 32, 31 - t % 32, m - 8 - i * 8, n - 1, maximum(i, t), (n + 31) // 32 * 32 - n):
        assert not refuted(e, inside), e


def test_numbers_keep_to_every_condition():
    known = Ranges().loop(i, 0, n).assume(i >= 5).assume(i <= 7)
    assert refuted(i - 6, known) and refuted(6 - i, known)
    assert not refuted(i - 5, known) and not refuted(7 - i, known)
    assert not refuted(i, known.assume(i > 9))  # nothing gets here


def test_beyond_what_stands_for_no_limit():
    """Numbers of which only one end is known, far out."""
    large, small = Ranges().assume(n > FAR), Ranges().assume(i < -FAR - 2)
    assert refuted(m - n, large) and refuted(2 * FAR - n - m, large.assume(n > 3 * FAR)) and refuted(i - m, small)
    assert not refuted(n - FAR, large) and not refuted(-FAR - i, small)


def test_a_choice_that_is_not_known_refutes_nothing():
    assert not refuted(select(n > 3, i, j), Ranges().loop(i, 0, 4).loop(j, 0, 4))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_refuted_that_can_be_proved(seed):
    chance = random.Random(seed)

    def some(depth: int) -> Expr:
        if depth == 0:
            return chance.choice([i, j, t, n, m, const(chance.randint(-9, 99), dt.int32)])
        a, b = some(depth - 1), some(depth - 1)
        size = chance.choice([2, 8, 32])
        made = [a + b, a - b, a * chance.randint(-3, 5), a // size, a % size, minimum(a, b), maximum(a, b), a // n]
        return chance.choice(made)

    known = Ranges().loop(i, chance.randint(0, 3), n).loop(t, 0, 128).loop(j, 0, i + chance.randint(0, 2))
    for _ in range(2):
        known = known.assume(some(1) < some(2))
    for _ in range(40):
        p: Polynomial = known._atoms.of(some(3))
        assert not (known._is_refuted(p) and known._non_negative(p, {})), p.terms
