# SPDX-License-Identifier: Apache-2.0
"""What a pipelined loop left in a tile is read behind it, also by the next iteration of the loop around."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile.language as T

Kernel = tuple[Any, Callable[[torch.Tensor], torch.Tensor]]


def read_by_the_next_iteration(around: str, stages: int) -> Kernel:
    """Each iteration stores what the tile held before its own copies."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "float32"), O: T.Tensor((3, 32), "float32")):
        with T.Kernel(1, threads=32):
            s, n = T.alloc_shared((32,), "float32"), T.alloc_var("int32", 0)
            T.fill(s, -1.0)
            if around == "while":
                while n < 3:
                    for i in T.Parallel(32):
                        O[n, i] = s[31 - i]
                    for k in T.Pipelined(4, num_stages=stages):
                        T.copy(A[k, 0:32], s)
                        for i in T.Parallel(32):
                            T.atomic_add(O[n, i], s[31 - i])
                    n += 1
            else:
                for t in T.serial(3):
                    for i in T.Parallel(32):
                        O[t, i] = s[31 - i]
                    for k in T.Pipelined(4, num_stages=stages):
                        T.copy(A[k, 0:32], s)
                        for i in T.Parallel(32):
                            T.atomic_add(O[t, i], s[31 - i])

    return kernel, lambda a: torch.stack([a.sum(0) - 1, a.sum(0) + a[3], a.sum(0) + a[3]]).flip(1)


def own_tile(around: str, stages: int) -> Kernel:
    """The tile belongs to the iteration, and changes in place: nothing is left of it."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 16), "float32"), O: T.Tensor((3, 32), "float32")):
        with T.Kernel(1, threads=32):
            n = T.alloc_var("int32", 0)
            for i in T.Parallel(32):
                for t in T.serial(3):
                    O[t, i] = 0.0
            if around == "while":
                for t in T.serial(3):
                    n = 0
                    while n < 1:  # found in the next iteration of the loop around
                        n += 1
                        for k in T.Pipelined(4, num_stages=stages):
                            s = T.alloc_shared((4, 4), "float32")
                            T.copy(A[0:4, k * 4 : k * 4 + 4], s)
                            T.transpose(s, s)
                            for i, j in T.Parallel(4, 4):
                                T.atomic_add(O[t, i * 4 + j], s[i, j])
            else:
                for t in T.serial(3):
                    for k in T.Pipelined(4, num_stages=stages):
                        s = T.alloc_shared((4, 4), "float32")
                        T.copy(A[0:4, k * 4 : k * 4 + 4], s)
                        T.transpose(s, s)
                        for i, j in T.Parallel(4, 4):
                            T.atomic_add(O[t, i * 4 + j], s[i, j])

    def meaning(a: torch.Tensor) -> torch.Tensor:
        total = a[:, :16].view(4, 4, 4).sum(1).t().reshape(16)
        return torch.cat([total, torch.zeros(16)]).expand(3, 32)

    return kernel, meaning


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("around", ["for", "while"])
@pytest.mark.parametrize("make", [read_by_the_next_iteration, own_tile], ids=lambda make: make.__name__)
def test_last_versions(
    make: Callable[..., Kernel], around: str, stages: int, seed: int, way: Callable[..., None]
) -> None:
    torch.manual_seed(seed)
    kernel, meaning = make(around, stages)
    a, out = torch.randint(-9, 10, (4, 32 if make is read_by_the_next_iteration else 16)).float(), torch.zeros(3, 32)
    way(kernel, a, out)
    assert torch.equal(out, meaning(a))
