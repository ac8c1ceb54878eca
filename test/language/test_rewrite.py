# SPDX-License-Identifier: Apache-2.0
"""Every construct of Python that a kernel may hold, on values known while tracing and on values of the device."""

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Break, Continue, For, If, Let, Store, While
from torch_tile.simulator.tile.interpreter import evaluate


def nodes(kernel, kind):
    return [n for n in walk(kernel.program) if isinstance(n, kind)]


def run(kernel, *args):
    """The kernel's last argument, a fresh vector of eight numbers, after a run on `args`."""
    out = torch.zeros(8)
    evaluate(kernel, *args, out)
    return out.tolist()


@pytest.mark.parametrize("flag", [False, True])
def test_if_on_python_values_leaves_no_trace(flag):
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            if flag:
                out[0] = 1.0
            elif not flag and len("ab") == 2:
                out[1] = 2.0
            else:
                out[2] = 3.0

    assert not nodes(kernel, If)
    assert run(kernel)[:3] == ([1, 0, 0] if flag else [0, 2, 0])


def test_if_on_device_values():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            if n < 0:
                out[0] = 1.0
            elif n == 0:
                out[1] = 2.0
            else:
                out[2] = 3.0
                if n > 5:
                    out[3] = 4.0

    assert len(nodes(kernel, If)) == 3
    results = {n: run(kernel, n)[:4] for n in (-1, 0, 1, 6)}
    assert results == {-1: [1, 0, 0, 0], 0: [0, 2, 0, 0], 1: [0, 0, 3, 0], 6: [0, 0, 3, 4]}


def test_logic_mixes_both_worlds():
    """A Python operand decides at once where it can; otherwise only the device operand remains."""
    yes, no = True, False

    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            if no and n > 0:
                out[0] = 1.0
            if yes or n > 0:
                out[1] = 1.0
            if yes and n > 0:
                out[2] = 1.0
            if not n > 3 and (n > 1 or no):
                out[3] = 1.0
            if 0 <= n < 4 != 5:
                out[4] = 1.0
            if not (no or n == 2) or n in [7, 8] if no else n != 2:
                out[5] = 1.0

    assert len(nodes(kernel, If)) == 4
    assert run(kernel, 2)[:6] == [0, 1, 1, 1, 1, 0]
    assert run(kernel, 9)[:6] == [0, 1, 1, 0, 0, 1]


def test_conditional_expressions():
    wide = True

    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            out[0] = 2.0 if wide else undefined_but_not_needed  # noqa: F821
            out[1] = 1.0 if n > 2 else -1.0
            out[2] = (1.0 if n > 2 else 2.0) if wide else 3.0

    assert run(kernel, 3)[:3] == [2, 1, 1]
    assert run(kernel, 2)[:3] == [2, -1, 2]


def test_for_over_python_values_is_unrolled():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in [0, 2]:
                out[i] = 1.0
            for i, name in enumerate(("a", "bb")):
                out[3 + i] = len(name)
            for (i, j), scale in zip([(5, 0), (6, 1)], [2.0, 3.0], strict=True):
                out[i] = x[j] * scale
            values = [x[i] for i in range(3)]
            table = {i: v * 2.0 for i, v in enumerate(values)}
            out[7] = sum(values[1:], values[0]) + table[2]

    assert not nodes(kernel, For)
    x = torch.arange(1.0, 9.0)
    assert run(kernel, x) == [1, 0, 1, 1, 2, 2, 6, 1 + 2 + 3 + 6]


def test_range_is_a_device_loop_only_in_for_statements():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in range(2):
                out[i] = 1.0
            for i in range(n, 8, 2):
                out[i] = 2.0
            for i in list(range(3, 4)):
                out[i] = 3.0

    assert [(repr(f.starts[0]), repr(f.stops[0]), f.step) for f in nodes(kernel, For)] == [("0", "2", 1), ("n", "8", 2)]
    assert run(kernel, 4) == [1, 1, 0, 3, 2, 0, 2, 0]


def test_collections_hold_values_not_places():
    """What a list, tuple or dict holds is read when it is bound, as in Python."""

    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(8):
                out[i] = i
            pair = (out[0], [out[1]])
            named = {"two": out[2]}
            out[0] = pair[1][0]
            out[1] = pair[0]
            out[2] = 9.0
            out[3] = named["two"]

    assert run(kernel)[:4] == [1, 0, 9, 2]


def test_while_in_both_worlds():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            todo = [3, 1]
            while todo:
                out[todo.pop()] = 1.0
            i = T.alloc_var("int32", 4)
            while i < n and out[7] == 0.0:
                out[i] = 2.0
                i += 1

    assert len(nodes(kernel, While)) == 1
    assert run(kernel, 6) == [0, 1, 0, 1, 2, 2, 0, 0]


def test_a_python_condition_is_asked_once_per_turn():
    asked = []

    def ask():
        asked.append(1)
        return len(asked) < 3

    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            while ask():
                out[len(asked)] = 1.0

    assert len(asked) == 3 and run(kernel)[:4] == [0, 1, 1, 0]


def test_break_and_continue_in_both_worlds():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in [0, 1, 2, 3]:
                if i == 1:
                    continue
                if i == 3:
                    break
                out[i] = 1.0
            else:
                out[7] = 9.0
            for i in T.serial(3, 8):
                for j in (0, 1):
                    if j == 1:
                        break
                    if i == n:
                        out[i] = 5.0
                if i == n:
                    continue
                if i > n + 1:
                    break
                out[i] = 2.0

    assert len(nodes(kernel, Break)) == 1 and len(nodes(kernel, Continue)) == 1
    assert run(kernel, 4) == [1, 0, 1, 2, 5, 2, 0, 0]


