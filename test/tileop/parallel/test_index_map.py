# SPDX-License-Identifier: Apache-2.0
"""Layouts carried over between nests and the fragments that they touch."""

import math
from random import Random

import pytest

from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var
from torch_tile.ir.layout import Digit, Layout, points, spread
from torch_tile.tileop.parallel.index_map import (
    Index,
    Piece,
    dims_of_nest,
    fits,
    index_of,
    layout_of_buffer,
    moving,
    sliced,
)

I, J, K = (Var(name, dt.int32, "loop") for name in "ijk")
NUMBERS = {I: 0, J: 1}
ACCUMULATOR = Layout.parse("[4:32t 2:2r 8:4t | 8:4r 4:1t 2:1r]")


def indices(*exprs):
    return [index_of(e, NUMBERS) for e in exprs]


def test_indices_are_sums_of_digits():
    assert indices(I, J // 4, J % 4, I * 8 + J) == [
        Index((Piece(1, 0),)),
        Index((Piece(1, 1, 4),)),
        Index((Piece(1, 1, 1, 4),)),
        Index((Piece(1, 1), Piece(8, 0))),
    ]
    (shifted,) = indices(I + 3 * K)
    assert shifted.pieces == (Piece(1, 0),) and shifted.rest is not None
    assert indices(I * J, I % K, -I) == [None, None, None]


def test_pieces_that_never_move_are_none():
    (both, digits, alone) = indices(I + J, I // 8 * 4 + J, I)
    assert moving(both, (64, 1)) == Index((Piece(1, 0),)) and moving(both, (64, 2)) == both
    assert moving(digits, (8, 4)) == Index((Piece(1, 1),)) and moving(digits, (9, 4)) == digits
    assert moving(alone, (1, 1)) == alone and len(moving(both, (1, 1)).pieces) == 1  # its owner runs the iteration
    assert moving(None, ()) is None


def test_sliced_cuts_on_boundaries_only():
    digits = (Digit(8, 4, "r"), Digit(4, 1, "t"), Digit(2, 1, "r"))
    assert sliced(digits, 2, 8) == (Digit(4, 1, "t"),)
    assert sliced(digits, 4, 16) == (Digit(2, 4, "r"), Digit(2, 2, "t"))
    assert sliced(digits, 3, None) is None


@pytest.mark.parametrize("exprs", [(I, J), (J, I), (I, J // 4), (J % 8, I), (I * 64 + J,), (I,), (J // 2, J % 2)])
@pytest.mark.parametrize("nest", [ACCUMULATOR, spread((64, 64), 128, 8), spread((64, 64), 96, 1)], ids=str)
def test_each_thread_holds_what_it_accesses(exprs, nest):
    """By evaluating both layouts at every point of the nest."""
    at = [tuple(eval(repr(e), {"i": i, "j": j}) for e in exprs) for i, j in points((64, 64))]
    shape = [max(index) + 1 for index in zip(*at, strict=True)]
    count = nest.extent("t")
    found = layout_of_buffer(indices(*exprs), nest.dims, shape, count)
    if found is None:
        assert nest.shape != (64, 64)  # only a padded nest may fail to tile the fragment
        return
    assert fits(indices(*exprs), nest.dims, found)
    assert math.prod(d.size for digits in (*found.dims, found.replicas) for d in digits if d.axis == "t") == count
    replicas = {0}
    for d in found.replicas:
        replicas = {r + k * d.stride for r in replicas for k in range(d.size)}
    for point, index in zip(points((64, 64)), at, strict=True):
        place = found.apply(index)["t"]
        assert nest.apply(point)["t"] in {place + r for r in replicas}


def test_a_nest_follows_its_fragment():
    assert dims_of_nest(indices(I, J), ACCUMULATOR, (64, 64)) == list(ACCUMULATOR.dims)
    assert dims_of_nest(indices(J, I), ACCUMULATOR, (64, 64)) == list(ACCUMULATOR.dims[::-1])
    rows = ACCUMULATOR.drop(1)
    assert dims_of_nest(indices(I), rows, (64, 64)) == [rows.dims[0], None]
    assert dims_of_nest(indices(I + K), rows, (64, 64)) is None


def test_rows_of_another_division_do_not_fit():
    rows = ACCUMULATOR.drop(1)
    assert fits(indices(I), ACCUMULATOR.dims, rows)
    assert not fits(indices(I), spread((64, 64), 128, 8).dims, rows)
    assert not fits(indices(J), ACCUMULATOR.dims, rows)


def test_a_nest_covers_a_slice_of_a_fragment():
    halves = Layout.parse("[4:32t 2:2r 8:4t | 4:8r 2:4r 4:1t 2:1r]")  # 64 columns, as two runs of 32 and more
    for offset in (0, 16, 48):
        dims = dims_of_nest(indices(I, J + offset), halves, (64, 16))
        assert dims == [halves.dims[0], (Digit(2, 4, "r"), Digit(4, 1, "t"), Digit(2, 1, "r"))]
        assert fits(indices(I, J + offset), dims, halves)
    assert dims_of_nest(indices(I, J + 8), halves, (64, 16)) is None  # not a multiple of what is covered
    assert dims_of_nest(indices(I, J + K), halves, (64, 16)) is None
    assert dims_of_nest(indices(I, J + 4), halves, (64, 4)) is None  # what chooses the slice is a matter of threads
    assert not fits(indices(I, J + 8), dims, halves)


def test_a_slice_is_a_choice_of_registers():
    threads = Layout.parse("[16:8t 4:2r | 8:1t 2:1r]")  # 64 rows, of which each thread holds four
    assert dims_of_nest(indices(I + 16, J), threads, (16, 16)) is None


@pytest.mark.parametrize("seed", range(3))
def test_slices_of_any_width_begin_at_any_register(seed):
    """By evaluating both layouts at every point of slices that do not divide a fragment's columns."""
    random = Random(seed)
    groups = random.choice([9, 11, 18, 22])
    whole = Layout.parse(f"[4:32t 2:2r 8:4t | {groups}:4r 4:1t 2:1r]")
    for _ in range(8):
        first = random.randrange(groups)
        count = random.randint(1, groups - first)
        at = indices(I, J + 8 * first)
        dims = dims_of_nest(at, whole, (64, 8 * count))
        assert dims is not None and fits(at, dims, whole), (first, count)
        nest = Layout(tuple(dims), ())
        for i, j in points((64, 8 * count)):
            assert nest.apply((i, j))["t"] == whole.apply((i, j + 8 * first))["t"]
        assert layout_of_buffer(at, dims, (64, 8 * groups), 128) is None or count == groups
        assert layout_of_buffer(at, dims, (64, 8 * groups), 128, grown=count > 1) == (whole if count > 1 else None)
        for odd in (4, 12):
            assert dims_of_nest(indices(I, J + 8 * first + odd), whole, (64, 8 * count)) is None
