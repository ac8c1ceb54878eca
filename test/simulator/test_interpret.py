# SPDX-License-Identifier: Apache-2.0
"""Arguments of a caller, bound and written in place; what the kernel allocates comes back."""

import pytest
import torch

from torch_tile.diagnostics.errors import LaunchError
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var, binary, const
from torch_tile.ir.stmt import Block, Kernel, Program
from torch_tile.simulator.interpret import interpret


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
