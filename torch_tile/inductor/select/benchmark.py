# SPDX-License-Identifier: Apache-2.0
"""Prepare two graphs and time them in turns: a replacement, and the code that it replaces.

The benchmark compares device time. On a GPU two events measure it, with a cold L2 cache before each run. In a model
other kernels run in between. The host stays ahead of the GPU, so launch overhead does not count.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_tile.inductor import compat
from torch_tile.inductor.compile_ahead.kernels import compiling_kernels
from torch_tile.inductor.graph.extract import EXTERN, is_extern
from torch_tile.inductor.graph.nodes import CAST, EXAMPLE, FROZEN, LAYOUT, PARTS, aten, is_call, val
from torch_tile.inductor.patterns.gemm.epilogue import PRODUCTS
from torch_tile.inductor.patterns.gemm.grouped_ops import is_grouped
from torch_tile.inductor.select.real_inputs import known_numbers
from torch_tile.profiler import FLUSHED

BUDGET = {"cpu": 0.2, "cuda": 0.04}
"""Seconds of timing for each pair, after one warm-up of each."""
FEWEST, MOST = 3, 200  # rounds
BURST = 5  # rounds between two waits for the GPU
AHEAD = 2_000  # of the GPU's clock cycles for a microsecond of the host's, so that it comes late

Rival = tuple[Callable[..., Any], list[Any]]


def times(new: GraphModule, old: GraphModule, options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the times of both graphs in microseconds; `options` are Inductor's."""
    device = next((v.device.type for v in map(val, _placeholders(new)) if isinstance(v, torch.Tensor)), "cpu")
    with compat.nested_compile():
        # Our kernels' compiler works beside Inductor's where it is not called by it.
        with compiling_kernels(new.graph) if is_called(new) else contextlib.nullcontext():
            spread = {n.target: numbers(n) for n in _placeholders(old)}  # the old graph shows what is a weight
            rivals = [
                (_callable_of(m, options), [example(n, *spread.get(n.target, ())) for n in _placeholders(m)])
                for m in (new, old)
            ]
            _run(*rivals[1])
        _run(*rivals[0])
        ours, theirs = (_gpu_times if device == "cuda" else _cpu_times)(rivals)
    return ours, theirs


def _placeholders(module: GraphModule) -> list[torch.fx.Node]:
    """List a graph's inputs."""
    return list(module.graph.find_nodes(op="placeholder"))


