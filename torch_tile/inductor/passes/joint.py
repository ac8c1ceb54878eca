# SPDX-License-Identifier: Apache-2.0
"""Joint: forward and backward in one graph, as AOTAutograd traces them, before they are parted.

Only here can a mask of attention in training be read: afterwards it is a tensor that the forward hands over. What rules
and texts say of it is computed in both kernels, so it is neither kept nor read, and tiles that it hides are skipped.
"""

from __future__ import annotations

from torch.fx import Node

from torch_tile.inductor.passes.attention import BACKWARD, read_mask
from torch_tile.inductor.passes.graph import Miss, Rewrite, arg, erase_dead
from torch_tile.inductor.passes.manager import Context
from torch_tile.inductor.passes.sinks import LSE


def read_masks(context: Context) -> None:
    """Rules and texts instead of masks, in calls whose mask gets no gradient."""
    for target, first in ((LSE, 0), (BACKWARD, 3)):
        for node in context.graph.find_nodes(op="call_function", target=target):
            mask, causal, _, window = (arg(node, first + n) for n in range(3, 7))
            changed = arg(node, 11) or arg(node, 13) if target is BACKWARD else arg(node, 9)
            if isinstance(mask, Node) and not (causal or window or changed):
                _read(node, mask, first)


def _read(node: Node, mask: Node, first: int) -> None:
    rewrite = Rewrite(node)
    q, k = node.args[1:3] if first else node.args[:2]
    try:
        tensor, *rule = read_mask(rewrite, q, k, mask, arg(node, first + 5))
    except Miss:
        rewrite.discard()
        return
    causal, _, window, _, *text = rule
    if tensor is mask and not (causal or window or text):
        rewrite.discard()
        return
    given = node.args[: first + 3]
    if first:  # the names of what is kept stand between
        rule[4:4] = [""]
    new = rewrite.call(node.target, *given, tensor, *rule)  # type: ignore[arg-type]
    new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    node.replace_all_uses_with(new)
    erase_dead(node)
