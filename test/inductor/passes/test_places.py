# SPDX-License-Identifier: Apache-2.0
from torch_tile.inductor.passes import lift
from torch_tile.inductor.passes.places import Places
from torch_tile.inductor.passes.views import Axis


def test_places_are_symbols_of_dimensions_and_back():
    b, kv, shared, q, k = (Axis(n) for n in (2, 3, 4, 5, 6))
    places = Places([b], [q], [k], [kv, shared])
    index = places.index([[b], [kv, shared], [], [q], [k]])
    assert index == (lift.B, lift.H, 0, lift.Q, lift.K)
    assert [places.group(i) for i in index] == [[b], [kv, shared], [], [q], [k]]
    (alone,) = places.index([[kv]])
    assert alone not in index and places.group(alone) == [kv]
    assert places.group(lift.Q - lift.K) is None
