# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import For
from torch_tile.lowering.cpu.split_parallel import split_parallel


def test_nest(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                x[i, j] = x[i, j] * 2.0

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    x[i, j] = x[i, j] * 2.0

    becomes(split_parallel, before, after)


def test_a_loop_inside_makes_it_serial(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                for j in T.vectorized(8):
                    x[i, j] = 0.0

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    x[i, j] = 0.0

    becomes(split_parallel, before, after)


# The body of a loop over i < 8, with tiles x and y of 16 elements: what must run in order, and what need not.
ORDERED = {
    "sum into one place": "x[0] = x[0] + y[i]",
    "last one wins": "x[0] = y[i]",
    "last one wins, by name": "a = y[i]; x[0] = a",
    "reads what the one before wrote": "x[i + 1] = x[i] + 1.0",
    "reads the mirror image": "x[i] = x[7 - i]",
    "places meet": "x[i % 3] = y[i]",
    "places meet by division": "x[i // 2] = y[i]",
    "two writes overlap": "x[i] = 1.0; x[i + 1] = 2.0",
    "branches write one place": "T.device_assert(True)\n if i < 4:\n  x[0] = 1.0\n else:\n  x[0] = 2.0",
    "place from memory": "x[p[i]] = y[i]",
}
INDEPENDENT = {
    "elementwise": "x[i] = y[i] + x[i]",
    "shifted": "x[i + 3] = y[i]",
    "scaled": "x[2 * i + 1] = y[15 - i]",
    "from the end": "x[7 - i] = y[i]",
    "one value for one place": "x[0] = 3.0",
    "reads anywhere": "x[i] = y[i % 3] + y[i // 2]",
    "by name": "k = i + 2; a = y[k]; x[k] = a * a",
    "branches": "if i < 4:\n  x[i] = 1.0\n else:\n  x[i] = 2.0",
}


def kinds(body, loop, tmp_path):
    text = f"""
@T.prim_func
def kernel(p: T.Tensor((16,), "int32")):
    with T.Kernel(1) as _:
        x = T.alloc_shared((16,), "float32")
        y = T.alloc_shared((16,), "float32")
        for i in {loop}(8):
"""
    for line in body.replace("; ", "\n ").split("\n"):
        text += " " * 12 + line.removeprefix(" ").replace("  ", "    ") + "\n"
    path = tmp_path / "kernel.py"
    path.write_text(text.replace("            T.device_assert(True)\n", ""))
    space = {"T": T}
    exec(compile(path.read_text(), str(path), "exec"), space)
    program = split_parallel(space["kernel"].program)
    return [n.kind.value for n in walk(program) if isinstance(n, For)], program is space["kernel"].program


@pytest.mark.parametrize("loop", ["T.Parallel", "T.vectorized"])
@pytest.mark.parametrize("case", ORDERED)
def test_runs_in_order(case, loop, tmp_path):
    assert kinds(ORDERED[case], loop, tmp_path) == (["serial"], False)


@pytest.mark.parametrize("loop", ["T.Parallel", "T.vectorized"])
@pytest.mark.parametrize("case", INDEPENDENT)
def test_runs_as_a_vector(case, loop, tmp_path):
    assert kinds(INDEPENDENT[case], loop, tmp_path) == (["vectorized"], loop == "T.vectorized")


def test_only_the_variables_that_carry_are_ordered(becomes):
    @T.prim_func
    def before(x: T.Tensor((4, 8), "float32"), total: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i, j in T.Parallel(4, 8):
                total[j] += x[i, j]

    @T.prim_func
    def after(x: T.Tensor((4, 8), "float32"), total: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(8):
                    total[j] += x[i, j]

    becomes(split_parallel, before, after)


def test_effects_are_not_vectorised():
    @T.prim_func
    def kernel(x: T.Tensor((4,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(4):
                T.print(x[i])
            for i in T.vectorized(4):
                T.device_assert(x[i] > 0)

    assert all(n.kind.value == "serial" for n in walk(split_parallel(kernel.program)) if isinstance(n, For))


def test_nothing_to_do(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((4, 4), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(4):
                for j in T.vectorized(4):
                    x[i, j] = 0.0

    keeps(split_parallel, kernel)
