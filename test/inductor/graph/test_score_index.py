# SPDX-License-Identifier: Apache-2.0
from torch_tile.inductor.graph import index_expr
from torch_tile.inductor.graph.axes import Axis
from torch_tile.inductor.graph.score_index import Places


def test_places_are_symbols_of_dimensions_and_back():
    b, kv, shared, q, k = (Axis(n) for n in (2, 3, 4, 5, 6))
    places = Places([b], [q], [k], [kv, shared])
    index = places.index([[b], [kv, shared], [], [q], [k]])
    assert index == (index_expr.B, index_expr.H, 0, index_expr.Q, index_expr.K)
    assert [places.group(i) for i in index] == [[b], [kv, shared], [], [q], [k]]
    (alone,) = places.index([[kv]])
    assert alone not in index and places.group(alone) == [kv]
    assert places.group(index_expr.Q - index_expr.K) is None
