# SPDX-License-Identifier: Apache-2.0
"""Note the mean and deviation of the tensors that a graph is compiled with. Contests then run on numbers like them.

Dynamo hands the real parameters and inputs to the backend; the passes see fake tensors only. Graphs of gradients are
compiled later, without them.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import FROZEN, NUMBERS, val

SAMPLED = 1 << 14  # most elements of a tensor to look at

_inputs: contextvars.ContextVar[Sequence[Any]] = contextvars.ContextVar("inputs", default=())


@contextlib.contextmanager
def compiling_with(inputs: Sequence[Any]) -> Iterator[None]:
    """Hand the real inputs of a call to `note`, while graphs are compiled for that call."""
    token = _inputs.set(inputs)
    try:
        yield
    finally:
        _inputs.reset(token)


def note(graph: Graph) -> None:
    """Write the numbers of the real inputs into a graph's placeholders; nothing under torch.distributed."""
    nodes, inputs = list(graph.find_nodes(op="placeholder")), _inputs.get()
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if shared or len(nodes) != len(inputs) or not all(map(_fits, nodes, inputs)):
        return
    with compat.nested_compile():
        for node, given in zip(nodes, inputs, strict=True):
            if (found := numbers_of(given)) is not None:
                node.meta[NUMBERS] = found


def _fits(node: Node, given: Any) -> bool:
    """Return whether an input may be that of a placeholder."""
    value = val(node)
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return not isinstance(value, torch.Tensor) and not isinstance(given, torch.Tensor)
    sizes = tuple(map(compat.size_hint, value.shape))
    return value.dtype == given.dtype and value.device == given.device and sizes == tuple(given.shape)


def known_numbers(node: Node) -> tuple[float, float] | None:
    """Return the mean and deviation of the tensor behind an input of a part: what is noted of it, or is frozen."""
    if NUMBERS not in node.meta and FROZEN in node.meta:
        with compat.nested_compile():
            return numbers_of(node.meta[FROZEN])
    found: tuple[float, float] | None = node.meta.get(NUMBERS)
    return found


def order_of_magnitude(node: Node) -> str:
    """Return the size of an input's numbers as a power of 4, if it is known. Layers of one kind share it."""
    found = known_numbers(node)
    return "" if found is None else f" about 4^{math.frexp(math.hypot(*found))[1] // 2}"


def numbers_of(given: Any) -> tuple[float, float] | None:
    """Return the mean and deviation of a real tensor of floats; None of anything else, and of NaN and infinities."""
    if type(given) not in (torch.Tensor, torch.nn.Parameter) or given.device.type == "meta" or not given.numel():
        return None
    if not given.is_floating_point() or given.dtype.itemsize == 1 or given.layout != torch.strided:
        return None
    flat = given.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLED)].double()
    mean, deviation = torch.stack([sample.mean(), sample.std(correction=0)]).tolist()
    return (mean, deviation) if math.isfinite(mean) and math.isfinite(deviation) else None
