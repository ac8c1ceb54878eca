# SPDX-License-Identifier: Apache-2.0
"""Where branches of loops begin and end, against their conditions in each iteration."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.dtype import int32, uint32
from torch_tile.ir.expr import Expr, Load, Var, binary, cast, const
from torch_tile.ir.stmt import Block, Break, For, If, Let, LoopKind, Stmt, Store
from torch_tile.lowering.analysis.branch_range import taken_from, taken_until

TURNS = 9
limit, t = Var("limit", int32, "param"), Var("t", int32, "thread")
x = Buffer("x", (const(4, int32),), int32, "global")


def both(a: Expr, b: Expr) -> Expr:
    return binary("and", a, b)


def either(a: Expr, b: Expr) -> Expr:
    return binary("or", a, b)


def loop(body: Callable[[Var], tuple[Stmt, ...]]) -> For:
    k = Var("k", int32, "loop")
    return For(LoopKind.SERIAL, (k,), (const(0, int32),), (const(TURNS, int32),), Block(body(k)))


WORK = Block((loop(lambda i: (Store(x, (i,), i),)),))


def branching(condition: Callable[[Expr], Expr], named: bool = False) -> For:
    """A loop whose branch is taken as `condition(k)` says, of another name for `8 - k` if `named`."""
    if not named:
        return loop(lambda k: (If(condition(k), WORK, Block(())),))
    name = Var("name", int32, "let")
    return loop(lambda k: (Let(name, 8 - k), If(condition(name), WORK, Block(()))))


RISING = [
    lambda k: k * 64 >= limit,
    lambda k: k * 64 > limit,
    lambda k: limit < k * 48 + 5,
    lambda k: limit <= k * 48 + 5,
    lambda k: either(k * 64 + 63 > limit, k * 30 >= limit - 7),
]
FALLING = [
    lambda k: k * 64 <= limit,
    lambda k: k * 64 < limit,
    lambda k: limit > k * 48 + 5,
    lambda k: limit - k * 30 >= 7,
    lambda k: either(k * 64 + 63 < limit, limit - 7 >= k * 30),
]


def iterations(condition: Callable[[Expr], Expr], value: int, named: bool) -> list[int]:
    """When the condition holds."""
    return [
        k for k in range(-99, 99) if evaluate(condition(const(8 - k if named else k, int32)), {limit: value})
    ]  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("rises", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_where(rises: bool, number: int, named: bool, seed: int) -> None:
    """Exact, for conditions of a loop's variable and of a name that counts the other way."""
    condition = (RISING if rises else FALLING)[number]
    made = branching(condition, named)
    begin, end = taken_from(int(named), made), taken_until(int(named), made)
    assert (end is None) == (rises != named) and (begin is None) != (end is None)
    near = [m + d for k in range(9) for m in (k * 64, k * 48 + 5) for d in (-1, 0, 1)]
    for value in [*near, *random.Random(seed).choices(range(-600, 1200), k=30)]:
        holds = iterations(condition, value, named)
        if begin is not None:
            assert evaluate(begin, {limit: value}) == min(holds, default=99), value
        else:
            assert end is not None and evaluate(end, {limit: value}) == max(holds, default=-100) + 1, value


def test_and_ends_where_a_part_does() -> None:
    """A number if there is one, whatever the other parts say."""
    end = taken_until(0, branching(lambda k: both(k * 64 <= limit, both(binary("==", k, const(0, int32)), t < limit))))
    assert end is not None and evaluate(end, {}) == 1
    end = taken_until(0, branching(lambda k: both(k * 64 <= limit, k > 2)))
    assert end is not None and evaluate(end, {limit: 200}) == 4
    assert taken_from(0, branching(lambda k: both(k * 64 <= limit, k > 2))) is None


@pytest.mark.parametrize(
    "condition",
    [
        lambda k: binary("==", k, limit + t),
        lambda k: k * 64 <= t,  # differs between threads
        lambda k: k * 64 > t,
        lambda k: k > Load(x, (const(0, int32),)),  # may change meanwhile
        lambda k: k % 2 * 64 >= limit,
        lambda k: k * k >= limit,
        lambda k: k * limit >= 5,  # nobody knows which way
        lambda k: cast(cast(k, uint32) * 64, int32) > limit,
        lambda k: either(k * 64 <= limit, k * 64 > limit + 99),
        lambda k: binary("<", limit, const(3, int32)),
    ],
)
def test_what_is_not_known(condition: Callable[[Expr], Expr]) -> None:
    made = branching(condition)
    assert taken_from(0, made) is None and taken_until(0, made) is None


def test_only_branches_that_compute() -> None:
    def found(*stmts: Stmt) -> bool:
        made = loop(lambda k: stmts)
        return taken_from(0, made) is not None or taken_until(0, made) is not None

    made = branching(RISING[0])
    (branch,) = made.body.stmts
    assert isinstance(branch, If) and taken_from(0, made) is not None
    assert not found(Break())
    for then, otherwise in ((Block((Break(),)), Block(())), (WORK, WORK)):
        other = loop(lambda k, a=then, b=otherwise: (If(k * 64 >= limit, a, b),))  # type: ignore[misc]
        assert taken_from(0, other) is None and taken_until(0, other) is None
