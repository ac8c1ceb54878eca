# SPDX-License-Identifier: Apache-2.0
"""Statements on one element at a place that multiplies variables of loops: refused where the element was a region."""

import pytest
import torch

import torch_tile.language as T

N = 24
PLACES = {
    "square": lambda i, j, n: i * i % N,
    "product": lambda i, j, n: i * j,
    "scaled_by_an_argument": lambda i, j, n: (i * n + j * j) % N,
    "of_a_difference": lambda i, j, n: (i - j) * (i + j) % N,
}
UPDATES = {"add": lambda a, b: a + b, "max": max, "min": min, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


def pairs(place, n):
    return [(i, j, int(place(i, j, n))) for i in range(5) for j in range(5)]


@pytest.mark.parametrize("scope", ["global", "shared"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", PLACES)
def test_atomics_of_parallel_iterations(name, update, scope, way, seed):
    torch.manual_seed(seed)
    place, atomic, n = PLACES[name], getattr(T, f"atomic_{update}"), int(torch.randint(1, 9, ()))

    @T.prim_func
    def kernel(X: T.Tensor((5, 5), "int32"), O: T.Tensor((N,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((N,), "int32")
            T.copy(O, s)
            for i, j in T.Parallel(5, 5):
                if scope == "shared":
                    atomic(s[place(i, j, n)], X[i, j])
                else:
                    atomic(O[place(i, j, n)], X[i, j])
            if scope == "shared":
                T.copy(s, O)

    x, o = torch.randint(0, 99, (5, 5), dtype=torch.int32), torch.randint(0, 99, (N,), dtype=torch.int32)
    wanted = o.tolist()
    for i, j, at in pairs(place, n):
        wanted[at] = UPDATES[update](wanted[at], int(x[i, j]))
    way(kernel, x, o, n)
    assert o.tolist() == wanted


@pytest.mark.parametrize("name", PLACES)
def test_copies_and_fills_of_one_element(name, way, seed):
    torch.manual_seed(seed)
    place, n = PLACES[name], int(torch.randint(1, 9, ()))

    @T.prim_func
    def kernel(X: T.Tensor((N,), "int32"), O: T.Tensor((2, N), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            s, t = T.alloc_shared((N,), "int32"), T.alloc_shared((2, N), "int32")
            T.copy(X, s)
            T.clear(t)
            for i in T.serial(5):
                for j in T.serial(5):
                    at = place(i, j, n)
                    T.copy(s[at : at + 1], t[0, at : at + 1])
                    T.fill(t[1, at : at + 1], i * 10 + j)
            T.copy(t, O)

    x, o = torch.randint(0, 99, (N,), dtype=torch.int32), torch.zeros(2, N, dtype=torch.int32)
    wanted = torch.zeros(2, N, dtype=torch.int32)
    for i, j, at in pairs(place, n):
        wanted[0, at], wanted[1, at] = x[at], i * 10 + j
    way(kernel, x, o, n)
    assert torch.equal(o, wanted)
