# SPDX-License-Identifier: Apache-2.0
"""Compile kernels that a graph may need beside the main thread, while Inductor still works on the graph.

The families run once over a copy of the graph and take every replacement. The kernels of the result are compiled, not
run (kernels.py). So a contest or the model's first call finds each kernel compiled, or in compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from torch_tile.compiler.parallel import workers_for
from torch_tile.hardware import Target
from torch_tile.inductor import compat, patterns
from torch_tile.inductor.compile_ahead import kernels, workers
from torch_tile.inductor.context import Context, Select, families
from torch_tile.inductor.graph.inline import IN_TRAINING
from torch_tile.inductor.graph.nodes import val
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.settings import Settings
from torch_tile.runtime.cache import get_or_build, is_kept, key_of
from torch_tile.runtime.source_digest import source_digest

SLOW = (torch.ops.tile.mla_decode.default,)
"""Kernels that compile for about 3 s, longer than Inductor works after its own passes. An early start of other kernels
would only delay the main thread: no worker is ready so early."""
MOST_NODES = 256
"""Most nodes of a graph that is traced ahead, at about 1 ms per node. A larger graph keeps Inductor busy."""


class Rehearsal(Context):
    """A context that takes every replacement and reports nothing."""

    def note(self, family: str, status: str, what: str, anchor: Node, *rest: Any) -> None:
        """Mark the anchor as handled; record no row."""
        self.handled.add(anchor)


def prefetch(graph: Graph, settings: Settings, stage: str) -> list[Future[None]]:
    """Start compiling the kernels that the families would use in a graph for a GPU.

    For a joint graph these are the kernels of attention in both directions: the backward's kernels are called as soon
    as its graph is compiled. For Dynamo's graph they are the kernels that `foresee` finds. An error here is only
    logged; it occurs again in the real compile.
    """
    try:
        if stage == "pre_grad":
            calls = foresee(graph, settings)
        else:
            calls = in_training(graph) if stage == "joint" else rehearse(graph, settings, stage)
    except Exception:
        report.log.debug("nothing is compiled ahead", exc_info=True)
        return []
    pool = workers.ready() if calls else None
    threads = kernels.threads(
        workers_for(Target("cuda", 90)) if pool is None else min(compat.worker_count(), kernels.AT_ONCE)
    )
    report.log.debug("%s: %d calls of kernels are compiled ahead", stage, len(calls))
    return [threads.submit(kernels.prepare, node.target, node.args, dict(node.kwargs), pool) for node in calls]


def in_training(graph: Graph) -> list[Node]:
    """List the different calls of attention, forward and backward."""
    return kernels.one_of_each_form(n for n in kernels.calls(graph) if n.target in IN_TRAINING)


def rehearse(graph: Graph, settings: Settings, stage: str) -> list[Node]:
    """Run the families over a copy of the graph; return the different calls of tile ops in it."""
    patterns.load("post_grad")
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    context = Rehearsal(copy, settings, stage, Select())
    for family in families("post_grad", settings):
        family(context)
        copy.eliminate_dead_code()
    return kernels.one_of_each_form(kernels.calls(copy))


def foresee(graph: Graph, settings: Settings) -> list[Node]:
    """Find the slow kernels that a rehearsal will find in Dynamo's graph, if it is small, new and for inference."""
    inputs = [val(n) for n in graph.find_nodes(op="placeholder")]
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    module, may_be_slow = graph.owning_module, any("softmax" in str(n.target) for n in graph.nodes)
    if module is None or not may_be_slow or trains or len(graph.nodes) > MOST_NODES or _is_known(graph, inputs):
        return []
    with compat.nested_compile(), FakeTensorMode(allow_non_fake_inputs=True) as mode, V.set_fake_mode(mode):
        traced = compat.decomposed(torch.fx.Interpreter(module).run, [compat.empty_for(x) for x in inputs])
        found = rehearse(traced.graph, settings, "inference")
    return [call for call in found if call.target in SLOW]


def _is_known(graph: Graph, inputs: Sequence[Any]) -> bool:
    """Return whether any process saw this graph before. Then Inductor most likely finds it in its cache."""
    facts = [(x.dtype, x.device, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in inputs]
    key = key_of("foreseen", str(graph), str(facts), source_digest(), torch.__version__)
    if is_kept(key, ".txt"):
        return True
    get_or_build(key, ".txt", lambda output: output.touch())
    return False
