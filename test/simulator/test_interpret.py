# SPDX-License-Identifier: Apache-2.0
"""Arguments of a caller, bound and written in place; what the kernel allocates comes back."""

import re

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, binary, const
from torch_tile.ir.stmt import Block, Kernel, Program
from torch_tile.simulator.interpret import interpret
from torch_tile.simulator.tile.interpreter import evaluate


def scaled(b):
    """y = x * factor for n elements of x, whose row of `step` holds one; blocks of 32."""
    n, step, factor = Var("n", role="dim"), Var("step", role="dim"), Var("factor", dt.float32, "param")
    old = [Buffer("x", (n,), dt.float32, "global", (step,), "param"), factor,
           Buffer("y", (n,), dt.float32, "global", None, "param")]  # fmt: skip
    new = [Buffer("x", (n,), dt.float32, "global", None, "param"), factor, old[2]]
    block = Var("bx", dt.int32, "block")
    at = block * 32 + b.thread
    body = b.when(at < n, b.store(new[2], at, b.load(new[0], at * step) * factor))
    kernel = Kernel((binary("//", n + 31, const(32, dt.int32)),), (block,), (32,), Block((body,)), None, b.thread, 0)
    return [Program("scaled", tuple(p), (kernel,), (), ()) for p in (old, new)]


@pytest.mark.parametrize("size", [1, 31, 77])
def test_sizes_strides_and_scalars_are_bound(build, size):
    old, new = scaled(build(32))
    x, y = torch.randn(size, 3)[:, 1], torch.full((size,), torch.nan)
    assert not interpret(new, old, [x, 2.0, y])
    torch.testing.assert_close(y, x * 2)
    findings = interpret(new, old, {"x": x, "factor": 3.0}, allocated=[2])
    assert not findings
    torch.testing.assert_close(findings.outputs[0], x * 3)


def test_chosen_blocks(build):
    old, new = scaled(build(32))
    x, y = torch.randn(80), torch.zeros(80)
    assert not interpret(new, old, [x, 1.0, y], blocks=[(1,)])
    assert torch.equal(y[32:64], x[32:64]) and not y[:32].any() and not y[64:].any()


def test_gaps_between_rows_are_outside(build):
    old, new = scaled(build(32))
    x = torch.randn(20, 2)[:, 0]
    flat = Program(new.name, new.params, (Kernel(*_with(new.kernels[0], x)),), (), ())
    findings = interpret(flat, old, [x, 1.0, torch.zeros(20)])
    assert "between its rows" in findings.report()


def _with(kernel, x):
    """The fields of a kernel that reads one element further."""
    from torch_tile.ir.expr import Load
    from torch_tile.ir.node import Rewriter

    class Further(Rewriter):
        def visit_Load(self, node):
            return Load(node.buffer, (node.indices[0] + 1,))

    changed = Further()(kernel)
    return [changed.grid, changed.blocks, changed.threads, changed.body, None, changed.thread, 0]


def test_unfit_arguments(build):
    old, new = scaled(build(32))
    with pytest.raises(LaunchError, match="`y`"):
        interpret(new, old, [torch.randn(4), 1.0, torch.zeros(5)])


m, n, s = T.dynamic("m"), T.dynamic("n"), T.dynamic("s")


@T.prim_func
def scale(
    A: T.Tensor((m, n), "float32"), B: T.Tensor((n, m), "float32"), factor: T.float32, C: T.Tensor((m,), T.int32)
):
    with T.Kernel(1) as _:
        for i, j in T.Parallel(m, n):
            B[j, i] = A[i, j] * factor
        for i in T.Parallel(m):
            C[i] = m * 100 + n


@T.prim_func
def halves(A: T.Tensor((2 * m + 1, T.ceildiv(n, 4)), "float32"), B: T.Tensor((n - m,), "int32")):
    with T.Kernel(1) as _:
        B[0] = m
        B[1] = n


@T.prim_func
def strided(A: T.StridedTensor((m, n), (s, 1), "float32"), out: T.Tensor((m,), "float32"), S: T.Tensor((1,), "int32")):
    with T.Kernel(1) as _:
        S[0] = s
        for i in T.Parallel(m):
            out[i] = 0.0
            for j in T.serial(n):
                out[i] = out[i] + A[i, j]


@T.prim_func
def unknown_dimension(A: T.Tensor((4,), "int32")):
    with T.Kernel(1) as _:
        A[0] = m


