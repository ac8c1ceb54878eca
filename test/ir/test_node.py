# SPDX-License-Identifier: Apache-2.0
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields

import pytest
from hypothesis import given, settings, strategies as st

import torch_tile.ir.printer  # noqa: F401  # reprs of nodes
from torch_tile.diagnostics.errors import Span, span_source
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, Range, Region
from torch_tile.ir.expr import Binary, Const, Load, Var, const
from torch_tile.ir.node import (
    Node,
    Rewriter,
    Visitor,
    alike,
    children,
    contains,
    equal,
    field_names,
    find,
    map_children,
    node_class,
    rebuilt,
    symbols,
    walk,
    with_fields,
)
from torch_tile.ir.stmt import Block, For, If, Let, LoopKind, Stmt, Store

N = Var("N", dt.int32, "dim")
i, j = (Var(n, dt.int32, "loop") for n in "ij")
zero = const(0, dt.int32)
A = Buffer("A", (N,), dt.int32, "global")


def nest(var: Var, buffer: Buffer = A, value: int = 3) -> For:
    """for var in T.serial(N): y = buffer[var] * value; buffer[var] = y"""
    y = Var("y", dt.int32)
    body = Block((Let(y, Load(buffer, (var,)) * value), Store(buffer, (var,), y)))
    return For(LoopKind.SERIAL, (var,), (zero,), (N,), body)


def test_nodes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        (i + j).op = "-"


def test_children_are_what_a_node_uses():
    assert children(i + 1)[0] is i
    loop = nest(i)
    assert list(children(loop)) == [zero, N, loop.body]  # not the variable that it introduces
    assert list(children(loop.body.stmts[0])) == [loop.body.stmts[0].value]
    assert list(children(A)) == []  # a symbol's own parts are seen where it is bound
    region = Region(A, (Range(i, const(4, dt.int32)),))
    assert [type(c) for c in children(region)] == [Buffer, Range]


def test_walk_goes_parents_first():
    e = (i + 1) * j
    assert [repr(node) for node in walk(e)] == ["(i + 1) * j", "i + 1", "i", "1", "j"]


def test_find_goes_the_same_way_and_leaves_out_the_rest():
    loop = nest(i)
    assert list(find(loop, Load, Store)) == [n for n in walk(loop) if isinstance(n, Load | Store)]
    assert list(find(loop, Stmt)) == [n for n in walk(loop) if isinstance(n, Stmt)]  # any kind
    assert list(find(loop, If)) == [] and list(find(i, Var)) == [i]
    assert contains(loop, Load) and contains(loop, If, Store) and not contains(loop, If)


def test_a_rewriter_does_not_look_where_no_method_applies():
    seen = []

    class Watch(Rewriter):
        def visit_Load(self, node):
            return node

        def __call__(self, node):
            seen.append(id(node))
            return super().__call__(node)

    let, store = nest(i).body.stmts
    Watch()(Block((let, store)))
    assert id(let.value) in seen and id(store) in seen and id(store.value) not in seen


def test_a_class_of_nodes_made_later_is_found_and_rewritten():
    class Rename(Rewriter):
        def visit_Late(self, node):
            return Late(node.a + 1)

    @dataclass(frozen=True, eq=False, repr=False)
    class Late(Stmt):
        a: Var

    block = Block((Late(i),))
    assert contains(block, Late) and equal(Rename()(block), Block((Late(i + 1),)))


def test_fields_without_the_span():
    assert field_names(i + 1) == ("op", "a", "b")


def test_an_unchanged_node_is_the_same_object():
    for node in (nest(i), i + j * 2, Region(A, (Range(zero, N),))):
        assert map_children(node, lambda c: c) is node
        assert Rewriter()(node) is node


