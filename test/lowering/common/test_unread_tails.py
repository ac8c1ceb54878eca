# SPDX-License-Identifier: Apache-2.0
"""Ends of tensors that too few blocks or iterations leave out are found, at sizes known early or at calls."""

import warnings

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.size_check import MOST_SIZES
from torch_tile.lowering.common.unread_tails import Ends


def sums(n, count, block=32):
    """Sum the rows of a matrix, in `count(n)` steps."""

    @T.prim_func
    def kernel(A: T.Tensor((n, 24), "float32"), B: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=64) as _:
            tile, total = T.alloc_shared((block, 24), "float32"), T.alloc_fragment((24,), "float32")
            T.clear(total)
            for k in T.serial(count(n)):
                T.copy(A[k * block, 0], tile)
                T.reduce_sum(tile, total, dim=0, clear=False)
            T.copy(total, B)

    return kernel


def scaled(n, count, block=32):
    """Scale a vector, in `count(n)` blocks."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(count(n), threads=64) as bx:
            first = bx * block
            for i in T.Parallel(block):
                B[first + i] = A[first + i] * 2

    return kernel


def rounded_down(n):
    return n // 32


def rounded_up(n):
    return T.ceildiv(n, 32)


@pytest.mark.parametrize("make, part, verb", [(sums, "A[96:100, :]", "read"), (scaled, "B[96:100]", "written")])
def test_steps_that_are_too_few(make, part, verb):
    (found,) = Ends(make(100, rounded_down).program).diagnostics()
    assert found.code == "unread_tail" and f"`{part}` is not {verb} here" in found.message
    assert "takes 3 steps of 32 elements" in found.message and "T.ceildiv(100, 32)" in found.fix
    assert [note.source() for note, _ in found.notes]
    for n, count in ((100, rounded_up), (96, rounded_down), (96, rounded_up), (20, rounded_up)):
        assert not Ends(make(n, count).program).diagnostics()


@pytest.mark.parametrize("make, part", [(sums, "A[0:20, :]"), (scaled, "B[0:20]")])
def test_no_step_at_all(make, part):
    (found,) = Ends(make(20, rounded_down).program).diagnostics()
    assert f"`{part}`" in found.message and "takes 0 steps" in found.message


@pytest.mark.parametrize("step", [2, 3])
def test_windows_may_leave_out_a_rest(step):
    n = 64 * step + 1

    @T.prim_func
    def pooled(X: T.Tensor((n,), "float32"), Y: T.Tensor((n // step,), "float32")):
        with T.Kernel(T.ceildiv(n // step, 32), threads=32) as bx:
            for i in T.Parallel(32):
                Y[bx * 32 + i] = X[(bx * 32 + i) * step] + X[(bx * 32 + i) * step + step - 1]

    assert not Ends(pooled.program).diagnostics()


def test_a_rest_of_its_own():
    @T.prim_func
    def kernel(X: T.Tensor((100,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32) as _:
            total = T.alloc_var("float32", init=0.0)
            for k in T.serial(3):
                for i in T.serial(32):
                    total += X[k * 32 + i]
            for i in T.serial(4):
                total += X[96 + i]
            Y[0] = total

    assert not Ends(kernel.program).diagnostics()


@pytest.mark.parametrize("first, second", [(rounded_up, rounded_down), (rounded_down, rounded_up)])
def test_one_of_two_passes(first, second):
    @T.prim_func
    def kernel(X: T.Tensor((100,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32) as _:
            x = T.alloc_shared((32,), "float32")
            top, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
            T.fill(top, -1e30)
            T.clear(total)
            for k in T.serial(first(100)):
                T.copy(X[k * 32], x)
                T.reduce_max(x, top, dim=0, clear=False)
            for k in T.serial(second(100)):
                T.copy(X[k * 32], x)
                T.reduce_sum(x, total, dim=0, clear=False)
            Y[0] = top[0] + total[0]

    (found,) = Ends(kernel.program).diagnostics()
    assert "`X[96:100]` is not read here" in found.message


@pytest.mark.parametrize("swapped", [False, True])
def test_counts_of_blocks_that_are_swapped(swapped):
    counts = (T.ceildiv(40, 32), T.ceildiv(70, 16))

    @T.prim_func
    def kernel(X: T.Tensor((70, 40), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(*(counts[::-1] if swapped else counts), threads=32) as (bx, by):
            x = T.alloc_fragment((16, 32), "float32")
            T.copy(X[by * 16, bx * 32], x)
            for i, j in T.Parallel(16, 32):
                T.atomic_add(Y[0], x[i, j])

    found = Ends(kernel.program).diagnostics()
    assert len(found) == swapped
    if swapped:
        assert "`X[32:70, :]` is not read here" in found[0].message and "dimension 1: swap" in found[0].fix


def told(kernel, *args):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernel(*args)
    return [text for each in seen if "fix:" in (text := str(each.message))]


def test_sizes_of_calls():
    """The first call with such sizes warns, and no other."""
    kernel = torch_tile.compile(sums(T.dynamic("n"), rounded_down), out_idx=[1], target="cpu")
    assert not told(kernel, torch.randn(64, 24)) and not told(kernel, torch.randn(96, 24))
    (text,) = told(kernel, torch.randn(100, 24))
    assert "`A[96:100, :]` is not read here" in text and "T.copy(A[k * block, 0], tile)" in text
    assert not told(kernel, torch.randn(100, 24)) and not told(kernel, torch.randn(101, 24))
    right = torch_tile.compile(sums(T.dynamic("n"), rounded_up), out_idx=[1], target="cpu")
    for n in range(95, 95 + MOST_SIZES + 2):
        assert not told(right, torch.randn(n, 24))


def test_declared_sizes_that_are_swapped():
    n, m = T.dynamic("n"), T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((n, m), "float32"), B: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, 32), T.ceildiv(n, 32), threads=64) as (bx, by):
            for i, j in T.Parallel(32, 32):
                B[bx * 32 + i, by * 32 + j] = A[bx * 32 + i, by * 32 + j]

    made = torch_tile.compile(kernel, target="cpu")
    assert not told(made, torch.randn(50, 50), torch.zeros(50, 50))
    (text,) = told(made, torch.randn(50, 70), torch.zeros(70, 50))
    assert "indices of `A`" in text and "where `A` is declared" in text


def test_results_of_out_idx():
    @T.prim_func
    def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(32):
                B[bx * 32 + i] = A[bx * 32 + i]

    (text,) = told(torch_tile.compile(kernel, out_idx=[1], target="cpu"), torch.randn(100))
    assert "`B[64:100]` is returned, but no statement writes it" in text


@pytest.mark.parametrize("swapped", [False, True])
def test_conditions_with_sizes_of_the_other_dimension(swapped):
    @T.prim_func
    def kernel(X: T.Tensor((45, 70), "float32"), Y: T.Tensor((45, 70), "float32")):
        with T.Kernel(T.ceildiv(70, 32), T.ceildiv(45, 16), threads=32) as (bx, by):
            for i, j in T.Parallel(16, 32):
                r, c = by * 16 + i, bx * 32 + j
                if r < 45 and c < 70:
                    Y[r, c] = X[c, r] if swapped else X[r, c]

    found = Ends(kernel.program).diagnostics()
    assert [each.code for each in found] == ["swapped_indices"] * swapped
