# SPDX-License-Identifier: Apache-2.0
"""Joint: forward and backward in one graph, as AOTAutograd traces them, before they are parted.

Only here can a mask of attention in training be read: afterwards it is a tensor that the forward hands over. What rules
and texts say of it is computed in both kernels, so it is neither kept nor read, and tiles that it hides are skipped.
Likewise heads of keys and values that were copied for each head of queries: here the copies and the sums of their
gradients are both to be seen.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, extent, leaves, trace
from torch_tile.inductor.graph.nodes import (
    Miss,
    Rewrite,
    arg,
    aten,
    dtype,
    erase_dead,
    is_call,
    known,
    shape,
)
from torch_tile.inductor.patterns.attention.rewrite import BACKWARD, read_mask, ungrouped
from torch_tile.inductor.patterns.attention.sinks import LSE


@family("attention", "joint", 10)
def share_heads(context: Context) -> None:
    """Keys and values of fewer heads, where they were copied for those of queries; the sums over copies fall away."""
    for target, first in ((LSE, 0), (BACKWARD, 1)):
        for node in context.graph.find_nodes(op="call_function", target=target):
            rewrite = Rewrite(node)
            given = node.args[first + 1 : first + 3]
            shared = ungrouped(rewrite, *given)
            results = [x for x in node.users if first and x.args[1] in (1, 2)]  # dk and dv
            sums = [_sum_of_copies(x, shape(shared[0])[1]) for x in results]
            if shared == given or None in sums:
                rewrite.discard()
                continue
            new = rewrite.call(target, *node.args[: first + 1], *shared, *node.args[first + 3 :])
            for result, found in zip(results, sums, strict=True):
                assert found is not None
                total, have, want = found
                instead = Rewrite(total)
                summed = arrange(instead, instead.call(operator.getitem, new, result.args[1]), have, want)
                assert summed is not None
                total.replace_all_uses_with(instead.reshape(summed, shape(total)))
                erase_dead(total)
            _replace(node, new)


def _sum_of_copies(gradient: Node, heads: int) -> tuple[Node, list[Group], list[Group]] | None:
    """The sum over the copies of each of `heads`, if nothing else is done with a gradient `[B, heads * copies, S, D]`;
    and the dimensions of `[B, heads, S, D]`, first as they lie there, then as they lie in the sum.
    """
    total = gradient
    while len(total.users) == 1 and not is_call(total, aten.sum.dim_IntList):
        (total,) = total.users
    if not is_call(total, aten.sum.dim_IntList) or dtype(total) != dtype(gradient):
        return None
    dims = axes_of(shape(total.args[0]))
    root, have = trace(total.args[0], dims)
    copies = [axis for d in total.args[1] for axis in leaves(dims[d])]  # type: ignore[union-attr,index]
    kept = [axis for axis in have[1] if axis not in copies] if root is gradient else []
    if root is not gradient or have[1] != [*kept, *copies] or not known(extent(kept) == heads):
        return None
    return total, [have[0], kept, *have[2:]], [[axis for axis in leaves(g) if axis not in copies] for g in dims]


def _replace(node: Node, new: Node) -> None:
    """`new` instead of the call `node`, from where it was written."""
    new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
    node.replace_all_uses_with(new)
    erase_dead(node)


@family("attention", "joint", 20)
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
    _replace(node, new)