@settings(max_examples=100)
@given(st.data())
def test_a_rewrite_of_nothing_keeps_every_expression(random, data):
    e = data.draw(random.integers() | random.floats() | random.conditions())

    class Nothing(Rewriter):
        def visit_Expr(self, e):
            return self.children(e)

    assert Nothing()(e) is e and equal(e, e) and alike(e, e)


def test_a_rewriter_dispatches_to_the_nearest_class():
    class Swap(Rewriter):
        def visit_Var(self, node):
            return j if node is i else node

        def visit_Const(self, node):
            return Const(node.value + 1, node.type)

    class Deep(Swap):
        def visit_Binary(self, node):
            new = self.children(node)
            return Binary("-", new.a, new.b)

    assert equal(Swap()(i + N * 2), j + N * 3)
    assert equal(Deep()(i + N * 2), j - (N - 3))


def test_only_what_changes_is_rebuilt():
    class Swap(Rewriter):
        def visit_Var(self, node):
            return j if node is i else node

    left, right = i + 1, N * 2
    new = Swap()(left * right)
    assert new.b is right and equal(new.a, j + 1)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_fields_with_the_same_objects_keep_the_node(count):
    """A tuple counts by its objects; an equal one that is new, a longer and a shorter one change the node."""
    span = Span("k.py", 1, 1, 0, 1)
    stmts = tuple(Store(A, (zero,), const(n, dt.float32)) for n in range(3))
    block, first = Block(stmts, span=span), stmts[:count]
    assert with_fields(block) is block and with_fields(block, stmts=(*stmts,)) is block
    for others in (first, (*first, rebuilt(stmts[0]), *stmts[count + 1 :]), (*stmts, *first, stmts[0])):
        new = with_fields(block, stmts=others)
        assert (new is block) is (others == stmts) and new.stmts == others and new.span == span
    branch = If(Binary("<", i, j), block, Block(()), span=span)
    assert with_fields(branch, then=block, condition=branch.condition) is branch
    new = with_fields(branch, then=branch.otherwise, condition=branch.condition)
    assert new.then is branch.otherwise and new.condition is branch.condition and branch.then is block


def test_new_nodes_take_the_place_of_old_ones():
    here, there = Span("k.py", 1, 1, 0, 1), Span("k.py", 2, 2, 0, 1)

    class Replace(Rewriter):
        def visit_Store(self, node):
            return Block((Store(node.buffer, node.indices, zero, span=there), Store(node.buffer, node.indices, zero)))

        def visit_Binary(self, node):
            return Binary("-", node.a, node.b)

    store = Store(A, (zero,), Binary("+", i, j, span=here), span=here)
    block = Replace()(store)
    assert block.span == here and block.stmts[0].span == there
    assert Replace()(If(Binary("<", i, j, span=here), Block(()), Block(()))).condition.span == here


def test_spans_come_from_the_author_while_tracing():
    here = Span("k.py", 3, 3, 4, 5)
    span_source.append(lambda: here)
    try:
        traced = i + 1
    finally:
        span_source.pop()
    assert traced.span == here and (i + 1).span is None
    assert equal(traced, i + 1) and alike(traced, i + 1)


def test_equal_keeps_symbols_and_alike_renames_them():
    assert equal(i + 1, i + 1) and not equal(i + 1, j + 1)
    assert alike(i + 1, j + 1) and not alike(i + 1, j + 2)
    assert alike(i + j, j + i) and not alike(i + i, i + j) and not alike(i + j, i + i)
    assert alike(nest(i), nest(j)) and not equal(nest(i), nest(i))
    other = Buffer("other", (N,), dt.int32, "global")
    assert alike(nest(i), nest(j, other)) and not alike(nest(i), nest(i, value=4))


def test_alike_compares_what_symbols_are():
    assert not alike(i, Var("i", dt.int64, "loop")) and not alike(i, Var("i", dt.int32, "let"))
    assert not alike(A, Buffer("A", (N,), dt.int32, "shared")) and not alike(A, Buffer("A", (N, N), dt.int32, "global"))


