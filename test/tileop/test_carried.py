# SPDX-License-Identifier: Apache-2.0
"""Along which variables of a T.Parallel nest the iterations run in order."""

import pytest

import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind
from torch_tile.tileop.carried import carried_vars


def carried(kernel):
    """Names of the variables that carry a value, in the only nest of a kernel."""
    (loop,) = (n for n in walk(kernel.program) if isinstance(n, For) and n.kind is LoopKind.PARALLEL)
    return [v.name for v in carried_vars(loop)]


def stores(place):
    """A nest that stores at `place(i, j, n)`, a row and a column."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, n), "int32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                A[place(i, j, n)] = i + j

    return kernel


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (lambda i, j, n: (i, j), []),
        (lambda i, j, n: (2 * i + 1, 7 - j), []),
        (lambda i, j, n: (i, 0), ["j"]),
        (lambda i, j, n: (0, 0), ["i", "j"]),
        (lambda i, j, n: ((i * 3 + 5) // n, (i * 3 + 5) % n), ["j"]),
        (lambda i, j, n: ((i + j * 4) % n, (i + j * 4) // n), []),
        (lambda i, j, n: (i // n, i % 3), ["i", "j"]),
        (lambda i, j, n: (i // 2, (i + 1) % 2), ["i", "j"]),
        (lambda i, j, n: (i % 1, i // 1 + 3), ["j"]),
    ],
)
def test_places_that_move_with_a_variable(place, wanted):
    assert carried(stores(place)) == wanted


def test_sums_and_neighbours():
    @T.prim_func
    def total(A: T.Tensor((8, 4), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(8, 4):
                B[i] += A[i, j]

    @T.prim_func
    def shifted(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(7, 4):
                A[i, j] = A[i + 1, j]

    assert carried(total) == ["j"]
    assert carried(shifted) == ["i", "j"]