def _callable_of(module: GraphModule, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a callable for a module: the module itself if it only calls kernels, else its compiled form."""
    if is_called(module) and not (options.get("max_autotune") and is_searched_for(module)):
        compute_constants(module)
        module.recompile()
        return module.forward

    compiled: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not compiled:
            compiled.append(compat.compile_alone(module, inputs, options))
        return compiled[0](*inputs)

    return run


def _run(call: Callable[..., Any], inputs: list[Any]) -> None:
    """Run a callable without gradients."""
    with torch.no_grad():
        call(*inputs)


RIGHT: dict[Any, int] = {aten.mm.default: 1, aten.addmm.default: 2, aten.bmm.default: 1, aten.baddbmm.default: 2}
"""Products, and the position of their right operand."""


def numbers(node: torch.fx.Node) -> tuple[float, float]:
    """Return the mean and deviation of an example for an input: those of the real tensor if they are known."""
    return known_numbers(node) or (0.0, assumed_deviation(node))


def assumed_deviation(node: torch.fx.Node) -> float:
    """Return the standard deviation of an example for an input of which nothing is known.

    A right operand of a product has that of trained weights: results of unit variance from inputs of unit variance.
    Larger ones drive exponentials and error functions into denormal numbers, which models never meet.
    """
    seen = [node]
    for each in seen:  # grows meanwhile
        for reader in each.users:
            position = 1 if is_grouped(reader) else RIGHT.get(reader.target)
            if position is not None and len(reader.args) > position and reader.args[position] is each:
                return 1 / math.sqrt(max(1, compat.size_hint(val(each).shape[-2])))
            if is_call(reader, CAST, *LAYOUT, *PARTS) and reader not in seen:
                seen.append(reader)
    return 1.0


def example(node: torch.fx.Node, mean: float = 0.0, deviation: float = 1.0) -> Any:
    """Make a real value with the form of the fake value of a node; a tensor that the graph holds is its own example."""
    if FROZEN in node.meta:
        return node.meta[FROZEN]
    if EXAMPLE in node.meta:
        return node.meta[EXAMPLE]()
    out = compat.empty_for(val(node))
    if not isinstance(out, torch.Tensor):
        return out
    if out.dtype == torch.bool or (out.dtype.is_floating_point and out.dtype.itemsize == 1):
        compat.elements(out).fill_(1)
    elif out.dtype.is_floating_point:
        compat.elements(out).normal_(mean, deviation)
    return out


def _cpu_times(rivals: Sequence[Rival]) -> list[float]:
    """Return the best time of each rival in microseconds. The rivals take turns, so load on the machine hits both."""
    best = [float("inf")] * len(rivals)
    end = time.perf_counter() + BUDGET["cpu"]
    rounds = 0
    while rounds < FEWEST or (time.perf_counter() < end and rounds < MOST):
        for i, (run, inputs) in enumerate(rivals):
            start = time.perf_counter()
            run(*inputs)
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
        rounds += 1
    return best


def _gpu_times(rivals: Sequence[Rival]) -> list[float]:
    """Return the median time of each rival in microseconds, taken in turns."""
    cache = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for run, inputs in rivals:
        run(*inputs)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in rivals]
    end = time.perf_counter() + BUDGET["cuda"]
    while len(samples[0]) < FEWEST or (time.perf_counter() < end and len(samples[0]) < MOST):
        torch.cuda._sleep(int(AHEAD * 1e6 * (host + 5e-5) * BURST))
        events = []
        for number in range(BURST):
            for i in range(len(rivals)) if number % 2 == 0 else reversed(range(len(rivals))):
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                cache.zero_()
                pair[0].record()
                rivals[i][0](*rivals[i][1])
                pair[1].record()
                events.append((i, pair))
        torch.cuda.synchronize()
        for i, (first, last) in events:
            samples[i].append(first.elapsed_time(last) * 1e3)
    return [statistics.median(s) for s in samples]


# Subgraphs of extern kernels and views only: running them eagerly costs the same GPU time as compiling them.
#
# The nodes are calls of kernels, views, and the constants that kernels read. A node that only torch's attention reads
# may also be a floating mask made from a bool mask: no compiler can fuse it with attention.

BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
ATTENTION = (*(op for op in EXTERN if "attention" in str(op)), *BACKWARD)
CONSTANTS = (aten.scalar_tensor.default, aten.full.default)
OF_MASKS = (aten.where.self, CAST)


def is_called(module: GraphModule) -> bool:
    """Return whether a part only calls kernels and views, and so needs no compiler."""
    return all(_needs_none(n) for n in module.graph.nodes if n.op == "call_function")


def is_searched_for(module: GraphModule) -> bool:
    """Return whether Inductor's search (`max_autotune`) may find faster kernels for a part than torch calls."""
    return any(is_call(n, *PRODUCTS) or is_grouped(n) for n in module.graph.nodes)


def compute_constants(module: GraphModule) -> None:
    """Turn nodes that depend on no input into attributes, so that calls do not compute them again."""
    for node in list(module.graph.nodes):
        if is_call(node, *CONSTANTS) and not node.all_input_nodes:
            target: Any = node.target
            module.register_buffer(node.name, target(*node.args, **node.kwargs))
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", node.name))
            module.graph.erase_node(node)


def _needs_none(node: Node) -> bool:
    """Return whether a node needs no compiler: an extern kernel, a view, a constant or a tile op."""
    if is_extern(node) or is_call(node, *LAYOUT, *PARTS, *BACKWARD, aten.alias.default):
        return True
    if is_call(node, *CONSTANTS) and not node.all_input_nodes:
        return True
    return getattr(node.target, "namespace", "") == "tile" or (is_call(node, *OF_MASKS) and _goes_to_attention(node))


def _goes_to_attention(node: Node) -> bool:
    """Return whether only torch's attention kernels read a node, or views of it."""
    readers = list(node.users)
    for reader in readers:  # grows meanwhile
        if is_call(reader, *LAYOUT, *PARTS):
            readers.extend(reader.users)
    return all(is_call(r, *LAYOUT, *PARTS, *ATTENTION) for r in readers)