def test_literals_are_compared_with_their_type():
    assert not equal(const(1, dt.int32), const(1, dt.int64))
    assert not equal(Const(1, dt.int32), Const(True, dt.int32)) and not equal(Const(1, dt.int32), Const(1.0, dt.int32))
    nan = float("nan")
    assert equal(const(nan, dt.float32), const(nan, dt.float32))
    assert not equal(const(0.0, dt.float32), const(-0.0, dt.float32))


def test_a_node_of_ones_own():
    @dataclass(frozen=True, eq=False, repr=False)
    class Pair(Node):
        parts: tuple[Node, ...]
        depth: int = 0

    pair = Pair((i, Pair((j,))))
    assert [type(c).__name__ for c in walk(pair)] == ["Pair", "Var", "Pair", "Var"]
    assert map_children(pair, lambda c: c) is pair and alike(pair, Pair((j, Pair((i,)))))
    assert repr(pair) == "<Pair>"


def test_a_copy_for_another_process_says_nothing_of_this_one():
    loop = nest(i)
    assert symbols(loop) and children(loop)  # kept with the node
    copy = pickle.loads(pickle.dumps(loop))
    assert set(vars(copy)) == {*field_names(loop), "span"} and alike(copy, loop)
    (store,) = (node for node in walk(copy) if isinstance(node, Store))
    assert store.indices[0] is copy.vars[0] and symbols(copy).isdisjoint(symbols(loop))


def test_methods_are_found_by_the_nearest_class():
    @dataclass(frozen=True, eq=False, repr=False)
    class Base(Node):
        pass

    @dataclass(frozen=True, eq=False, repr=False)
    class Below(Base):
        pass

    class Finds(Visitor):
        def visit_Base(self, node, more):
            return "base", node, more

    class FindsMore(Finds):
        def visit_Below(self, node, more):
            return "below", node, more

    base, below = Base(), Below()
    assert Finds().method_of(below)(below, 1) == ("base", below, 1)
    assert FindsMore().method_of(below)(below, 2) == ("below", below, 2)
    assert FindsMore().method_of(base)(base, 3) == ("base", base, 3)
    assert Finds().method_of(const(1, dt.int32)) is None


def test_what_the_text_does_not_say_makes_no_difference():
    tile = Buffer("tile", (const(4, dt.int32),), dt.float32, "shared")
    barriers = [Buffer("full", (const(2, dt.int32),), dt.uint64, "barrier", guards=guarded) for guarded in (tile, None)]
    assert alike(*barriers) and not equal(*barriers)


@pytest.mark.parametrize(
    "options", [{"default_factory": list}, {"kw_only": True}, {"init": False, "default": 1}], ids=str
)
def test_fields_that_nodes_cannot_have_are_refused(options):
    with pytest.raises(TypeError, match=r"Own\.values: fields of nodes are positional"):
        node_class(type("Own", (Node,), {"__annotations__": {"values": "Any"}, "values": field(**options)}))


def _all_below(cls):
    return [cls, *(each for below in cls.__subclasses__() for each in _all_below(below))]


@pytest.mark.parametrize("cls", _all_below(Node), ids=lambda cls: cls.__name__)
def test_constructors_are_those_of_frozen_dataclasses(cls):
    plain = dataclass(frozen=True, eq=False, repr=False)(type("Plain", (cls,), {}))
    assert inspect.signature(cls) == inspect.signature(plain)
    values = {f.name: object() for f in fields(cls)}
    if cls is Block:
        values["stmts"] = ()  # its constructor looks into them
    for passed in (values, {name: value for name, value in values.items() if name != "span"}):
        made, want = cls(**passed), plain(**passed)
        assert {**made.__dict__} == {**want.__dict__}
    with pytest.raises(FrozenInstanceError):
        made.span = None
    with pytest.raises(TypeError):
        cls(**values, unknown=1)
