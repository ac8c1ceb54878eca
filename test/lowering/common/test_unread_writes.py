# SPDX-License-Identifier: Apache-2.0
"""Writes of tiles that nothing reads afterwards are found, with the line that reads too early; no others are."""

import warnings

import pytest

import torch_tile.language as T
from torch_tile.lowering.common.check import check_kernel
from torch_tile.lowering.common.unread_writes import unread_writes


def found_in(body, thread=False):
    @T.prim_func
    def kernel(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as _:
            s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            if thread:
                T.device_assert(T.get_thread_binding() < 256)
            body(X, Y, s, f)

    return kernel.program, [(each.message.split("`")[1], len(each.notes)) for each in unread_writes(kernel.program)]


def never_read(X, Y, s, f):
    T.copy(X, s)
    T.copy(X, f)
    T.copy(f, Y)


def copied_out_early(X, Y, s, f):
    T.copy(X, s)
    T.copy(s, Y)
    T.cumsum(s, dim=0)


def copied_out_before_the_loop(X, Y, s, f):
    T.clear(s)
    T.copy(s, Y)
    for k in T.serial(4):
        for i in T.Parallel(64):
            s[i] = s[i] + X[i] * k


def read_by_idle_statements(X, Y, s, f):
    T.copy(X, f)
    T.copy(f, Y)
    T.copy(f, s)
    for i in T.Parallel(64):
        f[i] = s[i] * 2


@T.macro
def in_a_branch(X, Y, s, f):
    T.copy(X, f)
    if X[0] > 0:
        T.copy(X, s)
    else:
        T.copy(f, Y)


IDLE = {
    never_read: ("s", 0),
    copied_out_early: ("s", 1),
    copied_out_before_the_loop: ("s", 1),
    read_by_idle_statements: ("f", 1),
    in_a_branch: ("s", 0),
}


@pytest.mark.parametrize("body", IDLE, ids=lambda f: getattr(f, "__name__", "in_a_branch"))
def test_writes_that_nothing_reads_are_found(body):
    program, found = found_in(body)
    assert found == [IDLE[body]]
    with pytest.warns(UserWarning, match=f"nothing reads `{IDLE[body][0]}`"):
        check_kernel(program)


def read_by_the_next_iteration(X, Y, s, f):
    T.clear(s)
    for _ in T.serial(4):
        for i in T.Parallel(64):
            Y[i] = s[i]
        T.copy(X, s)


def summed_up(X, Y, s, f):
    T.clear(f)
    for k in T.serial(4):
        for i in T.Parallel(64):
            f[i] += X[i] * k
    T.copy(f, Y)


def unrolled_by_python(X, Y, s, f):
    T.clear(f)
    for _ in range(2):
        T.copy(f, Y)
        T.copy(X, f)


def only_cleared(X, Y, s, f):
    T.clear(s)
    T.copy(X, Y)


def read_by_a_condition(X, Y, s, f):
    T.copy(X, s)
    for i in T.Parallel(64):
        Y[i] = T.if_then_else(s[i] > 0, 1.0, 0.0)


def read_by_an_index(X, Y, s, f):
    n = T.alloc_shared((1,), "int32")
    n[0] = T.cast(X[0], "int32")
    Y[n[0] % 64] = 1.0


def read_by_a_pointer(X, Y, s, f):
    T.copy(X, s)
    T.call_extern("handle", "use", T.address_of(s[0]))


def printed(X, Y, s, f):
    T.copy(X, s)
    T.print(s)


def of_two_roles(X, Y, s, f):
    with T.ws(0):
        T.copy(s, Y)
    with T.ws(1):
        T.copy(X, s)


def awaited_by_a_bound(X, Y, s, f):
    for i in T.serial(T.cast(s[0], "int32")):
        Y[i] = 1.0
    T.copy(X, s)


@pytest.mark.parametrize(
    "body",
    [
        only_cleared, read_by_the_next_iteration, summed_up, unrolled_by_python, read_by_a_condition,
        read_by_an_index, read_by_a_pointer, printed,
    ],
)  # fmt: skip
def test_writes_that_something_reads_are_not(body):
    assert not found_in(body)[1]


def test_roles_and_threads_that_run_apart_read_what_stands_behind():
    assert not found_in(of_two_roles)[1]
    for body in (copied_out_early, awaited_by_a_bound):
        assert found_in(body)[1] and not found_in(body, thread=True)[1]
    assert found_in(never_read, thread=True)[1] == [("s", 0)]


def test_valid_programs_have_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_kernel(found_in(summed_up)[0])
