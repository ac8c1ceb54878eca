# SPDX-License-Identifier: Apache-2.0
"""Joint: forward and backward in one graph, as AOTAutograd traces them, before they are parted.

Only here can a mask of attention in training be read: afterwards it is a tensor that the forward hands over. What rules
and texts say of it is computed in both kernels, so it is neither kept nor read, and tiles that it hides are skipped.
Likewise heads of keys and values that were copied for each head of queries: here the copies and the sums of their
gradients are both to be seen.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.axes import Group, arrange, axes_of, extent, leaves, trace
from torch_tile.inductor.graph.nodes import (
    Miss,
    Rewrite,
    aten,
    bind,
    dtype,
    erase_dead,
    is_call,
    known,
    shape,
)
from torch_tile.inductor.patterns.attention.rewrite import BACKWARD, attention_args, read_mask, ungrouped
from torch_tile.inductor.patterns.attention.sinks import LSE


@family("attention", "joint", 10)
def share_heads(context: Context) -> None:
    """Keys and values of fewer heads, where they were copied for those of queries; the sums over copies fall away."""
    for target in (LSE, BACKWARD):
        for node in context.graph.find_nodes(op="call_function", target=target):
            rewrite, args = Rewrite(node), bind(node)
            given = args.k, args.v
            shared = ungrouped(rewrite, *given)
            results = [x for x in node.users if target is BACKWARD and x.args[1] in (1, 2)]  # dk and dv
            sums = [_sum_of_copies(x, shape(shared[0])[1]) for x in results]
            if shared == given or None in sums:
                rewrite.discard()
                continue
            new = rewrite.call(target, *args._replace(k=shared[0], v=shared[1]))
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
    for target in (LSE, BACKWARD):
        for node in context.graph.find_nodes(op="call_function", target=target):
            args = bind(node)
            kept = args.keep if target is BACKWARD else ""
            if isinstance(args.mask, Node) and not (args.causal or args.window or args.score or kept):
                _read(node, args)


def _read(node: Node, args: Any) -> None:
    rewrite, target = Rewrite(node), node.target
    assert callable(target)
    try:
        read = read_mask(rewrite, attention_args(node))
    except Miss:
        rewrite.discard()
        return
    if read.mask is args.mask and not (read.causal or read.window or read.score):
        rewrite.discard()
        return
    _replace(node, rewrite.call(target, *args._replace(**read._asdict())))
