# SPDX-License-Identifier: Apache-2.0

import math
import random

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.arith_util import Expand, Substitute, divides, divisor_of, evaluate, terms_of
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Binary, Expr, Load, Var, binary, cast, const, maximum, minimum, select, unary
from torch_tile.ir.node import equal

A, B, C, D = (Var(name, dt.int32, "loop") for name in "abcd")


def are(found: list[Expr], wanted: list[Expr]) -> bool:
    """By identity: `==` of expressions is an expression."""
    return list(map(id, found)) == list(map(id, wanted))


def test_terms_in_order_however_they_are_nested() -> None:
    product = C * A
    assert are(list(terms_of("+", (A + B) + (product + D))), [A, B, product, D])
    assert are(list(terms_of("+", product)), [product])


def test_other_operators_are_terms() -> None:
    first, second = A < B, C < D
    either = Binary("or", first, second)
    whole = Binary("and", Binary("and", first, either), second)
    assert are(list(terms_of("and", whole)), [first, either, second])


i, j, k = (Var(n, dt.int32, "loop") for n in "ijk")


def test_variables_are_replaced_once():
    assert equal(Substitute({i: j + 1, j: k})(i * j), (j + 1) * k)


def test_what_mentions_none_is_the_same_object():
    left, right = i + 1, k * 2
    new = Substitute({i: j})(left * right)
    assert new.b is right and Substitute({j: i})(left) is left


def test_names_are_expanded_all_the_way_down():
    expand = Expand({i: j + 1, j: k * 2})
    assert equal(expand(i - j), (k * 2 + 1) - k * 2)
    assert expand(i) is expand(i)  # worked out once


def test_a_name_that_is_known_later_is_replaced_from_then_on():
    known = {}
    substitute = Substitute(known)
    assert substitute(i) is i
    known[i] = const(3, dt.int32)
    assert substitute(i) is known[i]


M = Var("M", dt.int32, "dim")
K = Var("K", dt.int32, "dim")
x = Var("x", dt.float32)


def test_sizes_of_a_launch(seed):
    for _ in range(100):
        m, k = random.randint(1, 10**6), random.randint(1, 10**6)
        env = {M: m, K: k}
        assert evaluate((M + 127) // 128, env) == -(-m // 128)
        assert evaluate(minimum(M * K, M - K) % 7, env) == min(m * k, m - k) % 7
        assert evaluate(maximum(-M // 3, unary("~", K)), env) == max(-m // 3, ~k)
        assert evaluate(select(binary("and", M > 5, K >= M), M << 2, abs(M - K)), env) == (
            m << 2 if m > 5 and k >= m else abs(m - k)
        )


def test_index_types_do_not_wrap_and_others_do():
    assert evaluate(M * K, {M: 2**20, K: 2**20}) == 2**40
    byte = Var("b", dt.uint8)
    assert evaluate(byte + const(1, dt.uint8), {byte: 255}) == 0 and evaluate(byte + 1, {byte: 255}) == 256
    assert evaluate(-cast(byte, dt.int8), {byte: 128}) == -128
    assert evaluate(cast(M, dt.int8), {M: 200}) == -56


def test_floats_round_to_their_type():
    assert evaluate(x + 1, {x: 2.0**24}) == 2.0**24
    assert evaluate(cast(x, dt.float16), {x: 65520.0}) == math.inf
    assert evaluate(x / 0, {x: -1.0}) == -math.inf and math.isnan(evaluate(x / 0, {x: 0.0}))
    assert evaluate(cast(x, dt.int32), {x: -2.7}) == -2


def test_branches_not_taken_are_not_evaluated():
    assert evaluate(select(M > 0, M, M // 0), {M: 3}) == 3
    assert evaluate(binary("or", M > 0, M // 0 > 1), {M: 3}) is True


def test_what_has_no_value():
    with pytest.raises(ZeroDivisionError):
        evaluate(M // (K - K), {M: 1, K: 1})
    with pytest.raises(KeyError):
        evaluate(M + 1, {})
    with pytest.raises(ValueError, match="outside a kernel"):
        evaluate(Load(Buffer("A", (M,), dt.int32, "global"), (const(0, dt.int32),)), {M: 1})
    assert evaluate(cast(x, dt.int32), {x: math.inf}) == 2**31 - 1


N, M_divisor, K_divisor = Var("n", dt.int32, "dim", 8), Var("m", dt.int32, "dim"), Var("k", dt.int32, "loop")


def test_what_is_known() -> None:
    assert divisor_of(N) == 8 and divisor_of(M_divisor) == 1
    assert divisor_of(K_divisor * 64 + N) == 8
    assert divisor_of(N * 4 - 16) == 16
    assert divisor_of((K_divisor % 3) * 48) == 48
    assert divisor_of(N * 6 // 4) == 12
    assert divisor_of(cast(N, dt.int64) * M_divisor) == 8
    assert divisor_of(minimum(N, K_divisor * 12)) == 4
    assert divisor_of(select(K_divisor < 3, N, 0)) == 8
    assert divisor_of(const(0, dt.int32)) == 0 and divides(1024, const(0, dt.int32))
    assert divides(16, N << 1) and not divides(16, N)


def test_names_with_known_values() -> None:
    row = Var("row")
    assert divides(8, row, Ranges().define(row, const(24, dt.int32))) and not divides(8, row)


def test_never_claims_too_much(seed: int) -> None:
    rng = random.Random(seed)

    def some(depth: int) -> Expr:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([N, M_divisor, K_divisor, const(rng.randrange(-40, 40), dt.int32)])
        op = rng.choice(["+", "-", "*", "//", "%", "min", "max"])
        a, b = some(depth - 1), some(depth - 1)
        if op in ("//", "%"):
            return Binary(op, a, const(rng.randrange(1, 20), dt.int32))
        return maximum(a, b) if op == "max" else minimum(a, b) if op == "min" else Binary(op, a, b)

    for _ in range(300):
        expr = some(3)
        known = divisor_of(expr)
        values = {N: 8 * rng.randrange(9), M_divisor: rng.randrange(50), K_divisor: rng.randrange(-9, 50)}
        value = evaluate(expr, values)
        assert value == 0 if known == 0 else value % known == 0, (expr, known, value)
