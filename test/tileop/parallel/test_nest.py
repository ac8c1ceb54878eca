# SPDX-License-Identifier: Apache-2.0
"""Along which variables of a T.Parallel nest the iterations run in order."""

import pytest

import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind
from torch_tile.tileop.parallel.nest import carried_vars


def carried(kernel):
    """Names of the variables that carry a value, in the only nest of a kernel."""
    (loop,) = (n for n in walk(kernel.program) if isinstance(n, For) and n.kind is LoopKind.PARALLEL)
    return [v.name for v in carried_vars(loop)]


def stores(place):
    """A nest that stores at `place(i, j, n)`, a row and a column."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, n), "int32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                A[place(i, j, n)] = i + j

    return kernel


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (lambda i, j, n: (i, j), []),
        (lambda i, j, n: (2 * i + 1, 7 - j), []),
        (lambda i, j, n: (i, 0), ["j"]),
        (lambda i, j, n: (0, 0), ["i", "j"]),
        (lambda i, j, n: ((i * 3 + 5) // n, (i * 3 + 5) % n), ["j"]),
        (lambda i, j, n: ((i + j * 4) % n, (i + j * 4) // n), []),
        (lambda i, j, n: (i // n, i % 3), ["i", "j"]),
        (lambda i, j, n: (i // 2, (i + 1) % 2), ["i", "j"]),
        (lambda i, j, n: (i % 1, i // 1 + 3), ["j"]),
    ],
)
def test_places_that_move_with_a_variable(place, wanted):
    assert carried(stores(place)) == wanted


def test_sums_and_neighbours():
    @T.prim_func
    def total(A: T.Tensor((8, 4), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(8, 4):
                B[i] += A[i, j]

    @T.prim_func
    def shifted(A: T.Tensor((8, 4), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(7, 4):
                A[i, j] = A[i + 1, j]

    assert carried(total) == ["j"]
    assert carried(shifted) == ["i"]


def updates(update):
    """A nest of 4 x 8 iterations that calls `update(A, i, j, k, n)` with a tile, a loop variable around, and a size."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(B: T.Tensor((n, n), "int32"), C: T.Tensor((n,), "int32")):
        with T.Kernel(1) as _:
            A = T.alloc_shared((64, 64), "int32")
            for k in T.serial(4):
                for i, j in T.Parallel(4, 8):
                    update(A, B, C, i, j, k, n)

    return kernel


def split_in_three(A, B, C, i, j, k, n):
    m = k * 4 + i
    A[m // 6, m % 6 // 2 * 16 + j] = B[i, j] + A[m // 6, m % 6 // 2 * 16 + j]


def several_rows(A, B, C, i, j, k, n):
    A[0, i * 8 + j] = B[i, j]
    A[1, i * 8 + j] = B[j, i]


def interleaved(A, B, C, i, j, k, n):
    A[i, 2 * j] = A[i, 2 * j] - A[i, 2 * j + 1]
    A[i, 2 * j + 1] = A[i, 2 * j] + 1


def halves(A, B, C, i, j, k, n):
    a, b = A[i, j], A[i, j + 8]
    A[i, j] = a - b
    A[i, j + 8] = a + b


def overlapping_halves(A, B, C, i, j, k, n):
    A[i, j] = A[i, j + 7]


def two_versions(A, B, C, i, j, k, n):
    A[(k + 1) % 2, i * 8 + j] = A[k % 2, (i * 8 + j) ^ 1]


def one_version(A, B, C, i, j, k, n):
    A[(k + 2) % 2, i * 8 + j] = A[k % 2, (i * 8 + j) ^ 1]


def antidiagonals(A, B, C, i, j, k, n):
    A[0, i + j] += B[i, j]


def flattened(A, B, C, i, j, k, n):
    A[0, i * 8 + j] += B[i, j]


def flattened_too_narrow(A, B, C, i, j, k, n):
    A[0, i * 7 + j] += B[i, j]


def pieces(A, B, C, i, j, k, n):
    A[0, j // 2 * 8 + i * 2 + j % 2] += B[i, j]


def pieces_of_pieces(A, B, C, i, j, k, n):
    A[k, j // 4 * 16 + i * 4 + j // 2 % 2 + j % 2 * 2] += B[i, j]


def pieces_too_narrow(A, B, C, i, j, k, n):
    A[0, j // 2 * 6 + i * 2 + j % 2] += B[i, j]


def pieces_without_rests(A, B, C, i, j, k, n):
    A[0, j // 2 * 4 + i] += B[i, j]


def pieces_of_two_sizes(A, B, C, i, j, k, n):
    A[0, j // 2 * 32 + j // 3 * 8 + i * 2 + j] += B[i, j]


def gathered_offset(A, B, C, i, j, k, n):
    A[0, i + C[j]] += B[i, j]


def gathered_row(A, B, C, i, j, k, n):
    A[C[0], i * 8 + j] += B[i, j]


def counted(A, B, C, i, j, k, n):
    C[C[0] + i] = B[i, j]


@pytest.mark.parametrize(
    ("update", "wanted"),
    [
        (split_in_three, ["i"]), (several_rows, []), (interleaved, []), (halves, []), (overlapping_halves, ["j"]),
        (two_versions, []), (one_version, ["i", "j"]), (antidiagonals, ["i", "j"]), (flattened, []),
        (flattened_too_narrow, ["i", "j"]), (pieces, []), (pieces_of_pieces, []), (pieces_too_narrow, ["i", "j"]),
        (pieces_without_rests, ["j"]), (pieces_of_two_sizes, ["i", "j"]), (gathered_offset, ["i", "j"]),
        (gathered_row, []), (counted, ["i", "j"]),
    ],
)  # fmt: skip
def test_iterations_that_may_meet(update, wanted):
    assert carried(updates(update)) == wanted


def test_digits_tell_the_number_that_was_split():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((4, 5, 3), "float32")):
        with T.Kernel(4) as b:
            for i in T.Parallel(16):
                m = b * 16 + i
                B[m // 15, m % 15 // 3, m % 3] = A[m]

    assert carried(kernel) == []


@pytest.mark.parametrize("dtype,wanted", [("float32", []), ("float64", []), ("float16", [])])
def test_views_with_wider_elements_carry_nothing(dtype, wanted):
    """Each element is two or more of the memory, whose places are quotients and remainders."""
    width = {"float16": 2, "float32": 4, "float64": 8}[dtype]

    @T.prim_func
    def kernel(A: T.Tensor((16, 512 // width), dtype)):
        with T.Kernel(1, threads=128):
            memory = T.alloc_shared((16, 512), "int8")
            wide = T.view(memory, shape=[16, 512 // width], dtype=dtype)
            for i, j in T.Parallel(16, 512 // width):
                wide[i, j] = A[i, j]

    assert carried(kernel) == wanted


def test_parts_of_a_number_that_leave_some_out_carry():
    @T.prim_func
    def kernel(A: T.Tensor((32, 512), "int32")):
        with T.Kernel(1, threads=128):
            for i, j in T.Parallel(16, 512):
                A[i * 2 + j // 256, j % 256] = i
                A[i * 2 + j // 256, j % 128 + 1] = j

    assert carried(kernel)
