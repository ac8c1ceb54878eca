# SPDX-License-Identifier: Apache-2.0
import random

from torch_tile.ir import dtype as dt
from torch_tile.ir.bounds import Ranges
from torch_tile.ir.divisor import divides, divisor_of
from torch_tile.ir.evaluate import evaluate
from torch_tile.ir.expr import Binary, Expr, Var, cast, const, maximum, minimum, select

N, M, K = Var("n", dt.int32, "dim", 8), Var("m", dt.int32, "dim"), Var("k", dt.int32, "loop")


def test_what_is_known() -> None:
    assert divisor_of(N) == 8 and divisor_of(M) == 1
    assert divisor_of(K * 64 + N) == 8
    assert divisor_of(N * 4 - 16) == 16
    assert divisor_of((K % 3) * 48) == 48
    assert divisor_of(N * 6 // 4) == 12
    assert divisor_of(cast(N, dt.int64) * M) == 8
    assert divisor_of(minimum(N, K * 12)) == 4
    assert divisor_of(select(K < 3, N, 0)) == 8
    assert divisor_of(const(0, dt.int32)) == 0 and divides(1024, const(0, dt.int32))
    assert divides(16, N << 1) and not divides(16, N)


def test_names_with_known_values() -> None:
    row = Var("row")
    assert divides(8, row, Ranges().define(row, const(24, dt.int32))) and not divides(8, row)


def test_never_claims_too_much(seed: int) -> None:
    rng = random.Random(seed)

    def some(depth: int) -> Expr:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([N, M, K, const(rng.randrange(-40, 40), dt.int32)])
        op = rng.choice(["+", "-", "*", "//", "%", "min", "max"])
        a, b = some(depth - 1), some(depth - 1)
        if op in ("//", "%"):
            return Binary(op, a, const(rng.randrange(1, 20), dt.int32))
        return maximum(a, b) if op == "max" else minimum(a, b) if op == "min" else Binary(op, a, b)

    for _ in range(300):
        expr = some(3)
        known = divisor_of(expr)
        values = {N: 8 * rng.randrange(9), M: rng.randrange(50), K: rng.randrange(-9, 50)}
        value = evaluate(expr, values)
        assert value == 0 if known == 0 else value % known == 0, (expr, known, value)
