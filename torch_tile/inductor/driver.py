# SPDX-License-Identifier: Apache-2.0
"""Define the passes given to Inductor: each runs the families of its stage (context.py) over a graph.

Capture (pre_grad) replaces composite calls by tile ops one to one. The stage written_out finds attention's forward and
backward in one graph. The stage joint rewrites both where only both together show how. The stage post_grad, on
functional ATen, matches structure and then expands ops that lose. No pass raises: a family that fails is logged and its
nodes are left to Inductor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph

from torch_tile.inductor import patterns
from torch_tile.inductor.compat import CustomGraphPass
from torch_tile.inductor.context import Context, Family, Stage, families
from torch_tile.inductor.graph.nodes import is_on_gpu
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.select import real_inputs
from torch_tile.inductor.select.policy import policy_of
from torch_tile.inductor.settings import Settings
from torch_tile.runtime.source_digest import source_digest


class TilePass(CustomGraphPass):
    """Inductor pass of one stage. Its `uuid` covers our sources and settings, so Inductor's caches stay valid."""

    def __init__(self, stage: Stage, settings: Settings) -> None:
        self.stage = stage
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        """Run the stage's families over the graph."""
        context = self.run(graph)
        if self.stage == "pre_grad":
            _prefetch(context)

    def run(self, graph: Graph) -> Context:
        """Run the stage's families over the graph; return their context."""
        patterns.load(self.stage)
        kind = {"written_out": "joint", "post_grad": _graph_kind(graph)}.get(self.stage, self.stage)
        context = Context(graph, self.settings, kind, policy_of(self.settings))
        if self.stage == "pre_grad":
            for body in _checkpointed(graph):
                self.run(body.graph)
                body.recompile()
        elif self.stage == "post_grad":
            from torch_tile.inductor.codegen import lowering

            lowering.register()  # not before: a graph from Inductor's cache does without its lowerings, a slow import
            if kind != "backward" and self.settings.select == "fastest":
                real_inputs.note(graph)
            _prefetch(context)
        with self._progress():
            for family in self._steps():
                try:
                    family(context)
                except Exception:
                    report.log.exception("%s failed; its subgraphs are left to Inductor", family.__module__)
                if self.stage == "post_grad":
                    graph.eliminate_dead_code()
        if self.stage == "joint":
            _prefetch(context)
        return context

    def _steps(self) -> list[Family]:
        """Return the stage's families. For post_grad, the families of `settle` follow."""
        found = families(self.stage, self.settings)
        return found + families("settle", self.settings) if self.stage == "post_grad" else found

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        """Return a progress bar that counts contests, if the user wants a thorough search."""
        if not self.settings.thorough or self.stage != "post_grad" or self.settings.select != "fastest":
            return contextlib.nullcontext()
        from torch_tile.inductor.select.decide import shown

        return shown()

    def uuid(self) -> Any:
        """Return the identity for Inductor's caches: our sources, the stage and the settings."""
        return ("torch_tile", self.stage, repr(self.settings), source_digest(), torch.__version__)


def _prefetch(context: Context) -> None:
    """Start compiling the kernels of a graph for a GPU."""
    if not is_on_gpu(context.graph):
        return  # without an import that takes longer than a graph from Inductor's cache can wait
    from torch_tile.inductor.compile_ahead import rehearse

    rehearse.prefetch(context.graph, context.settings, context.stage)


def _checkpointed(graph: Graph) -> Iterator[torch.fx.GraphModule]:
    """Yield the bodies of torch.utils.checkpoint calls, which join the surrounding graph only later."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        body = getattr(graph.owning_module, str(getattr(node.args[0], "target", "")), None)
        if isinstance(body, torch.fx.GraphModule):
            yield body


def _graph_kind(graph: Graph) -> str:
    """Tell inference, forward and backward apart, by the names that AOTAutograd gives placeholders and outputs."""
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    if any(n.startswith("tangents") for n in names):
        return "backward"
    return "forward" if any(n.startswith("primals") for n in names) else "inference"
