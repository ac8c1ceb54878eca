# SPDX-License-Identifier: Apache-2.0
"""Reads of elements that no statement before can have written: certain ones are errors, all others pass."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.lowering.common.check import check_kernel
from torch_tile.lowering.common.written_boxes import uncovered
from torch_tile.simulator.tile.interpreter import evaluate


def part_of_a_copy(s, X, Y, n):
    T.copy(X[0:8, 0:16], s[0:8, :])
    T.copy(s, Y)  # here


def part_of_a_nest(s, X, Y, n):
    total = T.alloc_fragment((16,), "float32")
    for i, j in T.Parallel(16, 12):
        s[i, j] = X[i, j]
    T.reduce_sum(s, total, dim=1)  # here
    for i in T.Parallel(16):
        Y[i, 0] = total[i]


def guarded_stores(s, X, Y, n):
    for i, j in T.Parallel(16, 16):
        if i > 3:
            s[i, j] = X[i, j]
    for i, j in T.Parallel(16, 16):
        Y[i, j] = s[i, j] + 1  # here


def one_column_less(s, X, Y, n):
    for i, j in T.Parallel(16, 15):
        s[i, j + 1] = X[i, j]
    for k in T.serial(16):
        for i in T.Parallel(16):
            Y[i, k] = s[i, k]  # here


def first_turn(s, X, Y, n):
    for k in T.serial(4):
        for i in T.Parallel(16):
            Y[i, 0] = s[i, k]  # here
        for i in T.Parallel(16):
            s[i, k + 1] = X[i, k]


def garbage_again(s, X, Y, n):
    for i, j in T.Parallel(16, 16):
        if i > 3:
            s[i, j] = X[i, j]
    for i, j in T.Parallel(16, 16):
        s[i, j] = s[i, j] * 2
    T.copy(s, Y)  # here


def condition(s, X, Y, n):
    s[0, 0] = X[0, 0]
    if s[1, 0] > 2:  # here
        Y[0, 0] = 1.0


FAULTS = [part_of_a_copy, part_of_a_nest, guarded_stores, one_column_less, first_turn, garbage_again, condition]


def guarded_reads(s, X, Y, n):
    T.copy(X[0:8, 0:16], s[0:8, :])
    for i, j in T.Parallel(16, 16):
        Y[i, j] = T.if_then_else(i < 8, s[i, j], 0.0)


def two_halves(s, X, Y, n):
    T.copy(X[8:16, 0:16], s[8:16, :])
    for i, j in T.Parallel(8, 16):
        s[7 - i, j] = X[i, j]
    T.copy(s, Y)


def turn_by_turn(s, X, Y, n):
    T.clear(s[:, 0:1])
    for k in T.serial(15):
        for i in T.Parallel(16):
            s[i, k + 1] = s[i, k] + X[i, k]
    T.copy(s, Y)


def rows_beyond_the_tensor(s, X, Y, n):
    T.copy(X[0:8, 0:16], s[0:8, :])
    T.copy(s, Y[8, 0])


def rows_that_nobody_uses(s, X, Y, n):
    total = T.alloc_fragment((16,), "float32")
    T.copy(X[0:8, 0:16], s[0:8, :])
    T.reduce_sum(s, total, dim=1)
    for i in T.Parallel(8):
        Y[i, 0] = total[i]


def by_a_number_of_the_call(s, X, Y, n):
    for i, j in T.Parallel(16, 16):
        if i < n:
            s[i, j] = X[i, j]
    T.copy(s, Y)


def left_early(s, X, Y, n):
    T.clear(s[0:8, :])
    for i in T.serial(16):
        if i >= n:
            break
        Y[i, 0] = s[i, 0]


def in_some_order(s, X, Y, n):
    for k in T.serial(16):
        T.copy(X[(k * 5) % 16, 0:16], s[(k * 5) % 16, :])
    T.copy(s, Y)


def of_a_later_turn(s, X, Y, n):
    T.clear(s[0, :])
    for k in T.serial(4):
        T.copy(s[k % 2, :], Y[k, 0:16])
        T.copy(X[k, 0:16], s[(k + 1) % 2, :])


FINE = [
    guarded_reads, two_halves, turn_by_turn, rows_beyond_the_tensor, rows_that_nobody_uses, by_a_number_of_the_call,
    left_early, in_some_order, of_a_later_turn,
]  # fmt: skip


def kernel_of(body, scope):
    @T.prim_func
    def kernel(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((16, 16), "float32"), n: T.int32):
        with T.Kernel(1, threads=64) as _:
            s = T.alloc_shared((16, 16), "float32") if scope == "shared" else T.alloc_fragment((16, 16), "float32")
            body(s, X, Y, n)

    return kernel


@pytest.mark.parametrize("scope", ["shared", "fragment"])
@pytest.mark.parametrize("body", FAULTS)
def test_certain_reads_are_errors(body, scope):
    kernel = kernel_of(T.macro(body), scope)
    with pytest.raises(TileError) as caught:
        check_kernel(kernel.program)
    assert caught.value.code.startswith("unwritten") and caught.value.span.source().endswith("# here")
    with pytest.raises(TileError):  # as the meaning of the program says
        evaluate(kernel, torch.ones(16, 16), torch.zeros(16, 16), 16)


@pytest.mark.parametrize("scope", ["shared", "fragment"])
@pytest.mark.parametrize("body", FINE)
def test_all_others_pass(body, scope):
    program = kernel_of(T.macro(body), scope).program
    assert check_kernel(program) is program


def test_parts_of_boxes():
    box, others = ((0, 6), (0, 5)), [((1, 3), (2, 9)), ((2, 6), (0, 1)), ((5, 6), (4, 5))]
    points = {(i, j) for i in range(6) for j in range(5)}
    for (a, b), (c, d) in others:
        points -= {(i, j) for i in range(a, b) for j in range(c, d)}
    parts = [[(i, j) for i in range(a, b) for j in range(c, d)] for (a, b), (c, d) in uncovered(box, others)]
    assert sorted(p for part in parts for p in part) == sorted(points)
