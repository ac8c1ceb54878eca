# SPDX-License-Identifier: Apache-2.0
"""Loops over slices of fragments stay in registers, and compute the same."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.ir.node import find
from torch_tile.ir.stmt import For
from torch_tile.lowering.threads.slice_fragments import MOST_SLICES, slice_fragments


def staged(rows, columns, slices, threads, guarded, by_copy=False):
    """A product whose result is stored slice by slice through a smaller tile."""
    part = rows // slices

    @T.prim_func
    def main(A: T.Tensor((64, rows), "float16"), B: T.Tensor((64, columns), "float16"),
             C: T.Tensor((rows, columns), "float32")):  # fmt: skip
        with T.Kernel(1, threads=threads):
            a = T.alloc_shared((64, rows), "float16")
            b = T.alloc_shared((64, columns), "float16")
            acc = T.alloc_fragment((rows, columns), "float32")
            out = T.alloc_shared((part, columns), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, transpose_A=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True)
            for s in range(slices):
                if by_copy:
                    T.copy(acc[s * part : (s + 1) * part, :], out)
                elif guarded:
                    for i, j in T.Parallel(rows, columns):
                        if i < part:
                            out[i, j] = acc[i + s * part, j]
                else:
                    for i, j in T.Parallel(part, columns):
                        out[i, j] = acc[i + s * part, j]
                for i, j in T.Parallel(part, columns):
                    C[s * part + i, j] = out[i, j] + s

    return main


FORMS = [(32, 128, 2, 128, True, False), (64, 64, 4, 128, False, False), (32, 256, 2, 256, False, True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_slices_stay_in_registers(form, arch):
    kernel = torch_tile.compile(staged(*form), target=f"cuda:{arch}")
    assert not any("through shared memory" in remark.became for remark in kernel.build.remarks)
    rows, columns, slices = form[:3]
    a, b = torch.randn(64, rows).half(), torch.randn(64, columns).half()
    result = torch.zeros(rows, columns)
    assert not kernel.interpret(a, b, result).kinds
    expected = a.double().T @ b.double() + (torch.arange(rows) // (rows // slices))[:, None]
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


def test_values_on_the_cpu():
    for form in FORMS:
        rows, columns, slices = form[:3]
        a, b = torch.randn(64, rows).half(), torch.randn(64, columns).half()
        result = torch.zeros(rows, columns)
        torch_tile.compile(staged(*form), target="cpu")(a, b, result)
        expected = a.double().T @ b.double() + (torch.arange(rows) // (rows // slices))[:, None]
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


def test_other_loops_stay():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            tile = T.alloc_fragment((64, 64), "float32")
            T.copy(A, tile)
            for s in T.serial(4):  # one row, no slice
                for j in T.Parallel(64):
                    tile[s, j] += 1.0
            for s in T.serial(n):  # an unknown number
                for i, j in T.Parallel(2, 64):
                    tile[s * 2 + i, j] += 1.0
            for s in T.serial(MOST_SLICES * 2):  # too many
                for i, j in T.Parallel(2, 64):
                    tile[s * 2 + i, j] += 1.0
            for i, j in T.Parallel(64, 64):  # a guard, and no slice
                if i < 32:
                    tile[i, j] += 1.0
            T.copy(tile, A)

    program = main.program
    assert slice_fragments(program) is program


def test_a_guard_that_divides_shrinks_the_nest():
    def program(most):
        @T.prim_func
        def main(A: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=32):
                tile = T.alloc_fragment((64,), "float32")
                T.copy(A, tile)
                for i in T.Parallel(64):
                    if i < most:
                        A[i] = tile[i + 64 - most]

        return main.program

    extents = [
        [int(n.stops[0].value) for n in find(slice_fragments(program(most)), For) if n.vars] for most in (16, 24)
    ]
    assert extents == [[16], [64]]


def test_guards_of_expressions():
    """A guard `i * 2 + j < n` names no variable of its nest, and cannot be compared with one."""

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            held = T.alloc_fragment((64,), "float32")
            T.copy(A, held)
            for s in range(2):
                for i, j in T.Parallel(16, 2):
                    if i * 2 + j < 30:
                        B[s * 32 + i * 2 + j] = held[s * 32 + i * 2 + j]

    kernel = torch_tile.compile(main, target="cuda:sm_90a")
    a, b = torch.randn(64), torch.zeros(64)
    assert not kernel.interpret(a, b).kinds
    assert torch.equal(b, torch.where(torch.arange(64) % 32 < 30, a, 0.0))
