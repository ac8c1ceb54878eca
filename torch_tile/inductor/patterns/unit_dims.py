# SPDX-License-Identifier: Apache-2.0
"""Views are read of what they view, past permutations that only move dimensions of size one.

`einsum` writes a linear layer with such permutations around its product, and those are views like any other.
"""

from __future__ import annotations

from typing import Any

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import VIEWS, aten, is_call, known, shape


@family(None, "post_grad", 130)
def skip(context: Context) -> None:
    """Let each view read the tensor under the permutations of units, and the views, on which it stands."""
    for view in (n for n in context.graph.nodes if is_call(n, *VIEWS)):
        start: Any = view.args[0]
        under, found = start, False
        while (moves := moves_units(under)) or is_call(under, *VIEWS, aten.unsqueeze.default):
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
