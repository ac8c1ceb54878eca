# SPDX-License-Identifier: Apache-2.0
"""Bytes of fragments that are alive at once: each test has tiles of 16 KiB, and says how many of them."""

import math

import pytest

import torch_tile.language as T
from torch_tile.lowering.analysis.liveness import most_alive

TILE = 64 * 64 * 4


def tiles():
    return (T.alloc_fragment((64, 64), "float32") for _ in range(3))


def add(source, target):
    """Read a tile into another one, which keeps what it has."""
    for i, j in T.Parallel(64, 64):
        target[i, j] += source[i, j]


def one_after_the_other(x, y, bx):
    for tile in tiles():
        T.copy(x, tile)
        T.copy(tile, y)


def all_kept(x, y, bx):
    a, b, c = tiles()
    for tile in (a, b, c):
        T.copy(x, tile)
    for tile in (a, b, c):
        T.copy(tile, y)


def elements_replaced_one_by_one(x, y, bx):
    a, b, _ = tiles()
    T.copy(x, a)
    for i, j in T.Parallel(64, 64):
        b[i, j] = a[i, j] * 2.0
    T.copy(b, y)


def sums_of_a_loop(x, y, bx):
    """Two tiles live through the loop, and one after the other of two live in an iteration."""
    a, b, c = tiles()
    d, _, _ = tiles()
    T.clear(a)
    T.clear(b)
    for _ in T.serial(4):
        T.copy(x, c)
        add(c, a)
        T.copy(x, d)
        add(d, b)
    T.copy(a, y)
    T.copy(b, y)


def left_by_the_iteration_before(x, y, bx):
    a, b, _ = tiles()
    T.clear(a)
    for _ in T.serial(4):
        T.copy(x, b)
        T.copy(b, y)
        T.copy(a, y)
        T.copy(x, a)


def branches(x, y, bx):
    a, b, c = tiles()
    if bx == 0:
        T.copy(x, a)
        T.copy(a, y)
    else:
        T.copy(x, b)
        T.copy(x, c)
        add(b, c)
        T.copy(c, y)


def written_in_part(x, y, bx):
    """The other half of the tile lives on."""
    a, b, _ = tiles()
    T.copy(x, a)
    T.copy(x, b)
    T.copy(b, y)
    T.copy(x[0:32, 0:64], a[0:32, 0:64])
    T.copy(a, y)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (one_after_the_other, 1),
        (all_kept, 3),
        (elements_replaced_one_by_one, 1),
        (sums_of_a_loop, 3),
        (left_by_the_iteration_before, 2),
        (branches, 2),
        (written_in_part, 2),
    ],
)
def test_tiles_that_live_together(body, count):
    body = T.macro(body)

    @T.prim_func
    def main(x: T.Tensor((64, 64), "float32"), y: T.Tensor((64, 64), "float32")):
        with T.Kernel(2, threads=128) as bx:
            body(x, y, bx)

    assert alive(main) == count * TILE


def test_roles_hold_their_tiles_in_their_own_threads():
    @T.prim_func
    def main(x: T.Tensor((64, 64), "float32"), y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256) as _:
            for role in (0, 1):
                with T.ws(role):
                    tile = T.alloc_fragment((64, 64), "float32")
                    T.copy(x, tile)
                    T.copy(tile, y)

    assert alive(main) == 2 * TILE  # as if each thread held as much as one of 128 does


def alive(function):
    (kernel,) = function.program.kernels
    return most_alive(
        kernel.body, math.prod(kernel.threads), lambda b: (b.scope == "fragment") * math.prod(b.static_shape) * 4
    )
