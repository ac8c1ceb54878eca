# SPDX-License-Identifier: Apache-2.0
"""Statements that write all of a tile, by regions or by threads."""

import pytest

import torch_tile.language as T
from torch_tile.ir.node import find
from torch_tile.ir.stmt import Alloc, For
from torch_tile.lowering.analysis.whole_writes import writes_whole

THREADS = 64


def by_region(A, b, tx):
    T.copy(A, b)


def by_nest(A, b, tx):
    for i, j in T.Parallel(16, 32):
        b[i, j] = A[i, j] + 1


def by_halves(A, b, tx):
    for i, j in T.Parallel(8, 32):
        b[i, j] = A[i, j]
    for i, j in T.Parallel(8, 32):
        b[15 - i, j ^ 3] = A[i, j]


def by_threads(A, b, tx):
    for i in T.serial(4):
        at = (i * THREADS + tx) * 2
        for v in T.vectorized(2):
            b[at // 32, at % 32 + v] = A[0, v]


def but_one(A, b, tx):
    for i, j in T.Parallel(16, 31):
        b[i, j + 1] = A[i, j]


@T.macro
def by_half_the_threads(A, b, tx):
    for i in T.serial(8):
        if tx < 32:
            b[i * 2, tx] = A[0, 0]
            b[i * 2 + 1, tx] = A[0, 0]


def at_places_from_memory(A, b, tx):
    for i, j in T.Parallel(16, 32):
        b[T.cast(A[i, 0], "int32") % 16, j] = A[i, j]


def up_to_a_size_of_calls(A, b, tx):
    for i, j in T.Parallel(A.shape[0], 32):
        b[i, j] = A[i, j]


def read_first(A, b, tx):
    A[0, 0] = b[0, 0]
    T.copy(A, b)


def sums(A, b, tx):
    for i, j in T.Parallel(16, 32):
        b[i, j] += A[i, j]


@T.macro
def left_early(A, b, tx):
    for i in T.serial(16):
        for j in T.Parallel(32):
            b[i, j] = A[i, j]
        if A[i, 0] > 3:
            break


@T.macro
def with_rows_left_out(A, b, tx):
    for i in T.serial(16):
        if A[i, 0] > 3:
            continue
        for j in T.serial(32):
            b[i, j] = A[i, j]


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (by_region, True), (by_nest, True), (by_halves, True), (by_threads, True), (but_one, False),
        (by_half_the_threads, False), (at_places_from_memory, False), (up_to_a_size_of_calls, False),
        (read_first, False), (sums, False), (left_early, False),
        (with_rows_left_out, False),
    ],
)  # fmt: skip
def test_forms(body, whole):
    n = T.dynamic("n") if body is up_to_a_size_of_calls else 16

    @T.prim_func
    def kernel(A: T.Tensor((n, 32), "float32")):
        with T.Kernel(1, threads=THREADS):
            b = T.alloc_shared((16, 32), "float32")
            for _ in T.serial(2):
                body(A, b, T.get_thread_binding())

    (block,) = kernel.program.kernels
    loop = next(iter(find(block, For)))
    (tile,) = (n.buffer for n in find(block, Alloc) if n.buffer.scope == "shared")
    assert writes_whole(loop.body.stmts, tile, block.thread, THREADS) is whole
    if body is by_threads:
        assert not writes_whole(loop.body.stmts, tile, block.thread, THREADS - 1)
