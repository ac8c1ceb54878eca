# SPDX-License-Identifier: Apache-2.0
"""Run the backend without code generation: our passes on the graphs that Inductor would pass them, run by torch.

For `explain`, for tests, and for telling a wrong match from wrong generated code:
`torch.compile(model, backend=torch_tile.inductor.dry_run.dry_run)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_tile.inductor import compat
from torch_tile.inductor.backend import pass_patches, split_options
from torch_tile.inductor.driver import TilePass
from torch_tile.inductor.report.rows import Row
from torch_tile.ops.registry import operator_of


def dry_run(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    watch: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph as `tile` does, up to Inductor's code generation.

    The arguments are `tile`'s, and `watch`: write into the rows of the report which kernels run. The graph goes
    through the same AOTAutograd, decompositions, partitioner and joint passes; what our passes leave is run operator
    by operator.

    Raises:
        RuntimeError: on an unknown option or a bad value of ours.
    """
    patches, settings = split_options(mode, options)

    def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        """Run the passes behind Inductor's own, and return the graph as a function."""
        rows = TilePass("post_grad", settings).run(graph.graph).rows
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # a kernel's result may have other strides; Inductor copies
        graph.recompile()
        return Watched(graph, rows).run if watch else graph.forward

    ours = pass_patches(settings, patches)
    joint = {key: ours[key] for key in compat.JOINT_STAGES}
    with compat.inductor_config().patch({**patches, **joint}):
        TilePass("pre_grad", settings)(gm.graph)
        gm.recompile()
        return compat.compile_without_codegen(gm, example_inputs, compile_graph)


dry_run.captures_scans = True  # type: ignore[attr-defined]  # as `tile` does


class Watched(torch.fx.Interpreter):
    """Run a graph node by node, and record in each row the kernels that the row's nodes run."""

    def __init__(self, graph: torch.fx.GraphModule, rows: Mapping[torch.fx.Node, Row]) -> None:
        super().__init__(graph)
        self.rows = rows

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node."""
        operator = operator_of(n.target) if n in self.rows else None
        if operator is not None:
            args, named = self.fetch_args_kwargs_from_env(n)
            with compat.nested_compile():
                used = operator.plan(operator.args(*args, **named)).compile()
            known = self.rows[n].kernels
            known.extend(kernel for kernel in used if kernel not in known)
        return super().run_node(n)
