# SPDX-License-Identifier: Apache-2.0
"""Exported graphs assert the dtype of what was converted, of which matches would believe that it is read once more.

Inductor drops these assertions, too, right behind our passes.
"""

from __future__ import annotations

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import aten


@family(None, "post_grad", 110)
def drop(context: Context) -> None:
    """Erase them."""
    for node in context.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        context.graph.erase_node(node)
