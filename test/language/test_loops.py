# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For, LoopKind


def loops(body):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1) as _:
            body(A, n)

    return [node for node in walk(kernel.program) if isinstance(node, For)]


def test_kinds_and_bounds():
    @T.macro
    def body(A, n):
        for i in T.serial(3):
            A[i] = 1.0
        for i in T.Serial(1, n, 2):
            A[i] = 1.0
        for i in T.unroll(2, 4, step=1, explicit=True):
            A[i] = 1.0
        for i in T.vectorized(8):
            A[i] = 1.0
        for i in range(n):
            A[i] = 1.0

    found = loops(body)
    assert [(f.kind, repr(f.starts[0]), repr(f.stops[0]), f.step) for f in found] == [
        (LoopKind.SERIAL, "0", "3", 1), (LoopKind.SERIAL, "1", "n", 2), (LoopKind.UNROLLED, "2", "4", 1),
        (LoopKind.VECTOR, "0", "8", 1), (LoopKind.SERIAL, "0", "n", 1),
    ]  # fmt: skip


def test_parallel_nests():
    @T.macro
    def body(A, n):
        for i, j, k in T.Parallel(2, n, 4, coalesced_width=2):
            A[i * 16 + j * 4 + k] = 1.0
        for index in T.Parallel(2, 3):
            A[index[0] * 3 + index[1]] = 1.0
        for (i,) in T.Parallel(5):
            A[i] = 1.0

    found = loops(body)
    assert [len(f.vars) for f in found] == [3, 2, 1] and all(f.kind is LoopKind.PARALLEL for f in found)
    assert [v.name for v in found[0].vars] == ["i", "j", "k"]


def test_pipelines_keep_their_schedule():
    @T.macro
    def body(A, n):
        for i in T.Pipelined(n, num_stages=3):
            A[i] = 1.0
        for i in T.Pipelined(1, n, num_stages=2, order=[1, 0], stage=[0, 1]):
            A[i] = 1.0

    first, second = loops(body)
    assert (first.kind, first.stages, first.order, first.stage) == (LoopKind.PIPELINED, 3, (), ())
    assert (second.stages, second.order, second.stage, repr(second.starts[0])) == (2, (1, 0), (0, 1), "1")


def test_grids_are_python_loops():
    @T.macro
    def body(A, n):
        for i, j in T.grid(2, 3):
            A[i * 3 + j] = 1.0

    assert loops(body) == []


WRONG = {
    "serial of a float": (lambda n: T.serial(2.5), "bad_loop_range"),
    "parallel of nothing": (lambda n: T.Parallel(), "bad_argument"),
    "parallel of a float": (lambda n: T.Parallel(2, 1.5), "bad_loop_range"),
    "parallel of a float expression": (lambda n: T.Parallel(n * 0.5), "bad_loop_range"),
    "step zero": (lambda n: T.serial(0, 4, 0), "bad_argument"),
    "step of an expression": (lambda n: T.serial(0, 4, n), "bad_argument"),
    "half a stage": (lambda n: T.Pipelined(4, num_stages=1.5), "bad_argument"),
    "a symbolic grid": (lambda n: T.grid(n, 2), "bad_loop_range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops(name):
    make, code = WRONG[name]

    @T.macro
    def body(A, n):
        for _ in make(n):
            A[0] = 1.0

    with pytest.raises(TileError) as caught:
        loops(body)
    assert caught.value.code == code
