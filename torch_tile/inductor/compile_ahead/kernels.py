# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of calls without running them: all at once for a contest, or beside the main thread.

A call is planned on fake tensors like those of its graph, and the kernels of the plan are compiled. Threads trace the
programs. Inductor's worker processes (workers.py) compile them; without workers, the threads do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from torch_tile.inductor import compat
from torch_tile.inductor.compile_ahead import workers
from torch_tile.inductor.graph.nodes import is_on_gpu, val
from torch_tile.inductor.report import rows as report
from torch_tile.ops.registry import operator_of
from torch_tile.runtime.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from torch_tile.kernels.common import Machine

AT_ONCE = 8
"""Most kernels at workers at once: a graph rarely has more, and Inductor's own kernels need workers, too."""


@contextlib.contextmanager
def compiling_kernels(graph: Graph) -> Iterator[None]:
    """Compile the kernels of a graph's calls in parallel; on exit all are compiled."""
    nodes, pool = calls(graph), workers.ready() if is_on_gpu(graph) else None
    with ThreadPoolExecutor(max(1, len(nodes)), thread_name_prefix="torch_tile contest") as threads:
        for node in nodes:
            threads.submit(prepare, node.target, node.args, dict(node.kwargs), pool)
        yield


def calls(graph: Graph) -> list[Node]:
    """List the calls of tile ops in a graph."""
    return [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "namespace", "") == "tile"]


def one_of_each_form(nodes: Iterable[Node]) -> list[Node]:
    """Return one call for each form: calls alike in op, dtypes, sizes and strides share a kernel."""
    return list({form(n): n for n in nodes}.values())


def form(node: Node) -> str:
    """Return a call as text: its op, the forms of its tensors, and its other arguments."""

    def facts(n: Node) -> Any:
        value = val(n)
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"

    return f"{node.target} {torch.fx.map_arg((node.args, node.kwargs), facts)}"


@functools.cache
def threads(count: int) -> ThreadPoolExecutor:
    """Return the pool of threads that prepare calls beside the main thread."""
    return ThreadPoolExecutor(count, thread_name_prefix="torch_tile prefetch")


def plan_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any], machine: Machine | None = None) -> LaunchPlan:
    """Plan a graph's call of one of our ops on fake tensors. Sizes known only at run time get typical values."""
    operator = operator_of(op)
    assert operator is not None
    with compat.outside_trace(), FakeTensorMode():
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: compat.empty_for(val(n)))
    with compat.outside_trace():
        return operator.plan(operator.args(*args, **kwargs), machine)


def prepare(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], pool: Any = None, machine: Machine | None = None
) -> None:
    """Compile the kernels that a call of one of our ops launches, for its tensors' machine or for `machine`."""
    try:
        with compat.outside_trace(), workers.compiling_in(pool):
            plan_of(op, args, kwargs, machine).compile()
        report.log.debug("%s is compiled ahead", op)
    except Exception:
        report.log.debug("%s was not compiled ahead", op, exc_info=True)