@T.prim_func
def second_of_two(A: T.Tensor((m,), "float32")):
    between, last = T.empty((m,), "float32"), T.empty((m,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.serial(m):
            between[i] = A[i] * 2
    with T.Kernel(1, threads=32):
        for i in T.serial(m):
            last[i] = between[i] + A[i]
    return last


@T.prim_func
def outputs(A: T.Tensor((m,), "float32")):
    B = T.empty((m, 2), "float32")
    W = T.alloc_global((m,), "float32")
    with T.Kernel(1) as _:
        T.copy(A, W)
    with T.Kernel(1) as _:
        for i, j in T.Parallel(m, 2):
            B[i, j] = W[i] * (j + 1)
    return B


def test_dimensions_follow_from_shapes():
    a = torch.randn(5, 3)
    b, c = torch.zeros(3, 5), torch.zeros(5, dtype=torch.int32)
    assert evaluate(scale, a, b, 2.0, c) == ()
    assert torch.equal(b, a.T * 2)
    assert c.tolist() == [503] * 5


def test_ways_to_pass_arguments():
    a, c = torch.randn(5, 3), torch.zeros(5, dtype=torch.int32)
    results = []
    for call in (
        lambda b: evaluate(scale, a, b, 2, c),
        lambda b: evaluate(scale, [a, b, 2.0, c]),
        lambda b: evaluate(scale, {"A": a, "B": b, "factor": 2.0, "C": c}),
        lambda b: evaluate(scale.program, a, b, factor=torch.tensor(2.0), C=c),
    ):
        b = torch.zeros(3, 5)
        call(b)
        results.append(b)
    assert all(torch.equal(b, results[0]) for b in results)


def test_dimensions_inside_expressions():
    b = torch.zeros(4, dtype=torch.int32)
    evaluate(halves, torch.zeros(7, 2), b)
    assert b[:2].tolist() == [3, 7]


def test_dimensions_from_strides():
    base, sums, stride = torch.randn(4, 9), torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    evaluate(strided, base[:, :5], sums, stride)
    assert stride.item() == 9
    torch.testing.assert_close(sums, base[:, :5].sum(1))


def test_outputs_and_workspaces_are_allocated():
    a = torch.randn(7)
    (b,) = evaluate(outputs, a)
    assert torch.equal(b, a[:, None] * torch.tensor([1.0, 2.0]))


def test_a_tensor_that_is_not_returned_is_no_output():
    a = torch.randn(40)
    for made in (
        evaluate(second_of_two, a),
        torch_tile.compile(second_of_two, target="cuda:sm_80").interpret(a).outputs,
    ):
        (last,) = made
        assert torch.equal(last, a * 3)


A, B, C = torch.zeros(5, 3), torch.zeros(3, 5), torch.zeros(5, dtype=torch.int32)
WRONG = [
    (scale, (A, B, 2.0), "takes 4 arguments (A, B, factor, C), got 3"),
    (scale, ({"A": A, "B": B, "C": C},), "takes the arguments ['A', 'B', 'factor', 'C'], got ['A', 'B', 'C']"),
    (scale, (A.double(), B, 2.0, C), "argument `A` must have dtype torch.float32, got torch.float64"),
    (scale, (A, B[0], 2.0, C), "argument `B` must have 2 dimensions, got shape [5]"),
    (scale, (A, torch.zeros(3, 6), 2.0, C), "argument `B` must have size 5 (m) in dimension 1, got 6"),
    (scale, (A.T, torch.zeros(5, 3), 2.0, C[:3]), "argument `A` must be contiguous, got strides (1, 3)"),
    (scale, ([1.0], B, 2.0, C), "argument `A` must be a tensor, got list"),
    (scale, (A, B, "two", C), "argument `factor` must be a number of type float32, got str"),
    (scale, (A.to("meta"), B, 2.0, C), "argument `A` must be on cpu, got a tensor on meta"),
    (halves, (torch.zeros(8, 2), C[:4]), "argument `A` has size 8 in dimension 0, from which m of"),
    (strided, (A.T, B[:, 0].contiguous(), C[:1]), "argument `A` must have stride 1 in dimension 1, got 3"),
    (unknown_dimension, (C[:4],), "dimension `m` does not follow from the shapes"),
]


@pytest.mark.parametrize(("kernel", "args", "message"), WRONG)
def test_wrong_arguments(kernel, args, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        evaluate(kernel, *args)


def test_integer_scalars_are_not_floats():
    @T.prim_func
    def count(n: T.int32, out: T.Tensor((1,), "int32")):
        with T.Kernel(1) as _:
            out[0] = n

    out = torch.zeros(1, dtype=torch.int32)
    evaluate(count, 7, out)
    assert out.item() == 7
    with pytest.raises(LaunchError, match="argument `n` must be a number of type int32"):
        evaluate(count, 1.5, out)
