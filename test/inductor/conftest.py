# SPDX-License-Identifier: Apache-2.0
"""`light`: our passes on the graphs that Inductor would give them, run by torch itself.

It skips code generation (seconds per kernel), not matching: the graphs go through the same AOTAutograd, decompositions
and joint passes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

import torch_tile.ops  # noqa: F401 - registers the ops
from torch_tile.inductor.passes.manager import TilePass
from torch_tile.inductor.report import Report, collect
from torch_tile.inductor.settings import FAMILIES, Settings

Run = Callable[..., tuple[Any, Report]]


def light_backend(settings: Settings) -> Callable[..., Any]:
    """A Dynamo backend that runs our passes and then the graph as it is."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            gm = joint_graph_passes(gm)
            view_to_reshape(gm)
            TilePass("post_grad", settings)(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        TilePass("pre_grad", settings)(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return aot_autograd(fw_compiler=compile_graph, decompositions=select_decomp_table())(gm, inputs)

    return backend


@pytest.fixture
def backend() -> Callable[..., Any]:
    """The light backend with all families, every match replaced."""
    return light_backend(Settings("tile"))


@pytest.fixture
def light() -> Run:
    """`light(f, *args)` -> (what the compiled f returns, the report)."""

    def run(
        f: Callable[..., Any], *args: Any, dynamic: bool | None = None, families: tuple[str, ...] = FAMILIES, **kw: Any
    ) -> tuple[Any, Report]:
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=light_backend(Settings("tile", families)), dynamic=dynamic)
        with collect() as report:
            return compiled(*args, **kw), report

    return run


@pytest.fixture
def agrees(light: Run) -> Run:
    """Like `light`, and checks that the result is eager's, to float32 rounding."""

    def run(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Report]:
        with torch.no_grad():
            got, report = light(f, *args, **options)
            want = f(*args)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        return got, report

    return run


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
