# SPDX-License-Identifier: Apache-2.0
"""Names bound in the branches of a device `if` mean afterwards what Python says: on every engine that runs kernels."""

import ast
import textwrap

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, If, Let
from torch_tile.language.branches import Reads, mutable_names
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
    assert variables(kernel) == [] and not any(isinstance(n, If) for n in walk(kernel.program))  # a choice


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
    types = {n.var.name: n.var.dtype.name for n in walk(kernel.program) if isinstance(n, Let)}
    assert types == {"x": "float32", "found": "bool"}


def tree_of(body):
    return ast.parse("def f(a, b, n):\n" + textwrap.indent(textwrap.dedent(body), "    ")).body[0]


def live(body):
    """For each `if`, in order: the names bound in it, marked with ! if they may be read after it."""
    tree = tree_of(body)
    reads = Reads(tree)
    found = sorted((n for n in ast.walk(tree) if isinstance(n, ast.If)), key=lambda n: n.lineno)
    return [" ".join(name + "!" * is_live for name, is_live in reads.of_branches(n)) for n in found]


def carried(body):
    tree = tree_of(body)
    reads = Reads(tree)
    found = sorted((n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)), key=lambda n: n.lineno)
    return [" ".join(reads.carried(n)) for n in found]


AFTER = {
    "read": ("if a: x = 1\nelse: x = 2\nb(x)", ["x!"]),
    "bound again": ("if a: x = 1\nx = 2\nb(x)", ["x"]),
    "read in what binds it": ("if a: x = 1\nx = x + 1", ["x!"]),
    "added to": ("if a: x = 1\nx += 1", ["x!"]),
    "one of two": ("if a: x, (y, z) = 1, (2, 3)\nx = y", ["x y! z"]),
    "in one branch later": ("if a: x = 1\nif b: x = 2\nn(x)", ["x!", "x!"]),
    "in both branches later": ("if a: x = 1\nif b: x = 2\nelse: x = 3\nn(x)", ["x", "x!"]),
    "elif": ("if a: x = 1\nelif b: x = 2\nelse: y = 3\nn(x)", ["x! y", "x! y"]),
    "next turn": ("for i in n:\n  b(x)\n  if a: x = 1", ["x!"]),
    "bound first in each iteration": ("for i in n:\n  x = 0\n  b(x)\n  if a: x = 1", ["x"]),
    "while's condition": ("while x:\n  if a: x = 1", ["x!"]),
    "after a break": ("for i in n:\n  if a:\n    x = 1\n    break\n  x = 2\nb(x)", ["x"]),
    "after a continue": ("for i in n:\n  b(x)\n  if a:\n    x = 1\n    continue\n  x = 2", ["x"]),
    "return": ("if a: x = 1\nreturn x", ["x!"]),
    "function inside": ("def g(): return x\nif a: x = 1\nx = 2", ["x!"]),
    "lambda": ("g = lambda: x\nif a: x = 1\nx = 2", ["x!"]),
    "with": ("if a: x = y = 1\nwith n(y) as x: b(x)", ["x y!"]),
    "try": ("try:\n  if a: x = 1\nfinally:\n  b(x)", ["x!"]),
    "match": ("match n:\n  case 1:\n    if a: x = 1\n  case _: b(x)", ["x!"]),
    "loops, imports, walruses, functions": (
        "if a:\n  import q.r, s as t\n  for i in n: pass\n  (w := 1)\n  def g(): u = 1\n  [v for v in n]\nb(t, w)",
        ["q t! i w! g"],
    ),
    "annotations": ("if a: x: int = 1\nb(x)", ["x!"]),
    "of elsewhere": ("global x\nif a: x = y = 1\nb(x, y)", ["y!"]),
}


@pytest.mark.parametrize("case", AFTER)
def test_names_read_after_branches(case):
    body, found = AFTER[case]
    assert live(body) == found


CARRIED = {
    "sum": ("for i in n: x = x + 1", ["x"]),
    "bound first": ("for i in n:\n  x = 1\n  b(x)\n  x = 2", [""]),
    "bound in both branches": ("for i in n:\n  if a: x = 1\n  else: x = 2\n  b(x)", [""]),
    "bound in one branch": ("for i in n:\n  if a: x = 1\n  b(x)", ["x"]),
    "range": ("for i in n:\n  n = i", [""]),
    "loop variable": ("for i in n: i = i + 1", [""]),
    "inner": ("for i in n:\n  x = 0\n  for j in n: x += j\n  b(x)", ["", "x"]),
    "while": ("while n > 0: n = n - 1", ["n"]),
    "continue": ("for i in n:\n  if a: continue\n  b(x)\n  x = 1", ["x"]),
}


