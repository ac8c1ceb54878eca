# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
from hypothesis import given, settings, strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Interval, Ranges, interval, prove, range_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Unary, Var, binary, cast, const, maximum, minimum, select  # fmt: skip
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
    start, stop = draw(st.sampled_from(starts)), draw(st.sampled_from(stops))
    step = draw(st.sampled_from([1, 1, 1, 2, 3]))
    known = draw(st.none() | random.conditions())
    ranges = Ranges().loop(i, low, high + 1).loop(j, start, stop, step)
    points = []
    for n, m, a in itertools.product((1, 2, 7), (1, 4), range(low, high + 1)):
        env = {N: n, M: m, i: a, u: 37 * a % 256}
        points += [env | {j: b} for b in range(random.value(start, env), random.value(stop, env), step)]
    if known is not None:
        ranges = ranges.assume(known)
        points = [p for p in points if random.value(known, p) is True]
    return ranges, points


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_interval_holds_every_value(random, data):
    ranges, points = data.draw(scopes(random))
    for _ in range(3):
        e = data.draw(random.integers())
        found = interval(e, ranges)
        values = [random.value(e, p) for p in points]
        assert all(found.low <= v <= found.high for v in values if v is not None)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_false_is_proved(random, data):
    ranges, points = data.draw(scopes(random))
    for _ in range(3):
        claim = data.draw(random.conditions())
        proved, refuted = ranges.prove(claim), ranges.refute(claim)
        values = {random.value(claim, p) for p in points} if proved or refuted else set()
        assert not (proved and False in values) and not (refuted and True in values)


def test_numeric_ranges_are_enough():
    ranges = Ranges().loop(i, 0, 8)
    row = Var("row", dt.int32, "let")
    assert prove(i * 2 % 8 < 8, ranges)  # as a polynomial, 2 * i - 8 * (i // 4)
    inside = ranges.define(row, i * 2 % 8)
    assert prove(row < 8, inside) and prove(row >= 0, inside) and prove(row <= 7, inside)
    assert not prove(row < 6, inside) and not prove(row > 0, inside)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_affine_bounds_with_numbers_are_exact(extent, factor, offset, inner):
    ranges = Ranges().loop(i, 0, extent).loop(j, 0, inner)
    top = (extent - 1) * factor + offset + inner - 1
    index = i * factor + offset + j
    assert prove(index <= top, ranges) and not prove(index < top, ranges)
    assert interval(index, ranges) == Interval(offset, top)


TILES = Ranges().loop(bx, 0, (N + 127) // 128).loop(by, 0, 8).loop(k, 0, (K + 63) // 64).loop(i, 0, 128).loop(j, 0, 64)
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
    assert not prove(binary("+", x, 1) > x, Ranges())
    assert prove(cast(x, dt.int32) + 1 > cast(x, dt.int32), Ranges())
    assert interval(x + 1, Ranges()) == range_of(dt.uint8)


def test_kernel_gives_block_ranges():
    kernel = Kernel((M // 4, const(3, dt.int32)), (bx, by), (128,), Block(()))
    ranges = Ranges().kernel(kernel)
    assert ranges.prove(bx * 4 + 3 < M) and ranges.prove(by < 3) and not ranges.prove(by < 2)