def test_assignments():
    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            a = b = x[1]
            a, b = b + 1.0, a
            c, d = x[2], x[3]
            c, d = d, c
            (e, (f, g)), h = (1, (2, 3)), 4
            first, *rest = [5, 6]
            out[0], out[1] = a, b
            out[2] = c
            out[3] = d
            out[4] = e + f + g + h
            out[5] = rest[0] - first
            out[6] += x[6]
            typed: T.int32 = 7
            out[typed] = 8.0
            if (half := x[4] * 0.5) > 1.0:
                out[6] = half

    x = torch.arange(8.0)
    assert run(kernel, x) == [2, 1, 3, 2, 10, 1, 2, 8]


def test_names_are_bound_once_and_variables_are_stored():
    """A name is a value; one that is bound again inside a loop or branch becomes a variable, as does T.alloc_var."""

    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            value = out[0] + 1.0
            value = value * 2.0
            out[0] = value
            total = T.float32(0.0)
            running: T.int32 = n
            explicit = T.alloc_var("float32", 3.0)
            low, high = T.alloc_var("int32", 1), T.alloc_var("int32", 5)
            for i in T.serial(4):
                total = total + i
                total += 0.5
                running += 1
                explicit *= 2
                low, high = high, low
            if n > 0:
                running = running * 10
            out[1] = total
            out[2] = running
            out[3] = explicit
            out[4] = low * 10 + high

    assert run(kernel, 1)[:5] == [2, 8, 50, 48, 15]
    assert {let.var.name for let in nodes(kernel, Let)} >= {"value"}
    assert all(let.var.name not in ("total", "running") for let in nodes(kernel, Let))


@pytest.mark.parametrize("flag", [False, True])
def test_names_of_a_region_that_has_ended_are_bound_anew(flag):
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            for i in T.Parallel(8):
                d = T.cast(i, "float32")
                if flag:
                    d = d * 2.0
                out[i] = d
            for i in T.Parallel(8):
                d = out[i] + 1.0
                if i > 3:
                    d = d * 3.0
                out[i] = d
            for _half in (0, 1):
                for i in T.Parallel(8):
                    d = 0.5  # a variable again, of the type that it had
                    d = d + out[i]
                    out[i] = d

    assert run(kernel) == [(i * (1 + flag) + 1) * (3 if i > 3 else 1) + 1 for i in range(8)]


def test_source_text_is_left_alone():
    """Strings keep their lines, and columns are those of the file."""

    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        """A docstring
        whose text is not indented.
        """
        with T.Kernel(1) as _:
            text = """ab
c"""
            out[len(text)] = 1.0

    assert run(kernel).index(1) == len("ab\nc")
    (store,) = nodes(kernel, Store)
    assert store.span.source()[store.span.column : store.span.end_column].startswith("out[")


def test_helpers_run_as_plain_python():
    def scaled(x, i, factor=2.0):
        return x[i] * factor

    class Config:
        size = 4

        def index(self, i):
            return (i * 3) % self.size

    config, pick = Config(), lambda x, i: x[i + 1]

    @T.prim_func
    def kernel(x: T.Tensor((8,), "float32"), out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:

            def inner(i):
                return x[i] + 1.0

            for i in T.Parallel(4):
                out[config.index(i)] = scaled(x, i)
            out[4] = pick(x, 4)
            out[5] = inner(5)

    x = torch.arange(8.0)
    out = run(kernel, x)
    assert [out[(i * 3) % 4] for i in range(4)] == [0, 2, 4, 6]
    assert out[4:6] == [5, 6]


def test_exceptions_of_the_author_come_through():
    with pytest.raises(TileError, match="KeyError: 'absent'"):

        @T.prim_func
        def kernel(out: T.Tensor((8,), "float32")):
            with T.Kernel(1) as _:
                out[0] = {"present": 1.0}["absent"]


def test_assertions_in_both_worlds():
    @T.prim_func
    def kernel(n: T.int32, out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            assert len("abc") == 3, "Python's"
            assert n > 0, "the device's"
            out[0] = n

    assert run(kernel, 3)[0] == 3
    with pytest.raises(AssertionError, match="at once"):

        @T.prim_func
        def fails(out: T.Tensor((8,), "float32")):
            with T.Kernel(1) as _:
                assert len("abc") == 2, "at once"


def test_cells_that_differ_in_an_annotation_only(tmp_path):
    """Annotations of local names are not in a function's code: the codes of both cells are equal."""
    text = """@torch_tile.jit
def f(X):
    N = T.const("N")
    X: T.Tensor((N,), "{0}")
    Y = T.empty((N,), "float64")
    with T.Kernel(T.ceildiv(N, 64), threads=64) as bx:
        T.copy(X[bx * 64 : bx * 64 + 64], Y[bx * 64 : bx * 64 + 64])
    return Y
"""
    for dtype in ("float32", "int32", "float32"):
        cell = tmp_path / f"{dtype}.py"
        cell.write_text(text.format(dtype))
        names = {"torch_tile": torch_tile, "T": T}
        exec(compile(cell.read_text(), str(cell), "exec"), names)
        x = torch.arange(100).to(getattr(torch, dtype))
        assert torch.equal(names["f"](x), x.double())
