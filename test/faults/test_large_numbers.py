# SPDX-License-Identifier: Apache-2.0
"""Plain integers outside the type beside them are exact or an error; the least integers' magnitudes."""

import operator

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.simulator.tile.interpreter import evaluate
from torch_tile.tools.emulate import emulate

VALUES = [-(2**31), 2**31 - 1, -7, -1, 1, 5, 100, 3]


def tensor(values, dtype):
    return torch.tensor(list(values), dtype=getattr(torch, dtype))


def results(kernel, args, out):
    """What the kernel stores last, by the tile interpreter, the CPU target and the text of the CUDA target."""
    for target in ("meaning", "cpu", "cuda:sm_80"):
        found = out.clone()
        if target == "meaning":
            evaluate(kernel, *args, found)
        elif target == "cpu":
            torch_tile.compile(kernel, target=target)(*args, found)
        else:
            emulate(torch_tile.compile(kernel, target=target), *args, found)
        yield found


@pytest.mark.parametrize("number", [2**31, 2**31 + 7, 2**32 - 1, 2**40 + 3, -(2**31) - 1])
def test_an_int32_beside_a_larger_number_is_an_int64(number):
    ops = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]

    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), C: T.Tensor((11, 8), "int64")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                for k, op in enumerate(ops):
                    C[k, i] = op(A[i], number)
                    C[5 + k, i] = op(number, A[i])
                C[10, i] = T.if_then_else(A[i] > 0, A[i], number)

    def right(op, x, y):
        return (op(x, y) + 2**63) % 2**64 - 2**63

    values = VALUES
    wanted = [[right(op, x, number) for x in values] for op in ops]
    wanted += [[right(op, number, x) for x in values] for op in ops]
    wanted.append([x if x > 0 else number for x in values])
    a = tensor(values, "int32")
    for found in results(kernel, (a,), torch.zeros(11, 8, dtype=torch.int64)):
        assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("dtype", "number", "op"),
    [
        ("uint32", -3, operator.floordiv),
        ("uint32", -3, operator.mod),
        ("uint64", -1, operator.floordiv),
        ("uint32", 2**32, operator.add),
        ("int64", 2**63, operator.add),
        ("int64", 2**64, operator.and_),
        ("uint64", 2**64, operator.mul),
    ],
)
def test_a_number_for_which_there_is_no_type_is_an_error(dtype, number, op):
    def make():
        @T.prim_func
        def kernel(A: T.Tensor((8,), dtype), C: T.Tensor((8,), "int64")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(8):
                    C[i] = T.cast(op(A[i], number), "int64")

    with pytest.raises(TileError, match=f"{number}, outside {dtype}"):
        make()


@pytest.mark.parametrize(("dtype", "number"), [("uint32", -1), ("int32", 2**32 - 1), ("uint8", -1), ("int8", 255)])
def test_bits_of_a_number_may_be_stored(dtype, number):
    @T.prim_func
    def kernel(C: T.Tensor((8,), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                C[i] = number

    for found in results(kernel, (), torch.zeros(8, dtype=getattr(torch, dtype))):
        assert all(x % 2 ** (8 * found.itemsize) == number % 2 ** (8 * found.itemsize) for x in found.tolist())


@pytest.mark.parametrize("way", ["store", "fill", "variable"])
@pytest.mark.parametrize(("dtype", "number"), [("int8", 256), ("int32", 2**40), ("uint32", 2**32), ("int64", 2**64)])
def test_a_number_without_bits_is_not_stored(dtype, number, way):
    def make():
        @T.prim_func
        def kernel(C: T.Tensor((8,), dtype)):
            with T.Kernel(1, threads=32):
                if way == "fill":
                    T.fill(C, number)
                else:
                    x = number if way == "store" else T.alloc_var(dtype, init=number)
                    for i in T.Parallel(8):
                        C[i] = x

    with pytest.raises(TileError, match=f"{number}, outside {dtype}"):
        make()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_absmax_takes_the_least_integer_as_torch_abs_does(dtype, dim):
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), dtype), C: T.Tensor((8 if dim == 0 else 4,), dtype)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((4, 8), dtype)
            found = T.alloc_fragment((8 if dim == 0 else 4,), dtype)
            T.copy(A, tile)
            T.reduce_absmax(tile, found, dim=dim)
            T.copy(found, C)

    a = torch.randint(-9, 9, (4, 8)).to(getattr(torch, dtype))
    a[0, 0] = a[2, :] = a[:, 5] = torch.iinfo(a.dtype).min
    wanted = a.abs().amax(dim)
    for found in results(kernel, (a,), torch.zeros_like(wanted)):
        assert found.tolist() == wanted.tolist()
