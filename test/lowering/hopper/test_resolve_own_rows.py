# SPDX-License-Identifier: Apache-2.0
"""Rows that a warpgroup has of its own, and where it has none."""

from __future__ import annotations

import pytest
import torch

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.expr import is_zero
from torch_tile.ir.node import find
from torch_tile.ir.stmt import For, Let, Program
from torch_tile.lowering.hopper.resolve_own_rows import OWN, resolve_own_rows
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.simulator.tile.interpreter import evaluate

FULL_ROW, SQUARE = T.GemmWarpPolicy.FullRow, T.GemmWarpPolicy.Square


def product(rows=128, asked=128, groups=2, policy=FULL_ROW, dtype=T.float16):
    @T.prim_func
    def kernel(A: T.Tensor((rows, 256), dtype), B: T.Tensor((256, 64), dtype), C: T.Tensor((2,), T.int32)):
        with T.Kernel(1, threads=128 * groups):
            a, b = T.alloc_shared((rows, 64), dtype), T.alloc_shared((64, 64), dtype)
            c = T.alloc_fragment((rows, 64), T.float32)
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2, skip=T.own_rows(asked)[0]):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, c, policy=policy)
            C[0], C[1] = T.own_rows(asked)

    return kernel


def resolved(kernel: Program, target: str = "cuda:sm_90a", **options: bool) -> tuple[Program, Build]:
    build = Build(Target.of(target))
    return resolve_own_rows(specialize_warps(kernel.program, build), build, **options), build


@pytest.mark.parametrize("groups", [2, 3])
def test_each_warpgroup_has_64_rows(groups):
    program, build = resolved(product(64 * groups, 64 * groups, groups))
    group = next(let for let in find(program, Let) if let.var.name == "group")
    assert str(group.value) == f"(thread // 128 - 0) % {groups}"
    assert "C[0] = group * 64" in repr(program) and "C[1] = group * 64 + 64" in repr(program)
    assert "own_rows" not in repr(program)
    assert sum(OWN in remark.became for remark in build.remarks) == 1
    skips = [loop.skip for loop in find(program, For)]  # the copying warps leave nothing out
    assert sum(skip is not None for skip in skips) == 1 and len(skips) > 1


@pytest.mark.parametrize(
    "case",
    [
        {"target": "cuda:sm_80"},
        {"target": "cuda:sm_120a"},
        {"groups": 1},
        {"rows": 64, "asked": 64},  # columns are shared out
        {"rows": 256, "asked": 256},  # two times 64 rows
        {"asked": 64},  # of another tile
        {"policy": SQUARE},
        {"dtype": T.float32},
        {"shared": True},
    ],
    ids=str,
)
def test_else_all_rows_are_own(case):
    options = {key: case[key] for key in ("target", "shared") if key in case}
    program, _ = resolved(product(**{k: v for k, v in case.items() if k not in options}), **options)
    text, asked = repr(program), case.get("asked", 128)
    assert "own_rows" not in text and "C[0] = 0" in text and f"C[1] = {asked}" in text
    skips = [loop.skip for loop in find(program, For) if loop.skip is not None]
    assert all(map(is_zero, skips)) and (not skips or case == {"asked": 64})


def test_programs_without_own_rows_stay():
    @T.prim_func
    def kernel(C: T.Tensor((2,), T.int32)):
        with T.Kernel(1, threads=32):
            C[0] = 1

    assert resolve_own_rows(kernel.program) is kernel.program
    program = product().program
    assert "own_rows" in repr(program) and "own_rows" not in repr(resolve_own_rows(program))


def test_all_rows_are_those_of_a_tile():
    c = torch.zeros(2, dtype=torch.int32)
    evaluate(product(), torch.zeros(128, 256).half(), torch.zeros(256, 64).half(), c)
    assert c.tolist() == [0, 128]


@pytest.mark.parametrize("rows", [0, -64, 1.5, True, "all"])
def test_numbers_of_rows(rows):
    with pytest.raises(TileError) as found:
        product(asked=rows)
    assert found.value.code == "bad_argument" and "T.own_rows" in str(found.value)
