# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Interval, Ranges, interval, prove, range_of
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import (
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    binary,
    cast,
    const,
    maximum,
    minimum,
    select,
)  # fmt: skip
from torch_tile.ir.stmt import Block, Kernel


def dim(name: str) -> Var:
    return Var(name, dt.int32, "dim")


def loop(name: str) -> Var:
    return Var(name, dt.int32, "loop")


M, N, K, B, H = (dim(n) for n in "MNKBH")
i, j, k = (loop(n) for n in "ijk")
bx, by = (Var(n, dt.int32, "block") for n in ("bx", "by"))


def value(e: Expr, env: dict[int, int]) -> int | bool | None:
    """The value of an expression; None where it has none (division by zero, shift out of range)."""
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Var):
        return env[id(e)]
    if isinstance(e, Cast):
        x = value(e.a, env)
        return None if x is None else const(int(x), e.type).value
    if isinstance(e, Unary):
        x = value(e.a, env)
        return None if x is None else (not x if e.op == "not" else -x)
    if isinstance(e, Select):
        c = value(e.condition, env)
        return None if c is None else value(e.a if c else e.b, env)
    if isinstance(e, Call):
        x = value(e.args[0], env)
        return None if x is None else abs(x)
    assert isinstance(e, Binary)
    if e.op in ("and", "or"):
        x = value(e.a, env)
        return x if x is None or x is (e.op == "or") else value(e.b, env)
    x, y = value(e.a, env), value(e.b, env)
    if x is None or y is None or (e.op in ("//", "%") and y == 0) or (e.op in ("<<", ">>") and not 0 <= y < 12):
        return None
    table = {
        "+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "//": lambda: x // y, "%": lambda: x % y,
        "min": lambda: min(x, y), "max": lambda: max(x, y), "<<": lambda: x << y, ">>": lambda: x >> y,
        "&": lambda: x & y, "|": lambda: x | y, "^": lambda: x ^ y, "==": lambda: x == y, "!=": lambda: x != y,
        "<": lambda: x < y, "<=": lambda: x <= y, ">": lambda: x > y, ">=": lambda: x >= y,
    }  # fmt: skip
    result = table[e.op]()
    return result if isinstance(result, bool) else wrapped(result, e.dtype)


def wrapped(result: int, dtype: dt.DType) -> int:
    """Index types do not wrap, others do."""
    return result if dtype in (dt.int32, dt.int64) else const(result, dtype).value


VARIABLES = [N, M, i, j]
small = st.integers(-9, 9)


def integers(leaves: list[Var] = VARIABLES, narrow: bool = True) -> st.SearchStrategy[Expr]:
    """Random integer expressions over the variables."""
    leaf = st.sampled_from(leaves) | small.map(lambda v: const(v, dt.int32))

    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        plain = st.builds(binary, st.sampled_from(["+", "-", "*", "+", "-", "//", "%", "&", "|", "^"]), inner, inner)
        by_const = st.builds(binary, st.sampled_from(["//", "%", "*", "<<", ">>", "&"]), inner, st.integers(1, 8))
        by_dim = st.builds(binary, st.sampled_from(["//", "%", "*"]), inner, st.sampled_from([N, M]))
        ends = st.builds(minimum, inner, inner) | st.builds(maximum, inner, inner)
        test = st.builds(binary, st.sampled_from(["<", "<=", "==", "!="]), inner, inner)
        chosen = st.builds(select, test, inner, inner)
        through = st.builds(
            lambda e, t: cast(cast(e, t), dt.int32), inner, st.sampled_from([dt.int8, dt.uint8, dt.int64])
        )
        other = st.builds(abs, inner) | st.builds(lambda e: -e, inner)
        return plain | by_const | by_const | by_dim | ends | chosen | other | (through if narrow else other)

    return st.recursive(leaf, grow, max_leaves=7)


def comparisons() -> st.SearchStrategy[Expr]:
    return st.builds(binary, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), integers(), integers())


def conditions() -> st.SearchStrategy[Expr]:
    """Random bool expressions over the variables."""
    return st.recursive(comparisons(), lambda c: st.builds(binary, st.sampled_from(["and", "or"]), c, c), max_leaves=3)


@st.composite
def scopes(draw: st.DrawFn) -> tuple[Ranges, list[dict[int, int]]]:
    """Two nested loops, perhaps a known condition, and all points (of small sizes) that they allow."""
    low, high = sorted([draw(small), draw(small)])
    inner_low = draw(st.sampled_from([const(0, dt.int32), i, minimum(i, N), i - 3]))
    inner_high = draw(st.sampled_from([const(5, dt.int32), N, i + 4, i * 2 + 1, (N + 3) // 4, M * N, maximum(i, M)]))
    step = draw(st.sampled_from([1, 1, 1, 2, 3]))
    known = draw(st.none() | conditions())
    ranges = Ranges().loop(i, low, high + 1).loop(j, inner_low, inner_high, step)
    if known is not None:
        ranges = ranges.assume(known)
    points = []
    for n, m, x in itertools.product((1, 2, 3, 7), (1, 4, 9), range(low, high + 1)):
        env = {id(N): n, id(M): m, id(i): x}
        for y in range(value(inner_low, env), value(inner_high, env), step):
            point = env | {id(j): y}
            if known is None or value(known, point) is True:
                points.append(point)
    return ranges, points


@settings(max_examples=400, deadline=None)
@given(scopes(), st.lists(integers(), min_size=1, max_size=4))
def test_interval_holds_every_value(scope, exprs):
    ranges, points = scope
    for e in exprs:
        found = interval(e, ranges)
        values = [value(e, p) for p in points]
        assert all(found.low <= v <= found.high for v in values if v is not None)


@settings(max_examples=600, deadline=None)
@given(scopes(), st.lists(conditions(), min_size=1, max_size=4))
def test_nothing_false_is_proved(scope, claims):
    ranges, points = scope
    for claim in claims:
        values = {value(claim, p) for p in points} - {None}
        assert not (ranges.prove(claim) and False in values)
        assert not (ranges.refute(claim) and True in values)


@settings(max_examples=300, deadline=None)
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
