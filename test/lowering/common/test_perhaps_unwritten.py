# SPDX-License-Identifier: Apache-2.0
"""Strict mode names tiles that some path leaves unwritten before a read, and no other."""

import warnings

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.common.perhaps_unwritten import perhaps_unwritten


def by_a_branch(s, X, Y, n):
    if n > 3:
        T.clear(s)
    T.copy(s, Y)  # here


def by_a_loop_without_turns(s, X, Y, n):
    for _ in T.serial(n):
        T.copy(X, s)
    T.copy(s, Y)  # here


def by_a_guard(s, X, Y, n):
    for i, j in T.Parallel(16, 16):
        if i < n:
            s[i, j] = X[i, j]
    for i, j in T.Parallel(16, 16):
        Y[i, j] = s[i, j]  # here


def by_an_end(s, X, Y, n):
    for k in T.serial(16):
        if k > n:
            break
        T.copy(X[k, 0:16], s[k, :])
    T.copy(s, Y)  # here


def in_both_branches(s, X, Y, n):
    if n > 3:
        T.clear(s)
    else:
        T.copy(X, s)
    T.copy(s, Y)


def in_each_turn(s, X, Y, n):
    for _ in T.serial(n):
        T.copy(X, s)
        T.copy(s, Y)


def row_by_row(s, X, Y, n):
    for k in T.serial(16):
        T.copy(X[k, 0:16], s[k, :])
    T.copy(s, Y)


def where_it_is_read(s, X, Y, n):
    for i, j in T.Parallel(16, 16):
        if i < 8:
            s[i, j] = X[i, j]
            Y[i, j] = s[i, j]


DOUBTFUL = [by_a_branch, by_a_loop_without_turns, by_a_guard, by_an_end]
CLEAR = [in_both_branches, in_each_turn, row_by_row, where_it_is_read]


def kernel_of(body):
    body = T.macro(body)

    @T.prim_func
    def kernel(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((16, 16), "float32"), n: T.int32):
        with T.Kernel(1, threads=64) as _:
            s = T.alloc_shared((16, 16), "float32")
            body(s, X, Y, n)

    return kernel


@pytest.mark.parametrize("body", DOUBTFUL)
def test_paths_that_write_nothing(body):
    found = perhaps_unwritten(kernel_of(body).program)
    assert [d.code for d in found] == ["perhaps_unwritten"] and found[0].span.source().endswith("# here")


@pytest.mark.parametrize("body", CLEAR)
def test_all_paths_write(body):
    assert perhaps_unwritten(kernel_of(body).program) == []


@pytest.mark.parametrize("strict", [False, True])
def test_strict_mode_warns(strict):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch_tile.compile(kernel_of(by_a_branch), target="cpu", pass_configs={"tl.strict": strict})
    assert any("`s` is read here" in str(each.message) for each in told) == strict
