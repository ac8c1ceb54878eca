# SPDX-License-Identifier: Apache-2.0
"""Which values differ between threads, and where threads go apart."""

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.stmt import (
    Alloc,
    Block,
    Break,
    Continue,
    For,
    If,
    Kernel,
    Let,
    LoopKind,
    Store,
    While,
)
from torch_tile.lowering.sync.facts import Facts

TX, N = Var("tx", role="thread"), Var("n", role="size")
ONE = const(1, dt.int32)


def facts_of(*stmts):
    return Facts(Kernel((ONE,), (Var("b", role="block"),), (4,), Block(stmts), thread=TX))


def loop(*body, stop=N):
    return For(LoopKind.SERIAL, (Var("k", role="loop"),), (const(0, dt.int32),), (stop,), Block(body))


def when(condition, *then):
    return If(condition, Block(then), Block(()))


def test_names_and_variables_that_depend_on_the_thread():
    a, b = Var("a", role="let"), Var("b", role="let")
    mine, ours, late = (Buffer(name, (), dt.int32, "var") for name in ("mine", "ours", "late"))
    facts = facts_of(
        *map(Alloc, (mine, ours, late)), Let(a, TX + 1), Let(b, N + 1),
        when(a < 2, Store(mine, (), ONE)), Store(ours, (), b), Store(late, (), Load(mine, ())),
    )  # fmt: skip
    assert facts.is_divergent(a) and facts.is_divergent(Load(mine, ())) and facts.is_divergent(Load(late, ()))
    assert not facts.is_divergent(b) and not facts.is_divergent(Load(ours, ()))


def test_loops_that_threads_run_differently():
    apart = [loop(stop=TX), loop(when(TX < 2, Break())), While(TX < 2, Block(())), loop(when(TX < 2, Continue()))]
    together = [loop(), loop(when(N < 2, Break())), loop(loop(when(TX < 2, Break()))), While(N < 2, Block(()))]
    facts = facts_of(*apart, *together)
    assert all(map(facts.is_divergent_loop, apart)) and not any(map(facts.is_divergent_loop, together))


def test_a_variable_set_where_threads_have_parted():
    mine = Buffer("mine", (), dt.int32, "var")
    facts = facts_of(Alloc(mine), loop(when(TX < 2, Break()), Store(mine, (), ONE)))
    assert facts.is_divergent(Load(mine, ()))


def test_what_leaves_or_waits_is_more_than_its_accesses():
    from torch_tile.intrinsics.memory import cp_async_wait

    waits, leaves, plain = loop(cp_async_wait(0)), when(N < 2, Break()), when(N < 2, Let(Var("a", role="let"), ONE))
    facts = facts_of(waits, leaves, plain)
    assert facts.orders(waits) and facts.orders(leaves) and not facts.orders(plain)
