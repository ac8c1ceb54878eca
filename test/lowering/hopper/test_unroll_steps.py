# SPDX-License-Identifier: Apache-2.0
"""Short loops of products with sums of their own: unrolled, so that products run beside arithmetic."""

from __future__ import annotations

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.intrinsics.wgmma import wgmma_wait
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Do, For
from torch_tile.lowering.hopper import unroll_steps as module
from torch_tile.lowering.hopper.async_wgmma import async_wgmma
from torch_tile.lowering.hopper.warp_specialize import specialize_warps
from torch_tile.tileop.gemm.op import Gemm

TARGET = "cuda:sm_90a"
ROWS, COLUMNS, GROUP = 128, 64, 64


def scaled(steps=4, stages=2, threads=256, form="", rows=ROWS):
    """Two groups of widened weights an iteration, whose sums are scaled. `form` names what keeps the loop as it is."""

    @T.prim_func
    def kernel(
        W: T.Tensor((rows, steps * 2 * GROUP), "int8"), X: T.Tensor((COLUMNS, steps * 2 * GROUP), "float16"),
        S: T.Tensor((rows, steps * 2), "float32"), C: T.Tensor((rows, COLUMNS), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads):
            words, x = T.alloc_shared((rows, 2 * GROUP), "int8"), T.alloc_shared((COLUMNS, 2 * GROUP), "float16")
            total, outside = (T.alloc_fragment((rows, COLUMNS), "float32") for _ in range(2))
            T.clear(total)
            T.clear(outside)
            for k in T.Pipelined(steps, num_stages=stages):
                T.copy(W[0, k * 2 * GROUP], words)
                T.copy(X[0, k * 2 * GROUP], x)
                one, two = T.alloc_fragment((rows, GROUP), "float16"), T.alloc_fragment((rows, GROUP), "float16")
                first, second = (T.alloc_fragment((rows, COLUMNS), "float32") for _ in range(2))
                if form == "one fragment":
                    two = one
                if form == "a sum of the loop":
                    second = outside
                for i, j in T.Parallel(rows, GROUP):
                    one[i, j] = T.cast(words[i, j], "float16")
                T.gemm(one, x[0:COLUMNS, 0:GROUP], first, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, GROUP):
                    two[i, j] = T.cast(words[i, GROUP + j], "float16")
                go_on = form == "a sum that goes on"
                T.gemm(two, x[0:COLUMNS, GROUP : 2 * GROUP], second, transpose_B=True, clear_accum=not go_on)
                for i, j in T.Parallel(rows, COLUMNS):
                    total[i, j] += first[i, j] * S[i, k * 2]
                for i, j in T.Parallel(rows, COLUMNS):
                    if form == "both results":
                        total[i, j] += second[i, j] * S[i, k * 2 + 1] + first[i, j] * 0.0
                    elif form == "a tile":
                        total[i, j] += second[i, j] * S[i, k * 2 + 1] + T.cast(x[j, 0], "float32") * 0.0
                    else:
                        total[i, j] += second[i, j] * S[i, k * 2 + 1]
            T.copy(total, C)

    return kernel


def unrolled(**options):
    """The program after both passes."""
    build = Build(Target.of(TARGET))
    return async_wgmma(specialize_warps(scaled(**options).program, build), build)


def events(program) -> list[object]:
    """Products by their results, sums, and how many products each wait leaves in flight, in order."""
    found: list[object] = []
    for one in walk(program):
        if isinstance(one, Gemm):
            found.append(f"start {one.C.buffer.name}")
        elif isinstance(one, Do) and one.call.name == "wgmma_wait":
            found.append(one.call.options[0])
        elif isinstance(one, For) and "total[" in repr(one) and not any(isinstance(n, Gemm) for n in walk(one)):
            found.append("sum")
    return found


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_each_product_runs_beside_arithmetic(steps) -> None:
    """Each starts in front of the sum of the one before, also in the next iteration."""
    one, two = "start first", "start second"
    following = [one, 1, "sum", two, 1, "sum"] * (steps - 1)
    assert events(unrolled(steps=steps)) == [one, two, 1, "sum", *following, 0, "sum"]


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 5},
        {"steps": 1},
        {"rows": 64},
        {"stages": 1},
        {"threads": 128},
        {"form": "one fragment"},
        {"form": "a sum of the loop"},
        {"form": "a sum that goes on"},
        {"form": "both results"},
        {"form": "a tile"},
    ],
    ids=str,
)
def test_other_loops_stay(options) -> None:
    """Each of these would read what another statement has overwritten, wait for itself, or gain nothing."""
    assert sum(isinstance(n, Gemm) for n in walk(unrolled(**options))) == 2


def run(**options) -> tuple[bool, bool]:
    """Run the kernel thread by thread; whether nothing was found, and whether the values are those of float64."""
    steps = options.get("steps", 4)
    w = torch.randint(-8, 8, (ROWS, steps * 2 * GROUP)).to(torch.int8)
    x, s = torch.randint(-3, 4, (COLUMNS, w.shape[1])).half(), torch.randint(1, 5, (ROWS, steps * 2)).float()
    c = torch.zeros(ROWS, COLUMNS)
    made = torch_tile.compile(scaled(**options), target=TARGET)
    findings = made.interpret(w, x, s, c)
    wide = w.double() * s.double().repeat_interleave(GROUP, 1)
    return not findings, torch.equal(c.double(), wide @ x.double().T)


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"stages": 3}, {"steps": 3, "stages": 4}, {"form": "one fragment"}], ids=str
)
def test_values(options, seed) -> None:
    torch.manual_seed(seed)
    assert run(**options) == (True, True)


def test_products_are_waited_for(monkeypatch, seed) -> None:
    """The thread simulator sees waits that leave one more product in flight."""
    torch.manual_seed(seed)
    monkeypatch.setattr(module, "wgmma_wait", lambda left: wgmma_wait(left + 1))
    assert run() != (True, True)


def test_tiles_are_released_behind_their_products(monkeypatch, seed) -> None:
    """The thread simulator sees tiles that an iteration releases at its start."""
    torch.manual_seed(seed)
    split = module._parts

    def early(stmts):
        parts = split(stmts)
        if parts is not None:
            parts.starts[0][:0] = parts.releases
            parts.releases.clear()
        return parts

    monkeypatch.setattr(module, "_parts", early)
    assert run() != (True, True)


def test_operands_of_products_in_flight_are_kept(monkeypatch, seed) -> None:
    """The thread simulator sees weights that are overwritten beside the product that reads them."""
    torch.manual_seed(seed)
    monkeypatch.setattr(module, "_may_cross", lambda parts: True)
    assert run(form="one fragment") != (True, True)


def test_the_assembler_has_no_advice() -> None:
    made = torch_tile.compile(scaled(), target=TARGET)
    assert not made.cubin.warnings
    assert not any(used.spills for used in made.resources.values())
