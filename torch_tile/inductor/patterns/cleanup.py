# SPDX-License-Identifier: Apache-2.0
"""Clean-up before the patterns: permutations of dimensions of size one, assertions, sizes of intermediate tensors."""

from __future__ import annotations

from typing import Any

import torch

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import (
    UNITS,
    VIEWS,
    Miss,
    Rewrite,
    aten,
    is_call,
    known,
    shape,
    val,
)


@family(None, "post_grad", 130)
def skip(context: Context) -> None:
    """Let each view read the tensor under the permutations of units, and the views, on which it stands."""
    for view in (n for n in context.graph.nodes if is_call(n, *VIEWS)):
        start: Any = view.args[0]
        under, found = start, False
        while (moves := moves_units(under)) or is_call(under, *VIEWS, *UNITS):
            under, found = under.args[0], found or moves
        if found:
            view.target = aten.reshape.default  # as one of them may have copied
            view.replace_input_with(start, under)


def moves_units(node: Any) -> bool:
    """Whether a node is a permutation that leaves the dimensions that are not of size one in order."""
    if not is_call(node, aten.permute.default):
        return False
    sizes: Any = shape(node.args[0])
    new: Any = node.args[1]
    order = [d % len(sizes) for d in new if not known(sizes[d] == 1)]
    return order == sorted(order)


# Exported graphs assert the dtype of what was converted, of which matches would believe that it is read once more.
#
# Inductor drops these assertions, too, right behind our passes.


@family(None, "post_grad", 110)
def drop(context: Context) -> None:
    """Erase them."""
    for node in context.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        context.graph.erase_node(node)


# Sizes are computed from those of the inputs, not read off intermediate tensors, which could then never go away.


@family(None, "post_grad", 120)
def use(context: Context) -> None:
    """Replace every `sym_size` of a tensor that is no input, where inputs have what it takes."""
    for node in context.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        size, tensor = val(node), node.args[0]
        if not isinstance(size, torch.SymInt) or tensor.op == "placeholder":
            continue
        rewrite = Rewrite(tensor)
        try:
            node.replace_all_uses_with(rewrite.size(size))
        except Miss:
            rewrite.discard()
