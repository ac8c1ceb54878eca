# SPDX-License-Identifier: Apache-2.0
"""Replace written-out softmax, `exp(x - max(x)) / sum(...)`, by `tile.softmax`: an attention anchor, or a kernel."""

from __future__ import annotations

import torch
from torch.fx import Node

from torch_tile.inductor.context import Context, family
from torch_tile.inductor.graph.nodes import Rewrite, arg, aten, dtype, equivalent, is_call, uncast
from torch_tile.inductor.patterns.norm.statistics import reduced


@family("softmax", "post_grad", 210)
def recognise(context: Context) -> None:
    """Turn every written-out softmax whose parts are not used elsewhere into one node."""
    for node in list(context.graph.nodes):
        if as_one(node) is not None:
            context.graph.eliminate_dead_code()


def as_one(node: Node) -> Node | None:
    """Insert a `tile.softmax` for `node`, if that is the last part of a written-out softmax; else return None."""
    found = (arg(node, "self"), arg(node, "dim")) if is_call(node, aten._softmax.default) else _parts(node)
    if found is None:
        return None
    x, dim = found
    plain = uncast(x)
    same = dtype(plain) == dtype(node)
    new = Rewrite(node).call(torch.ops.tile.softmax.default, plain, dim, *([] if same else [dtype(node)]))
    node.replace_all_uses_with(new)
    return new


def _parts(node: Node) -> tuple[Node, int] | None:
    """Return `(x, dim)` if `node` is `e / e.sum(dim)` with e = `exp(x - x.amax(dim))` or `exp(x)`, else None."""
    if not is_call(node, aten.div.Tensor):
        return None
    e, total = arg(node, "self"), arg(node, "other")
    found = reduced(total, aten.sum.dim_IntList)
    if found is None or found[0] is not e or not is_call(e, aten.exp.default):
        return None
    inner, dim = set(_sum_and_views(total)), found[1]
    if any(u is not node and u not in inner for n in (e, *inner) for u in n.users):
        return None
    shifted = arg(e, "self")
    if is_call(shifted, aten.sub.Tensor):
        top = reduced(arg(shifted, "other"), aten.amax.default, aten.max.dim)
        if top is not None and top[1] == dim and equivalent(top[0], arg(shifted, "self")):
            return arg(shifted, "self"), dim
    return shifted, dim


def _sum_and_views(total: Node) -> list[Node]:
    """Return the sum, and the views that restore its dimension."""
    chain = [total]
    while not is_call(chain[-1], aten.sum.dim_IntList):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain
