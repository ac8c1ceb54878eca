# SPDX-License-Identifier: Apache-2.0
"""One kernel for each mistake with names, scopes and control flow."""

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate


def no_source():
    namespace = {"T": T}
    exec("def kernel(A: T.Tensor((4,), 'float32')):\n    pass", namespace)
    T.prim_func(namespace["kernel"])  # here


def undefined_name():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = 1.0 + missing  # noqa: F821  # here


def undefined_before_assignment():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = late  # noqa: F821  # here
            late = 1.0  # noqa: F841


def undefined_in_closure():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = later  # here

    later = 3.0
    return kernel, later


def out_of_scope():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                x = A[i] * 2.0
            A[0] = x  # here


def out_of_scope_kernel():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            tile = T.alloc_shared((4,), "float32")
        with T.Kernel(1) as _:
            T.copy(tile, A)  # here


def symbolic_condition():
    def helper(i):
        if i > 2:  # here
            return 1
        return 2

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            A[0] = helper(n)


def rebound_in_region():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            count = 0
            for _ in range(3):
                count = count + 1  # here
            A[0] = count


def rebound_parameter():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            for _ in T.serial(3):
                n = n * 2  # here
            A[0] = n


def not_in_kernel():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        T.clear(A)  # here


def not_in_kernel_at_all():
    T.alloc_shared((4,), "float32")  # here


def not_outermost():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.serial(4):
                with T.role(0, 32):  # here
                    A[i] = 0.0


def barrier_not_outermost():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _, T.role(0, 32):
            T.alloc_barrier(1)  # here


def nested_kernel():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = 1.0
            with T.Kernel(2) as b:  # here
                A[b] = 1.0


def bad_annotation():
    @T.prim_func
    def kernel(
        A: T.Tensor((4,), "float32"),
        n: list,  # here
    ):
        pass


def bad_annotation_missing():
    @T.prim_func
    def kernel(A):  # here
        pass


def unbound_const():
    @tilelang.jit
    def kernel(A):
        M, N = T.const("M, N")  # here
        A: T.Tensor((M,), "float32")
        with T.Kernel(1) as _:
            A[0] = N

    kernel(torch.zeros(4))


def tensor_not_annotated():
    @tilelang.jit
    def kernel(A):  # here
        with T.Kernel(1) as _:
            pass

    kernel(torch.zeros(4))


def bad_return():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as b:
            A[b] = 1.0
        return A  # here


def return_in_region():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            if A[0] > 0.0:
                return  # here
            A[1] = 2.0


def bad_break():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            for i in [0, 1, 2]:
                if n == i:
                    break  # here
                A[i] = 1.0


def break_of_nest():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            for i, j in T.grid(2, n):
                if n == i:
                    break  # here
                A[i + j] = 1.0


def bad_continue():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            for i in [0, 1, 2]:
                if n == i:
                    continue  # here
                A[i] = 1.0


def no_kernel():
    @tilelang.jit(target="cpu")
    def build(n):  # here
        @T.prim_func
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                A[0] = 1.0

    build(4)


def no_kernel_but_a_number():
    @tilelang.jit(target="cpu")
    def build(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                A[0] = 1.0

        return 4  # here

    build.trace(4)


def no_kernel_undecorated():
    @tilelang.jit(target="cpu")
    def build(n):
        def main(A: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                A[0] = 1.0

        return main  # here

    build(4)


def not_compiled():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            A[0] = 1.0

    kernel(torch.zeros(4))  # here


CASES = {
    no_kernel: ("no_kernel", "build"),
    no_kernel_but_a_number: ("no_kernel", "return 4"),
    no_kernel_undecorated: ("no_kernel", "return main"),
    not_compiled: ("not_compiled", "kernel(torch.zeros(4))"),
    no_source: ("no_source", 'T.prim_func(namespace["kernel"])'),
    undefined_name: ("undefined_name", "missing"),
    undefined_before_assignment: ("undefined_name", "late"),
    undefined_in_closure: ("undefined_name", "later"),
    out_of_scope: ("out_of_scope", "A[0]"),
    out_of_scope_kernel: ("out_of_scope", "T.copy(tile, A)"),
    symbolic_condition: ("symbolic_condition", "i > 2"),
    rebound_in_region: ("rebound_in_region", "count = count + 1"),
    rebound_parameter: ("rebound_in_region", "n = n * 2"),
    not_in_kernel: ("not_in_kernel", "T.clear(A)"),
    not_in_kernel_at_all: ("not_in_kernel", 'T.alloc_shared((4,), "float32")'),
    not_outermost: ("not_outermost", "T.role(0, 32)"),
    barrier_not_outermost: ("not_outermost", "T.alloc_barrier(1)"),
    nested_kernel: ("nested_kernel", "T.Kernel(2)"),
    bad_annotation: ("bad_annotation", "n: list"),
    bad_annotation_missing: ("bad_annotation", "A"),
    unbound_const: ("unbound_const", 'T.const("M, N")'),
    tensor_not_annotated: ("tensor_not_annotated", "A"),
    bad_return: ("bad_return", "return A"),
    return_in_region: ("return_in_region", "return"),
    bad_break: ("bad_break", "break"),
    break_of_nest: ("break_of_nest", "break"),
    bad_continue: ("bad_break", "continue"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


@pytest.mark.parametrize("case", [no_kernel, no_kernel_but_a_number, no_kernel_undecorated], ids=lambda f: f.__name__)
def test_a_missing_kernel_is_named(case, refused):
    assert "main" in refused(case, *CASES[case]).diagnostics[0].fix


def test_values_of_an_outer_scope_may_be_used():
    """The neighbours of the scoping errors that are no errors."""

    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32):
        with T.Kernel(1) as b:
            x = A[0]
            for i in T.serial(4):
                y = x + A[i]
                i = i + 1
                A[b] = y + i
            n = n + 1
            A[1] = n

    a = torch.zeros(4)
    evaluate(kernel, a, 7)
    assert a.tolist() == [4, 8, 0, 0]


def test_an_error_inside_a_helper_points_at_the_helper():
    def helper(buffer):
        return buffer[1.5]  # in the helper

    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                A[0] = helper(A)

    assert caught.value.span.source().endswith("# in the helper")
