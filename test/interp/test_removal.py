# SPDX-License-Identifier: Apache-2.0
"""A pipeline made by hand: right as it is, and reported without any one of its waits and barriers."""

import pytest
import torch

from torch_tile.interp.removal import ordering, removals
from torch_tile.interp.threads import run_threads
from torch_tile.intrinsics import memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, const, select


def pipeline(b, steps, stages=2):
    """y[t] = sum over steps of x[step, 63 - t], through `stages` versions of shared memory."""
    n = b.threads
    x, y = b.tensor("x", torch.randn(steps * n)), b.tensor("y", torch.zeros(n))
    tile, total = b.shared("s", stages * n), b.var("total", "float32", 0.0)
    k = Var("k", dt.int32, "loop")

    def copy(step):
        valid = select(step < steps, 4, 0)
        source = select(step < steps, step, 0)
        return tm.cp_async(b.address(tile, step % stages * n + b.thread), b.address(x, source * n + b.thread), valid, 4)

    before = [s for m in range(stages - 1) for s in (copy(const(m, dt.int32)), tm.cp_async_commit())]
    body = (
        tm.cp_async_wait(stages - 2),
        tm.barrier(),
        copy(k + stages - 1),
        tm.cp_async_commit(),
        b.store(total, None, b.load(total) + b.load(tile, k % stages * n + (n - 1 - b.thread))),
    )
    return [*before, b.loop(k, 0, steps, *body), b.store(y, b.thread, b.load(total))]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_each_removal_is_reported(build, stages):
    b = build(64)
    program = b.program(*pipeline(b, 5, stages))
    tensors = {id(p): t for p, t in zip(b.params, b.tensors, strict=True)}
    assert not run_threads(program, tensors, {})
    x, y = b.tensors
    torch.testing.assert_close(y, x.view(5, 64).sum(0).flip(0))
    assert [c.name for c in ordering(program)] == ["cp_async_wait", "barrier"]
    made = list(removals(program))
    assert [r.name for r in made] == ["cp_async_wait", "cp_async_wait, one laxer", "barrier"]
    for removal in made:
        assert len(ordering(removal.program)) == (2 if "laxer" in removal.name else 1)
        assert run_threads(removal.program, tensors, {}), removal.name


def test_the_program_itself_is_untouched(build):
    b = build(32)
    program = b.program(tm.barrier(), tm.barrier())
    text = repr(program)
    assert len(list(removals(program))) == 2 and repr(program) == text
    assert list(removals(b.program())) == []
