# SPDX-License-Identifier: Apache-2.0
"""What a pass knows at each point of a kernel."""

from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Load, Var, const
from torch_tile.ir.scope_facts import Known
from torch_tile.ir.stmt import Block, For, If, Kernel, Let, LoopKind, Program, Role, Store

x = Buffer("x", (const(999, dt.int32),), dt.int32, "global")
t, n = Var("t", dt.int32, "thread"), Var("n", dt.int32, "dim", 4)


class Ask(Known):
    """Asks `question(known, index)` at the only store."""

    def __init__(self, question):
        super().__init__()
        self.question, self.answer = question, None

    def visit_Store(self, store):
        self.answer = self.question(self, store.indices[0])
        return store


def answer(question, *stmts):
    kernel = Kernel((const(1, dt.int32),), (Var("b", dt.int32, "block"),), (32, 2), Block(stmts), thread=t)
    program = Program("demo", (x,), (kernel,), (), ())
    ask = Ask(question)
    assert ask(program) is program  # and nothing changes
    return ask.answer


def test_what_launches_check():
    kernel = Kernel((n,), (Var("b", dt.int32, "block"),), (32,), Block((put(t * 2),)), thread=t)
    for assumed, holds in (((n <= 7,), True), ((n <= 7, n >= 2), True), ((n <= 8,), False), ((), False)):
        ask = Ask(lambda known, i: known.ranges.prove(n * 2 + i < 77))
        ask(Program("demo", (x,), (kernel,), (), (), assumed=assumed))
        assert ask.answer is holds


def put(index):
    return Store(x, (index,), const(0, dt.int32))


def test_threads():
    assert answer(lambda known, i: known.ranges.prove(i < 64), put(t))
    assert not answer(lambda known, i: known.ranges.prove(i < 63), put(t))


def test_branches_and_names():
    name = Var("name", dt.int32)
    body = If(t < n, Block((Let(name, t * 4), put(name))), Block(()))
    assert answer(lambda known, i: known.ranges.prove(i < n * 4), body)
    assert not answer(lambda known, i: known.ranges.prove(i < n * 4), Let(name, t * 4), put(name))


def test_divisors():
    name, i = Var("name", dt.int32), Var("i", dt.int32, "loop")
    zero, twelve = const(0, dt.int32), const(12, dt.int32)

    def by(number, *stmts):
        return answer(lambda known, index: known.divides(number, index), *stmts)

    assert by(8, Let(name, t * 4), put(name * 2)) and not by(16, Let(name, t * 4), put(name * 2))
    assert by(4, put(n * t)) and not by(8, put(n * t))
    stepped = For(LoopKind.SERIAL, (i,), (twelve,), (n,), Block((put(i),)), step=8)
    assert by(4, stepped) and not by(8, stepped)
    assert not by(2, For(LoopKind.SERIAL, (i,), (zero,), (n,), Block((put(i),))))
    assert not by(2, put(Load(x, (t,))))


def test_a_role_knows_its_threads():
    role = Role(32, 32, Block((put(t),)))
    assert answer(lambda known, i: known.ranges.prove(i >= 32), role)
    assert not answer(lambda known, i: known.ranges.prove(i >= 33), role)
    assert answer(lambda known, i: known.ranges.prove(i - 32 < 32), role)
    assert not answer(lambda known, i: known.ranges.prove(i >= 32), put(t))
