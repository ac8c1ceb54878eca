# SPDX-License-Identifier: Apache-2.0
"""Stores of all blocks to one place: those with values of their own are found, and no others."""

from collections.abc import Callable
from typing import Any

import pytest

import torch_tile.language as T
from torch_tile.lowering.common.block_races import block_races


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
