# SPDX-License-Identifier: Apache-2.0
"""Sizes are computed from those of the inputs, not read off intermediate tensors, which could then never go away."""

from __future__ import annotations

import torch

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Miss, Rewrite, aten, val


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
