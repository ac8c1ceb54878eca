# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of calls without running them: for a contest all at a time, or beside the main thread.

A call is made on tensors like those of its graph, on which kernels are only prepared. Threads trace the programs; the
rest is done by Inductor's worker processes (workers.py) or, where there are none, by the threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_tile.inductor import compat
from torch_tile.inductor.compile_ahead import workers
from torch_tile.inductor.graph.nodes import is_on_gpu, val
from torch_tile.inductor.report import rows as report
from torch_tile.kernel import only_preparing

AT_ONCE = 8
"""Kernels that are with workers at a time: a graph rarely has more, and Inductor's own need workers, too."""


@contextlib.contextmanager
def compiling_kernels(graph: Graph) -> Iterator[None]:
    """Those of a graph's calls, all at a time; at the end they are there."""
    nodes, pool = calls(graph), workers.ready() if is_on_gpu(graph) else None
    with ThreadPoolExecutor(max(1, len(nodes)), thread_name_prefix="torch_tile contest") as threads:
        for node in nodes:
            threads.submit(prepare, node.target, node.args, dict(node.kwargs), pool)
        yield


def calls(graph: Graph) -> list[Node]:
    """The calls of tile ops in a graph."""
    return [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "namespace", "") == "tile"]


def different(nodes: Iterable[Node]) -> list[Node]:
    """One call of each form."""
    return list({form(n): n for n in nodes}.values())


def form(node: Node) -> str:
    """A call as text: its op, what its tensors are like, and its other arguments."""

    def facts(n: Node) -> Any:
        value = val(n)
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"

    return f"{node.target} {torch.fx.map_arg((node.args, node.kwargs), facts)}"


@functools.cache
def threads(count: int) -> ThreadPoolExecutor:
    """The threads that prepare calls beside the main one."""
    return ThreadPoolExecutor(count, thread_name_prefix="torch_tile prefetch")


def prepare(op: Any, args: Sequence[Any], kwargs: dict[str, Any], pool: Any = None) -> None:
    """Call an op on tensors like those of the graph, kernels being compiled only."""
    try:
        with compat.isolated_compile(), only_preparing(), workers.compiling_in(pool):
            args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: compat.empty_for(val(n)))
            op(*args, **kwargs)
        report.log.debug("%s is compiled ahead", op)
    except Exception:
        report.log.debug("%s was not compiled ahead", op, exc_info=True)
