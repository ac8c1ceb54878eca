# SPDX-License-Identifier: Apache-2.0
"""Statements on single elements of a fragment, outside of T.Parallel and within, whichever thread holds the element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile.language as T

SIZE = 40


@T.macro
def _clear(t: Any, Q: Any, n: Any) -> None:
    T.clear(t[n : n + 1])


@T.macro
def _fill(t: Any, Q: Any, n: Any) -> None:
    T.fill(t[n], 7)


@T.macro
def _take(t: Any, Q: Any, n: Any) -> None:
    T.copy(Q[2:3], t[n : n + 1])


@T.macro
def _give(t: Any, Q: Any, n: Any) -> None:
    T.copy(t[n : n + 1], Q[2:3])


@T.macro
def _update_by(t: Any, Q: Any, n: Any) -> None:
    T.atomic_max(Q[1:2], t[n : n + 1], memory_order="acq_rel")


@T.macro
def _update(t: Any, Q: Any, n: Any) -> None:
    T.atomic_add(t[n], 3)
    Q[0] = T.atomic_add(t[n], Q[1], return_prev=True)


@T.macro
def _update_in_nests(t: Any, Q: Any, n: Any) -> None:
    for i in T.Parallel(3):
        T.atomic_add(t[n], i)
    for i in T.Parallel(SIZE):
        T.atomic_min(t[i], 30 - i)


@T.macro
def _both(t: Any, Q: Any, n: Any) -> None:
    T.copy(t[n : n + 1], t[1:2])
    T.fill(t[n], t[SIZE - 1])


ACTIONS = [_clear, _fill, _take, _give, _update_by, _update, _update_in_nests, _both]


def _expected(action: Any, t: list[int], q: list[int], n: int) -> None:
    if action is _clear:
        t[n] = 0
    elif action is _fill:
        t[n] = 7
    elif action is _take:
        t[n] = q[2]
    elif action is _give:
        q[2] = t[n]
    elif action is _update_by:
        q[1] = max(q[1], t[n])
    elif action is _update:
        q[0] = t[n] + 3
        t[n] += 3 + q[1]
    elif action is _update_in_nests:
        t[n] += 3
        t[:] = [min(x, 30 - i) for i, x in enumerate(t)]
    else:
        t[1] = t[n]
        t[n] = t[SIZE - 1]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__.strip("_"))
def test_of_a_spread_fragment(action: Any, known: bool, seed: int, way: Callable[..., None]) -> None:
    place, threads, dtype = seed % SIZE, 32 << seed % 3, ("int32", "int64")[seed % 2]

    @T.prim_func
    def kernel(X: T.Tensor((SIZE,), dtype), O: T.Tensor((SIZE,), dtype), Q: T.Tensor((4,), dtype), n: T.int32):
        with T.Kernel(1, threads=threads):
            t = T.alloc_fragment((SIZE,), dtype)
            T.copy(X, t)
            action(t, Q, place if known else n)
            T.copy(t, O)

    x = torch.arange(SIZE).to(getattr(torch, dtype)) + 1
    o, q = torch.zeros_like(x), torch.arange(4).to(x.dtype) + 5
    wanted, values = x.tolist(), q.tolist()
    _expected(action, wanted, values, place)
    way(kernel, x, o, q, place)
    assert o.tolist() == wanted and q.tolist() == values


@pytest.mark.parametrize("place", [(0, 0), (9, 5), (15, 7)])
def test_of_an_accumulator(place: tuple[int, int], way: Callable[..., None]) -> None:
    i, j = place

    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), O: T.Tensor((16, 8), "float32"), Q: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((16, 16), "float16"), T.alloc_shared((16, 8), "float16")
            c = T.alloc_fragment((16, 8), "float32")
            T.copy(A, a)
            T.copy(A[0:16, 0:8], b)
            T.clear(c)
            T.gemm(a, b, c)
            T.copy(c[i, j], Q[0])
            T.fill(c[i : i + 1, j], 100)
            T.atomic_add(Q[1], c[i, j])
            T.copy(c, O)

    a = torch.randint(-4, 5, (16, 16)).half()
    o, q = torch.zeros(16, 8), torch.zeros(2)
    way(kernel, a, o, q)
    wanted = a.float() @ a[:, :8].float()
    assert q.tolist() == [wanted[i, j].item(), 100]
    wanted[i, j] = 100
    assert torch.equal(o, wanted)
