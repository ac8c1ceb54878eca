# SPDX-License-Identifier: Apache-2.0
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, const
from torch_tile.ir.node import equal
from torch_tile.ir.substitute import Expand, Substitute

i, j, k = (Var(n, dt.int32, "loop") for n in "ijk")


def test_variables_are_replaced_once():
    assert equal(Substitute({id(i): j + 1, id(j): k})(i * j), (j + 1) * k)


def test_what_mentions_none_is_the_same_object():
    left, right = i + 1, k * 2
    new = Substitute({id(i): j})(left * right)
    assert new.b is right and Substitute({id(j): i})(left) is left


def test_names_are_expanded_all_the_way_down():
    expand = Expand({id(i): j + 1, id(j): k * 2})
    assert equal(expand(i - j), (k * 2 + 1) - k * 2)
    assert expand(i) is expand(i)  # worked out once


def test_a_name_that_is_known_later_is_replaced_from_then_on():
    known = {}
    substitute = Substitute(known)
    assert substitute(i) is i
    known[id(i)] = const(3, dt.int32)
    assert substitute(i) is known[id(i)]
