# SPDX-License-Identifier: Apache-2.0
"""Products that stay under way: what loops become. That values stay as they are is shown in test_split_warps.py."""

from __future__ import annotations

import torch_tile.language as T
from torch_tile.build import Build
from torch_tile.ir.node import walk
from torch_tile.lowering.async_products import async_products
from torch_tile.lowering.split_warps import split_warps
from torch_tile.target import Target
from torch_tile.tileop.fill import Fill
from torch_tile.tileop.gemm import Gemm
from torch_tile.tileop.results import WgmmaResults


def product(stages=3, dtype="float16", total="float32", target="cuda:sm_90a"):
    """The program of a plain product after both passes."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), dtype), B: T.Tensor((512, 512), dtype), C: T.Tensor((512, 512), total)):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            a, b, c = (
                T.alloc_shared((64, 64), dtype),
                T.alloc_shared((64, 64), dtype),
                T.alloc_fragment((64, 64), total),
            )
            T.clear(c)
            for ko in T.Pipelined(8, num_stages=stages):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(B[bx * 64, ko * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    build = Build(Target.of(target))
    return async_products(split_warps(kernel.program, build), build)


def waits(program) -> list[int]:
    return [n.wg_wait for n in walk(program) if isinstance(n, Gemm)]


def test_a_turn_stays_under_way() -> None:
    assert waits(product()) == [1]


def test_not_if_its_tiles_have_one_stage() -> None:
    """The copier would wait for a turn that waits for the copier."""
    assert waits(product(stages=1)) == [0]


def test_other_targets() -> None:
    assert waits(product(target="cuda:sm_80")) == [0]


def test_integer_zeros_are_there_before_the_first_product() -> None:
    pinned = [n for n in walk(product(dtype="int8", total="int32")) if isinstance(n, Fill | WgmmaResults)]
    assert [type(n) for n in pinned] == [Fill, WgmmaResults, WgmmaResults]
    assert [type(n) for n in walk(product()) if isinstance(n, Fill | WgmmaResults)] == [Fill, WgmmaResults]
