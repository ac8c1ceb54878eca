# SPDX-License-Identifier: Apache-2.0
"""Stores of all blocks, or turns of T.Parallel, to one place: those with own values are found, and no others."""

from collections.abc import Callable
from typing import Any

import pytest

import torch_tile.language as T
from torch_tile.lowering.common.block_races import block_races, iteration_races


def found_in(body: Callable[[Any, Any, Any], None], blocks: int) -> list[str]:
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(blocks, threads=32) as bx:
            body(X, Y, bx)

    return [found.code for found in block_races(kernel.program)]


def by_an_element(X, Y, bx):
    Y[0] = X[bx]


def by_a_name(X, Y, bx):
    first = bx * 8
    Y[3] = X[first + 1] * 2


def by_a_tile(X, Y, bx):
    a = T.alloc_fragment((8,), "float32")
    T.copy(X[bx * 8], a)
    T.copy(a, Y[0])


def by_a_tile_of_a_tile(X, Y, bx):
    a, b = T.alloc_shared((8,), "float32"), T.alloc_fragment((8,), "float32")
    for k in T.serial(2):
        T.copy(a, b)
        T.copy(X[bx * 8 + k * 4], a)
    T.copy(b, Y[8])


def own_place(X, Y, bx):
    Y[bx] = X[bx]


def own_place_by_a_name(X, Y, bx):
    place = bx * 2
    Y[place + 1] = X[bx]


def one_value(X, Y, bx):
    Y[0] = X[0] + 1


@T.macro
def one_block(X, Y, bx):
    if bx == 0:
        Y[0] = X[bx]


def added_up(X, Y, bx):
    T.atomic_add(Y[0], X[bx])


def own_turns(X, Y, bx):
    for tile in T.serial(bx, 8, 4):
        Y[tile] = X[bx]


@pytest.mark.parametrize("body", [by_an_element, by_a_name, by_a_tile, by_a_tile_of_a_tile])
def test_values_of_their_own_race(body: Callable[[Any, Any, Any], None]) -> None:
    assert found_in(body, 4) == ["block_race"]
    assert not found_in(body, 1)


@pytest.mark.parametrize("body", [own_place, own_place_by_a_name, one_value, one_block, added_up, own_turns])
def test_others_do_not(body: Callable[[Any, Any, Any], None]) -> None:
    assert not found_in(body, 4)


PLACES = {"first": lambda bx, by: bx, "second": lambda bx, by: by, "both": lambda bx, by: bx * 4 + by}


@pytest.mark.parametrize("grid", [(4, 4), (1, 4), (4, 1)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", PLACES)
def test_an_index_of_the_grid_races_alone(value: str, place: str, grid: tuple[int, int]) -> None:
    """A store races where an index of several steps is in its value, and not in its place."""

    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(*grid, threads=32) as (bx, by):
            Y[PLACES[place](bx, by)] = X[PLACES[value](bx, by)]

    named = {"first": {0}, "second": {1}, "both": {0, 1}}
    lost = {n for n in named[value] - named[place] if grid[n] > 1}
    assert [found.code for found in block_races(kernel.program)] == ["block_race"] * bool(lost)


def turns(body: Callable[[Any, Any, Any, Any], None], sizes: tuple[int, int]) -> list[str]:
    @T.prim_func
    def kernel(X: T.Tensor((64, 8), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            x, y = T.alloc_fragment((64, 8), "float32"), T.alloc_shared((64,), "float32")
            T.copy(X, x)
            T.clear(y)
            for i, j in T.Parallel(*sizes):
                body(x, y, i, j)
            T.copy(y, Y)

    return [found.code for found in iteration_races(kernel.program)]


def all_to_one(x, y, i, j):
    y[3] = x[i, 0]


def a_row_to_one(x, y, i, j):
    y[i] = x[i, j]


def by_a_variable(x, y, i, j):
    v = T.alloc_var("float32")
    v = x[i, j] * 2
    y[0] = v


@T.macro
def one_of_them(x, y, i, j):
    if j == 3:
        y[i] = x[i, j]


def own_places(x, y, i, j):
    y[i * 8 + j] = x[0, j]


def equal_values(x, y, i, j):
    y[i] = x[i, 0] + 1


def sums(x, y, i, j):
    y[i] += x[i, j]


def updates(x, y, i, j):
    T.atomic_max(y[i], x[i, j])


@pytest.mark.parametrize("body", [all_to_one, a_row_to_one, by_a_variable], ids=lambda f: f.__name__)
def test_stores_of_turns_to_one_place_are_found(body):
    assert turns(body, (8, 8)) == ["iteration_race"]


@pytest.mark.parametrize("body", [own_places, equal_values, one_of_them, sums, updates], ids=lambda f: f.__name__)
def test_turns_with_places_or_values_of_their_own_are_not(body):
    assert not turns(body, (8, 8))


def test_a_single_iteration_races_with_none():
    assert not turns(a_row_to_one, (8, 1)) and not turns(all_to_one, (1, 1))
