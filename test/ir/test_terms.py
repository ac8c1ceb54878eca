# SPDX-License-Identifier: Apache-2.0
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Binary, Expr, Var
from torch_tile.ir.terms import terms_of

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
