# SPDX-License-Identifier: Apache-2.0
"""Replace a captured op by ATen: trace its reference on the inputs of the op and copy the result into the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_tile.inductor import compat
from torch_tile.inductor.graph.nodes import aten, val
from torch_tile.ops.registry import operator_of

FAMILIES = {"attention": "attention", "rms_norm": "norm", "layer_norm": "norm", "softmax": "softmax"}
"""Operators that a pattern captures before their contest, and the family of each."""

IN_TRAINING = torch.ops.tile.attention_lse.default, torch.ops.tile.attention_backward.default
"""Operators whose contest runs before autograd."""


def captured(node: Node) -> tuple[str, Callable[..., torch.Tensor]] | None:
    """Return the family of a captured operator and its computation in torch's own operators; None for other nodes."""
    operator = operator_of(node.target)
    if operator is None or operator.as_aten is None or operator.name not in FAMILIES:
        return None
    as_aten, args = operator.as_aten, operator.args
    return FAMILIES[operator.name], lambda *given, **named: as_aten(args(*given, **named))


def expand(node: Node, reference: Callable[..., torch.Tensor]) -> list[Node]:
    """Replace a captured op by the ATen of `reference`; return the new nodes."""
    traced = trace_reference(node, reference)
    inputs = node.all_input_nodes
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = node.graph
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                env[inner] = graph.node_copy(inner, lambda n: env[n])
                for key in ("nn_module_stack", "stack_trace"):
                    if key in node.meta:
                        env[inner].meta[key] = node.meta[key]
            elif inner.op == "get_attr":
                env[inner] = _literal(node, getattr(traced, str(inner.target)))
            elif inner.op == "output":
                node.replace_all_uses_with(env[inner.args[0]])
    graph.erase_node(node)
    return [n for n in env.values() if n not in inputs]


def _literal(before: Node, tensor: torch.Tensor) -> Node:
    """Insert a node for a tensor constant of a traced reference, which must be a scalar such as -inf."""
    if tensor.numel() != 1:
        raise ValueError("a reference made a tensor constant that is not a scalar")
    with before.graph.inserting_before(before):
        new = before.graph.call_function(
            aten.full.default, ([], tensor.item()), {"dtype": tensor.dtype, "device": tensor.device}
        )
    new.meta["val"] = val(before).new_empty((), dtype=tensor.dtype)
    return new


def trace_reference(node: Node, reference: Callable[..., torch.Tensor]) -> GraphModule:
    """Trace `reference` on the node's inputs to functional ATen, decomposed as Inductor does."""
    from torch._inductor.virtualized import V

    inputs = node.all_input_nodes

    def call(*values: Any) -> torch.Tensor:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return reference(*args, **kwargs)

    with V.fake_mode, torch.no_grad():
        return compat.decomposed(call, [val(n) for n in inputs])
