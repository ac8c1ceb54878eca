# SPDX-License-Identifier: Apache-2.0
"""Parts of a graph that need no compiler: run node by node they cost the GPU what they would cost compiled.

They are calls of kernels and views, the constants that those read, and what only attention of torch's reads (a mask of
numbers made of one of bools), which no compiler can fuse with it.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from torch_tile.inductor.graph.extract import EXTERN, LAYOUT, is_extern
from torch_tile.inductor.graph.nodes import CAST, aten, is_call
from torch_tile.inductor.patterns.gemm.epilogue import PRODUCTS
from torch_tile.inductor.patterns.gemm.grouped_ops import is_grouped

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
    """Whether a part needs no compiler."""
    return all(_needs_none(n) for n in module.graph.nodes if n.op == "call_function")


def is_searched_for(module: GraphModule) -> bool:
    """Whether Inductor's search (`max_autotune`) may find better kernels for a part than torch calls."""
    return any(is_call(n, *PRODUCTS) or is_grouped(n) for n in module.graph.nodes)


def compute_constants(module: GraphModule) -> None:
    """What depends on no input becomes an attribute of a part, not to be computed again at each call."""
    for node in list(module.graph.nodes):
        if is_call(node, *CONSTANTS) and not node.all_input_nodes:
            target: Any = node.target
            module.register_buffer(node.name, target(*node.args, **node.kwargs))
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", node.name))
            module.graph.erase_node(node)


def _needs_none(node: Node) -> bool:
    if is_extern(node) or is_call(node, *LAYOUT, *BACKWARD, aten.alias.default):
        return True
    if is_call(node, *CONSTANTS) and not node.all_input_nodes:
        return True
    return getattr(node.target, "namespace", "") == "tile" or (is_call(node, *OF_MASKS) and _goes_to_attention(node))


def _goes_to_attention(node: Node) -> bool:
    """Whether torch's kernels for attention are all that reads a node, or views of it."""
    readers = list(node.users)
    for reader in readers:  # grows meanwhile
        if is_call(reader, *LAYOUT):
            readers.extend(reader.users)
    return all(is_call(r, *LAYOUT, *ATTENTION) for r in readers)