@pytest.mark.parametrize("case", CARRIED)
def test_names_carried_by_loops(case):
    body, found = CARRIED[case]
    assert carried(body) == found


LEFT = {
    "read": ("for i in n:\n  if a: break\n  x = y = 1\nb(x)", ["x"]),
    "not read": ("for i in n:\n  x = 1\n  if a: continue\nx = 2\nb(x)", [""]),
    "inner": ("while a:\n  for i in n:\n    if a: break\n    x = 1\n  b(x)", ["", "x"]),
    "read in the next iteration": ("for j in n:\n  for i in n: x = 1\n  if a: b(x)\n  x = 2", ["", "x"]),
    "no way out": ("for i in n: x = 1\nb(x)", ["x"]),
    "else": ("for i in n: x = 1\nelse: b(x)", ["x"]),
}


@pytest.mark.parametrize("case", LEFT)
def test_names_read_after_loops(case):
    body, found = LEFT[case]
    tree = tree_of(body)
    reads = Reads(tree)
    loops = sorted((n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)), key=lambda n: n.lineno)
    assert [" ".join(reads.of_loop(n)) for n in loops] == found


def test_names_bound_at_two_depths():
    tree = tree_of("v = x = y = z = 0\nfor i in n:\n  v = x = 1\n  z: int\n  f(v)\nif a: w = y = 2\nelse: w = x")
    assert mutable_names(tree, Reads(tree)) == {"x"}


def test_names_bound_anew_in_loops_after_each_other(way):
    """No later turn, and nothing behind the loops, reads what a turn bound: each binding is a value of its own."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "int32"), B: T.Tensor((4, 8), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            x, step = 100, 0
            for i in T.serial(4):
                if n > 0:
                    for k in T.serial(2):
                        offset = 1 << k
                        B[i, offset] = offset
                x = 5
                for j in T.serial(4, 8):
                    step = A[i, j]
                    x = step * 2
                    x = x + 1
                    B[i, j] = x
            for k in T.serial(4):
                offset = k + n
                x = 7
                B[k, 0] = offset + x

    assert "alloc_var" not in kernel.script()
    a, b = torch.randint(0, 50, (4, 8), dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    way(kernel, a, b, 3)
    want = torch.cat([torch.zeros(4, 4, dtype=torch.int32), a[:, 4:] * 2 + 1], 1)
    want[:, 0], want[:, 1], want[:, 2] = torch.arange(10, 14), 1, 2
    assert torch.equal(b, want)


def test_choices_keep_loops_vectors():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(64):
                x = A[i]
                x = x * 2
                if x > 1:
                    x = T.exp(-x)
                B[i] = x

    assert "vector_copy<16>(B" in torch_tile.compile(kernel, target="cuda:sm_80").get_kernel_source()


def test_branches_that_do_more_keep_variables(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(8, threads=32) as i:
            x = A[i]
            if x > 0:
                B[i] = 1.0
                x = -x
            B[i] += x

    assert variables(kernel) == ["x"]
    a, b = torch.randn(8), torch.zeros(8)
    way(kernel, a, b)
    torch.testing.assert_close(b, torch.where(a > 0, 1 - a, a))


def test_choices_read_only_what_they_choose(way):
    """The branch guards its index, of memory on and off the chip, and its division."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), C: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((64,), "int32")
            T.copy(A, tile)
            for i in T.Parallel(64):
                left, part, far = 0, 1, -1
                if i > 0:
                    left = tile[i - 1]
                if A[i] != 0:
                    part = 100 // A[i]
                if A[i] >= 0 and A[i] < 64:
                    far = tile[A[i]]
                B[i] = left + part
                C[i] = far

    a, b, c = torch.randint(-9, 70, (64,)).int(), torch.zeros(64).int(), torch.zeros(64).int()
    a[5] = 0
    way(kernel, a, b, c)
    want = [(int(a[i - 1]) if i else 0) + (100 // int(a[i]) if a[i] else 1) for i in range(64)]
    assert b.tolist() == want
    assert c.tolist() == [int(a[x]) if 0 <= x < 64 else -1 for x in a.tolist()]
