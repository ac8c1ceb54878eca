# SPDX-License-Identifier: Apache-2.0
"""How blocks share the tiles that do not fill their last wave."""

import itertools
from collections import Counter

import pytest

from torch_tile.ir.arith_util import evaluate
from torch_tile.ir.expr import Expr
from torch_tile.kernels.split_k import Shares


def number(value):
    return evaluate(value, {}) if isinstance(value, Expr) else value


@pytest.mark.parametrize("blocks", [1, 2, 5, 132])
def test_each_step_has_one_block(blocks):
    """Work differs by a step at most, and parts lie where the kernel that adds up looks for them."""
    for tiles, steps in itertools.product((1, 2, 4, 7, 131, 132, 133, 300), (1, 2, 3, 5, 8, 56)):
        shares, found, slots, taken = Shares.of(tiles, steps, blocks), Counter(), {}, Counter()
        for block in range(blocks):
            pieces = shares.pieces(block)
            assert 0 <= pieces <= 2
            for iteration in range(tiles // blocks + pieces):
                tile, whole, first, last = map(number, shares.work(block, iteration))
                assert 0 <= first < last <= steps and whole == (iteration < tiles // blocks) == (tile < shares.first)
                found.update((tile, step) for step in range(first, last))
                taken[block] += last - first
                if not whole:
                    slots.setdefault(tile - shares.first, []).append(shares.slot(block, tile - shares.first))
        assert found == Counter(itertools.product(range(tiles), range(steps)))
        ideal = -(-tiles * steps // blocks)
        assert max(taken.values()) <= max(ideal, tiles // blocks * steps + min(4, steps))
        for tile in range(tiles % blocks):
            owners = range(shares.owner(tile), shares.owner(tile) + shares.owners(tile))
            assert [shares.slot(block, tile) for block in owners] == slots[tile]
        used = [*itertools.chain(*slots.values())]
        assert len(used) == len(set(used)) and all(0 <= slot < 2 * blocks for slot in used)
