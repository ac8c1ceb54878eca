# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of bools: addition is refused where it is written, others are exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile
import torch_tile.language as T


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_addition_of_bools(target: str, refused: Callable[..., Any]) -> None:
    def case() -> None:
        @T.prim_func
        def count(O: T.Tensor((8,), "bool")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(8):
                    T.atomic_add(O[i], True)  # here

        torch_tile.compile(count, target=target)

    refused(case, "bad_argument", "T.atomic_add(O[i], True)")


@pytest.mark.parametrize("name", ["max", "min", "and", "or", "xor", "store"])
def test_other_updates_of_bools(name: str, way: Callable[..., None]) -> None:
    @T.prim_func
    def update(O: T.Tensor((4,), "bool"), A: T.Tensor((4,), "bool")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                getattr(T, f"atomic_{name}")(O[i], A[i])

    old, new = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    joined = {"max": old | new, "min": old & new, "and": old & new, "or": old | new, "xor": old ^ new, "store": new}
    out = old.clone()
    way(update, out, new)
    assert torch.equal(out, joined[name])
