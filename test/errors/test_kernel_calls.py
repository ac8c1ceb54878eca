# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels that do not fit, functions that are no kernels, and names that stand for something else."""

import numpy as np
import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


@torch_tile.jit
def other(A):
    A: T.Tensor((4,), "float32")
    with T.Kernel(1) as _:
        T.clear(A)


@torch_tile.jit
def lazy(n):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            T.clear(A)

    return main


def nested():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            other(A)  # here


def assigned_type():
    @torch_tile.jit
    def kernel(A):
        A = T.Tensor((4,), "float32")  # here
        with T.Kernel(1) as _:
            A[0] = 1

    kernel(torch.zeros(4))


def one_name_for_a_grid():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(2, 2) as block:
            A[block * 2] = 1  # here


def one_name_of_two():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(2, 2) as bx:
            A[bx[0] + by] = 1  # noqa: F821  # here


def garbage():
    @torch_tile.jit(strict=True)
    def kernel(A):
        A: T.Tensor((4,), "float32")
        B = T.empty((4,), "float32")  # here
        with T.Kernel(1) as _:
            T.clear(A)
        return B

    kernel(torch.zeros(4))


def added_to_garbage():
    @torch_tile.jit(strict=True)
    def kernel(A):
        A: T.Tensor((4,), "float32")
        B = T.empty((4,), "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                B[i] += A[i]  # here
        return B

    kernel(torch.zeros(4))


def tensors_for_sizes():
    lazy(torch.zeros(4))


def unknown_size():
    lazy(m=4)


def of_a_class():
    torch_tile.jit(dict)


CASES = {
    nested: ("kernel_in_kernel", "other(A)"),
    assigned_type: ("type_as_tensor", 'A = T.Tensor((4,), "float32")'),
    one_name_for_a_grid: ("tuple_as_index", "block * 2"),
    one_name_of_two: ("undefined_name", "by"),
    added_to_garbage: ("only_updated", "B[i]"),
    garbage: ("unwritten_result", 'T.empty((4,), "float32")'),
}
CALLS = {
    tensors_for_sizes: ("bad_kernel_call", "lazy(...)(x)"),
    unknown_size: ("bad_kernel_call", "`n`"),
    of_a_class: ("bad_function", "def kernel"),
}
CASES |= CALLS


@pytest.mark.parametrize("case", [case for case in CASES if case not in CALLS], ids=lambda f: f.__name__)
def test_refused(case, refused):
    refused(case, *CASES[case])


@pytest.mark.parametrize("case", CALLS, ids=lambda f: f.__name__)
def test_refused_call(case):
    """Python's own traceback shows the line."""
    with pytest.raises(TileError) as caught:
        case()
    assert isinstance(caught.value, TypeError) and caught.value.code == CALLS[case][0]
    assert CALLS[case][1] in caught.value.diagnostics[0].fix


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.nn.Linear(4, 4), "got Linear: give B.weight.detach()"),
        ([[1.0]], "got list: give torch.tensor(B)"),
        (np.ones((4, 4)), "got a numpy.ndarray: give torch.from_numpy(B)"),
        (3, "got int: give torch.tensor(B)"),
        ("B", "got str"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_later_argument_is_no_tensor(wrong, text):
    """The sizes that only it has stay unknown."""

    @torch_tile.jit
    def rows(A, B):
        M, N = T.const("M, N")
        A: T.Tensor((M,), "float32")
        B: T.Tensor((M, N), "float32")
        with T.Kernel(1, threads=32) as _:
            A[0] = B[0, N - 1]

    with pytest.raises(torch_tile.LaunchError) as caught:
        rows(torch.zeros(4), wrong)
    assert f"argument `B` must be a tensor, {text}" in str(caught.value)


def test_truth_is_no_position():
    @torch_tile.jit(out_idx=True)
    def make():
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
            with T.Kernel(1) as _:
                B[0] = A[0]

        return kernel

    with pytest.raises(TileError, match="argument `out_idx` is True"):
        make()


def test_a_result_that_nothing_writes_is_warned_of():
    """It holds garbage, as in TileLang; other results are right."""

    @torch_tile.jit(target="cpu")
    def kernel(A):
        A: T.Tensor((4,), "float32")
        B, C = T.empty((4,), "float32"), T.empty((2, 3), "float16")
        with T.Kernel(1) as _:
            T.copy(A, B)
        return B, C

    a = torch.randn(4)
    with pytest.warns(UserWarning, match="`C` is returned, but no statement writes it"):
        b, c = kernel(a)
    assert torch.equal(a, b) and c.shape == (2, 3) and c.dtype == torch.float16


SCALE = 2.0


@torch_tile.jit
def scaled(A):
    A: T.Tensor((4,), "float32")
    B = T.empty((4,), "float32")
    with T.Kernel(1) as _:
        for i in T.Parallel(4):
            B[i] = A[i] * SCALE
    return B


def test_a_changed_global_counts(monkeypatch):
    """Of a kernel that was compiled before: the new number, and the old one again without a compilation."""
    a = torch.randn(4)
    torch.testing.assert_close(scaled(a), a * 2)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    torch.testing.assert_close(scaled(a), a * 3)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.testing.assert_close(scaled(a), a * 2)
    assert len(scaled.kernels) == 2


def test_a_changed_enclosing_variable_counts():
    offset = 1.0

    @torch_tile.jit(out_idx=[-1])
    def make(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.Parallel(n):
                    B[i] = A[i] + offset

        return main

    a = torch.randn(8)
    torch.testing.assert_close(make(8)(a), a + 1)
    offset = 5.0
    torch.testing.assert_close(make(8)(a), a + 5)
    assert make(8) is make(8)


def test_results_that_are_set_first():
    """A T.Kernel before may clear a result, and a condition may choose what the first turn takes."""

    @torch_tile.jit(strict=True)
    def cleared(A):
        A: T.Tensor((96,), "float32")
        B = T.empty((1,), "float32")
        with T.Kernel(1) as _:
            T.clear(B)
        with T.Kernel(3) as block:
            for i in T.serial(32):
                T.atomic_add(B[0], A[block * 32 + i])
        return B

    @torch_tile.jit(strict=True)
    def chosen(A):
        A: T.Tensor((96,), "float32")
        B = T.empty((1,), "float32")
        with T.Kernel(1) as _:
            for i in T.serial(96):
                B[0] = T.if_then_else(i == 0, 0.0, B[0]) + A[i]
        return B

    x = torch.randn(96)
    for kernel in (cleared, chosen):
        assert abs(kernel(x).item() - x.double().sum().item()) < 1e-4


def test_tensors_without_a_declaration_are_told_to_be_declared():
    @torch_tile.jit
    def of_pointers(x_ptr, n):
        T.store(x_ptr + n, 0)

    with pytest.raises(TileError, match=r"tensor for `x_ptr`, which is declared nowhere[\s\S]*x_ptr: T.Tensor\("):
        of_pointers(torch.ones(4), 4)

    @torch_tile.jit
    def of_a_result(X, block=4):
        X: T.Tensor((4,), "float32")
        Y = T.empty((4,), "float32")
        with T.Kernel(1) as _:
            for i in T.Parallel(block):
                Y[i] = X[i]
        return Y

    with pytest.raises(TileError, match="gives a tensor for `block`: leave it out"):
        of_a_result(torch.ones(4), torch.empty(4))
