# SPDX-License-Identifier: Apache-2.0
"""The passes given to Inductor: each runs the families of its stage (context.py) over a graph.

Capture (pre-grad) swaps composite calls for tile ops one to one; written_out finds attention's forward and backward in
one graph, and joint says in both alike what only both together show; refine (post-grad, on functional ATen) matches
structure, then puts back what is not worth a kernel. None ever raises: a family that fails is logged and its nodes are
left to Inductor.
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
from torch_tile.inductor.select.policy import policy_of
from torch_tile.inductor.settings import Settings
from torch_tile.runtime.source_digest import source_digest


class TilePass(CustomGraphPass):
    """A pass over one stage; its `uuid` covers our sources and settings, so Inductor's caches stay right."""

    def __init__(self, stage: Stage, settings: Settings) -> None:
        self.stage = stage
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        """Run the stage's families over the graph."""
        context = self.run(graph)
        if self.stage == "pre_grad":
            _prefetch(context)

    def run(self, graph: Graph) -> Context:
        """The same; returns what they left behind."""
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
        """The stage's families; those that judge what is captured come last, in one go with post_grad."""
        found = families(self.stage, self.settings)
        return found + families("settle", self.settings) if self.stage == "post_grad" else found

    def _progress(self) -> contextlib.AbstractContextManager[None]:
        """A bar that counts contests, on a terminal, where a thorough search was asked for."""
        if not self.settings.thorough or self.stage != "post_grad" or self.settings.select != "fastest":
            return contextlib.nullcontext()
        from torch_tile.inductor.select.decide import shown

        return shown()

    def uuid(self) -> Any:
        """Identity for Inductor's caches: our sources, the stage and the settings."""
        return ("torch_tile", self.stage, repr(self.settings), source_digest(), torch.__version__)


def _prefetch(context: Context) -> None:
    if not is_on_gpu(context.graph):
        return  # without an import that takes longer than a graph from Inductor's cache can wait
    from torch_tile.inductor.compile_ahead import rehearse

    rehearse.prefetch(context.graph, context.settings, context.stage)


def _checkpointed(graph: Graph) -> Iterator[torch.fx.GraphModule]:
    """The bodies of calls of torch.utils.checkpoint, which are one graph with what surrounds them only later on."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        body = getattr(graph.owning_module, str(getattr(node.args[0], "target", "")), None)
        if isinstance(body, torch.fx.GraphModule):
            yield body


def _graph_kind(graph: Graph) -> str:
    """Inference, forward or backward, from the names that AOTAutograd gives placeholders and outputs."""
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    if any(n.startswith("tangents") for n in names):
        return "backward"
    return "forward" if any(n.startswith("primals") for n in names) else "inference"
