# SPDX-License-Identifier: Apache-2.0
"""Kernels that a graph may need are compiled beside the main thread, while the graph is still being worked on.

The families run once over a copy of the graph, where every replacement is taken; what they make is compiled, not run.
By the time a contest or the model's first call asks for a kernel, it is there or on its way. Threads trace them;
the rest is done by Inductor's worker processes (workers.py) or, where there are none, by the threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from torch_tile.compiler.parallel import workers_for
from torch_tile.hardware import Target
from torch_tile.inductor import compat
from torch_tile.inductor.compile_ahead import workers
from torch_tile.inductor.driver import Context, fingerprint
from torch_tile.inductor.graph.nodes import Rewrite, is_on_gpu, val
from torch_tile.inductor.report import rows as report
from torch_tile.inductor.settings import Settings
from torch_tile.kernel import only_preparing
from torch_tile.runtime.cache import get_or_build, is_kept, key_of

SLOW = (torch.ops.tile.mla_decode.default,)
"""Kernels that take longer, three seconds, than Inductor is busy once its own passes are done. Others would only delay
the main thread if they were begun before it is: no worker is ready so early."""
MOST_NODES = 256
"""Of a graph that is traced ahead, which takes about a millisecond for each. A larger one keeps Inductor busy."""
AT_ONCE = 8
"""Kernels that are with workers at a time: a graph rarely has more, and Inductor's own need workers, too."""


class Rehearsal(Context):
    """A context in which every replacement is taken and nothing is reported."""

    def refused(self, nodes: Iterable[Node]) -> str:
        """Nothing is recorded."""
        return ""

    def contest(self, rewrite: Rewrite, pairs: list[tuple[Node, Node]]) -> None:
        """Nothing is timed."""

    def note(self, family: str, status: str, what: str, anchor: Node, *rest: Any) -> None:
        """Only that the anchor is settled."""
        self.handled.add(anchor)


def prefetch(graph: Graph, settings: Settings, stage: str) -> list[Future[None]]:
    """Start compiling what the families would make of a graph for a GPU. Of a joint one, in which attention is ready in
    both directions, that: the backward's kernels are called as soon as its graph is compiled. Of Dynamo's, what
    `foresee` does. What fails now fails later, too.
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
    threads = _threads(workers_for(Target("cuda", 90)) if pool is None else min(compat.worker_count(), AT_ONCE))
    report.log.debug("%s: %d calls of kernels are compiled ahead", stage, len(calls))
    return [threads.submit(_prepare, node.target, node.args, dict(node.kwargs), pool) for node in calls]


def in_training(graph: Graph) -> list[Node]:
    """The different calls of attention in both directions."""
    from torch_tile.inductor.graph.inline import IN_TRAINING

    return _different(n for n in _calls(graph) if n.target in IN_TRAINING)


def rehearse(graph: Graph, settings: Settings, stage: str) -> list[Node]:
    """The different calls of tile ops in a copy of the graph, once the families have been over it."""
    from torch_tile.inductor.graph import inline as expand
    from torch_tile.inductor.patterns import refine_families

    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    context = Rehearsal(copy, settings, stage)
    for family in refine_families(settings):
        if family.__module__ != expand.__name__:  # that one judges, and this one does not
            family(context)
            copy.eliminate_dead_code()
    return _different(_calls(copy))


def foresee(graph: Graph, settings: Settings) -> list[Node]:
    """The slow kernels that a rehearsal will find in a graph of Dynamo's, if that is small, new and for inference.

    The graph is traced to ATen for this, as AOTAutograd will.
    """
    inputs = [val(n) for n in graph.find_nodes(op="placeholder")]
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    module, may_be_slow = graph.owning_module, any("softmax" in str(n.target) for n in graph.nodes)
    if module is None or not may_be_slow or trains or len(graph.nodes) > MOST_NODES or _is_known(graph, inputs):
        return []
    with compat.isolated_compile(), FakeTensorMode(allow_non_fake_inputs=True) as mode, V.set_fake_mode(mode):
        traced = compat.decomposed(torch.fx.Interpreter(module).run, [compat.empty_for(x) for x in inputs])
        found = rehearse(traced.graph, settings, "inference")
    return [call for call in found if call.target in SLOW]


def _is_known(graph: Graph, inputs: Sequence[Any]) -> bool:
    """Whether a graph was looked at before, by any process: most likely Inductor finds all of it in its cache."""
    facts = [(x.dtype, x.device, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in inputs]
    key = key_of("foreseen", str(graph), str(facts), fingerprint())
    if is_kept(key, ".txt"):
        return True
    get_or_build(key, ".txt", lambda output: output.touch())
    return False


@contextlib.contextmanager
def compiling_kernels(graph: Graph) -> Iterator[None]:
    """Those of a graph's calls, all at a time; at the end they are there."""
    calls, pool = _calls(graph), workers.ready() if is_on_gpu(graph) else None
    with ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="torch_tile contest") as threads:
        for node in calls:
            threads.submit(_prepare, node.target, node.args, dict(node.kwargs), pool)
        yield


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "namespace", "") == "tile"]


def _different(calls: Iterable[Node]) -> list[Node]:
    return list({_form(n): n for n in calls}.values())


def _form(node: Node) -> str:
    def facts(n: Node) -> Any:
        value = val(n)
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"

    return f"{node.target} {torch.fx.map_arg((node.args, node.kwargs), facts)}"


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="torch_tile prefetch")


def _prepare(op: Any, args: Sequence[Any], kwargs: dict[str, Any], pool: Any = None) -> None:
    """Call an op on tensors like those of the graph, kernels being compiled only."""
    try:
        with compat.isolated_compile(), only_preparing(), workers.compiling_in(pool):
            args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: compat.empty_for(val(n)))
            op(*args, **kwargs)
        report.log.debug("%s is compiled ahead", op)
    except Exception:
        report.log.debug("%s was not compiled ahead", op, exc_info=True)
