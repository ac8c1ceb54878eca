# SPDX-License-Identifier: Apache-2.0
import pytest

from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.layout import Layout, points, shared_tile
from torch_tile.ir.layout_fit import fit_memory, fit_threads

P = Layout.parse


@pytest.mark.parametrize("shape", [(8, 64), (3, 16, 64), (24, 32), (64, 16), (16, 192)])
def test_operand_tiles_are_found_again(shape):
    tile = shared_tile(shape, 16)
    assert tile.swizzle is not None
    found = fit_memory(shape, lambda *p: tile.apply(p)["m"])
    assert [found.apply(p) for p in points(shape)] == [tile.apply(p) for p in points(shape)]


def test_digits_of_threads_and_registers():
    layout = P("[3:2r 8:4t | 4:1t 2:1r] x[2:32t]")
    found = fit_threads(layout.shape, lambda i, j, k: layout.apply((i, j))["t"] + 32 * k,
                        lambda i, j: layout.apply((i, j))["r"], 2)  # fmt: skip
    assert found == layout
    counted = fit_threads((4, 6), lambda i, j: i, None)
    assert counted == P("[4:1t | 6:1r]")


def test_a_replica_is_a_thread():
    with pytest.raises(TileError, match="threads and registers"):
        fit_threads((4,), lambda i, k: i + (4 if k else 0) * (1 if i else 2), lambda i: 0, 2)
