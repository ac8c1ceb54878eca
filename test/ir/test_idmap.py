# SPDX-License-Identifier: Apache-2.0
"""Maps and sets by identity behave as dictionaries and sets of the keys' identities, and keep their keys."""

import gc
import weakref

import pytest
from hypothesis import given, strategies as st

from torch_tile.diagnostics.errors import TileError
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, const
from torch_tile.ir.idmap import IdMap, IdSet, mentions
from torch_tile.ir.node import symbols
from torch_tile.ir.polynomial import structure

NODES = [const(1, dt.int32) for _ in range(3)] + [Var("i", dt.int32, "loop") for _ in range(3)]
CHOSEN = st.lists(st.integers(0, len(NODES) - 1))


@given(CHOSEN, CHOSEN)
def test_maps(one, other):
    found, plain = IdMap((NODES[n], n) for n in one), {n: n for n in one}
    for n in other:
        found[NODES[n]], plain[n] = -n, -n
    for n, node in enumerate(NODES):
        assert (node in found) == (n in plain) and found.get(node) == plain.get(n)
    assert list(found.values()) == list(plain.values()) and len(found) == len(plain)
    assert [id(k) for k in found] == [id(NODES[n]) for n in plain]
    for n in other:
        if NODES[n] in found:
            del found[NODES[n]], plain[n]
    assert list(found.values()) == list(plain.values())


@given(CHOSEN, CHOSEN)
def test_sets(one, other):
    a, b = (IdSet(NODES[n] for n in chosen) for chosen in (one, other))
    x, y = set(one), set(other)

    def numbers(found):
        return {n for n, node in enumerate(NODES) if node in found}

    assert numbers(a) == x and len(a) == len(x)
    assert numbers(a & b) == x & y and numbers(a | b) == x | y and numbers(a - b) == x - y
    assert (a <= b) == (x <= y) and a.isdisjoint(b) == x.isdisjoint(y) and (a == b) == (x == y)
    assert [id(k) for k in a] == [id(NODES[n]) for n in dict.fromkeys(one)]  # in the order in which they came
    a |= b
    a.discard(NODES[0])
    assert numbers(a) == (x | y) - {0}


@pytest.mark.parametrize("made", [dict, IdMap])
def test_equal_expressions_are_different_keys(made):
    one, two = const(1, dt.int32), const(1, dt.int32)
    found = made([(one, "one")])
    assert two not in found and found[one] == "one"
    with pytest.raises(KeyError):
        found[two]
    with pytest.raises(KeyError):
        del found[two]


def test_nodes_are_keys_without_being_compared():
    """`==` builds an expression, whose truth is an error: sets and dictionaries never ask for it."""
    made = [Var("i", dt.int32, "loop") for _ in range(5000)]
    pairs = {(var, n): n for n, var in enumerate(made)}
    assert len(set(made)) == 5000 and all(pairs[var, n] == n for n, var in enumerate(made))
    assert symbols(made[0] + made[1]) == {made[0], made[1]} and symbols(made[0]) != symbols(made[1])
    with pytest.raises(TileError):
        made[0] in made[1:]  # noqa: B015


def test_keys_of_equal_structure():
    i, j = (Var("i", dt.int32, "loop") for _ in range(2))
    assert structure(i * 2 + 1) == structure(i * 2 + 1) != structure(j * 2 + 1)
    gone = structure(Var("k", dt.int32, "loop") + 1)  # which no later variable may have
    assert all(structure(Var("k", dt.int32, "loop") + 1) != gone for _ in range(100))


def test_values_that_are_equal():
    assert [IdMap([(1, "one")]).get(key) for key in (1, 1.0, True)] == ["one", None, None]


def test_keys_live_as_long_as_the_map():
    class Key:
        pass

    key = Key()
    alive, found = weakref.ref(key), IdMap([(key, 1)])
    inside = IdSet([key])
    del key
    gc.collect()
    assert alive() is not None and list(found) == [alive()]
    del found
    gc.collect()
    assert alive() is not None
    del inside
    gc.collect()
    assert alive() is None


def test_what_a_node_mentions():
    i, j, k = (Var(n, dt.int32, "loop") for n in "ijk")
    sum_ = i + j
    assert mentions(sum_, i) and not mentions(sum_, k)
    assert IdSet([k, j]).any_in(sum_) and not IdSet([k]).any_in(sum_) and not IdSet().any_in(sum_)
