# SPDX-License-Identifier: Apache-2.0
"""Names bound in the branches of a device `if` mean afterwards what Python says: on every engine that runs kernels."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc
from torch_tile.simulator.tile.interpreter import evaluate

ENGINES = {
    "tiles": lambda kernel, *args: evaluate(kernel, *args),
    "cpu": lambda kernel, *args: torch_tile.compile(kernel, target="cpu")(*args),
    "threads": lambda kernel, *args: interpreted(torch_tile.compile(kernel, target="cuda:sm_90a"), *args),
}
X = torch.tensor([3.0, -1.0, 0.5, -4.0, 2.0, 0.0, -0.25, 7.0])


def interpreted(kernel, *args):
    assert not kernel.interpret(*args)


def check(kernel, meaning, x=X):
    """The kernel's second argument becomes what `meaning`, the same in Python, makes of each element of the first."""
    wanted = torch.tensor([float(meaning(value)) for value in x.tolist()])
    for name, run in ENGINES.items():
        out = torch.zeros_like(x)
        run(kernel, x.clone(), out)
        torch.testing.assert_close(out, wanted, msg=lambda text, name=name: f"{name}: {text}")


def variables(kernel):
    return [n.buffer.name for n in walk(kernel.program) if isinstance(n, Alloc) and n.buffer.scope == "var"]


Vector = T.Tensor((8,), "float32")


def test_numbers_of_both_branches():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            if a[i] > 0:
                x = 3.0
            else:
                x = 2.0
            b[i] = x

    check(kernel, lambda v: 3.0 if v > 0 else 2.0)
    assert variables(kernel) == ["x"]


def test_in_a_nest_of_elements():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(1, threads=32) as _:
            for i in T.Parallel(8):
                if a[i] > 0:
                    x = 3
                elif a[i] < -2.0:
                    x, y = a[i] * 2.0, 1
                    x = x + y
                else:
                    x = a[i]
                b[i] = x

    check(kernel, lambda v: 3 if v > 0 else v * 2 + 1 if v < -2 else v)


def test_a_number_that_one_branch_changes():
    """Each branch starts from what held before; a chain of `if`s adds up; so does one in a loop of its own."""

    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            x = 1
            if a[i] > 0:
                x = 10
                if a[i] > 2.5:
                    x += 5
            else:
                x = x + 1
            if a[i] < 0.25:
                x *= 100
            b[i] = x
            for k in T.serial(3):
                y = 0.5
                if k == 1:
                    y = y + a[i]
                b[i] += y

    def meaning(v):
        x = (15 if v > 2.5 else 10) if v > 0 else 2
        return (x * 100 if v < 0.25 else x) + 1.5 + v

    check(kernel, meaning)


def test_values_of_the_device():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            total = 0.0
            if a[i] > 0:
                scale = a[i] * 2.0
                for k in T.serial(2):
                    scale = scale + k
                n = 7
            else:
                scale, n = 0.5, i
                total = a[(i + 1) % 8]
            total = total + scale * n
            b[i] = total

    where = {v: i for i, v in enumerate(X.tolist())}
    check(kernel, lambda v: (v * 2 + 1) * 7 if v > 0 else X.tolist()[(where[v] + 1) % 8] + 0.5 * where[v])


def test_branches_that_leave_a_loop():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            for k in T.serial(3):
                if a[i] > k + 1.0:
                    x = 3.0
                    b[i] += x
                    break
                else:  # noqa: RET508
                    x = a[i] + k
                b[i] += x
                if k > 0:
                    y = 1.0
                elif a[i] < 0:
                    continue
                else:
                    y = 4.0
                b[i] += y

    def meaning(v):
        total = 0.0
        for k in range(3):
            if v > k + 1.0:
                return total + 3.0
            total += v + k
            if k == 0 and v < 0:
                continue
            total += 1.0 if k > 0 else 4.0
        return total

    check(kernel, meaning)


def test_variables_of_the_author_stay_what_they_are():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            x = T.alloc_var("float32", 1.0)
            y = a[i]
            if a[i] > 0:
                x = 2.0
                y = y + 1.0
            b[i] = x + y

    check(kernel, lambda v: 3.0 + v if v > 0 else 1.0 + v)
    assert variables(kernel) == ["x", "y"]


def test_names_of_a_branch_alone_leave_no_trace():
    """The same names again later, in helpers and after other uses; equal values; a buffer by another name."""
    helper = lambda value, by: value * by  # noqa: E731

    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            one, f = 1.0, helper
            if a[i] > 0:
                x, t, one = 2.0, a, 1.0
                b[i] = f(t[i], x)
            else:
                x, t = 3.0, b
                b[i] = a[i] + x
            x, t = 4.0, b
            for k in T.serial(2):
                if k > 0:
                    u = x + k
                    b[i] += u
            t[i] += x * one

    check(kernel, lambda v: (v * 2 if v > 0 else v + 3) + 9)
    assert not variables(kernel)


@pytest.mark.parametrize("flag", [False, True])
def test_conditions_of_python_decide_at_once(flag):
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            if flag:
                x, source = 2, b
            else:
                source = a
            if a[i] > 0:
                if flag:
                    x = 4
                b[i] = 1.0
            if not flag:
                x = 3
            b[i] = source[i] + x

    check(kernel, lambda v: (5.0 if v > 0 else 2.0) if flag else v + 3)
    assert variables(kernel) == (["x"] if flag else [])


def test_macros_have_names_of_their_own():
    @T.macro
    def choose(b, i, condition):
        if condition:
            x = 3.0
        else:
            x = 2.0
        b[i] = x

    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            x = 1.0
            if a[i] > 0:
                choose(b, i, a[i] > 1.0)
            b[i] += x

    check(kernel, lambda v: 1.0 + (0 if v <= 0 else 3.0 if v > 1 else 2.0))


def test_bool_and_number_meet_in_their_common_type():
    @T.prim_func
    def kernel(a: Vector, b: Vector):
        with T.Kernel(8, threads=32) as i:
            if a[i] > 0:
                x, found = 2, True
            else:
                x, found = 0.5, False
            if found:
                b[i] = x
            else:
                b[i] = -x

    check(kernel, lambda v: 2 if v > 0 else -0.5)
    types = {n.buffer.name: n.buffer.dtype.name for n in walk(kernel.program) if isinstance(n, Alloc)}
    assert types == {"x": "float32", "found": "bool"}
