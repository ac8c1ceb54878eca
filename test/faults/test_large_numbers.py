# SPDX-License-Identifier: Apache-2.0
"""Plain integers outside the type beside them, and values of types that no type holds both: exact, or an error."""

import operator

import numpy as np
import pytest
import torch
from emulate import emulate

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.dtype import limits, to_dtype
from torch_tile.simulator.tile.interpreter import evaluate

VALUES = [-(2**31), 2**31 - 1, -7, -1, 1, 5, 100, 3]


def tensor(values, dtype):
    return torch.tensor(list(values), dtype=getattr(torch, dtype))


def results(kernel, args, out):
    """What the kernel stores last, by the tile interpreter, the CPU target and the text of the CUDA target."""
    for target in ("meaning", "cpu", "cuda:sm_80"):
        found = out.clone()
        run_on(target, kernel, (*args, found))
        yield found


def run_on(target, kernel, args):
    if target == "meaning":
        evaluate(kernel, *args)
    elif target == "cpu":
        torch_tile.compile(kernel, target=target)(*args)
    else:
        emulate(torch_tile.compile(kernel, target=target), *args)


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


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def some_integers(dtype, number):
    """The ends of a type, small numbers, the ends of other types that it holds, each in `number` places of an order."""
    low, high = limits(to_dtype(dtype))
    ends = [end + more for to in INTEGERS for end in limits(to_dtype(to)) for more in (-1, 0, 1)]
    found = sorted({n for n in (*ends, 2, 5, -7) if low <= n <= high})
    return np.array([found[(k * number) % len(found)] for k in range(PAIRS)], dtype)


PAIRS = 256


@pytest.mark.parametrize("signed", [t for t in INTEGERS if t.startswith("int")])
def test_integers_of_two_signs_meet_as_numbers(signed):
    ops = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
    unsigned = [t for t in INTEGERS if t.startswith("u")]

    @T.prim_func
    def kernel(
        A: T.Tensor((PAIRS,), signed),
        *others: [T.Tensor((PAIRS,), to) for to in unsigned],
        C: T.Tensor((len(unsigned), 12, PAIRS), "bool"),
        most: T.Tensor((len(unsigned), 2, PAIRS), "uint64"),
        least: T.Tensor((len(unsigned), 2, PAIRS), "int64"),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(PAIRS):
                for n, B in enumerate(others):
                    for k, op in enumerate(ops):
                        C[n, k, i] = op(A[i], B[i])
                        C[n, 6 + k, i] = op(B[i], A[i])
                    most[n, 0, i], most[n, 1, i] = T.max(A[i], B[i]), T.max(B[i], A[i])
                    least[n, 0, i], least[n, 1, i] = T.min(A[i], B[i]), T.min(B[i], A[i])

    a, others = some_integers(signed, 1), [some_integers(to, 7) for to in unsigned]
    x, pairs = [int(v) for v in a], [[int(v) for v in b] for b in others]
    wanted = [[[op(u, v) for u, v in zip(x, y, strict=True)] for op in ops] for y in pairs]
    mirrored = [[[op(v, u) for u, v in zip(x, y, strict=True)] for op in ops] for y in pairs]
    ends = [[[choose(u, v) for u, v in zip(x, y, strict=True)] for y in pairs] for choose in (max, min)]
    tensors = [torch.from_numpy(t) for t in (a, *others)]
    for target in ("meaning", "cpu", "cuda:sm_80"):
        shapes = {
            "C": ((12, PAIRS), torch.bool),
            "most": ((2, PAIRS), torch.uint64),
            "least": ((2, PAIRS), torch.int64),
        }
        given = [torch.zeros((len(unsigned), *shape), dtype=dtype) for shape, dtype in shapes.values()]
        run_on(target, kernel, (*tensors, *given))
        found, most, least = (t.numpy() for t in given)
        for n in range(len(unsigned)):
            assert found[n].tolist() == [*wanted[n], *mirrored[n]], (target, unsigned[n])
            assert [[int(v) for v in row] for row in least[n]] == [ends[1][n]] * 2, (target, unsigned[n])
            larger = [v % 2**64 for v in ends[0][n]]
            assert [[int(v) for v in row] for row in most[n]] == [larger] * 2, (target, unsigned[n])


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


@pytest.mark.parametrize("limit", [-(2**31), -1, 3, 2**31 - 1])
def test_products_of_complements_wrap(limit, way):
    """The text holds such values in 64 bits, which the outer product would leave."""
    least = -(2**31)

    @T.prim_func
    def kernel(O: T.Tensor((4,), "int32"), number: T.int32):
        with T.Kernel(1, threads=32) as _:
            O[0] = least * ~(number * least)
            O[1] = ~(~(number * least) * least) * least
            O[2] = -(~(number * least)) * least
            O[3] = (~(number * number) - number) * least

    p = limit * least
    exact = [least * ~p, ~(~p * least) * least, -(~p) * least, (~(limit * limit) - limit) * least]
    out = torch.zeros(4, dtype=torch.int32)
    way(kernel, out, limit)
    assert out.tolist() == [(x - least) % 2**32 + least for x in exact]
