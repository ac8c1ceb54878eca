# SPDX-License-Identifier: Apache-2.0
"""One kernel for each way in which a name would not survive the branches of a device `if` or the iterations of a
loop.
"""

import sys

import pytest
import torch

import torch_tile.language as T
from torch_tile.simulator.tile.interpreter import evaluate


def of_one_branch():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A[0] > 0:
                x = 3.0
            A[1] = x  # here


def of_buffers():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A[0] > 0:
                source = A
            else:
                source = B
            A[1] = source[2]  # here


def of_functions():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            act = T.exp
            if A[0] > 0:
                act = T.log
            A[1] = act(A[2])  # here


def of_pairs():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                if A[i] > 0:
                    both = (1.0, 2.0)
                    continue
                if A[i] < 0:
                    both = (2.0, 1.0)
                else:
                    both = (2.0, 3.0)
                A[i] = max(both)  # here


def in_the_other_branch():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A[0] > 0:
                x = 3.0
                A[1] = x
            else:
                A[2] = x  # here


def of_a_loop_inside():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A[0] > 0:
                for i in T.serial(2):
                    x = A[i]
            else:
                x = 1.0
            A[1] = x  # here


def after_a_break():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                x = 1.0
                if A[i] > 0:
                    break
                x = 2.0
            A[0] = x  # here


def rebound_across_loops():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                x = 0.0
                A[i] = x
            for _ in T.serial(3):
                x = x + 1.0  # here
            A[0] = x


def rebound_pair():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            both = (1.0, 2.0)
            while A[0] > 0:
                A[0] = A[0] - both[0]
                both = (both[1], both[0])  # here


def rebound_in_branch_of_loop():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            best = 0
            for i in T.serial(4):
                if A[i] > 1.0:
                    best = 5  # here
            A[0] = best


def of_a_long_chain():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32")):
        with T.Kernel(1) as _:
            for i in T.serial(32):
                if A[i] == 0:
                    A[i] = 100
                elif A[i] == 1:
                    A[i] = 101
                elif A[i] == 2:
                    A[i] = 102
                elif A[i] == 3:
                    A[i] = 103
                elif A[i] == 4:
                    A[i] = 104
                elif A[i] == 5:
                    A[i] = 105
                elif A[i] == 6:
                    A[i] = 106
                elif A[i] == 7:
                    A[i] = 107
                elif A[i] == 8:
                    A[i] = 108
                elif A[i] == 9:
                    A[i] = 109
                elif A[i] == 10:
                    A[i] = 110
                elif A[i] == 11:
                    A[i] = 111
                elif A[i] == 12:
                    A[i] = 112
                elif A[i] == 13:
                    A[i] = 113
                elif A[i] == 14:
                    A[i] = 114
                elif A[i] == 15:
                    A[i] = 115
                elif A[i] == 16:
                    A[i] = 116
                elif A[i] == 17:
                    A[i] = 117
                elif A[i] == 18:  # here
                    A[i] = 118
                elif A[i] == 19:  # here
                    A[i] = 119
                elif A[i] == 20:
                    A[i] = 120
                elif A[i] == 21:
                    A[i] = 121
                elif A[i] == 22:
                    A[i] = 122
                elif A[i] == 23:
                    A[i] = 123


def of_a_turn():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1):
            x = 1
            for i in T.serial(n):
                x = 5
                A[i] = x
            A[0] = x  # here


def rebound_parameter_of_a_later_turn():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1):
            for i in T.serial(4):
                A[i] = n
                n = n * 2  # here


def swapped_buffers():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1):
            a, b = T.alloc_shared((4,), "float32"), T.alloc_shared((4,), "float32")
            T.copy(A, a)
            for _ in T.serial(n):
                T.copy(a, b)
                a, b = b, a  # here


def tile_in_a_nest():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_shared((64,), "float32")
            T.copy(A, a)
            for i in T.Parallel(64):
                a = A[i] * 2  # here
            T.copy(a, B)


def tensor_in_a_nest():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(64):
                B = A[i]  # noqa: F841  # here


def tile_set_to_a_number():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((64,), "float32")
            a = 0.0  # here
            T.copy(a, A)


def tile_set_to_a_copy():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1) as _:
            a = T.alloc_fragment((64,), "float32")
            a = T.copy(A, a)  # here
            T.copy(a, B)


CASES = {
    tile_in_a_nest: ("rebound_tile", "a = A[i] * 2"),
    tensor_in_a_nest: ("rebound_tile", "B = A[i]"),
    tile_set_to_a_number: ("rebound_tile", "a = 0.0"),
    tile_set_to_a_copy: ("rebound_tile", "a = T.copy(A, a)"),
    of_a_turn: ("out_of_scope", "x"),
    rebound_parameter_of_a_later_turn: ("rebound_in_region", "n = n * 2"),
    swapped_buffers: ("rebound_buffer", "a, b = b, a"),
    of_a_long_chain: ("nested_too_deep", f"elif A[i] == {18 + (sys.version_info >= (3, 14))}:"),
    of_one_branch: ("out_of_scope", "x"),
    of_buffers: ("out_of_scope", "source"),
    of_functions: ("out_of_scope", "act"),
    of_pairs: ("out_of_scope", "both"),
    in_the_other_branch: ("undefined_name", "x"),
    of_a_loop_inside: ("out_of_scope", "x"),
    after_a_break: ("out_of_scope", "x"),
    rebound_across_loops: ("rebound_in_region", "x = x + 1.0"),
    rebound_pair: ("rebound_in_region", "both = (both[1], both[0])"),
    rebound_in_branch_of_loop: ("rebound_in_region", "best = 5"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


def test_a_tiles_name_may_name_one_of_its_elements():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            best = T.alloc_fragment((1,), "float32")
            T.reduce_max(A, best, dim=0)
            best = best[0]
            for i in T.Parallel(4):
                B[i] = A[i] - best

    a, b = torch.randn(4), torch.zeros(4)
    evaluate(kernel, a, b)
    assert torch.equal(b, a - a.max())


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_may_outlive_branches_and_loops_that_leave_them_alike(wide):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            size, name, pair = 1, "exp", (2, 3)
            if n > 0:
                size, name, pair, step = 1, "exp", (2, 3), 4
                n = n + 1
            else:
                step = 4
            for i in T.serial(4):
                if i > n:
                    break
                width = 5
                if wide:
                    lanes = 4.0
                    A[i] = lanes
                    scale = A[i] * lanes
                    A[i] = scale
                lanes = 2.0
                if i == 0:
                    continue
            for i in T.serial(4):
                if wide:
                    lanes, scale = 8.0, A[i]
                    A[i] = lanes * scale
            assert name == "exp"
            A[0], A[1], A[2], A[3] = size, pair[1], step, width + n

    a = torch.zeros(4)
    evaluate(kernel, a, 7)
    assert a.tolist() == [1, 3, 4, 13]
