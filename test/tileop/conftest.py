# SPDX-License-Identifier: Apache-2.0
"""Every op runs twice, by its meaning and by what it becomes on the CPU, and is compared with plain torch."""

import pytest

import torch_tile as tilelang
from torch_tile.interp.tiles import evaluate
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import TileOp


@pytest.fixture(params=["evaluate", "cpu"])
def launch(request):
    """`launch(kernel, *args)` runs a @T.prim_func on its arguments in place."""
    if request.param == "evaluate":
        return evaluate
    return lambda kernel, *args: tilelang.compile(kernel)(*args)


@pytest.fixture
def findings():
    """`findings(kernel)` gives what the `check` methods of its tile ops complain of."""

    def collect(kernel):
        return [d for n in walk(kernel.program) if isinstance(n, TileOp) for d in n.check()]

    return collect


@pytest.fixture
def complaint(findings):
    """`complaint(kernel, code)` asserts a single finding at the statement marked `# here`, and gives its message."""

    def single(kernel, code):
        (found,) = findings(kernel)
        assert found.code == code
        assert "# here" in found.span.source()
        return found.message

    return single
