# SPDX-License-Identifier: Apache-2.0
"""Clean up graphs before the patterns: unit-dimension permutations, assertions, sizes of intermediate tensors."""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import UNITS, VIEWS, Miss, Rewrite, aten, is_call, known, shape, val


@family(None, "post_grad", 130)
def skip_views(context: Context) -> None:
    """Let each view read the tensor under the views and unit-dimension permutations in front of it."""
    for view in (n for n in context.graph.nodes if is_call(n, *VIEWS)):
        start: Any = view.args[0]
        under, found = start, False
        while (moves := moves_units(under)) or is_call(under, *VIEWS, *UNITS):
            under, found = under.args[0], found or moves
        if found:
            view.target = aten.reshape.default  # as one of them may have copied
            view.replace_input_with(start, under)


def moves_units(node: Any) -> bool:
    """Return whether a node is a permutation that only moves dimensions of size one."""
    if not is_call(node, aten.permute.default):
        return False
    sizes: Any = shape(node.args[0])
    new: Any = node.args[1]
    order = [d % len(sizes) for d in new if not known(sizes[d] == 1)]
    return order == sorted(order)


# Exported graphs assert the dtype of converted tensors. Matchers would count an assertion as a further reader.
#
# Inductor drops these assertions, too, right after our passes.


@family(None, "post_grad", 110)
def drop_dtype_assertions(context: Context) -> None:
    """Erase the dtype assertions."""
    for node in context.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        context.graph.erase_node(node)


# Compute sizes from the sizes of inputs. A size read from an intermediate tensor would keep that tensor alive.


@family(None, "post_grad", 120)
def use_input_sizes(context: Context) -> None:
    """Replace every `sym_size` of an intermediate tensor, if the size can be computed from input sizes."""
    for node in context.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        size, tensor = val(node), node.args[0]
        if not isinstance(size, torch.SymInt) or tensor.op == "placeholder":
            continue
        rewrite = Rewrite(tensor)
        try:
            node.replace_all_uses_with(rewrite.size(size))
        except Miss:
            rewrite.discard()
