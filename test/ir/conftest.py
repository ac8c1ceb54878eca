# SPDX-License-Identifier: Apache-2.0
"""Random expressions for the tests of what the compiler claims about them and does to them."""

import functools
from typing import Any

import pytest
from hypothesis import strategies as st

from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import (
    Binary,
    Expr,
    Scalar,
    Var,
    binary,
    cast,
    const,
    maximum,
    minimum,
    select,
    unary,
)
from torch_tile.ir.node import Node, walk

M, N = (Var(n, dt.int32, "dim") for n in "MN")
i, j = (Var(n, dt.int32, "loop") for n in "ij")
u = Var("u", dt.uint8, "param")
x, y = (Var(n, dt.float32, "let") for n in "xy")
h = Var("h", dt.float16, "let")
small = st.integers(-9, 9)
INT32 = range(-(2**31), 2**31)


@functools.cache
def integers(leaves: int = 7) -> st.SearchStrategy[Expr]:
    """int32 expressions over M, N >= 1, any i, j, and the uint8 u."""
    leaf = st.sampled_from([M, N, i, i, j, j, cast(u, dt.int32)]) | small.map(lambda v: const(v, dt.int32))
    kinds = st.sampled_from([dt.int8, dt.uint8, dt.int64, dt.float32])

    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        plain = st.builds(binary, st.sampled_from(["+", "-", "*", "+", "-", "//", "%", "&", "|", "^"]), inner, inner)
        by_const = st.builds(binary, st.sampled_from(["//", "%", "*", "<<", ">>", "&", "|"]), inner, st.integers(0, 8))
        by_dim = st.builds(binary, st.sampled_from(["//", "%", "*"]), inner, st.sampled_from([N, M]))
        ends = st.builds(minimum, inner, inner | small) | st.builds(maximum, inner, inner | small)
        chosen = st.builds(select, comparisons(inner), inner, inner)
        wrapping = st.builds(lambda e, v: cast(binary("+", cast(e, dt.uint8), v), dt.int32), inner, small)
        through = st.builds(lambda e, t: cast(cast(e, t), dt.int32), inner, kinds)
        other = st.builds(abs, inner) | st.builds(unary, st.sampled_from("-~"), inner)
        return plain | by_const | by_const | by_dim | ends | chosen | other | through | wrapping

    return st.recursive(leaf, grow, max_leaves=leaves)


@functools.cache
def comparisons(operands: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.builds(binary, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), operands, operands)


@functools.cache
def conditions() -> st.SearchStrategy[Expr]:
    """bool expressions over the same variables."""

    def grow(c: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        return st.builds(binary, st.sampled_from(["and", "or"]), c, c) | st.builds(unary, st.just("not"), c)

    return st.recursive(comparisons(integers(4)), grow, max_leaves=3)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 2.0, float("inf"), float("-inf"), float("nan")]


@functools.cache
def floats() -> st.SearchStrategy[Expr]:
    """Floating expressions over x, y (float32) and h (float16); literals beside operators, which are not folded."""
    leaf = st.sampled_from([x, y, h, cast(i, dt.float32), cast(i, dt.float16)])

    def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        literal = st.sampled_from(SPECIAL)
        operators = st.sampled_from(["+", "-", "*", "/"])
        by_literal = st.builds(binary, operators, inner, literal) | st.builds(binary, operators, literal, inner)
        plain = st.builds(binary, operators, inner, inner)
        kinds = st.sampled_from([dt.float16, dt.float32, dt.float64, dt.bfloat16, dt.float8_e4m3fn, dt.float8_e5m2])
        casts = st.builds(cast, inner, kinds)
        chosen = st.builds(select, comparisons(inner), inner, inner)
        same = st.builds(lambda e: Binary("min", e, e), inner) | st.builds(lambda e: -e, inner)
        return by_literal | by_literal | plain | casts | chosen | same

    return st.recursive(leaf, grow, max_leaves=6)


def value(expr: Expr, env: dict[Var, Scalar]) -> Scalar | None:
    """The value of an expression; None where it has none, or where an index computation leaves its type."""
    try:
        found = evaluate(expr, env)
    except (ZeroDivisionError, ValueError, OverflowError):
        return None
    return None if any(leaves_type(node, env) for node in walk(expr)) else found


def leaves_type(node: Node, env: dict[Var, Scalar]) -> bool:
    if not isinstance(node, Expr) or node.dtype != dt.int32:
        return False
    try:
        return evaluate(node, env) not in INT32
    except (ZeroDivisionError, ValueError, OverflowError):
        return False  # in a branch that is not taken


class Names:
    """This module's names: random.integers(), random.value(...), random.i, ..."""

    def __init__(self, names: dict[str, Any]):
        self.__dict__.update(names)

    def __repr__(self) -> str:
        return "random"


@pytest.fixture(scope="session")
def random() -> Names:
    return Names(globals())
