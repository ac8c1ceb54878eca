# SPDX-License-Identifier: Apache-2.0

import itertools
import math
import operator
import random

import pytest
from hypothesis import given, settings, strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import FAR, Interval, Ranges, binary_interval, dtype_interval, interval, prove
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Expr, Load, Unary, Var, cast, const, maximum, minimum, select  # fmt: skip
from torch_tile.ir.polynomial import Polynomial
from torch_tile.ir.stmt import Block, Kernel


def dim(name: str) -> Var:
    return Var(name, dt.int32, "dim")


def loop(name: str) -> Var:
    return Var(name, dt.int32, "loop")


M, N, K, B, H = (dim(n) for n in "MNKBH")
i, j, k = (loop(n) for n in "ijk")
bx, by = (Var(n, dt.int32, "block") for n in ("bx", "by"))


@st.composite
def scopes(draw: st.DrawFn, random) -> tuple[Ranges, list[dict[Var, int]]]:
    """Two nested loops, perhaps a known condition, and all points (of small sizes) that they allow."""
    i, j, M, N, u = random.i, random.j, random.M, random.N, random.u
    low, high = sorted([draw(random.small), draw(random.small)])
    starts = [const(0, dt.int32), i, minimum(i, N), i - 3]
    stops = [const(5, dt.int32), N, i + 4, i * 2 + 1, (N + 3) // 4, M * N, maximum(i, M)]
    stops += [(maximum(M - i, 0) + (N - 1)) // N, (i + 5) // N, minimum((M * 3 + N) // N, i + 2)]
    start, stop = draw(st.sampled_from(starts)), draw(st.sampled_from(stops))
    step = draw(st.sampled_from([1, 1, 1, 2, 3]))
    products = [j * N < M - i, (j + 1) * N <= M + i, j * N > i, M * N * j <= 9, (i + j) // N >= 1, maximum(j, 0) > i]
    known = draw(st.none() | random.conditions() | st.sampled_from(products))
    ranges = Ranges().loop(i, low, high + 1).loop(j, start, stop, step)
    points = []
    for n, m, a in itertools.product((1, 2, 7), (1, 4), range(low, high + 1)):
        env = {N: n, M: m, i: a, u: 37 * a % 256}
        points += [env | {j: b} for b in range(random.value(start, env), random.value(stop, env), step)]
    if known is not None:
        ranges = ranges.assume(known)
        points = [p for p in points if random.value(known, p) is True]
    return ranges, points


@settings(max_examples=100)
@given(st.data())
def test_interval_holds_every_value(random, data):
    ranges, points = data.draw(scopes(random))
    for _ in range(3):
        e = data.draw(random.integers())
        found = interval(e, ranges)
        values = [random.value(e, p) for p in points]
        assert all(found.low <= v <= found.high for v in values if v is not None)
        assert ranges.may_be_negative(e) or all(v >= 0 for v in values if v is not None)


def test_quotients_by_sizes_are_not_negative():
    for e, low in ((i // N * 4, 0), (i // N - 1, -1), (maximum(i // N - 1, i), 0), (minimum(i // N, j), -5)):
        ranges = Ranges().loop(i, 0, M).loop(j, -5, 5)
        assert ranges.may_be_negative(e) == (low < 0)


@settings(max_examples=200)
@given(st.data())
def test_nothing_false_is_proved(random, data):
    ranges, points = data.draw(scopes(random))
    for _ in range(3):
        claim = data.draw(random.conditions())
        proved, refuted = ranges.prove(claim), ranges.refute(claim)
        values = {random.value(claim, p) for p in points} if proved or refuted else set()
        assert not (proved and False in values) and not (refuted and True in values)


def test_a_variable_stays_below_what_it_says():
    """Sums and remainders of it follow; without such a fact nothing is known of a variable."""
    some, free = (Load(Buffer("v", (), dt.int32, "var", below=below), ()) for below in (10, 0))
    assert interval(some, Ranges()) == Interval(0, 9) and interval(free, Ranges()) == dtype_interval(dt.int32)
    assert interval((some + 3) % 10, Ranges()) == Interval(0, 9) and interval(some // 5, Ranges()) == Interval(0, 1)
    assert prove(some < 10, Ranges()) and not prove(some < 9, Ranges())


def test_numeric_ranges_are_enough():
    ranges = Ranges().loop(i, 0, 8)
    row = Var("row", dt.int32, "let")
    assert prove(i * 2 % 8 < 8, ranges)  # as a polynomial, 2 * i - 8 * (i // 4)
    inside = ranges.define(row, i * 2 % 8)
    assert prove(row < 8, inside) and prove(row >= 0, inside) and prove(row <= 7, inside)
    assert not prove(row < 6, inside) and not prove(row > 0, inside)


@settings(max_examples=100)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_affine_bounds_with_numbers_are_exact(extent, factor, offset, inner):
    ranges = Ranges().loop(i, 0, extent).loop(j, 0, inner)
    top = (extent - 1) * factor + offset + inner - 1
    index = i * factor + offset + j
    assert prove(index <= top, ranges) and not prove(index < top, ranges)
    assert interval(index, ranges) == Interval(offset, top)


TILES = Ranges().loop(bx, 0, (N + 127) // 128).loop(by, 0, 8).loop(k, 0, (K + 63) // 64).loop(i, 0, 128).loop(j, 0, 64)
# Blocks take tiles in turns: bx, bx + B, bx + 2 * B, ..
TURNS = Ranges().loop(bx, 0, B).loop(i, 0, (maximum(N - bx, 0) + (B - 1)) // B)
TRUE = {
    "block start inside a ragged size": (TILES, bx * 128 < N),
    "static tile": (TILES, by * 128 + i < 1024),
    "pipelined start": (TILES, k * 64 < K),
    "guarded": (TILES.assume(bx * 128 + i < N), bx * 128 + i < N),
    "guarded, written otherwise": (TILES.assume(i + bx * 128 <= N - 1), i + 128 * bx < N),
    "rounding down": (TILES, i // 4 * 4 >= 0),
    "digits": (TILES, (i * 64 + j) // 64 == i),
    "last digit": (TILES, (i * 64 + j) % 64 == j),
    "flat address": (Ranges().loop(i, 0, M).loop(j, 0, N), i * N + j < M * N),
    "row of a flat address": (Ranges().loop(i, 0, M).loop(j, 0, N), (i * N + j) // N == i),
    "column of a flat address": (Ranges().loop(i, 0, M).loop(j, 0, N), (i * N + j) % N == j),
    "batch of a joint block index": (Ranges().loop(bx, 0, B * H), bx // H < B),
    "head of a joint block index": (Ranges().loop(bx, 0, B * H), bx % H < H),
    "quotient below a size": (Ranges().loop(bx, 0, M * 4), bx // 4 < M),
    "clamped": (Ranges().loop(bx, 0, M * 4), minimum(bx, M - 1) < M),
    "clamped from below": (Ranges().loop(bx, 0, M), maximum(bx - 3, 0) >= 0),
    "loop stop is a minimum": (Ranges().loop(i, bx * 128, minimum(bx * 128 + 128, M)), i < M),
    "strided loop": (Ranges().loop(k, 0, 128, 32), k + 31 < 128),
    "runs at least once": (Ranges().loop(k, 0, K - 5), K >= 6),
    "select": (Ranges().loop(i, 0, 5), select(N > 3, i, i + 1) <= 5),
    "shift and mask": (Ranges().loop(i, 0, 64), (i >> 3) * 8 + (i & 7) == i),
    "tile of a turn": (TURNS, bx + i * B < N),
    "first row of a tile of a turn": (TURNS, (N - 1 - bx - i * B) * 128 >= 0),
    "a later turn": (TURNS.assume((i + 1) * B < N - bx), bx + i * B + B <= N - 1),
    "later tiles are not the first": (TURNS, bx + (i + 1) * B >= 1),
    "what runs has something": (TURNS, bx < N),
    "a product is at most a size": (Ranges().assume(B >= 1).assume(i * B <= N), i * B * 3 <= N * 3),
    "a product is at least a size": (Ranges().assume(B >= 1).assume(i * B >= N), i * B * 3 + 1 > N * 3),
    "a quotient of one": (Ranges().assume(N // 128 >= 2), N >= 256),
}


@pytest.mark.parametrize("name", TRUE)
def test_what_kernels_need_is_proved(name):
    ranges, claim = TRUE[name]
    assert ranges.prove(claim)
    assert ranges.refute(Unary("not", claim))


# Just beyond what holds, so that a bound that is off by one shows.
FALSE = {
    "last digit": (TILES, i % 4 < 3),
    "last digit from below": (TILES, i - i // 4 * 4 > 0),
    "rounding down": (TILES, i // 4 * 4 > i - 3),
    "static tile": (TILES, by * 128 + i < 1023),
    "pipelined tile": (TILES, k * 64 + j < K),
    "guarded": (TILES.assume(bx * 128 + i < N), bx * 128 + i < N - 1),
    "flat address": (Ranges().loop(i, 0, M).loop(j, 0, N), i * N + j < M * N - 1),
    "head of a joint block index": (Ranges().loop(bx, 0, B * H), bx % H < H - 1),
    "quotient below a size": (Ranges().loop(bx, 0, M * 4 + 1), bx // 4 < M),
    "strided loop": (Ranges().loop(k, 0, 129, 32), k + 31 < 128),
    "runs at least once": (Ranges().loop(k, 0, K - 5), K >= 7),
    "tile of a turn": (TURNS, bx + i * B < N - 1),
    "a later turn": (TURNS, bx + i * B + B <= N - 1),
    "later tiles are not the first": (TURNS, bx + i * B >= 1),
    "a product is at most a size": (Ranges().assume(B >= 1).assume(i * B <= N), i * B * 3 < N * 3),
    "a factor that may be 0": (Ranges().assume(i * B <= N), i <= N),
    "a quotient of one": (Ranges().assume(N // 128 >= 2), N >= 257),
}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_just_too_much_is_not_proved(name):
    ranges, claim = FALSE[name]
    assert not ranges.prove(claim) and not ranges.refute(Unary("not", claim))


def test_ragged_tile_needs_a_guard():
    assert not TILES.inside(bx * 128 + i, N)
    assert TILES.inside(i, const(128, dt.int32))
    assert not TILES.inside(i - 1, const(128, dt.int32))


def test_what_memory_said_is_not_remembered():
    memory = Load(Buffer("A", (N,), dt.int32, "global"), (i,))
    ranges = Ranges().loop(i, 0, N)
    assert not ranges.assume(memory < 5).prove(memory < 5)
    x = Var("x", dt.int32)
    assert not ranges.define(x, memory).prove(x == memory)
    assert ranges.define(x, minimum(memory, 5)).prove(x <= 5)


def test_a_named_value_is_seen_through():
    x = Var("x", dt.int32)
    ranges = Ranges().loop(i, 0, N).define(x, i * 2 + 1)
    assert ranges.prove(x < N * 2) and ranges.prove(x - i * 2 == 1)


def test_scopes_are_immutable():
    outer = Ranges().loop(i, 0, 4)
    outer.assume(i < 2)
    assert not outer.prove(i < 2) and outer.assume(i < 2).prove(i < 2)


def test_small_types_wrap():
    x = Var("x", dt.uint8, "param")
    assert interval(x, Ranges()) == Interval(0, 255)
    one = const(1, dt.uint8)
    assert not prove(x + one > x, Ranges()) and prove(x + 1 > x, Ranges())
    assert prove(cast(x, dt.int32) + 1 > cast(x, dt.int32), Ranges())
    assert interval(x + one, Ranges()) == dtype_interval(dt.uint8) and interval(x + 1, Ranges()) == Interval(1, 256)


def test_kernel_gives_block_ranges():
    kernel = Kernel((M // 4, const(3, dt.int32)), (bx, by), (128,), Block(()))
    ranges = Ranges().kernel(kernel)
    assert ranges.prove(bx * 4 + 3 < M) and ranges.prove(by < 3) and not ranges.prove(by < 2)


n, m = (Var(name, dt.int32, "dim") for name in "nm")
i_counterexample, j_counterexample, t = (
    Var(name, dt.int32, role) for name, role in (("i", "loop"), ("j", "loop"), ("t", "thread"))
)


def refuted(e: Expr, ranges: Ranges) -> bool:
    """Whether `e >= 0` has a counterexample."""
    return ranges._is_refuted(ranges._atoms.of(e))


def test_what_can_be_negative_is_refuted():
    inside = Ranges().loop(i_counterexample, 0, n).loop(t, 0, 128)
    for e in (
        i_counterexample - 1,
        n - 2 - i_counterexample,
        1 - t // 32,
        30 - t % 32,
        minimum(i_counterexample, t) - 1,
        5 - maximum(n - i_counterexample, t),
        t - i_counterexample,
    ):
        assert refuted(e, inside), e


def test_what_follows_is_not():
    inside = Ranges().loop(i_counterexample, 0, n).loop(t, 0, 128).assume(i_counterexample * 8 + 7 < m)
    for e in (
        i_counterexample,
        n - 1 - i_counterexample,
        3 - t // 32,
        31 - t % 32,
        m - 8 - i_counterexample * 8,
        n - 1,
        maximum(i_counterexample, t),
        (n + 31) // 32 * 32 - n,
    ):
        assert not refuted(e, inside), e


def test_numbers_keep_to_every_condition():
    known = Ranges().loop(i_counterexample, 0, n).assume(i_counterexample >= 5).assume(i_counterexample <= 7)
    assert refuted(i_counterexample - 6, known) and refuted(6 - i_counterexample, known)
    assert not refuted(i_counterexample - 5, known) and not refuted(7 - i_counterexample, known)
    assert not refuted(i_counterexample, known.assume(i_counterexample > 9))  # nothing gets here


def test_beyond_what_stands_for_no_limit():
    """Numbers of which only one end is known, far out."""
    large, small = Ranges().assume(n > FAR), Ranges().assume(i_counterexample < -FAR - 2)
    assert (
        refuted(m - n, large)
        and refuted(2 * FAR - n - m, large.assume(n > 3 * FAR))
        and refuted(i_counterexample - m, small)
    )
    assert not refuted(n - FAR, large) and not refuted(-FAR - i_counterexample, small)


def test_a_choice_that_is_not_known_refutes_nothing():
    assert not refuted(
        select(n > 3, i_counterexample, j_counterexample),
        Ranges().loop(i_counterexample, 0, 4).loop(j_counterexample, 0, 4),
    )


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_refuted_that_can_be_proved(seed):
    chance = random.Random(seed)

    def some(depth: int) -> Expr:
        if depth == 0:
            return chance.choice([i_counterexample, j_counterexample, t, n, m, const(chance.randint(-9, 99), dt.int32)])
        a, b = some(depth - 1), some(depth - 1)
        size = chance.choice([2, 8, 32])
        made = [a + b, a - b, a * chance.randint(-3, 5), a // size, a % size, minimum(a, b), maximum(a, b), a // n]
        return chance.choice(made)

    known = (
        Ranges()
        .loop(i_counterexample, chance.randint(0, 3), n)
        .loop(t, 0, 128)
        .loop(j_counterexample, 0, i_counterexample + chance.randint(0, 2))
    )
    for _ in range(2):
        known = known.assume(some(1) < some(2))
    for _ in range(40):
        p: Polynomial = known._atoms.of(some(3))
        assert not (known._is_refuted(p) and known._non_negative(p, {})), p.terms


OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "min": min,
    "max": max, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
bounds = st.integers(-20, 20)


def intervals() -> st.SearchStrategy[Interval]:
    closed = st.tuples(bounds, bounds).map(lambda ab: Interval(min(ab), max(ab)))
    return closed | bounds.map(lambda a: Interval(low=a)) | bounds.map(lambda b: Interval(high=b)) | st.just(Interval())


def test_remainders_by_sizes_beside_their_multiples():
    """Splits of keys count down from the last tile: `bx % N` is the split, N their number."""
    ranges = Ranges().loop(i, 0, M)
    tile = K - 1 - (bx % N + (i + 1) * N)
    assert prove(tile * 32 + 31 < K * 32, ranges) and not prove(tile * 32 + 31 >= 0, ranges)
    assert not prove(K - 1 - (bx % N + i * N) < K - 1, ranges)


def member(draw_from: Interval) -> st.SearchStrategy[int]:
    low = draw_from.low if isinstance(draw_from.low, int) else min(-200, draw_from.high)
    high = draw_from.high if isinstance(draw_from.high, int) else max(200, low)
    return st.integers(int(low), int(high))


@settings(max_examples=300)
@given(st.sampled_from(list(OPERATORS)), st.data())
def test_results_lie_inside(op, data):
    a, b = data.draw(intervals()), data.draw(intervals())
    x, y = data.draw(member(a)), data.draw(member(b))
    if op in ("<<", ">>") and not 0 <= y < 64:
        return
    y = y or (op in ("//", "%"))  # by 0 they are what they are by 1
    found = binary_interval(op, a, b)
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
    ("%", Interval(), Interval(-5, 8), Interval(-4, 7)),
    ("%", Interval(0, 3), dtype_interval(dt.int32), Interval(1 - 2**31, 3)),
    ("//", Interval(0, 9), dtype_interval(dt.int32), Interval(-9, 9)),
    ("//", Interval(2, 9), Interval(0, 4), Interval(0, 9)),
    ("&", Interval(), Interval(7, 7), Interval(0, 7)),
    ("<<", Interval(1, 3), Interval(2, 2), Interval(4, 12)),
])  # fmt: skip
def test_results_are_as_small_as_expected(op, a, b, want):
    assert binary_interval(op, a, b) == want


def test_sets():
    a, b = Interval(0, 5), Interval(3, 9)
    assert a | b == Interval(0, 9) and a & b == Interval(3, 5) and -a == Interval(-5, 0)
    assert Interval(3, 4).within(a) and not b.within(a) and Interval(2, 2).is_point
    assert Interval().low == -math.inf and not Interval().is_point


def test_ranges_of_types():
    assert dtype_interval(dt.bool_) == Interval(0, 1)
    assert dtype_interval(dt.int8) == Interval(-128, 127) and dtype_interval(dt.uint16) == Interval(0, 65535)
